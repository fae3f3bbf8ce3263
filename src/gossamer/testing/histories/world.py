"""Simulated processes around the state machine that real workers run, and what must hold at any time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from gossamer.process.liveness.liveness import Change, Liveness, Notice, Send, Timing, first_record
from gossamer.process.liveness.records import Message, Stage, from_bytes, to_bytes
from gossamer.testing.histories.network import EventQueue, LinkQuality, Network

HEARTBEAT_S = 0.1

TIMING = Timing(dead_s=2.0, hung_s=6.0)
"""Shorter than for real workers: a history should not take longer than it has to."""

SLACK_S = 1.5
"""How much longer than ``Timing`` says it may take until a death is noticed: messages are late and lost."""

MachineFactory = Callable[..., Liveness]


class Violated(Exception):
    """An invariant does not hold."""


class Process:
    """One process of a worker."""

    def __init__(self, rank: int, number: int, machine: Liveness, now: float) -> None:
        self.rank, self.number, self.machine, self.started_at = rank, number, machine, now
        self.stopped = False
        """By SIGSTOP: what comes meanwhile waits."""
        self.hung = False
        """Its threads that count heartbeats stand still; it still answers."""
        self.resumed_at = float("-inf")
        self.waiting: list[Callable[[], None]] = []
        self.said: dict[int, tuple[Change, int, float]] = {}
        """What was last said about each other worker, about which process of it, and when."""


class World:
    def __init__(
        self,
        seed: int,
        workers: int,
        quality: LinkQuality,
        make_machine: MachineFactory = Liveness,
        log: Callable[[str], None] | None = None,
        timing: Timing = TIMING,
    ) -> None:
        self.seed, self.workers, self.timing, self._make_machine, self._log = seed, workers, timing, make_machine, log
        self._encodes = seed % 16 == 0
        """Whether messages travel as bytes, as on a real connection: that takes longer than all the rest."""
        self.rng = random.Random(f"world {seed}")
        self.queue = EventQueue()
        self.network = Network(workers, quality, self.rng, self.queue)
        self.processes: dict[int, Process] = {}
        self.gone: dict[int, int] = {}
        """The numbers of the processes that have ended, by rank."""
        self.left: set[int] = set()
        self.addresses: dict[int, tuple[str, int]] = {}
        """What the store has: where each worker listens, and its process."""
        self.numbers: dict[int, int] = {}
        self.num_started = 0
        self.changed_at: dict[int, float] = dict.fromkeys(range(workers), 0.0)
        """When each worker was last disturbed: it, or its links."""
        self.links_changed_at = 0.0
        self.num_notices = 0

    @property
    def now(self) -> float:
        return self.queue.now

    def say(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.now:8.3f}  {text}")

    def disturb(self, ranks: Any = None) -> None:
        """Note that something happens now to these workers; None: to all."""
        for rank in range(self.workers) if ranks is None else ranks:
            self.changed_at[rank] = self.now
        if ranks is None:
            self.links_changed_at = self.now

    # Faults

    def start(self, rank: int, clock_is_behind: bool = False) -> None:
        """Start a process; another one of this rank has ended."""
        self.num_started += 1
        number = 1000 + (-self.num_started if clock_is_behind else self.num_started)
        address = (f"host{rank}", self.num_started)
        own = first_record(rank, number, address)
        machine = self._make_machine(own, self.workers, self.now, self.seed, self.timing)
        process = self.processes[rank] = Process(rank, self.num_started, machine, self.now)
        self.addresses[rank], self.numbers[rank] = address, number
        self.left.discard(rank)
        self.say(f"worker {rank} starts")
        self.disturb([rank])
        machine.all_seen = True
        self._read_board(process)
        self._repeat(process, HEARTBEAT_S, self._beat)
        self._repeat(process, self.timing.tick_s, lambda process: process.machine.tick(self.now))

    def crash(self, rank: int) -> None:
        process = self.processes.pop(rank, None)
        if process is not None:
            self.say(f"worker {rank} is killed")
            self.gone[rank] = process.number
            self.disturb([rank])

    def leave(self, rank: int) -> None:
        """End in order."""
        process = self.processes.get(rank)
        if process is not None and not process.stopped:
            self.say(f"worker {rank} leaves")
            process.machine.advance(Stage.LEFT)
            self._carry_out(process)
            self.left.add(rank)
            self.crash(rank)

    def stop(self, rank: int) -> None:
        if rank in self.processes:
            self.say(f"worker {rank} is stopped")
            self.processes[rank].stopped = True
            self.disturb([rank])

    def go_on(self, rank: int) -> None:
        process = self.processes.get(rank)
        if process is not None and (process.stopped or process.hung):
            self.say(f"worker {rank} goes on")
            if process.stopped:
                process.resumed_at = self.now
            process.stopped = process.hung = False
            self.disturb([rank])
            waiting, process.waiting = process.waiting, []
            for call in waiting:
                # Whether it looks at its clock or at its messages first is chance.
                self.queue.at(self.now + 0.2 * self.rng.random(), lambda call=call: self._do(process, call))  # type: ignore[misc]

    def hang(self, rank: int) -> None:
        if rank in self.processes:
            self.say(f"worker {rank} hangs")
            self.processes[rank].hung = True
            self.disturb([rank])

    def request(self, rank: int, generation: int) -> None:
        process = self.processes.get(rank)
        if process is not None and not process.stopped:
            self.say(f"worker {rank} requests generation {generation}")
            process.machine.request(0, generation)
            self._carry_out(process)

    # Processes

    def _repeat(self, process: Process, interval_s: float, call: Callable[[Process], None]) -> None:
        def again() -> None:
            if self.processes.get(process.rank) is not process:
                return
            if not process.stopped:
                self._do(process, lambda: call(process))
            self.queue.at(self.now + interval_s * self.rng.uniform(1.0, 1.2), again)

        self.queue.at(self.now + interval_s * self.rng.random(), again)

    def _beat(self, process: Process) -> None:
        if not process.hung:
            process.machine.beat(process.machine.own.steps + 1, 0.0)
            if self.rng.random() < 0.1:
                self._read_board(process)

    def _read_board(self, process: Process) -> None:
        """Read in the store, at the first worker's that answers, where the others are."""
        if any((rank, process.rank) not in self.network.down for rank in self.processes if rank != process.rank):
            for rank, address in self.addresses.items():
                if rank != process.rank:
                    process.machine.found(rank, self.numbers[rank], address, self.now)

    def _do(self, process: Process, call: Callable[[], None]) -> None:
        """Let a process do something: later, if it is stopped; never, if it has ended."""
        if self.processes.get(process.rank) is not process:
            return
        if process.stopped:
            process.waiting.append(call)
            return
        call()
        self._carry_out(process)

    def _carry_out(self, process: Process) -> None:
        actions, process.machine.actions = process.machine.actions, []
        for action in actions:
            if isinstance(action, Send):
                self._send(process, action.rank, action.message)
            else:
                self._check(process, action)

    def _send(self, process: Process, rank: int, message: Message) -> None:
        sender = process.rank
        # As on a real connection: what cannot be answered does not get through either.
        if (rank, sender) in self.network.down:
            return
        known = process.machine.record(rank)
        address = self.addresses[rank] if known is None or process.machine.dead(rank) else known.address
        if self._encodes:
            message = _travelled(message, self.workers)

        def arrive() -> None:
            receiver = self.processes.get(rank)
            if receiver is None or self.addresses[rank] != address:
                self.network.send(rank, sender, refuse)
                return
            self._do(receiver, lambda: receiver.machine.receive(sender, message, self.now))

        def refuse() -> None:
            self._do(process, lambda: process.machine.refused(rank, address, self.now))

        self.network.send(sender, rank, arrive)

    # Invariants

    def _check(self, process: Process, notice: Notice) -> None:
        """What is said about a worker is true, or was just now."""
        self.num_notices += 1
        rank, change = notice.rank, notice.change
        self.say(f"worker {process.rank}: worker {rank} {change}")
        known = process.machine.record(rank)
        number = known.process if known is not None else 0
        before, about, at = process.said.get(rank, (Change.RETURNED, 0, 0.0))
        process.said[rank] = (change, number, self.now)
        if change == Change.DIED and before == Change.DIED:
            raise Violated(f"worker {process.rank} says twice that worker {rank} died")
        other = self.processes.get(rank)
        ended_at = self.changed_at[rank]
        if change == before == Change.RETURNED or other is not None or about != number:
            pass
        elif change == Change.RETURNED and at > ended_at > self.links_changed_at + self._known_after_s():
            raise Violated(f"worker {process.rank} says that worker {rank} is back, as it was when it died")
        # Whoever was stopped has nothing to say about those that were not.
        just_resumed = process.resumed_at == self.changed_at[process.rank]
        quiet_s = self.now - (ended_at if just_resumed else max(ended_at, self.changed_at[process.rank]))
        if quiet_s < self._known_after_s():
            return
        there = {each.rank for each in self.processes.values() if not each.stopped}
        if change == Change.RETURNED and other is None and not just_resumed:
            raise Violated(f"worker {process.rank} says that worker {rank} is back, which ended {quiet_s:.1f} s ago")
        alive = other is not None and not other.stopped and not other.hung
        connected = rank in self.network.reachable(process.rank, there)
        others = (at for each, at in self.changed_at.items() if each != process.rank or not just_resumed)
        quiet = all(self.now - at > self._known_after_s() for at in others)
        if change == Change.DIED and alive and connected and quiet:
            raise Violated(f"worker {process.rank} says that worker {rank} died, which is alive and connected")

    def _known_after_s(self) -> float:
        return self.timing.dead_s + SLACK_S

    def check_known(self) -> None:
        """Everybody knows who is alive, and what was requested. To be called if nothing has happened for long."""
        running = {rank for rank, process in self.processes.items() if not process.stopped}
        for process in [self.processes[rank] for rank in sorted(running)]:
            heard = self.network.reachable(process.rank, running)
            for rank in range(self.workers):
                self._check_one(process, rank, heard)
            requests = max(self.processes[rank].machine.own.requests[0] for rank in heard)
            if process.machine.own.requests[0] < requests:
                raise Violated(f"worker {process.rank} does not know that generation {requests} is requested")

    def _check_one(self, process: Process, rank: int, heard: set[int]) -> None:
        dead, other, known = process.machine.dead(rank), self.processes.get(rank), process.machine.record(rank)
        if rank == process.rank:
            return
        if rank in heard and other is not None and not other.hung:
            if dead or known is None:
                raise Violated(f"worker {process.rank} does not know that worker {rank} is alive")
            if known.process != other.machine.own.process:
                raise Violated(f"worker {process.rank} knows an earlier process of worker {rank} only")
            if known.stage != other.machine.own.stage:
                raise Violated(f"worker {process.rank} does not know how far worker {rank} is")
        elif not dead:
            raise Violated(f"worker {process.rank} takes worker {rank} for alive")


def _travelled(message: Message, workers: int) -> Message:
    parsed = from_bytes(to_bytes(*message), workers)
    assert parsed is not None
    return parsed
