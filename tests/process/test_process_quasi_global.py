"""Quasi-global momentum on real workers: its recursion, and the same way as in the virtual cluster."""

import pytest
import torch
from real_workers import RealWorkers
from twin_script import train

import gossamer
from gossamer.config import resolve
from gossamer.methods import METHODS
from gossamer.methods.quasi_global import LAST, MOMENTUM, AveragingConfig
from gossamer.virtual.simulation import simulate

AVERAGING = sorted(name for name, method in METHODS.items() if issubclass(method.Config, AveragingConfig))
LOCKSTEP = [name for name in AVERAGING if METHODS[name].lockstep]
BETA = 0.9


class Quadratic(torch.nn.Module):
    """½‖w − b‖² in float64; its gradient is w − b."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, b):
        return 0.5 * (self.w - b).square().sum()


@pytest.mark.parametrize("method", AVERAGING)
def test_one_real_worker_has_quasi_hyperbolic_momentum(method):
    model, b = Quadratic(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, m = model.w.detach().clone(), torch.zeros(3, dtype=torch.float64)
    with gossamer.join(model, optimizer, method=method, quasi_global=BETA):
        for step in range(12):
            lr = optimizer.param_groups[0]["lr"] = (0.1, 0.0, 0.2)[step % 3]
            optimizer.zero_grad()
            model(b).backward()
            optimizer.step()
            g = x - b
            x = x - lr * (g + BETA * m)
            m = BETA * (2 - BETA) * m + (1 - BETA) * g if lr else m
            torch.testing.assert_close(model.w.detach(), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "optimizer"), [(method, ("sgd", "adamw")[at % 2]) for at, method in enumerate(LOCKSTEP)]
)
def test_methods_that_wait_take_the_same_way_in_both_worlds(method, optimizer):
    values = {"task": "quadratic", "method": method, "workers": 3, "steps": 30, "dim": 8, "quasi_global": BETA}
    values |= {"optimizer": optimizer, "lr": 0.05, "weight_decay": 0.1}
    with RealWorkers(3, script=train, values=values) as real:
        ends = real.finished()
    (run,) = resolve(values)
    twin = simulate(run).model
    for end in ends:
        torch.testing.assert_close(torch.tensor(end["weights"]), twin, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_contains_the_momentum():
    def trained(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, dtype=torch.float64)).backward()
            optimizer.step()

    straight, first, second = Quadratic(), Quadratic(), Quadratic()
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
    with gossamer.join(straight, optimizer, method="lasgd", quasi_global=BETA):
        trained(straight, optimizer, 9)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with gossamer.join(first, optimizer, method="lasgd", quasi_global=BETA) as swarm:
        trained(first, optimizer, 4)
        state = swarm.state_dict()
    assert {MOMENTUM, LAST} <= state["vectors"].keys()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with gossamer.join(second, optimizer, method="lasgd", quasi_global=BETA) as swarm:
        swarm.load_state_dict(state)
        trained(second, optimizer, 5)
    assert torch.equal(second.w, straight.w)
