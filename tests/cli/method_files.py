"""Methods as users write them into files, for the tests."""

BLEND = '''\
"""Moves a part of the way to the mean of all workers, in every step."""

from dataclasses import dataclass

from gossamer import Method, MethodConfig
from gossamer.effects import Mean, Update, yields
from gossamer.settings import option


@dataclass(frozen=True, kw_only=True)
class BlendConfig(MethodConfig):
    strength: float = option(1.0, "share of the way to the mean", above=0, maximum=1)
    offset: int = 0


class Blend(Method):
    """The class's own words."""

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
'''
"""With strength 1 it is local SGD that averages in every step."""

PAIRS = '''\
from dataclasses import dataclass

from gossamer import MethodConfig
from gossamer.effects import Pair, Swap, yields
from gossamer.methods import Method
from gossamer.settings import option


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    rate: float = option(1.0, "exchanges of the user's own method", above=0)


class Pairs(Method):
    """Pairwise averaging."""

    name = "pairs"
    summary = "averages with one neighbour at a time"
    Config = Config

    def __init__(self, config, topology):
        super().__init__(config, topology)
        self.rate = config.rate

    @yields(Pair, Swap)
    def background(self, worker):
        while True:
            peer = yield Pair(self.rate)
            sent = worker.snapshot()
            received = yield Swap(sent, peer)
            if received is not None:
                worker.x.add_(received - sent, alpha=0.5)
'''
"""Gossip, in other words."""

HEAD = "from gossamer import Method\nfrom gossamer.effects import Mean, Pair, Update, yields\n"


def method_class(name="Mine", body='    name = "mine"\n    summary = ""\n', base="Method"):
    return f"class {name}({base}):\n{body}"
