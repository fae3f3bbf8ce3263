"""Gossamer in a loop with Hugging Face's Accelerate, one process per worker under torchrun or ``accelerate launch``.

::

    from gossamer.integrations.accelerate import Accelerator        # instead of: from accelerate import Accelerator

    accelerator = Accelerator(method="a2cid2", topology="ring")     # and the arguments that it had
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ...                                                             # the loop as it is
    accelerator.finish()                                            # all workers now hold the same, averaged model

Accelerate does for a worker what it does for one that trains alone: devices, precision, accumulation. It knows the
true rank and the number of workers, so it also deals the data, steps schedules, logs and saves as with several
processes. It makes no process group and does not wrap the model. What workers tell each other goes through Gossamer.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import networkx as nx
import torch
from accelerate.data_loader import get_sampler
from accelerate.state import PartialState
from accelerate.utils import recursively_apply
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from gossamer.api import join
from gossamer.errors import InputError
from gossamer.integrations.accelerate_arguments import check_not_sharded, dealing
from gossamer.integrations.alone import alone
from gossamer.integrations.collectives import WorkerCollectives
from gossamer.integrations.options import check_join_options
from gossamer.methods import AnyMethod
from gossamer.process.runtime.swarm import Swarm


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose workers train their own replicas, which Gossamer averages.

    ``prepare`` joins the other workers once it has seen the model and its optimizer, and deals the data. ``gather``,
    ``gather_for_metrics``, ``reduce``, ``pad_across_processes``, ``wait_for_everyone`` and ``main_process_first`` wait
    for the workers that are alive and not done.

    Args:
        method: As for ``gossamer.join``.
        topology: As for ``gossamer.join``.
        seed: As for ``gossamer.join``. It is also the seed of the order in which the data is dealt, unless the
            ``dataloader_config`` has one.
        **arguments: Those of ``accelerate.Accelerator``, and further options of ``gossamer.join`` and the method.
    """

    def __init__(
        self, *, method: AnyMethod = "a2cid2", topology: str | nx.Graph = "", seed: int = 0, **arguments: Any
    ) -> None:
        known = inspect.signature(accelerate.Accelerator).parameters
        theirs = {name: arguments.pop(name) for name in list(arguments) if name in known}
        options = {"method": method, "topology": topology, "seed": seed, **arguments}
        self._joining = check_join_options(options, others=known)
        check_not_sharded(theirs)
        theirs["dataloader_config"] = dealing(theirs.get("dataloader_config"), seed)
        self._seed = seed
        self._collectives = WorkerCollectives()
        with alone():
            super().__init__(**theirs)
        for state in (PartialState(), self.state):
            state.process_index, state.num_processes = self._collectives.rank, self._collectives.workers
            state.local_process_index = PartialState().local_process_index
        self.swarm: Swarm | None = None
        """The handle of this worker, from ``prepare`` on."""
        self._trained: list[nn.Module] = []
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._loaded_from = ""
        self.register_save_state_pre_hook(self._save_worker)
        self.register_load_state_pre_hook(self._load_models)

    # Preparing

    def prepare_model(self, model: nn.Module, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> nn.Module:
        prepared: nn.Module = super().prepare_model(model, *args, evaluation_mode=evaluation_mode, **kwargs)
        if not evaluation_mode and any(parameter.requires_grad for parameter in prepared.parameters()):
            self._trained.append(prepared)
            self._join()
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        prepared: Any = super().prepare_optimizer(optimizer, *args, **kwargs)
        # Accelerate's wrapper passes steps on to the optimizer inside.
        inner = prepared.optimizer
        if self._optimizer is not None and self._optimizer is not inner:
            raise InputError("a second optimizer was prepared: Gossamer trains one model with one optimizer")
        self._optimizer = inner
        self._join()
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        sampler = get_sampler(data_loader)
        if isinstance(sampler, DistributedSampler):
            raise InputError(
                "the data loader has a DistributedSampler, and Accelerate deals the data too: leave the sampler out"
            )
        if not isinstance(sampler, RandomSampler) and getattr(sampler, "generator", 0) is None:
            # All workers must draw the same order, of which each takes its share.
            sampler.generator = torch.Generator().manual_seed(self._seed)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def _join(self) -> None:
        """Join the other workers if the model and its optimizer are there."""
        if self._optimizer is None or self.swarm is not None:
            return
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        for model in self._trained:
            if held & {id(parameter) for parameter in model.parameters()}:
                self._model = model
                self.swarm = self._collectives.swarm = join(model, self._optimizer, **self._joining)
                return

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.swarm is None:
            raise InputError("no model and optimizer were prepared: call prepare(model, optimizer, …) before backward")
        super().backward(loss, **kwargs)

    # The end

    def finish(self) -> None:
        """End the training: wait for the other workers alive and average all models exactly (``Swarm.finish``)."""
        if self.swarm is not None:
            self.swarm.finish()
        self._collectives.end()

    def end_training(self) -> None:
        self.finish()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Finish, and forget all that was prepared: another model may be prepared afterwards."""
        if self.swarm is not None:
            self.finish()
        self.swarm, self._model, self._optimizer, self._trained = None, None, None, []
        return super().free_memory(*objects)

    # What workers tell each other

    def wait_for_everyone(self) -> None:
        self._collectives.barrier()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        def gathered(each: Tensor) -> Tensor:
            parts = [part[None] if part.ndim == 0 else part for part in self._collectives.gather(each)]
            if len({tuple(part.shape[1:]) for part in parts}) > 1:
                raise InputError(
                    f"workers gather tensors of the shapes {[tuple(part.shape) for part in parts]}: "
                    "call pad_across_processes first for the dimensions after the first one"
                )
            return torch.cat(parts)

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            lists = self._collectives.gather_values(input_data)
            data: Any = [each for values in lists for each in (values if isinstance(values, list) else [values])]
        else:
            data = self.gather(input_data)
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if remainder <= 0:
            return data
        # The last batches of an epoch repeat samples from its start, so that all workers have equally many.
        return data[:remainder] if use_gather_object else recursively_apply(lambda tensor: tensor[:remainder], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if reduction == "none":
            return tensor
        return recursively_apply(
            lambda each: self._collectives.reduce(each, reduction), tensor, error_on_other_type=True
        )

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        def padded(each: Tensor) -> Tensor:
            if not -each.ndim <= dim < each.ndim:
                return each
            size = max(self._collectives.gather_values(each.shape[dim]))
            missing = list(each.shape)
            missing[dim] = size - each.shape[dim]
            padding = each.new_full(missing, pad_index)
            return torch.cat([padding, each] if pad_first else [each, padding], dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    # Saving. While training, the parameters share one storage, of which Accelerate would save one tensor only.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        return _apart(super().get_state_dict(model, unwrap))

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        super().save(_apart(obj), f, safe_serialization)

    # Checkpoints. Accelerate saves the models and the optimizer of rank 0, every worker adds its own.

    def _save_worker(self, models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        if self._collectives.swarm is not None:
            assert self._model is not None
            assert self._optimizer is not None
            state = {
                "model": _apart(self._model.state_dict()),
                "optimizer": self._optimizer.state_dict(),
                "swarm": self._collectives.swarm.state_dict(),
            }
            torch.save(state, _worker_file(output_dir, self.process_index))

    def _load_models(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the models in Accelerate's place, which cannot load into parameters that share one storage."""
        self._loaded_from = input_dir
        for number, model in enumerate(models):
            if model is not self._model or self._collectives.swarm is None:
                name = f"model_{number}" if number else "model"
                load_model(model, Path(input_dir, f"{name}.safetensors"), device=str(self.device))
        models.clear()

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what ``save_state`` saved: each worker its own model, optimizer and swarm state.

        A worker that was not there when the state was saved takes those of rank 0.
        """
        super().load_state(*args, **kwargs)
        swarm = self._collectives.swarm
        if swarm is None:
            return
        assert self._model is not None
        assert self._optimizer is not None
        own = _worker_file(self._loaded_from, self.process_index)
        saved = own if own.exists() else _worker_file(self._loaded_from, 0)
        if not saved.exists():
            raise InputError(
                f"{saved} is missing: the state was saved by another Accelerator, load the weights instead"
            )
        state = torch.load(saved, map_location=self.device, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if saved == own:
            swarm.load_state_dict(state["swarm"])


def _worker_file(folder: str, rank: int) -> Path:
    return Path(folder, f"gossamer_{rank}.pt")


def _apart(state: Any) -> Any:
    """Return a dictionary with copies of its tensors; anything else as it is."""
    if not isinstance(state, dict):
        return state
    # In place of a new dictionary: the class of a state dictionary matters to Accelerate.
    copies = copy.copy(state)
    for name, value in state.items():
        copies[name] = value.clone() if isinstance(value, Tensor) else value
    return copies
