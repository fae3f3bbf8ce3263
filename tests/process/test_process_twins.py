"""The same run with real processes and in the virtual cluster."""

import pytest
import torch
from real_workers import RealWorkers
from twin_script import train

from gossamer.config import resolve
from gossamer.virtual.simulation import simulate


# The conformance tests compare the two worlds for every method, without the settings and the data of a run.
@pytest.mark.parametrize(("method", "workers"), [("allreduce", 2), ("diloco", 3), ("divisible", 3), ("overlap", 4)])
def test_methods_that_wait_take_the_same_way_in_both_worlds(method: str, workers: int) -> None:
    values = {"task": "quadratic", "method": method, "workers": workers, "steps": 30, "dim": 8, "lr": 0.05}
    with RealWorkers(workers, script=train, values=values) as real:
        ends = real.finished()
    (run,) = resolve(values)
    twin = simulate(run).model
    for end in ends:
        torch.testing.assert_close(torch.tensor(end["weights"]), twin, rtol=1e-5, atol=1e-6)
