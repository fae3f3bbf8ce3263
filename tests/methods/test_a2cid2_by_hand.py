"""A²CiD²'s rules on two workers, against the paper's equations in x and x̃ worked out step by step."""

import math

import pytest
import torch

from gossamer.effects import Pair, Swap
from gossamer.methods.a2cid2 import A2CiD2, drift
from gossamer.methods.gossip import GossipConfig
from gossamer.testing.worlds.any_order_worker import Peer
from gossamer.topology import build

ETA, ALPHA_TILDE = 0.3, 2.0


class Pen:
    """One worker on paper: dx = η(x̃ − x)dt, dx̃ = η(x − x̃)dt between events."""

    def __init__(self, x):
        self.x = self.tilde = float(x)
        self.time = 0.0

    def advance(self, time):
        # The middle stays, the difference decays at rate 2η.
        middle, half = (self.x + self.tilde) / 2, (self.x - self.tilde) / 2
        half *= math.exp(-2 * ETA * (time - self.time))
        self.x, self.tilde, self.time = middle + half, middle - half, time

    def update(self, u):
        self.x += u
        self.tilde += u

    def exchange(self, difference):
        self.x -= 0.5 * difference
        self.tilde -= ALPHA_TILDE * difference


class Worker:
    """One worker driven by hand, and the same recursion computed separately."""

    def __init__(self, method, rank, x):
        self.method, self.pen = method, Pen(x)
        self.peer = Peer(rank, method.topology, 0, 1, torch.tensor([float(x)], dtype=torch.float64))
        self.background = method.background(self.peer)
        assert isinstance(self.background.send(None), Pair)

    def send(self, time):
        self.peer.time = time
        self.pen.advance(time)
        swap = self.background.send(1 - self.peer.rank)
        assert isinstance(swap, Swap)
        assert swap.peer == 1 - self.peer.rank
        assert float(swap.vector) == pytest.approx(self.pen.x, abs=1e-12)
        return swap.vector.clone()

    def receive(self, time, sent, received):
        self.peer.time = time
        self.pen.advance(time)
        assert isinstance(self.background.send(received), Pair)
        if received is not None:
            self.pen.exchange(float(sent - received))
        assert float(self.peer.x) == pytest.approx(self.pen.x, abs=1e-12)
        assert float(self.peer.x + self.peer.vector("z")) == pytest.approx(self.pen.tilde, abs=1e-12)

    def gradient(self, time, u):
        self.peer.time = time
        self.pen.advance(time)
        point = torch.zeros_like(self.peer.x)
        self.method.eval_point(self.peer, point)
        assert float(point) == pytest.approx(self.pen.x, abs=1e-12)
        assert self.method.step is None, "a step is one Update"
        self.peer.x.add_(u)
        self.pen.update(u)


@pytest.fixture
def workers():
    method = A2CiD2(GossipConfig(), build("ring", 2))
    method.eta, method.alpha_tilde = ETA, ALPHA_TILDE
    return Worker(method, 0, 1.0), Worker(method, 1, -2.0)


def test_two_workers_follow_the_equations_of_the_paper(workers):
    one, two = workers
    # Exchanges whose messages take time, with gradients of either worker before, during and after.
    one.gradient(0.4, 0.7)
    sent_one, sent_two = one.send(1.0), two.send(1.0)
    two.gradient(1.3, -0.2)
    one.receive(1.5, sent_one, sent_two)
    two.receive(1.5, sent_two, sent_one)
    one.gradient(2.0, 0.1)
    two.gradient(2.0, 0.5)
    two.gradient(2.5, -0.4)
    sent_one, sent_two = one.send(3.0), two.send(3.0)
    one.receive(3.0, sent_one, sent_two)
    two.receive(3.0, sent_two, sent_one)
    assert one.pen.tilde != one.pen.x


def test_a_peer_that_went_away_changes_nothing(workers):
    one, _ = workers
    sent = one.send(1.0)
    one.receive(2.0, sent, None)


def test_drift_is_the_solution_of_the_flow():
    assert drift(0.5, 0.0) == 0.0
    assert drift(0.0, 3.0) == 0.0
    assert drift(0.5, 2.0) == pytest.approx((1 - math.exp(-2)) / 2)
    assert drift(0.5, 1e9) == 0.5


@pytest.mark.parametrize(
    ("graph", "workers", "eta", "alpha_tilde"), [("ring", 16, 0.143, 1.87), ("ring", 64, 0.035, 7.26)]
)
def test_the_constants_come_from_the_graph(graph, workers, eta, alpha_tilde):
    method = A2CiD2(GossipConfig(), build(graph, workers))
    assert method.eta == pytest.approx(eta, abs=0.001)
    assert method.alpha_tilde == pytest.approx(alpha_tilde, abs=0.01)


def test_on_the_complete_graph_it_is_gossip():
    assert A2CiD2(GossipConfig(), build("complete", 64)).alpha_tilde == pytest.approx(0.5)
