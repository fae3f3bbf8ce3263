"""What a worker, or a rank of a replica, keeps in a checkpoint and in the end, and how it continues from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gossamer.config import Run
from gossamer.errors import InputError
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.runs.run_folder import save_model
from gossamer.seeds import stream
from gossamer.train.checkpoint import Checkpoint, Layout
from gossamer.train.pacing import Pace
from gossamer.train.worker_task import WorkerTask


def displace_start(run: Run, rank: int, runtime: WorkerRuntime) -> None:
    """Move to this worker's own start, if the task has one per worker (the consensus task)."""
    if run.task.start is not None:
        start = run.task.start(rank, stream(run.config.seed, "start", rank))
        with runtime.state.lock:
            x = runtime.flat_model.x
            runtime.flat_model.load_weights(x.add_(torch.as_tensor(start).to(x)))


def collect_state(task: WorkerTask, pace: Pace, counts: Mapping[str, Any], swarm: dict[str, Any]) -> dict[str, Any]:
    """Return the state: nested data with tensors in it, some of them sharded over the ranks of a replica."""
    state = {
        "status": dict(counts),
        "swarm": swarm,
        "compute_rng": pace.rng.bit_generator.state,
        "torch_rng": torch.get_rng_state(),
    }
    if not task.shard or task.run.config.inside != "ddp":
        # With DDP all ranks of a replica have the same.
        state |= {"model": task.plain_model.state_dict(), "optimizer": task.optimizer.state_dict()}
    if task.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(task.device)
    return state


def load_state(task: WorkerTask, pace: Pace, checkpoint: Checkpoint, swarm: Swarm, layout: Layout) -> dict[str, Any]:
    """Continue from the state of the same worker, and the same rank of it; return its counts.

    InputError if it does not fit.
    """
    state = checkpoint.state(task.rank, task.shard, task.like)
    try:
        task.load(state["model"], state["optimizer"])
        # The same count on all workers: what each of them knew of it differs by what was in flight.
        swarm.load_state_dict({**state["swarm"], "batches": checkpoint.total_steps(layout)})
    except (RuntimeError, ValueError, KeyError) as error:
        raise _unfit(checkpoint, error) from None
    pace.rng.bit_generator.state = state["compute_rng"]
    torch.set_rng_state(state["torch_rng"])
    if task.device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"], task.device)
    return dict(state["status"])


def load_average(task: WorkerTask, checkpoint: Checkpoint) -> float:
    """Start from the mean of the workers in a checkpoint; return for how many seconds they had trained."""
    average = checkpoint.average(task.like)
    try:
        task.load(average["model"], average["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise _unfit(checkpoint, error) from None
    return float(average["status"]["seconds"])


def save_average(folder: Path, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the final model of a run into its folder."""
    c = run.config
    about = {"method": c.method, "topology": c.topology, "workers": c.workers, "seed": c.seed, "steps": c.steps}
    save_model(folder, weights, {name: str(value) for name, value in about.items()})


def _unfit(checkpoint: Checkpoint, error: Exception) -> InputError:
    why = " ".join(str(error).split())
    return InputError(f"the checkpoint {checkpoint.path} is not of this model, method and optimizer: {why}")
