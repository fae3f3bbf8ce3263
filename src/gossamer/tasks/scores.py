"""Loss and accuracy of classifiers: one prediction per sample, or one per position of a sequence."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Mean cross-entropy of logits [..., classes] against integer classes [...] of any integer type."""
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten().long())


def cross_entropies(logits: Tensor, classes: Tensor) -> Tensor:
    """``cross_entropy`` of several models, along the first dimension: it takes several times as long by ``vmap``."""
    each = F.cross_entropy(logits.flatten(0, -2), classes.flatten().long(), reduction="none")
    return each.view(len(logits), -1).mean(1)


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Fraction of predictions whose largest logit is the right class."""
    return (logits.argmax(-1) == classes).float().mean()
