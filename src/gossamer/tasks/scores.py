"""Loss and accuracy of classifiers: one prediction per sample, or one per position of a sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Mean cross-entropy of logits [..., classes] against integer classes [...] of any integer type."""
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten().long())


def cross_entropies(logits: Tensor, classes: Tensor) -> Tensor:
    """The cross-entropy of each of several models, along the first dimension."""
    each = F.cross_entropy(logits.flatten(0, -2), classes.flatten().long(), reduction="none")
    return each.view(len(logits), -1).mean(1)


Loss = Callable[[Tensor, Tensor], Tensor]

OF_MANY: dict[Loss, Loss] = {cross_entropy: cross_entropies}
"""Losses of one model, and the same of several in one call: by ``vmap`` it takes several times as long."""


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Fraction of predictions whose largest logit is the right class."""
    return (logits.argmax(-1) == classes).float().mean()
