"""Ready-made jobs to train: model, data, loss, metric; and how the data is dealt to the workers."""

from gossamer.tasks.partition import Batches, partition, worker_batches
from gossamer.tasks.scores import accuracy, cross_entropy
from gossamer.tasks.table import build, describe, names
from gossamer.tasks.task import Task, TaskConfig

__all__ = [
    "Batches",
    "Task",
    "TaskConfig",
    "accuracy",
    "build",
    "cross_entropy",
    "describe",
    "names",
    "partition",
    "worker_batches",
]
