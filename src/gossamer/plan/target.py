"""The target of a plan for quality: an accuracy to rise to, or a loss to fall to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.errors import InputError
from gossamer.results import Point

ACCURACY, LOSS = "accuracy", "loss"


@dataclass(frozen=True)
class Target:
    measure: str
    value: float

    def __str__(self) -> str:
        return f"{self.measure} {self.value:g}"

    def error_of(self, point: Point) -> float | None:
        """Return how far a point is from perfect, which falls while a model learns; None if it was not evaluated."""
        if self.measure == LOSS:
            return point.loss
        return None if point.accuracy is None else 1.0 - point.accuracy

    @property
    def error(self) -> float:
        """The error at which the target is reached."""
        return self.value if self.measure == LOSS else 1.0 - self.value


def parse_target(text: str) -> Target:
    """Return the target written as ``accuracy=0.9`` or ``loss=1.8``."""
    measure, equals, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if measure not in (ACCURACY, LOSS) or not equals or math.isnan(value):
        raise InputError(f"--until is {text!r}: expected accuracy=NUMBER or loss=NUMBER, such as accuracy=0.9")
    if measure == ACCURACY and not 0 < value < 1:
        raise InputError(f"--until is {text!r}: expected an accuracy between 0 and 1, such as accuracy=0.9")
    if measure == LOSS and not 0 < value < math.inf:
        raise InputError(f"--until is {text!r}: expected a loss above 0")
    return Target(measure, value)
