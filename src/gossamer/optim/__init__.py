"""Optimizers: AccumAdam and AccumAdamW, and a table of all that can be asked for by name."""

from gossamer.optim.accumadam import AccumAdam, AccumAdamW
from gossamer.optim.table import OPTIMIZERS, default_lr, is_elementwise, make, names

__all__ = ["OPTIMIZERS", "AccumAdam", "AccumAdamW", "default_lr", "is_elementwise", "make", "names"]
