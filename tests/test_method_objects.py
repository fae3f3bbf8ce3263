"""Methods as objects of a program: a class or a built method in ``gossamer.simulate`` and ``gossamer.join``."""

from dataclasses import dataclass

import pytest
import torch

import gossamer
from gossamer import Method, MethodConfig
from gossamer.config import resolve
from gossamer.effects import Mean, Update, yields
from gossamer.errors import InputError
from gossamer.methods.gossip import Gossip, GossipConfig
from gossamer.settings import option
from gossamer.topology import build

SETTINGS = {"task": "quadratic", "workers": 4, "steps": 10}


@dataclass(frozen=True, kw_only=True)
class BlendConfig(MethodConfig):
    strength: float = option(1.0, "share of the way to the mean", above=0, maximum=1)


class Blend(Method):
    name = "blend"
    summary = "part of the way to the mean"
    Config = BlendConfig
    uses_topology = False

    def __init__(self, config, topology):
        super().__init__(config, topology)
        self.strength = config.strength

    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        mean = yield Mean(worker.x, round=worker.step)
        worker.x.lerp_(mean, self.strength)


class Wrapped(Method):
    """Has the parts of another method, under a name of its own."""

    summary = "another method"

    def __init__(self, inner):
        super().__init__(MethodConfig(), inner.topology)
        self.name = f"wrapped-{inner.name}"
        self.step, self.background, self.finish = inner.step, inner.background, inner.finish


def test_a_class_runs_with_options():
    half = gossamer.simulate(method=Blend, strength=0.5, **SETTINGS)
    full = gossamer.simulate(method=Blend, **SETTINGS)
    assert half.method == full.method == "blend"
    assert full.final.consensus < 1e-6 < half.final.consensus
    # In every step the models are averaged exactly.
    local = gossamer.simulate(method="localsgd", period=1, **SETTINGS)
    torch.testing.assert_close(full.model, local.model)


def test_a_built_method_brings_its_settings_and_its_topology():
    built = Gossip(GossipConfig(rate=2.0), build("star", workers=4))
    by_object = gossamer.simulate(method=built, task="quadratic", steps=10)
    by_name = gossamer.simulate(method="gossip", rate=2.0, topology="star", **SETTINGS)
    assert (by_object.method, by_object.topology, by_object.workers) == ("gossip", "star", 4)
    assert torch.equal(by_object.model, by_name.model)
    (run,) = resolve({"task": "quadratic"}, method=built)
    assert run.method() is built


def test_a_built_method_may_wrap_another():
    inner = Gossip(GossipConfig(), build("ring", workers=4))
    wrapped = gossamer.simulate(method=Wrapped(inner), **SETTINGS)
    plain = gossamer.simulate(method="gossip", **SETTINGS)
    assert wrapped.method == "wrapped-gossip"
    assert torch.equal(wrapped.model, plain.model)


def test_a_file_is_found_by_programs_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from gossamer.methods.gossip import Gossip\n\n\nclass Mine(Gossip):\n    name = 'mine'\n", encoding="utf-8"
    )
    mine = gossamer.simulate(method=f"{path}:Mine", rate=2.0, **SETTINGS)
    assert mine.method == "mine"
    assert torch.equal(mine.model, gossamer.simulate(method="gossip", rate=2.0, **SETTINGS).model)


class Undeclared(Blend):
    name = "undeclared"

    def step(self, worker):
        yield Update()


def on_ring(workers=4):
    return Blend(BlendConfig(), build("ring", workers=workers))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": Blend, "rate": 2.0}, "--rate does not apply to blend"),
        ({"method": Blend, "strngth": 2.0}, "unknown option 'strngth'.*'strength'"),
        ({"method": on_ring(), "strength": 0.5}, "strength is given besides a method that is built already"),
        ({"method": on_ring(), "topology": "ring"}, "blend has been built with its topology"),
        ({"method": on_ring(5)}, "blend was built for 5 workers, but there are 4"),
        ({"method": Undeclared}, "step of method undeclared does not say which effects it yields"),
        ({"method": int}, "the method is the class int: expected a subclass of gossamer.Method"),
        ({"method": 3}, "the method is a int: expected a subclass of gossamer.Method"),
        ({"method": Method}, "method Method has no name"),
        ({"method": ""}, "unknown method ''"),
    ],
)
def test_what_cannot_be_simulated_is_one_clear_line(settings, message):
    with pytest.raises(InputError, match=message) as caught:
        gossamer.simulate(**SETTINGS, **settings)
    assert "\n" not in str(caught.value)


def trained(method, **settings):
    """Train alone with ``join``, and return the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swarm = gossamer.join(model, optimizer, method=method, **settings)
    for _ in range(5):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    swarm.finish()
    return model.weight.detach().clone()


def test_join_takes_a_class_or_a_built_method():
    plain = trained("localsgd", period=1)
    assert torch.equal(trained(Blend, strength=0.5), plain)
    assert torch.equal(trained(on_ring(workers=1)), plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": Blend, "rate": 2.0}, "blend has no option 'rate': expected some of strength"),
        ({"method": on_ring(1), "strength": 0.5}, "strength is given besides a method that is built already"),
        ({"method": on_ring(1), "topology": "ring"}, "blend has been built with its topology"),
        ({"method": on_ring(4)}, "blend was built for 4 workers, but there are 1"),
        ({"method": Undeclared}, "step of method undeclared does not say which effects it yields"),
        ({"method": int}, "the method is the class int"),
    ],
)
def test_what_cannot_be_joined_is_one_clear_line(settings, message):
    model = torch.nn.Linear(3, 1)
    with pytest.raises(InputError, match=message) as caught:
        gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    assert "\n" not in str(caught.value)
