"""Edges between neighbours: connections that are cut, go silent or are replaced, at any point."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.pairwise.edge import Edge, EdgeLost
from gossamer.process.pairwise.peer_connections import PeerConnections

FRAME = 32


class Relay:
    """Between the higher rank and the lower one: cuts a connection after so many bytes, or keeps them to itself."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.counts = [0, 0]
        """Bytes of the newest connection: up, to the lower rank, and down."""
        self.cut: tuple[int, int] | None = None
        """Direction and number of bytes after which both directions end."""
        self.silent: tuple[int, int] | None = None
        """Direction and number of bytes after which nothing more arrives in either direction."""
        self.tells_ends = True
        """Whether the end of a connection is passed on."""
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                self._open.append(client)
                server = socket.create_connection(self._to)
            except OSError:
                return
            self.counts = [0, 0]
            self._open.append(server)
            plan, ends = (self.cut, self.silent), (client, server)
            for direction in (0, 1):
                threading.Thread(target=self._pipe, args=(ends, direction, self.counts, plan), daemon=True).start()

    def _pipe(
        self,
        ends: tuple[socket.socket, socket.socket],
        direction: int,
        counts: list[int],
        plan: tuple[tuple[int, int] | None, tuple[int, int] | None],
    ) -> None:
        cut, silent = plan
        with contextlib.suppress(OSError):
            while data := ends[direction].recv(1 << 16):
                if cut is not None and cut[0] == direction:
                    data = data[: max(cut[1] - counts[direction], 0)]
                if silent is not None and counts[silent[0]] >= silent[1]:
                    continue
                # Before it arrives: who waits for it may look at the count at once.
                counts[direction] += len(data)
                ends[1 - direction].sendall(data)
                if cut is not None and cut[0] == direction and counts[direction] >= cut[1]:
                    break
        for end in ends if self.tells_ends else ():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            # What nobody reads would reset the connection, and what has been passed on would be lost with it.
            while ends[direction].recv(1 << 16):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()
        for end in self._open:
            end.close()


