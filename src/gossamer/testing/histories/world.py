"""Simulated processes around the state machine that real workers run, and what must hold at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from gossamer.process.liveness.actions import Notice, Send
from gossamer.process.liveness.board import BOARD_WORKERS
from gossamer.process.liveness.peer import Timing
from gossamer.process.liveness.records import Stage, first_record
from gossamer.process.state.lineage import ViewId
from gossamer.process.views.messages import FINISH, PURPOSES, View
from gossamer.process.views.view_change import Installed, ProbeLinks, SendTo, Tell, ViewChange
from gossamer.seeds import text_stream
from gossamer.testing.histories.collectives import Collectives
from gossamer.testing.histories.delivery import Delivery
from gossamer.testing.histories.invariants import Invariants, Violated
from gossamer.testing.histories.network import EventQueue, LinkQuality, Network
from gossamer.testing.histories.process import Parts, Process
from gossamer.testing.histories.trainer import Model, Trainer

HEARTBEAT_S = 0.1

TIMING = Timing(dead_s=2.0, hung_s=6.0, cut_s=1.0, whole_s=0.5)
"""Shorter than for real workers: a history should not take longer than it has to."""


class World:
    def __init__(
        self,
        seed: int,
        workers: int,
        quality: LinkQuality,
        parts: Parts | None = None,
        log: Callable[[str], None] | None = None,
        timing: Timing = TIMING,
        step_s: float | None = None,
        logs_messages: bool = False,
    ) -> None:
        """``step_s``: how long a step takes. ``None``: nobody trains."""
        self.seed, self.workers, self.timing, self._log = seed, workers, timing, log
        self.parts, self.step_s = parts or Parts(), step_s
        self.rng = text_stream(f"world {seed}")
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
        self.processes_changed_at = 0.0
        self.requested_at = 0.0
        """When a view was last requested."""
        self.num_notices = 0
        # What the workers do.
        self.delivery = Delivery(self, encodes=seed % 16 == 0, logs=logs_messages)
        self.collectives = Collectives(self)
        self.invariants = Invariants(self)
        self.batches = [1_000_000] * workers
        self.has_majority_policy = False
        self.has_started = False
        """What the store says to a worker that starts: the training has begun."""
        self.enough = False
        """Everybody ends after the next step."""
        self.models: dict[tuple[ViewId, int], int] = {}
        """The weights that each name of a model stands for."""
        self.has_average: set[tuple[ViewId, int]] = set()
        """Who has published that it has the final average of a view."""
        self.ended: dict[int, tuple[int, ViewId, int | None]] = {}
        """Who came to its end: which process, and with which weights."""
        self.num_steps = self.num_merges = self.num_discarded = self.num_repeated = 0

    @property
    def now(self) -> float:
        return self.queue.now

    def say(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.now:8.3f}  {text}")

    def violate(self, text: str) -> NoReturn:
        raise Violated(text)

    def disturb(self, ranks: Any = None) -> None:
        """Note that something happens now to these workers; None: to all."""
        for rank in range(self.workers) if ranks is None else ranks:
            self.changed_at[rank] = self.now
        if ranks is None:
            self.links_changed_at = self.now
        else:
            self.processes_changed_at = self.now

    # Faults

    def start(self, rank: int, clock_is_behind: bool = False) -> None:
        """Start a process; another one of this rank has ended."""
        self.num_started += 1
        number = 1000 + (-self.num_started if clock_is_behind else self.num_started)
        address = (f"host{rank}", self.num_started)
        own = first_record(rank, number, address)
        machine = self.parts.liveness(own, self.workers, self.now, self.seed, self.timing)
        process = Process(rank, number, machine, self.parts.grouping(rank, range(self.workers), machine.dead))
        self.processes[rank] = process
        self.addresses[rank], self.numbers[rank] = address, number
        self.left.discard(rank)
        self.say(f"worker {rank} starts")
        self.disturb([rank])
        machine.all_seen = True
        self._read_board(process)
        self._repeat(process, HEARTBEAT_S, self._beat)
        self._repeat(process, self.timing.tick_s, self._tick)
        if self.step_s is not None:
            process.views = [
                self.parts.view_change(index, rank, number, range(self.workers), self._gone(process, purpose))
                for index, purpose in enumerate(PURPOSES)
            ]
            process.trainer = self.parts.trainer(self, process, self.batches[rank], self.step_s)
            self.do(process, process.trainer.start)

    def crash(self, rank: int) -> None:
        process = self.processes.pop(rank, None)
        if process is not None:
            self.say(f"worker {rank} is killed")
            self.gone[rank] = process.number
            self.disturb([rank])
            if process.trainer is not None and process.trainer.view is not None:
                self.collectives.leave(process.trainer.purpose, process.trainer.view, rank)

    def leave(self, rank: int) -> None:
        """End in order."""
        process = self.processes.get(rank)
        if process is not None and not process.stopped:
            self.say(f"worker {rank} leaves")
            process.machine.advance(Stage.LEFT)
            self.carry_out(process)
            self.left.add(rank)
            self.crash(rank)

    def end(self, process: Process, view: View) -> None:
        """A worker has come to the end of its program."""
        assert process.trainer is not None
        self.ended[process.rank] = process.number, view.id, process.trainer.final
        self.leave(process.rank)

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
                self.queue.at(self.now + 0.2 * self.rng.random(), lambda call=call: self.do(process, call))  # type: ignore[misc]

    def hang(self, rank: int) -> None:
        if rank in self.processes:
            self.say(f"worker {rank} hangs")
            self.processes[rank].hung = True
            self.disturb([rank])

    def request(self, rank: int, number: int) -> None:
        process = self.processes.get(rank)
        if process is not None and not process.stopped:
            self.say(f"worker {rank} requests generation {number}")
            self.do(process, lambda: process.machine.request(0, number))

    def request_next(self, rank: int) -> None:
        process = self.processes.get(rank)
        if process is not None:
            self.request(rank, process.machine.own.requests[0] + 1)

    def finish(self, rank: int) -> None:
        """Let a worker end its training before the others."""
        process = self.processes.get(rank)
        if process is not None and process.trainer is not None:
            process.trainer.batches = 0

    # What workers read and do

    def later(self, process: Process, delay_s: float, call: Callable[[], None]) -> None:
        """Let the threads of a process do something later: they stand still if it hangs."""

        def act() -> None:
            if process.hung:
                self.later(process, 0.1, call)
            else:
                self.do(process, call)

        self.queue.at(self.queue.now + delay_s, act)

    def note_model(self, trainer: Trainer, model: Model) -> None:
        """Models that have one name have the same weights."""
        assert model.lineage is not None
        name = model.lineage.head, model.lineage.head_count
        if self.models.setdefault(name, model.weights) != model.weights:
            self.violate(f"worker {trainer.rank} has another model than others after the same steps")

    def may_train(self, process: Process) -> bool:
        if not self.has_majority_policy:
            return True
        reached = [rank for rank in range(self.workers) if not process.away(rank)]
        return 2 * len(reached) > self.workers or (2 * len(reached) == self.workers and 0 in reached)

    def has_final(self, process: Process, view: View, rank: int) -> bool:
        """Whether a member has the final average or is dead, as another one knows it."""
        published = (view.id, rank) in self.has_average and (rank, process.rank) not in self.network.down
        return published or process.away(rank)

    def _gone(self, process: Process, purpose: str) -> Callable[[int], bool]:
        if purpose == FINISH:
            return process.away
        return lambda rank: process.away(rank) or process.is_done(rank)

    # Processes

    def _tick(self, process: Process) -> None:
        now = self.queue.now
        process.machine.tick(now)
        for views in process.views:
            views.tick(now)

    def _repeat(self, process: Process, interval_s: float, call: Callable[[Process], None]) -> None:
        queue, uniform = self.queue, self.rng.uniform

        def again() -> None:
            if self.processes.get(process.rank) is not process:
                return
            if not process.stopped:
                call(process)
                self.carry_out(process)
            queue.at(queue.now + interval_s * uniform(1.0, 1.2), again)

        queue.at(queue.now + interval_s * self.rng.random(), again)

    def _beat(self, process: Process) -> None:
        if not process.hung:
            process.machine.beat(process.machine.own.steps + 1, 0.0)
            if process.trainer is not None:
                process.trainer.poll()
            if self.rng.random() * max(1.0, self.workers / BOARD_WORKERS) < 0.1:
                self._read_board(process)

    def _read_board(self, process: Process) -> None:
        """Read in the store, at the first worker's that answers, where the others are."""
        if any((rank, process.rank) not in self.network.down for rank in self.processes if rank != process.rank):
            for rank, address in self.addresses.items():
                if rank != process.rank:
                    process.machine.found(rank, self.numbers[rank], address, self.now)

    def do(self, process: Process, call: Callable[[], None]) -> None:
        """Let a process do something: later, if it is stopped; never, if it has ended."""
        if self.processes.get(process.rank) is not process:
            return
        if process.stopped:
            process.waiting.append(call)
            return
        call()
        self.carry_out(process)

    def carry_out(self, process: Process) -> None:
        machine = process.machine
        while True:
            if machine.actions:
                actions, machine.actions = machine.actions, []
                for action in actions:
                    if isinstance(action, Send):
                        self.delivery.send(process, action.ranks, action.message)
                    elif isinstance(action, Notice):
                        self.invariants.check_notice(process, action)
            if machine.changed:
                changed, machine.changed = machine.changed, set()
                self._tell_views(process, changed)
            acts = []
            for views in process.views:
                if views.actions:
                    acts += [(views, act) for act in views.actions]
                    views.actions = []
            if not acts and not machine.actions and not machine.changed:
                return
            for views, act in acts:
                self._carry_out_view(process, views, act)

    def _tell_views(self, process: Process, ranks: set[int]) -> None:
        machine = process.machine
        records = [machine.record(rank) for rank in ranks if rank != process.rank]
        process.hear_of_links([machine.own, *records])
        for index, views in enumerate(process.views):
            views.request(machine.own.requests[index])
            for record in records:
                if record is not None:
                    views.heard(record.rank, record.process, record.views[index])
            views.update()

    def _carry_out_view(
        self, process: Process, views: ViewChange, action: SendTo | ProbeLinks | Tell | Installed
    ) -> None:
        match action:
            case SendTo(ranks, message):
                self.delivery.send(process, ranks, message)
            case ProbeLinks(ranks):
                process.machine.reachability.probe(ranks, self.now)
            case Tell(number):
                self.requested_at = self.now
                process.machine.request(views.purpose, number)
            case Installed(view):
                self.say(f"worker {process.rank}: view {view.id.number} of {PURPOSES[views.purpose]}: {view.ranks}")
                process.machine.enter(views.purpose, view.mark)
                trainer = process.trainer
                if trainer is not None:
                    self.later(process, 0.0, lambda: trainer.installed(views.purpose, view))
