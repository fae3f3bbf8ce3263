"""Every method learns: digits, 16 workers on a ring, with the defaults of the method and the task."""

import pytest

from gossamer.methods import METHODS
from plain_training import simulated


@pytest.mark.parametrize("name", METHODS)
def test_every_method_reaches_95_percent_with_its_defaults(name):
    result = simulated(task="digits", method=name, workers=16, topology="ring", eval_every=1000)
    assert result.final.accuracy >= 0.95
    assert result.final.worker_accuracy.min >= 0.9
    assert result.final.loss < result.history[0].loss / 5
