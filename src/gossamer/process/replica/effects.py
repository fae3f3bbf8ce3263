"""Answers effects on a rank of a replica: each collective counts on all ranks of the replica, or on none."""

from __future__ import annotations

from typing import Any

from gossamer.effects import Effect, Gather, Mean, Shift, Start, Wait
from gossamer.process.collectives.membership import FOREGROUND, Membership
from gossamer.process.replica.agreement import Agreement
from gossamer.process.replica.background import not_finite, sends_finite
from gossamer.process.runtime.effect_handler import EffectHandler


class ReplicaEffectHandler(EffectHandler):
    """Answers the effects of a method in lockstep, whose collectives all begin and end in the training thread."""

    _agreeing = False
    """The ranks of the replica are in a collective: what it consists of needs no agreement of its own."""

    @property
    def replica(self) -> Agreement:
        assert self.state.replica is not None
        return self.state.replica

    def answer(self, effect: Effect, channel: str, of: Membership | None = None, started_in: int | None = None) -> Any:
        if channel != FOREGROUND or self._agreeing:
            return super().answer(effect, channel, of, started_in)
        if isinstance(effect, Start):
            return super().answer(Start(self._of_finite_replica(effect.effect)), channel, of, started_in)
        if isinstance(effect, Mean | Gather | Shift):
            effect = self._of_finite_replica(effect)
        elif not isinstance(effect, Wait) or effect.ticket.done:
            return super().answer(effect, channel, of, started_in)
        membership = of or self.groups.train

        def act() -> Any:
            self._agreeing = True
            try:
                return super(ReplicaEffectHandler, self).answer(effect, channel, of, started_in)
            finally:
                self._agreeing = False

        if membership is self.groups.train:
            return self.replica.step(membership, self.state, act)
        return self.replica.whole(membership, act)

    def _of_finite_replica(self, effect: Any) -> Any:
        """Return ``effect``, or one that is not finite either if another part of this replica is not.

        So all shards refuse the same replicas, and a replica that is refused takes over all its parts.
        """
        finite = sends_finite(effect)
        return effect if self.replica.all_true(finite) or not finite else not_finite(effect)
