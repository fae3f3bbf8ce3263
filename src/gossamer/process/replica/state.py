"""The state of one rank of a replica: while its background part rebuilds a membership, it moves at boundaries only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.process.roster.roster import Roster
from gossamer.process.runtime.worker_state import WorkerState

Exported = tuple[dict[str, Tensor], dict[str, Any]]


class ReplicaState(WorkerState):
    _frozen: Exported | None = None
    """What others take over."""
    _taken: Exported | None = None
    """What this rank has taken over since."""
    _members_changed = False

    def freeze(self) -> None:
        """From now on give a copy of this moment's state, and keep apart what is taken over. At a boundary."""
        self._frozen, self._taken, self._members_changed = super().export_state(), None, False

    def thaw(self) -> None:
        """Continue from what was taken over since ``freeze``. At a boundary."""
        taken, self._frozen, self._taken = self._taken, None, None
        if self._members_changed:
            super().on_membership_change()
        if taken is not None:
            super().import_state(*taken)
            # The next gradient is taken at the new weights already.
            self.stale_gradient = False

    def export_state(self) -> Exported:
        return super().export_state() if self._frozen is None else self._frozen

    def import_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        if self._frozen is None:
            super().import_state(tensors, rest)
            return
        self._taken = tensors, rest
        self.taken_from, self.taken_at = rest.get("rank"), rest["step"]

    def on_membership_change(self, roster: Roster | None = None) -> None:
        if self._frozen is None:
            super().on_membership_change(roster)
        else:
            self._members_changed = True
