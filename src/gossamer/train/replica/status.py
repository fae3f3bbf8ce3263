"""The status of replicas: their ranks publish one each, and the monitor reads them as that of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gossamer.runs.status import FAILED, StatusBoard, WorkerStatus

FIGURES = ("pid", "host", "state", "steps", "idle_s", "step_s", "bytes_sent", "loss_sum", "loss_count")
"""What is shown of each rank."""


class ReplicaBoard(StatusBoard):
    """The boards of all shards as one: a status is that of a whole replica, requests go to its first rank."""

    def __init__(self, boards: Sequence[StatusBoard]) -> None:
        """``boards``: by shard."""
        super().__init__(boards[0]._store)
        self.boards = boards

    def get(self, rank: int) -> WorkerStatus | None:
        first, *others = (board.get(rank) for board in self.boards)
        return first and whole_status(first, [status for status in others if status is not None])

    def close(self) -> None:
        for board in self.boards:
            board.close()


def whole_status(first: WorkerStatus, others: Sequence[WorkerStatus]) -> WorkerStatus:
    """Return the status of a replica. Its first rank speaks for all but for sums, and for what fails elsewhere.

    The consensus distance of each rank is that of the whole replica.
    """
    ranks = [first, *others]
    failed = next((status for status in ranks if status.state == FAILED), first)
    diverged = [status.diverged_at for status in ranks if status.diverged_at is not None]
    return replace(
        first,
        state=failed.state,
        error=first.error or failed.error,
        diverged_at=min(diverged, default=None),
        loss_sum=sum(status.loss_sum for status in ranks),
        loss_count=sum(status.loss_count for status in ranks),
        bytes_sent=sum(status.bytes_sent for status in ranks),
        ranks=[rank_figures(status) for status in ranks],
    )


def rank_figures(status: WorkerStatus) -> dict[str, Any]:
    """Return the figures of one rank that are its own."""
    return {name: getattr(status, name) for name in FIGURES}
