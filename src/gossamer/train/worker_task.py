"""A task on one worker: its model, its share of the data in its job_spec, and what the test set says.

The same seed gives the same initial weights, the same partition and the same mini-batches as in the virtual cluster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.config import Run, find_device
from gossamer.process.store.rank_info import find_local_rank
from gossamer.seeds import stream
from gossamer.tasks import worker_batches

TEST_PIECE = 1000
"""Samples of the test set that are evaluated at a time."""


class WorkerTask:
    """What worker ``rank`` of a run computes."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        c = run.config
        self.device = _own_device(c.device)
        torch.manual_seed(c.seed)
        self.model = run.task.model().to(self.device)
        # From here on every worker draws its own, for dropout and the like.
        torch.manual_seed(int(stream(c.seed, "torch", rank).integers(2**63)))
        self.optimizer = run.make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        self._lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.batches = worker_batches(run.task, c.partition, c.workers, c.batch, c.seed)[rank]
        self._train = tuple(part.to(self.device) for part in run.task.train)
        self._test = tuple(part.to(self.device) for part in run.task.test)

    def gradient(self, number: int) -> Tensor | None:
        """Leave the gradient of mini-batch ``number`` in the parameters; returns its loss, if the task has one."""
        self.optimizer.zero_grad()
        if not self.run.task.gradients:
            return None
        task, (inputs, targets) = self.run.task, self._mini_batch(number)
        self.model.train()
        loss = task.loss(self._outputs(inputs), targets)
        loss.backward()
        return loss.detach()

    def update(self, number: int) -> None:
        """The optimizer's step, at the learning rate that step ``number`` has."""
        factor = self.run.schedule(number)
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor
        self.optimizer.step()

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _mini_batch(self, number: int) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(self.batches.take(number)).to(self.device)
        inputs, targets = (part.index_select(0, index) for part in self._train)
        if self.run.task.augment is not None:
            inputs = self.run.task.augment(inputs, stream(self.run.config.seed, "augment", self.rank, number))
        return inputs, targets

    def _outputs(self, inputs: Tensor) -> Tensor:
        if self.run.task.prepare is not None:
            inputs = self.run.task.prepare(inputs)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.config.precision == "bfloat16"):
            outputs: Tensor = self.model(inputs)
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs

    @property
    def test_batches(self) -> float:
        """How many mini-batches the test set would make."""
        return len(self._test[0]) / self.run.config.batch

    @torch.no_grad()
    def scores(self) -> tuple[float | None, float | None]:
        """Loss and accuracy on the test set, as far as the task has them."""
        task, (inputs, targets) = self.run.task, self._test
        if not task.gradients:
            return None, None
        self.model.eval()
        loss, correct = 0.0, 0.0
        for at in range(0, len(inputs), TEST_PIECE):
            some = slice(at, at + TEST_PIECE)
            outputs, share = self._outputs(inputs[some]), len(targets[some]) / len(targets)
            loss += share * float(task.loss(outputs, targets[some]))
            if task.correct is not None:
                correct += share * float(task.correct(outputs, targets[some]))
        return loss, None if task.correct is None else correct

    def weights(self) -> dict[str, Tensor]:
        """The model's state_dict, in memory of its own."""
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.model.state_dict().items()}


class LossMeter:
    """The losses of a worker's mini-batches, summed where they are computed: the device is never waited for."""

    def __init__(self, device: torch.device) -> None:
        self._sum_and_count = torch.zeros(2, dtype=torch.float64, device=device)
        self._bad = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: Tensor) -> None:
        finite = torch.isfinite(loss)
        self._sum_and_count += torch.stack((torch.where(finite, loss, 0.0), finite))
        self._bad = (self._bad + 1) * ~finite

    def sum_and_count(self) -> tuple[float, int]:
        """Of those that were finite; both as of the same mini-batch, whoever asks."""
        total, count = self._sum_and_count.tolist()
        return total, int(count)

    def bad_in_a_row(self) -> int:
        """How many of the newest mini-batches had a loss that was not finite."""
        return int(self._bad)


def _own_device(name: str) -> torch.device:
    """This worker's device: where there are several GPUs, workers of one machine share them out."""
    device = find_device(name)
    if device.type != "cuda":
        return device
    if ":" not in name:
        device = torch.device("cuda", find_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
