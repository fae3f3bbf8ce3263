"""The end of a run: the method's ``finish``, then one exact average over all workers.

If a worker is lost or comes back in the middle of it, the others agree on a new generation and start again. Each
worker has a *standing*: whether its weights count. One that already has the final average gives it to the others.
"""

from __future__ import annotations

import time

import torch

from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND, StepRetry
from gossamer.process.lifecycle import TrainingEnded
from gossamer.process.pairwise.screening import absurd
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.runtime.worker_state import is_finite

POLL_S = 0.01
HOST_LEAVES_AFTER_S = 0.5
"""How long the host of the store waits for the others to leave first."""

EXCLUDED, COUNTS, HAS_AVERAGE = 0, 1, 2
"""Standings: weights that are not finite or not of this run; weights that count; the final average itself."""


class FinalAverage:
    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime, self.rank, self.store = runtime, runtime.rank, runtime.store
        self.groups, self.of = runtime.groups, runtime.groups.finish
        self._standing = EXCLUDED
        self._method_finished = False
        """The method's ``finish`` has begun here: it cannot be repeated."""

    def run(self) -> None:
        """Run until the average is complete on every worker alive."""
        while not self._attempt():
            pass
        self.runtime.flat_model.load_weights(self.runtime.flat_model.x)

    def _attempt(self) -> bool:
        """Return False if the membership changed in the middle of it."""
        try:
            self.of.begin()
            # The first message: if the connections fail, nobody has begun yet and all can start again.
            flag_of_ours = (torch.tensor([int(self._method_finished)]),)
            begun = self.groups.gather(self.of, FOREGROUND, flag_of_ours, Call("Gather", "begun", 0))
            if not any(int(flag) for (flag,) in begun):
                self._method_finished = True
                self.runtime.driver.finish_method(self.of)
            self._average()
            self._standing = HAS_AVERAGE
            self._leave_together()
        except StepRetry:
            return False
        except TrainingEnded:
            pass
        return True

    def _average(self) -> None:
        """Average weights and buffers over the workers whose weights count."""
        flat_model, of = self.runtime.flat_model, self.of
        x, buffers = flat_model.x.to("cpu"), flat_model.buffer_vector().to("cpu")
        if self._standing != HAS_AVERAGE:
            counts = is_finite(x) and is_finite(buffers) and not self.runtime.state.needs_state
            self._standing = COUNTS if counts else EXCLUDED
        own = torch.tensor([self._standing, torch.linalg.vector_norm(x)], dtype=torch.float64)
        standings = torch.stack(
            [row for (row,) in self.groups.gather(of, FOREGROUND, (own,), Call("Gather", "standings", 0))]
        )
        # Only the best standing counts: where somebody has the average, that; where nobody counts, everybody.
        best = standings[:, 0] == standings[:, 0].max()
        typical_norm = float(standings[best, 1].median())
        best &= torch.tensor([not absurd(float(norm), typical_norm) for norm in standings[:, 1]])
        if not best.any():
            best[:] = True
        counts = bool(best[of.members.index(self.rank)])
        means = []
        for name, vector in (("weights", x), ("buffers", buffers)):
            part, call = vector if counts else torch.zeros_like(vector), Call("Mean", name, 0)
            result = self.groups.mean(of, FOREGROUND, part, call, weight=float(counts)) if len(vector) else None
            means.append(vector if result is None else result.mean)
        flat_model.x.copy_(means[0])
        flat_model.load_buffers(means[1])

    def _leave_together(self) -> None:
        """Wait until every member has the average. The host of the store leaves last."""
        of = self.of
        others = [rank for rank in of.members if rank != self.rank]

        def all_have(published: str) -> bool:
            return all(
                self.store.get(f"{published}/{rank}") is not None or self.runtime.heartbeats.dead(rank)
                for rank in others
            )

        has, left = (f"{of.key}/{of.generation}/{what}" for what in ("has", "left"))
        while True:
            self.store.set(f"{has}/{self.rank}", "1")
            if of.requested > of.generation:
                raise StepRetry
            if all_have(has):
                break
            time.sleep(POLL_S)
        if self.store.hosted_here:
            until = time.monotonic() + HOST_LEAVES_AFTER_S
            while time.monotonic() < until and not all_have(left):
                time.sleep(POLL_S)
        else:
            self.store.set(f"{left}/{self.rank}", "1")
