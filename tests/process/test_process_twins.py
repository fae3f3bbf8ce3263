"""The same run with real processes and in the virtual cluster."""

import pytest
import torch
from real_workers import RealWorkers
from twin_script import train

from gossamer.config import resolve
from gossamer.methods import METHODS
from gossamer.virtual.simulation import simulate

LOCKSTEP = [name for name, method in METHODS.items() if method.lockstep]


@pytest.mark.parametrize(("method", "workers"), [(name, 3) for name in LOCKSTEP] + [("overlap", 4), ("allreduce", 2)])
def test_methods_that_wait_take_the_same_way_in_both_worlds(method: str, workers: int) -> None:
    values = {"task": "quadratic", "method": method, "workers": workers, "steps": 30, "dim": 8, "lr": 0.05}
    with RealWorkers(workers, script=train, values=values) as real:
        ends = real.finished()
    (run,) = resolve(values)
    twin = simulate(run).model
    for end in ends:
        torch.testing.assert_close(torch.tensor(end["weights"]), twin, rtol=1e-5, atol=1e-6)