class Two:
    """Two workers in this process, rank 1 behind a relay."""

    def __init__(self) -> None:
        self.listeners = [Listener("127.0.0.1", identity=Identity(rank, "test")) for rank in range(2)]
        self.messages: list[list[tuple[int, ...]]] = [[], []]
        self.peers = [
            PeerConnections(
                rank, (1 - rank,), self.listeners[rank], lambda _, message, at=rank: self.heard(at, message)
            )
            for rank in range(2)
        ]
        self.relay = Relay(self.listeners[0].address)
        # That is what it tells others about itself.
        self.listeners[0].address = self.relay.address
        self.peers[0].set_address(1, self.listeners[1].address)
        self.peers[1].set_address(0, self.relay.address)

    def heard(self, rank: int, message: tuple[int, ...]) -> None:
        self.messages[rank].append(message)

    def edges(self) -> list[Edge]:
        """Wait until both have the same open edge."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            found = [self.peers[0].edge(1), self.peers[1].edge(0)]
            if found[0] is not None and found[1] is not None and found[0].name == found[1].name:
                return [edge for edge in found if edge is not None]
            time.sleep(0.002)
        raise AssertionError("no edge")

    def exchange(self, both: list[Edge], numel: int, timeout_s: float = 60.0) -> list[bool]:
        """Exchange vectors; return at which end that took place, as these see it."""
        took_place = [False, False]

        def run(rank: int) -> None:
            received = torch.full((numel,), -1.0)
            with contextlib.suppress(EdgeLost):
                words = both[rank].exchange(torch.full((numel,), float(rank)), received, timeout_s, (rank + 0.5,))
                took_place[rank] = words == [1.5 - rank] and bool((received == 1.0 - rank).all())

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return took_place

    def close(self) -> None:
        for peers in self.peers:
            peers.close()
        for listener in self.listeners:
            listener.close()
        self.relay.close()


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def test_messages_arrive_in_order(two: Two) -> None:
    both = two.edges()
    for number in range(1, 200):
        both[0].send(number)
        both[1].send(number, -1, 2**62, 3)
    until = time.monotonic() + 60
    while min(map(len, two.messages)) < 199 and time.monotonic() < until:
        time.sleep(0.01)
    assert two.messages[1] == [(number, 0, 0, 0) for number in range(1, 200)]
    assert two.messages[0] == [(number, -1, 2**62, 3) for number in range(1, 200)]


def test_messages_and_vectors_share_an_edge(two: Two) -> None:
    both = two.edges()
    stop = threading.Event()

    def chat() -> None:
        while not stop.is_set():
            both[0].send(7)
            both[1].send(8)
            time.sleep(0.0005)

    chatting = threading.Thread(target=chat, daemon=True)
    chatting.start()
    for numel in (0, 1, 100, 3_000_000):
        assert two.exchange(both, numel) == [True, True]
    stop.set()
    chatting.join()
    assert both[0].num_exchanges == both[1].num_exchanges == 4
    assert [{*messages} for messages in two.messages] == [{(8, 0, 0, 0)}, {(7, 0, 0, 0)}]


def test_a_state_goes_one_way(two: Two) -> None:
    both = two.edges()
    received = torch.zeros(1_000_000)
    giving = threading.Thread(target=lambda: both[0].exchange(torch.ones(1_000_000), None, 60.0), daemon=True)
    giving.start()
    both[1].exchange(None, received, 60.0)
    giving.join(60)
    assert not giving.is_alive()
    assert float(received.sum()) == 1_000_000


@pytest.mark.parametrize("direction", [0, 1])
def test_an_exchange_that_is_cut_takes_place_at_both_ends_or_at_none(two: Two, direction: int) -> None:
    """Cut after every byte of a short exchange: the ends reconnect and settle what is in doubt."""
    numel = 4
    assert two.exchange(two.edges(), numel) == [True, True]
    # From the greeting and the first frame on: frame, word and vector, then receipt or commit.
    first = two.relay.counts[direction] - (FRAME + 8 + 4 * numel + FRAME)
    outcomes = []
    for after in range(first + 1, two.relay.counts[direction] + 1):
        two.relay.cut = (direction, after)
        for edge in two.edges():
            edge.drop()
        time.sleep(0.002)
        both = two.edges()
        two.relay.cut = None
        took_place = two.exchange(both, numel)
        assert took_place[0] == took_place[1], after - first
        outcomes.append(took_place[0])
    # Upwards the last byte is that of the receipt: who has it commits. Downwards the last frame is the commit;
    # if the connection ends right before it, the receipt may have arrived or not.
    assert sum(outcomes) in ((1,) if direction == 0 else (FRAME, FRAME + 1))


@pytest.mark.parametrize(("direction", "frames"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_who_hears_nothing_gives_up_at_the_deadline_and_agrees(two: Two, direction: int, frames: int) -> None:
    """The connection stays open and goes silent: before an end has the vector, or after."""
    assert two.exchange(two.edges(), 4) == [True, True]
    whole = two.relay.counts[direction]
    two.relay.silent = (direction, whole - FRAME if frames else whole - FRAME - 16)
    for edge in two.edges():
        edge.drop()
    time.sleep(0.002)
    both = two.edges()
    took_place = two.exchange(both, 4, timeout_s=1.0)
    # What is not yet in doubt, or in one piece with what came before, may still succeed.
    assert took_place[0] == took_place[1]
    two.relay.silent = None
    for edge in two.edges():
        edge.drop()
    assert two.exchange(two.edges(), 4) == [True, True]


def test_closing_wakes_both_ends(two: Two) -> None:
    both = two.edges()
    threading.Timer(0.2, both[0].drop).start()
    began = time.monotonic()
    with pytest.raises(EdgeLost):
        both[1].exchange(torch.zeros(10), torch.zeros(10), 120.0)
    assert time.monotonic() - began < 100
    assert two.edges()[0] is not both[0]


def test_the_lower_rank_asks_for_a_new_edge(two: Two) -> None:
    """Rank 1 does not notice that its edge is dead, since the relay keeps it open."""
    both = two.edges()
    two.relay.tells_ends = False
    both[0].drop()
    assert both[1].open
    assert two.edges()[1] is not both[1]
