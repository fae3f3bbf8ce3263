"""A real worker put together: its model, its method, its connections, the thread that maintains them."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import torch
from torch import nn

from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.methods.loading.method_contract import check_declaration, gradient_topic
from gossamer.process.collectives import nccl
from gossamer.process.collectives.encoded_mean import EncodedMeans
from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.group_connections import GroupConnections
from gossamer.process.collectives.groups import Groups
from gossamer.process.collectives.membership import BACKGROUND, FOREGROUND
from gossamer.process.events import EventKind
from gossamer.process.joining.handshake import Handshake
from gossamer.process.joining.join_checks import register
from gossamer.process.joining.join_facts import find_facts
from gossamer.process.lifecycle import Phase, StepRetry, TrainingEnded
from gossamer.process.liveness.heartbeats import Heartbeats, HeartbeatThreads, Progress
from gossamer.process.net.secret import NO_SECRET, is_loopback
from gossamer.process.replica.agreement import Agreement as ReplicaAgreement
from gossamer.process.replica.driver import make_driver, worker_classes
from gossamer.process.roster.newcomer import announcement
from gossamer.process.roster.placement import place
from gossamer.process.roster.roster import KnownRoster
from gossamer.process.roster.roster_store import RosterStore, check_place
from gossamer.process.runtime.early_gradient import make_early_gradient
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.process.runtime.partition_policy import CONTINUE, PartitionPolicy
from gossamer.process.runtime.process_worker import ProcessWorker
from gossamer.process.runtime.staging import Staging
from gossamer.process.store.addresses import local_address
from gossamer.process.store.claim_watch import ClaimWatch
from gossamer.process.store.parsing import Refusals, read_time
from gossamer.process.store.rank_claim import RankClaim
from gossamer.process.store.rank_info import START_TIMEOUT_S, RankInfo
from gossamer.process.store.worker_addresses import WorkerAddresses
from gossamer.process.views.agreement import Agreement
from gossamer.process.watches.peer_watch import PeerWatch
from gossamer.process.watches.waits import FinishWait, JoinWait
from gossamer.recording import Recorder
from gossamer.topology import Topology
from gossamer.wire import Codec, Links, MeanLink

STATE_TIMEOUT_S = 30.0
"""How long a worker that comes back waits for a peer's weights."""

LEAVE_GROUPS_AFTER_S = 0.5
"""How long a worker that is done stays in the groups of the others: if all end together, no group is rebuilt."""

CLOSE_TIMEOUT_S = 1.0


