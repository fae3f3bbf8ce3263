"""The counts in a worker's status, from what its swarm and its meters have counted."""

from __future__ import annotations

from gossamer.process.metrics import Metrics
from gossamer.runs.status import WorkerStatus
from gossamer.train.worker_task import LossMeter


def measure(status: WorkerStatus, before: WorkerStatus, metrics: Metrics, losses: LossMeter) -> None:
    """Update the counts; only while training, since the final ones differ. ``before``: when the run was resumed."""
    status.idle_s, status.consensus = before.idle_s + metrics.idle_s, metrics.consensus
    loss_sum, loss_count = losses.sum_and_count()
    status.loss_sum, status.loss_count = before.loss_sum + loss_sum, before.loss_count + loss_count
    # Not at the end, where all workers leave.
    status.peers_alive = metrics.peers_alive
    measure_exchanges(status, before, metrics)


def measure_exchanges(status: WorkerStatus, before: WorkerStatus, metrics: Metrics) -> None:
    """Update the counts of exchanges; until the end, since a worker that is done serves those that are not."""
    status.exchanges = before.exchanges + metrics.exchanges
    status.bytes_sent = before.bytes_sent + metrics.bytes_sent
    status.refused, status.lost = before.refused + metrics.refused, before.lost + metrics.lost
