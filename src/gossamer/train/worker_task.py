"""The task of one worker: its model, its mini-batches in their order, its evaluation on the test set.

The same seed gives the same initial weights, the same partition and the same mini-batches as in the virtual cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.config import Run, find_device
from gossamer.process.store.rank_info import find_local_rank
from gossamer.seeds import stream
from gossamer.tasks import worker_batches
from gossamer.vectors.flat import is_sharded, local_part

if TYPE_CHECKING:
    from gossamer.train.replica.rank import ReplicaRank

TEST_BATCH = 1000


class WorkerTask:
    def __init__(self, run: Run, rank: int, replica: ReplicaRank | None = None) -> None:
        """``replica``: the rank of its replica that this process is; None if the worker is one process."""
        self.run, self.rank, self.replica = run, rank, replica
        c = run.config
        self.shard = 0 if replica is None else replica.shard
        # Numbers of rank 0 of a replica are those of a worker of one rank.
        self._who = (rank, self.shard) if self.shard else (rank,)
        self.device = own_device(c.device)
        torch.manual_seed(c.seed)
        self.plain_model = run.task.model().to(self.device)
        self.model = self.plain_model if replica is None else replica.parallelize(self.plain_model, c.inside)
        # From here on each rank draws its own random numbers, for dropout and the like.
        torch.manual_seed(int(stream(c.seed, "torch", *self._who).integers(2**63)))
        self.optimizer = run.make_optimizer([p for p in self.plain_model.parameters() if p.requires_grad])
        self._lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.deal(tuple(range(max(c.workers, rank + 1))))
        self._train = tuple(part.to(self.device) for part in run.task.train)
        self._test = tuple(part.to(self.device) for part in run.task.test)

    def deal(self, ranks: tuple[int, ...]) -> None:
        """Take this worker's share of the data, which is dealt among these workers."""
        c, position = self.run.config, ranks.index(self.rank)
        if self.run.task.own_data:
            # There is data for as many workers as the run began with.
            position, num_shares = self.rank % c.workers, c.workers
        else:
            num_shares = len(ranks)
        self.ranks = ranks
        self.batches = worker_batches(self.run.task, c.partition, num_shares, c.worker_batch, c.seed)[position]

    def gradient(self, number: int) -> Tensor | None:
        """Compute the gradient of mini-batch ``number`` into the parameters; return its loss, if the task has one."""
        self.optimizer.zero_grad()
        if not self.run.task.gradients:
            return None
        task, (inputs, targets) = self.run.task, self._mini_batch(number)
        self.model.train()
        loss = task.loss(self._outputs(inputs), targets)
        loss.backward()
        return loss.detach()

    def update(self, number: int) -> None:
        """Make the optimizer's step at the learning rate of step ``number``."""
        factor = self.run.schedule(number)
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor
        self.optimizer.step()

    def like(self, name: str, size: torch.Size) -> Tensor | None:
        """Return the parameter whose layout over ranks a tensor of a checkpoint has, by the tensor's name there."""
        _, kind, *rest = name.split("/")
        if kind == "model":
            return self._by_name.get("/".join(rest))
        if kind == "optimizer" and rest[0] == "state":
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            parameter: Tensor = parameters[int(rest[1])]
            return parameter if parameter.shape == size else None
        return None

    def load(self, model: Mapping[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Load the model and the optimizer from a checkpoint, whose tensors may be whole where ours are sharded."""
        self.plain_model.load_state_dict({name: self._laid_out(f"/model/{name}", t) for name, t in model.items()})
        state = {
            index: {name: self._laid_out(f"/optimizer/state/{index}/{name}", value) for name, value in entry.items()}
            for index, entry in optimizer["state"].items()
        }
        self.optimizer.load_state_dict({**optimizer, "state": state})

    def _laid_out(self, name: str, value: Any) -> Any:
        like = self.like(name, value.shape) if isinstance(value, Tensor) else None
        if like is None or not is_sharded(like):
            return value
        from gossamer.train.replica.sharded_checkpoint import laid_out_as

        return laid_out_as(value, like)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _mini_batch(self, number: int) -> tuple[Tensor, Tensor]:
        # The ranks of a replica share the mini-batch that a worker of one rank would have.
        own = slice(self.shard * self.run.config.batch, (self.shard + 1) * self.run.config.batch)
        index = torch.from_numpy(self.batches.take(number)[own]).to(self.device)
        inputs, targets = (part.index_select(0, index) for part in self._train)
        if self.run.task.augment is not None:
            inputs = self.run.task.augment(
                inputs, stream(self.run.config.seed, "augment", self.rank, number, *self._who[1:])
            )
        return inputs, targets

    def _outputs(self, inputs: Tensor) -> Tensor:
        if self.run.task.prepare is not None:
            inputs = self.run.task.prepare(inputs)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.config.precision == "bfloat16"):
            # DDP's own forward pass is for training only.
            outputs: Tensor = (self.model if torch.is_grad_enabled() else self.plain_model)(inputs)
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs

    @property
    def _by_name(self) -> dict[str, Tensor]:
        return dict(self.plain_model.state_dict())

    @property
    def num_test_batches(self) -> float:
        return len(self._test[0]) / self.run.config.batch

    @torch.no_grad()
    def evaluate(self) -> tuple[float | None, float | None]:
        """Return loss and accuracy on the test set, as far as the task has them."""
        task, (inputs, targets) = self.run.task, self._test
        if not task.gradients:
            return None, None
        self.plain_model.eval()
        loss, correct = 0.0, 0.0
        for start in range(0, len(inputs), TEST_BATCH):
            batch = slice(start, start + TEST_BATCH)
            outputs, share = self._outputs(inputs[batch]), len(targets[batch]) / len(targets)
            loss += share * float(task.loss(outputs, targets[batch]))
            if task.correct is not None:
                correct += share * float(task.correct(outputs, targets[batch]))
        return loss, None if task.correct is None else correct

    def parameters(self) -> Tensor:
        """Return a copy of the trainable parameters, or of this rank's part of them, as one vector."""
        return torch.cat([local_part(p.detach()).flatten() for p in self.model.parameters() if p.requires_grad])

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the whole model's state_dict in host memory. All ranks of a replica must call it."""
        weights = {}
        for name, tensor in self.plain_model.state_dict().items():
            whole = tensor.full_tensor() if is_sharded(tensor) else tensor
            weights[name] = whole.detach().cpu().clone().contiguous()
        return weights


class LossMeter:
    """Sums the losses of a worker's mini-batches on their device, so that the host never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._sum_and_count = torch.zeros(2, dtype=torch.float64, device=device)
        self._num_nonfinite = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: Tensor) -> None:
        finite = torch.isfinite(loss)
        self._sum_and_count += torch.stack((torch.where(finite, loss, 0.0), finite))
        self._num_nonfinite = (self._num_nonfinite + 1) * ~finite

    def sum_and_count(self) -> tuple[float, int]:
        """Return sum and number of the finite losses, both as of the same mini-batch."""
        total, count = self._sum_and_count.tolist()
        return total, int(count)

    def nonfinite_in_a_row(self) -> int:
        """Return how many of the newest losses in a row were not finite."""
        return int(self._num_nonfinite)


def own_device(name: str) -> torch.device:
    """Return this worker's device: workers of one machine are spread over its GPUs."""
    device = find_device(name)
    if device.type != "cuda":
        return device
    if ":" not in name:
        device = torch.device("cuda", find_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
