"""Handwritten digits with Ray Train on a local Ray cluster, trained by workers that do not wait for each other.

    python examples/ray_train.py

Three lines belong to Gossamer: ``join``, ``finish`` and ``torch_config``. ``--fail`` lets worker 1 fail once: Ray
starts it again, it takes over the weights of the others and helps them to the end.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gossamer
from gossamer import tasks
from gossamer.integrations.ray import GossamerConfig


def train(options: dict) -> None:
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    digits = tasks.build("digits", workers=1, seed=0)
    torch.manual_seed(0)
    train_set = TensorDataset(*digits.train)
    sampler = DistributedSampler(train_set, num_replicas=workers, rank=rank)
    loader = prepare_data_loader(DataLoader(train_set, batch_size=16, sampler=sampler), add_dist_sampler=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(get_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    swarm = gossamer.join(model, optimizer, method=options["method"], topology="ring")
    # All workers together do so many steps, whoever is there to do them.
    for step, (x, y) in enumerate(swarm.batches(loader, total_steps=options["steps"])):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if options["pause_s"]:
            time.sleep(options["pause_s"])
        if options["fail"] and rank == 1 and step == 20 and not Path(options["fail"]).exists():
            Path(options["fail"]).touch()
            os._exit(1)
    swarm.finish()  # now all workers hold the same, averaged model

    x, y = (tensor.to(get_device()) for tensor in digits.test)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double().sum().item()
    print(f"worker {rank}: {swarm.metrics().steps} steps, accuracy {accuracy:.3f}, weights {weights:.12f}", flush=True)
    events = "; ".join(map(str, swarm.events))
    # Here all workers wait for each other, as they must in ray.train.report. Before finish they would not meet.
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, f"model-{rank}.pt"))
        Path(folder, f"events-{rank}.txt").write_text(events)
        ray.train.report({"accuracy": accuracy}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", default="a2cid2")
    parser.add_argument("--steps", type=int, default=400, help="of all workers together")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step, to watch")
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    parser.add_argument("--fail", action="store_true", help="let worker 1 fail once")
    options = parser.parse_args()

    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = str(out / "failed") if options.fail else ""
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "method": options.method,
            "steps": options.steps,
            "pause_s": options.pause_s,
            "fail": failed,
        },
        torch_config=GossamerConfig(),
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=str(out), failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    print(f"accuracy of the averaged model: {result.metrics['accuracy']:.3f}, saved in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
