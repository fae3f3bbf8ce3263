"""Optimizers: AccumAdam and AccumAdamW, and the table of all optimizers by name."""

from gossamer.optim.accumadam import AccumAdam, AccumAdamW
from gossamer.optim.table import OPTIMIZERS, default_lr, make, names

__all__ = ["OPTIMIZERS", "AccumAdam", "AccumAdamW", "default_lr", "make", "names"]
