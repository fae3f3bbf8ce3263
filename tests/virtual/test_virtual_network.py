"""Messages that share NICs, with times computed by hand. A link carries 1 MB/s, a message is 1 MB."""

import pytest

from gossamer.hardware import HardwareConfig, NodeLayout
from gossamer.virtual.comm.network import Network
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue

MB = 1e6


class NetworkRun:
    """A network, and the time at which each message arrived."""

    def __init__(self, workers, **hardware):
        self.queue, self.arrived = EventQueue(), {}
        config = HardwareConfig(**{"link": "8mbit/0ms", "node_link": "80mbit/0ms", **hardware})
        self.network = Network(NodeLayout(config, workers), workers, self.queue)

    def send(self, time, kind, name, *arguments):
        def begin(now):
            getattr(self.network, kind)(now, *arguments, lambda done: self.arrived.__setitem__(name, done))

        self.queue.schedule(time, MESSAGE, begin)
        return self

    def times(self):
        while self.queue.run_next():
            pass
        return pytest.approx(self.arrived)


def test_a_message_alone_has_the_full_bandwidth():
    assert NetworkRun(2).send(0, "swap", "a", 0, 1, MB).times() == {"a": 1.0}


def test_two_messages_through_one_nic_take_twice_as_long():
    run = NetworkRun(3).send(0, "swap", "a", 0, 1, MB).send(0, "swap", "b", 0, 2, MB)
    assert run.times() == {"a": 2.0, "b": 2.0}


def test_messages_through_different_nics_do_not_share_bandwidth():
    run = NetworkRun(4).send(0, "swap", "a", 0, 1, MB).send(0, "swap", "b", 2, 3, MB)
    assert run.times() == {"a": 1.0, "b": 1.0}


def test_a_later_message_slows_the_first_and_then_has_the_full_bandwidth():
    # a: ½ MB alone, ½ MB at half rate. b: ½ MB together with a until 1.5 s, then ½ MB alone.
    run = NetworkRun(3).send(0, "swap", "a", 0, 1, MB).send(0.5, "swap", "b", 0, 2, MB)
    assert run.times() == {"a": 1.5, "b": 2.0}


def test_three_messages_one_after_the_other():
    # 0–1 s: a alone (1 of 2 MB). 1–2 s: a, b at ½ (a 1.5, b ½). 2–3.5 s: a, b, c at ⅓: a arrives.
    # b and c then at ½: b has 1 − ½ − ½ = 0 left at 3.5 s too; c has ½ left, alone.
    run = NetworkRun(4).send(0, "swap", "a", 0, 1, 2 * MB).send(1, "swap", "b", 0, 2, MB).send(2, "swap", "c", 0, 3, MB)
    assert run.times() == {"a": 3.5, "b": 3.5, "c": 4.0}


def test_latency_is_added_and_does_not_occupy_the_nic():
    run = NetworkRun(3, link="8mbit/250ms").send(0, "swap", "a", 0, 1, MB).send(1.0, "swap", "b", 0, 2, MB)
    assert run.times() == {"a": 1.25, "b": 2.25}


def test_a_slow_link_slows_only_its_own_messages():
    run = NetworkRun(4, slow_link="0-1:2mbit/0ms").send(0, "swap", "a", 0, 1, MB).send(0, "swap", "b", 2, 3, MB)
    assert run.times() == {"a": 4.0, "b": 1.0}


def test_workers_of_one_node_share_its_nic_but_have_their_own_inside():
    # Nodes {0, 1} and {2, 3}: both messages between nodes pass through the same two NICs.
    between = NetworkRun(4, nodes=2).send(0, "swap", "a", 0, 2, MB).send(0, "swap", "b", 1, 3, MB)
    assert between.times() == {"a": 2.0, "b": 2.0}
    # Inside a node, at 10 MB/s, without sharing with the message between nodes.
    inside = (
        NetworkRun(4, nodes=2)
        .send(0, "swap", "a", 0, 1, MB)
        .send(0, "swap", "b", 2, 3, MB)
        .send(0, "swap", "c", 0, 2, MB)
    )
    assert inside.times() == {"a": 0.1, "b": 0.1, "c": 1.0}


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_an_allreduce_sends_twice_the_vector_but_a_share_through_every_nic(workers):
    run = NetworkRun(workers, link="8mbit/10ms").send(0, "mean", "a", tuple(range(workers)), MB)
    assert {"a": 2 * (workers - 1) / workers + 2 * (workers - 1) * 0.01} == run.times()


def test_a_gather_forwards_every_message():
    run = NetworkRun(4, link="8mbit/10ms").send(0, "gather", "a", (0, 1, 2, 3), MB)
    assert run.times() == {"a": 3 + 3 * 0.01}


def test_an_allreduce_runs_at_the_rate_of_its_slowest_link():
    run = NetworkRun(4, slow_link="2-3:4mbit/50ms").send(0, "mean", "a", (0, 1, 2, 3), MB)
    assert run.times() == {"a": 1.5 / 0.5 + 6 * 0.05}


def test_with_infinite_bandwidth_a_message_arrives_at_once():
    assert NetworkRun(2, link="inf").send(3, "swap", "a", 0, 1, 1e18).times() == {"a": 3.0}


def test_messages_in_opposite_directions_do_not_share_bandwidth():
    run = NetworkRun(3).send(0, "shift", "a", 0, 1, MB).send(0, "shift", "b", 1, 0, MB).send(0, "shift", "c", 2, 0, MB)
    # b and c both go into the NIC of worker 0.
    assert run.times() == {"a": 1.0, "b": 2.0, "c": 2.0}


def test_a_permutation_of_messages_takes_as_long_as_one():
    run = NetworkRun(5, link="8mbit/10ms")
    for rank in range(5):
        run.send(0, "shift", rank, rank, (rank + 2) % 5, MB)
    assert run.times() == dict.fromkeys(range(5), 1.01)


def test_a_message_in_one_direction_shares_bandwidth_with_exchanges():
    # Until 1 s: both at half rate. Then the message has ended, and the exchange has ½ MB left.
    run = NetworkRun(3).send(0, "shift", "a", 0, 1, 0.5 * MB).send(0, "swap", "b", 0, 2, MB)
    assert run.times() == {"a": 1.0, "b": 1.5}
    # Out of worker 0 and into it: the exchange shares each direction with one message only.
    run = NetworkRun(4).send(0, "shift", "a", 0, 1, MB).send(0, "shift", "b", 2, 0, MB).send(0, "swap", "c", 0, 3, MB)
    assert run.times() == {"a": 2.0, "b": 2.0, "c": 2.0}


def test_messages_between_nodes_share_the_nics_of_the_nodes():
    run = NetworkRun(4, nodes=2)
    # Out of node 0: two messages. Inside of node 1: a link of its own, ten times as fast.
    run.send(0, "shift", "a", 0, 2, MB).send(0, "shift", "b", 1, 3, MB).send(0, "shift", "c", 2, 3, MB)
    assert run.times() == {"a": 2.0, "b": 2.0, "c": 0.1}
