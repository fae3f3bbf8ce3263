"""Train one PyTorch model on many workers that do not wait for each other."""

from gossamer.api import join, simulate
from gossamer.optim import AccumAdam, AccumAdamW
from gossamer.tasks import Task
from gossamer.topology import Topology

__version__ = "0.1.0"

__all__ = ["AccumAdam", "AccumAdamW", "Task", "Topology", "__version__", "join", "simulate"]
