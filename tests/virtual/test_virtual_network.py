"""Messages that share network cards, with times worked out by hand. A link carries 1 MB/s, a message is 1 MB."""

import pytest

from gossamer.hardware import HardwareConfig, NodeLayout
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.network import Network

MB = 1e6


class Lab:
    """A network, and when each message arrived."""

    def __init__(self, workers, **hardware):
        self.queue, self.arrived = EventQueue(), {}
        config = HardwareConfig(**{"link": "8mbit/0ms", "node_link": "80mbit/0ms", **hardware})
        self.network = Network(NodeLayout(config, workers), workers, self.queue)

    def at(self, time, kind, name, *arguments):
        def begin(now):
            getattr(self.network, kind)(now, *arguments, lambda done: self.arrived.__setitem__(name, done))

        self.queue.schedule(time, MESSAGE, begin)
        return self

    def times(self):
        while self.queue.run_next():
            pass
        return pytest.approx(self.arrived)


def test_a_message_alone_has_the_whole_card():
    assert Lab(2).at(0, "swap", "a", 0, 1, MB).times() == {"a": 1.0}


def test_two_messages_over_one_card_take_twice_as_long():
    lab = Lab(3).at(0, "swap", "a", 0, 1, MB).at(0, "swap", "b", 0, 2, MB)
    assert lab.times() == {"a": 2.0, "b": 2.0}


def test_messages_over_different_cards_do_not_meet():
    lab = Lab(4).at(0, "swap", "a", 0, 1, MB).at(0, "swap", "b", 2, 3, MB)
    assert lab.times() == {"a": 1.0, "b": 1.0}


def test_a_message_that_joins_halfway_slows_the_first_and_then_has_the_card_alone():
    # a: ½ MB alone, ½ MB at half pace. b: ½ MB beside a until 1.5 s, then ½ MB alone.
    lab = Lab(3).at(0, "swap", "a", 0, 1, MB).at(0.5, "swap", "b", 0, 2, MB)
    assert lab.times() == {"a": 1.5, "b": 2.0}


def test_three_messages_one_after_the_other():
    # 0–1 s: a alone (1 of 2 MB). 1–2 s: a, b at ½ (a 1.5, b ½). 2–3.5 s: a, b, c at ⅓: a is there.
    # b and c then at ½: b has 1 − ½ − ½ = 0 left at 3.5 s too; c has ½ left, alone.
    lab = Lab(4).at(0, "swap", "a", 0, 1, 2 * MB).at(1, "swap", "b", 0, 2, MB).at(2, "swap", "c", 0, 3, MB)
    assert lab.times() == {"a": 3.5, "b": 3.5, "c": 4.0}


def test_latency_comes_on_top_and_does_not_hold_the_card():
    lab = Lab(3, link="8mbit/250ms").at(0, "swap", "a", 0, 1, MB).at(1.0, "swap", "b", 0, 2, MB)
    assert lab.times() == {"a": 1.25, "b": 2.25}


def test_a_slow_link_slows_only_those_who_use_it():
    lab = Lab(4, slow_link="0-1:2mbit/0ms").at(0, "swap", "a", 0, 1, MB).at(0, "swap", "b", 2, 3, MB)
    assert lab.times() == {"a": 4.0, "b": 1.0}


def test_workers_of_one_node_share_its_card_but_not_their_ports_inside():
    # Nodes {0, 1} and {2, 3}: both messages between nodes go over the same two cards.
    between = Lab(4, nodes=2).at(0, "swap", "a", 0, 2, MB).at(0, "swap", "b", 1, 3, MB)
    assert between.times() == {"a": 2.0, "b": 2.0}
    # Inside, at 10 MB/s, and not in the way of the message between nodes.
    inside = Lab(4, nodes=2).at(0, "swap", "a", 0, 1, MB).at(0, "swap", "b", 2, 3, MB).at(0, "swap", "c", 0, 2, MB)
    assert inside.times() == {"a": 0.1, "b": 0.1, "c": 1.0}


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_an_allreduce_puts_twice_all_but_a_share_through_every_card(workers):
    lab = Lab(workers, link="8mbit/10ms").at(0, "mean", "a", tuple(range(workers)), MB)
    assert {"a": 2 * (workers - 1) / workers + 2 * (workers - 1) * 0.01} == lab.times()


def test_a_gathering_passes_every_message_on():
    lab = Lab(4, link="8mbit/10ms").at(0, "gather", "a", (0, 1, 2, 3), MB)
    assert lab.times() == {"a": 3 + 3 * 0.01}


def test_an_allreduce_goes_at_the_pace_of_its_slowest_link():
    lab = Lab(4, slow_link="2-3:4mbit/50ms").at(0, "mean", "a", (0, 1, 2, 3), MB)
    assert lab.times() == {"a": 1.5 / 0.5 + 6 * 0.05}


def test_without_limits_a_message_arrives_at_once():
    assert Lab(2, link="inf").at(3, "swap", "a", 0, 1, 1e18).times() == {"a": 3.0}