class WorkerRuntime:
    """One real worker. ``Swarm`` is what users see of it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        topology: Topology,
        rank_info: RankInfo,
        seed: int,
        transport: str = "tcp",
        recorder: Recorder | None = None,
        codec: Codec | None = None,
        timeout_s: float = START_TIMEOUT_S,
        has_output: bool = False,
        replica: ReplicaAgreement | None = None,
        partition: str = CONTINUE,
        job: str = "",
    ) -> None:
        """Join the other workers; returns when all of them have joined.

        ``codec``: how models travel. ``timeout_s``: how long to wait for the others. ``has_output``: this worker
        reports to a run folder or a tracker. ``replica``: this worker is a rank of one. ``partition``: what to do
        without the others. ``job``: what the run announces to processes that want to come to it.
        """
        self.method, self.rank = method, rank_info.rank
        self._announcement = announcement(rank_info.prefix, job, replica is not None)
        self.everybody = KnownRoster(rank_info.roster)
        check_declaration(method)
        has_background = method.background is not None
        self.flat_model = FlatModel(model, optimizer, has_background or method.eval_point is not None)
        # Bounded and cheap, so that one is there even if nobody reads it.
        self.recorder = recorder or Recorder([self.rank])
        placement = place(topology, self.everybody.ranks)
        method.on_topology_change(placement.topology)
        self.worker = ProcessWorker(self.rank, placement, seed, self.flat_model, self.recorder)
        if transport == "nccl":
            nccl.check(self.flat_model.device)
        staging = Staging(self.flat_model.device, nccl=transport == "nccl")
        new_state, new_exchanges, new_handler = worker_classes(replica)
        self.state = new_state(method, self.flat_model, self.worker, staging, self.everybody, topology)
        self.state.replica, self.worker.counts_time = replica, replica is not None
        self.lifecycle, self.metrics = self.state.lifecycle, self.state.metrics
        self._joined = False
        self._began = ""
        """When the run began, in seconds since the epoch; empty until that is agreed on."""
        self.came_back = False
        """The run had begun when this worker joined: it, or an earlier process of it, was away."""

        events = self.state.events
        refused = partial(events.add, EventKind.REFUSED)
        self.store = rank_info.connect_store(timeout_s, partial(events.add, EventKind.WAITING), refused)
        # Also of one worker: others may come to its run.
        if not rank_info.secret and not is_loopback(rank_info.host):
            events.add(EventKind.UNPROTECTED, NO_SECRET)
        listener = self.store.listen(local_address(rank_info.host))
        self._claim = RankClaim(self.store, listener.address, lambda: len(self.everybody))
        self.refusals = Refusals(refused)
        self.addresses = WorkerAddresses(self.rank, listener.address, self.store, self.refusals)
        self.heartbeats = Heartbeats(self.rank, self.everybody, self.store, self.addresses)
        self._claim_watch = ClaimWatch(self._claim, self.heartbeats.counter, self._end_as_second)
        self.heartbeats.on_namesake = self._claim_watch.hear_of_namesake
        self.roster_store = RosterStore(self.store, self.everybody, self.refusals)
        history = self.state.history
        self.heartbeats.own_progress = lambda: Progress(history.steps, history.busy_s)
        self.peer_watch = PeerWatch(self.everybody, self.heartbeats, self.state.events, method.lockstep)
        size = 0 if replica is None else replica.size
        facts = find_facts(self.flat_model, method, topology, seed, transport, codec, has_output, size)
        self._timeout_s = timeout_s
        self._handshake = Handshake(self.rank, topology.workers, facts, self.store, self.heartbeats, timeout_s, events)
        self._handshake.replica = replica
        try:
            if replica is not None:
                # The store may end as soon as one of them sees that the replicas differ.
                replica.all_true(True)
            # Before anything is published: a worker that does not fit a run that has begun must not disturb it.
            self._handshake.check_run()
            self.roster_store.read()
            check_place(self.rank, self.everybody)
            self.everybody.on_change.append(self.peer_watch.on_roster_change)
            self._claim.make()
        except BaseException:
            self.state.watch.close()
            self.store.close()
            raise
        # A method that averages in the background only also rebuilds its membership there, so no step waits for it.
        self._owner = BACKGROUND if has_background and not method.lockstep else FOREGROUND
        self._connections = GroupConnections(self.rank, listener, self.addresses.find, self.addresses.known)
        builder = GroupBuilder(self.rank, self.store, self._connections)
        agreement = Agreement(self.heartbeats, self.refusals)
        self.groups = Groups(
            self.everybody, builder, self.heartbeats, agreement, self.state, self.lifecycle, self._owner
        )
        # Some may have come or left since the run began. Collectives follow where their members agree on it.
        self.state.follow(self.everybody.value)
        self.state.on_placed = self._find_neighbours
        neighbours = self.worker.placement.neighbours(self.rank) if method.pairwise else ()
        links = encoded = None
        if codec is not None:
            links = Links(codec, seed, self.rank)
            encoded = EncodedMeans(self.groups, staging, partial(MeanLink, codec, seed + self.rank))
        self.exchanges = new_exchanges(self.state, neighbours, listener, self.heartbeats, links)
        self.effects = new_handler(self.state, self.groups, self.exchanges, encoded)
        topic = gradient_topic(method)
        if topic and transport != "nccl" and codec is None and replica is None:
            self.effects.early = make_early_gradient(self.state, self.groups, topic)
        self._policy = PartitionPolicy(partition, self.heartbeats, agreement.grouping, events, self.lifecycle)
        self.driver = make_driver(self.state, self.effects, self._policy, replica)
        self.missing: list[int] = []
        """Workers that are not in the final average."""
        self._heartbeat_threads = HeartbeatThreads(self.heartbeats, self._poll, self._follow)
        try:
            self._join()
            if replica is not None:
                replica.joined(self.groups.train, self.state)
        except BaseException:
            self.close()
            raise
        self.flat_model.note_start_buffers()
        method.begin(self.worker)
        self.state.write_eval_point()
        register(self.flat_model, self.lifecycle)

    # Joining

    def _join(self) -> None:
        """Start from rank 0's weights and buffers, or take over the state of the others if the run has begun."""
        self._publish()
        self.store.on_move.append(self._on_store_moved)
        self.heartbeats.beat()
        self._handshake.run()
        # Others may have published their addresses only now. They hear of this worker before it trains with them.
        self.heartbeats.look_again()
        self.heartbeats.beat()
        self.heartbeats.follow()
        for rank in self.exchanges.peers.neighbours:
            address = self.addresses.find(rank)
            if address is not None:
                self.exchanges.peers.set_address(rank, address)
        self.addresses.on_found = self.exchanges.peers.set_address
        train = self.groups.train
        # "started" is published once everybody has joined: a worker that reads it before it has joined comes back.
        wait = JoinWait(self.everybody, self.heartbeats, self._timeout_s, self._handshake.check_replica)
        train.cancelled = lambda: wait.too_late() or self.store.get("started") is not None
        self.state.needs_state = self.rank != 0
        try:
            with contextlib.suppress(StepRetry):
                train.rebuild(self._owner)
            self._joined = True
            self._republish()
            self.state.needs_state = False
        except TrainingEnded:
            # Exchanges are recorded from here on.
            self._agree_on_start()
            self._come_back(wait)
            self._joined = True
        train.cancelled = lambda: False
        self.driver.raise_background_error()
        self._agree_on_start()
        self.heartbeats.all_seen = True

    def _agree_on_start(self) -> None:
        """Agree with the other workers on when the run began: the first one to publish its time decides.

        A resumed run began as long ago as it has lasted.
        """
        own = f"{time.time() - self.recorder.resumed_after_s:.6f}"
        self._began = f"{self.refusals.agreed(self.store, 'began', own, read_time) or float(own):.6f}"
        self.driver.last_step_at = time.monotonic()
        self.recorder.origin = self.driver.last_step_at - (time.time() - float(self._began))

    def _come_back(self, wait: JoinWait) -> None:
        """Take over the state of the others: the run has begun without this worker, or before it was restarted."""
        self.state.needs_state = self.came_back = True
        train, averaged = self.groups.train, self.groups.averaged
        train.cancelled = wait.too_late
        is_new = self.rank in self.everybody.value.came
        text = f"came {'to the run' if is_new else 'back'}: taking over from the others"
        self.state.events.add(EventKind.TOOK_OVER, text)
        # The others are connected with an earlier process of this rank.
        averaged.request(averaged.requested + 1)
        if self.method.pairwise and not self.method.lockstep:
            self._take_weights_of_a_peer()
        else:
            train.request(train.requested + 1)
            rebuild, replica = partial(train.rebuild, self._owner), self.state.replica
            with contextlib.suppress(StepRetry):
                # All ranks of a replica take over from the same one, at the same step.
                rebuild() if replica is None else replica.step(train, self.state, rebuild)
        if self.state.needs_state:
            text = "nobody is left to take over from: this worker's weights do not count in the end"
            self.state.events.add(EventKind.NOT_AVERAGED, text)
        if is_new and not any(event.kind == EventKind.RESIZED for event in self.state.events):
            # Those that were there say so when it comes.
            self.state.events.add(EventKind.RESIZED, self.worker.placement.describe())

    def _take_weights_of_a_peer(self) -> None:
        pairing = self.exchanges.pairing
        pairing.needs_state = True
        self.driver.start_background()
        until = time.monotonic() + STATE_TIMEOUT_S
        self.driver.serve(lambda: not pairing.needs_state or time.monotonic() > until or self.others_done())
        pairing.needs_state = False

    # The store

    def _publish(self) -> None:
        """Publish where we listen, and whether we are done: an earlier process of this rank may be."""
        if self._announcement:
            self.store.announce(self._announcement)
        self.roster_store.publish()
        self.addresses.publish()
        self.peer_watch.publish_failure(None)
        self.heartbeats.publish_done(self.lifecycle.done)

    def _republish(self) -> None:
        """Publish all our entries in a store that may be new."""
        self._claim.republish()
        self._publish()
        self.heartbeats.look_again()
        if not self._joined:
            self._handshake.publish()
        else:
            self._handshake.republish_agreed()
            if self._began:
                self.store.compare_set("began", self._began)
            self.store.set("started", "1")

    def _on_store_moved(self) -> None:
        try:
            self._republish()
        except InputError as error:
            self._end_as_second(error)

    def _end_as_second(self, error: InputError) -> None:
        """Another live process has this rank: say nothing any more; the next step raises ``error``."""
        self.heartbeats.muted = True
        self.driver.fail(error)

    def _poll(self) -> None:
        """Maintain the connections. Runs in the heartbeat thread, ten times a second; waits for nobody."""
        for part in (self.exchanges, self.groups, self.peer_watch, self._policy):
            part.poll()

    def _follow(self) -> None:
        """Follow what the store says. Runs in a thread of its own, ten times a second."""
        self.store.move_to_earlier()
        self.roster_store.poll()
        self._claim_watch.poll()
        if self.method.pairwise and not self.method.lockstep:
            # Nobody has to agree: an edge is there once both ends know that they are neighbours.
            self.state.follow(self.everybody.value)

    def _find_neighbours(self) -> None:
        """Connect with the neighbours of this worker's new place."""
        if self.method.pairwise:
            neighbours = self.worker.placement.neighbours(self.rank)
            self.exchanges.peers.set_neighbours({rank: self.addresses.find(rank) for rank in neighbours})

    def others_done(self) -> bool:
        """Return whether every other worker is dead or done with its training."""
        return all(self.heartbeats.done(rank) or self.heartbeats.dead(rank) for rank in {*self.everybody} - {self.rank})

    def leave(self) -> None:
        """Every worker alive has the final average: from now on none dies, all leave."""
        self.heartbeats.say_notices()
        self.peer_watch.ended = True
        self.heartbeats.publish_left()

    def close(self) -> None:
        self.driver.close()
        self.exchanges.close()
        self._heartbeat_threads.close()
        self.groups.disconnect()
        self.driver.join(CLOSE_TIMEOUT_S)
        self._connections.close()
        self.store.close()

    def finish_training(self) -> None:
        """Stop training here, and wait until every other worker has, serving those that still train."""
        self.driver.abandon_step()
        self.driver.raise_background_error()
        self.exchanges.check_delivery(ended=True)
        self.lifecycle.advance(Phase.DONE)
        self.heartbeats.publish_done(True)
        leave_groups_at, released = time.monotonic() + LEAVE_GROUPS_AFTER_S, False
        wait = FinishWait(self.everybody, self.heartbeats, self.state.events)

        def others_done() -> bool:
            nonlocal released
            wait.poll()
            if not released and time.monotonic() > leave_groups_at:
                self.groups.release()
                released = True
            return self.others_done()

        self.driver.serve(others_done)
        self.effects.drain()
        self.driver.stop_background(self.exchanges.max_duration_s + 1)
        self.driver.raise_background_error()
