"""One worker of several that train in a loop with Accelerate, started by torchrun; what it saw goes to a file."""

import json
import os
import sys
from pathlib import Path

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

import accelerate_digits
from gossamer.errors import InputError
from gossamer.integrations.accelerate import Accelerator

RANK = int(os.environ["RANK"])


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def points(size=42):
    x = torch.arange(float(size))[:, None]
    return TensorDataset(x, 3 * x / 40 + 1)


def loop(accelerator, epochs=2):
    """The same lines for Gossamer's Accelerator and for Accelerate's own."""
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loader = DataLoader(points(), batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                seen += x.flatten().tolist()
                accelerator.backward(nn.functional.mse_loss(model(x / 40), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, {"trained_on": seen, "lr": scheduler.get_last_lr()[0], "before_the_end": flat(model)}


def train(method):
    accelerator = Accelerator(method=method, cpu=True, gradient_accumulation_steps=2)
    model, report = loop(accelerator)
    accelerator.finish()
    metrics = accelerator.swarm.metrics()
    return {**report, "weights": flat(model), "steps": metrics.steps, "exchanges": metrics.exchanges}


def with_accelerate_alone():
    data = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=data)
    return loop(accelerator)[1]


def what_workers_tell_each_other(out):
    accelerator = Accelerator(method="gossip", cpu=True)
    log = Path(out, "first.txt")
    with accelerator.main_process_first():  # before the workers have joined
        known = log.exists()
        log.touch()
    optimizer = torch.optim.SGD((model := nn.Linear(1, 1)).parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(7), batch_size=2))
    values = torch.arange(2.0) + 10 * RANK
    ragged = torch.full((1 + RANK, 2), RANK)
    if RANK == 1:
        accelerator.set_trigger()
    for x, _ in loader:
        last = accelerator.gather_for_metrics(x)
    with accelerator.split_between_processes(list("abc")) as share:
        pass
    report = {
        "main": accelerator.is_main_process,
        "last": accelerator.is_last_process,
        "main_had_been_there": known,
        "gathered": accelerator.gather({"a": values, "b": torch.tensor(RANK)}),
        "ragged": accelerator.gather(ragged),
        "for_metrics": last.flatten(),
        "objects": accelerator.gather_for_metrics([f"text {RANK}"], use_gather_object=True),
        "sum": accelerator.reduce(values),
        "mean": accelerator.reduce(values, "mean"),
        "max": accelerator.reduce(values, "max"),
        "padded": accelerator.pad_across_processes(torch.full((1 + RANK,), 7), pad_index=-1),
        "triggered": accelerator.check_trigger(),
        "share": share,
    }
    accelerator.wait_for_everyone()
    accelerator.end_training()
    report["alone"] = accelerator.gather(torch.tensor([RANK]))
    return json.loads(json.dumps(report, default=lambda tensor: tensor.tolist()))


def resume(out):
    accelerator = Accelerator(method="gossip", rate=1e-6, cpu=True)
    optimizer = torch.optim.Adam((model := nn.Linear(1, 1)).parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward((model(torch.ones(1, 1)) * (1 - 2 * RANK) * (1 + RANK)).sum())
    optimizer.step()
    saved = flat(model)
    accelerator.save_state(Path(out, "checkpoint"))
    accelerator.save_model(model, Path(out, "saved"))
    accelerator.free_memory()
    optimizer = torch.optim.Adam((model := nn.Linear(1, 1)).parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.wait_for_everyone()
    accelerator.load_state(Path(out, "checkpoint"))
    report = {
        "saved": saved,
        "loaded": flat(model),
        "moment": abs(optimizer.state_dict()["state"][0]["exp_avg"].item()),
    }
    accelerator.finish()
    return report


def refused(action):
    try:
        action()
    except InputError as error:
        return str(error)
    return None


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([float(x)]) for x in range(8))


def loaders():
    accelerator = Accelerator(cpu=True)
    set_seed(RANK)
    weighted = DataLoader(range(40), batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40, replacement=False))
    stream, weighted = accelerator.prepare(DataLoader(Stream(), batch_size=2), weighted)
    return {
        "stream": [x for batch in stream for x in batch.flatten().tolist()],
        "weighted": [x for batch in weighted for x in batch.tolist()],
    }


def mistakes():
    accelerator = Accelerator(cpu=True)
    sampler = DistributedSampler(points(), num_replicas=2, rank=RANK)
    report = {
        "backward": refused(lambda: accelerator.backward(torch.ones(1, requires_grad=True).sum())),
        "dealt twice": refused(lambda: accelerator.prepare(DataLoader(points(), sampler=sampler))),
        "fsdp": refused(lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())),
        "dispatched": refused(lambda: Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))),
        "typo": refused(lambda: Accelerator(mixed_precison="bf16")),
        "typo in an option": refused(lambda: Accelerator(method="gossip", raet=2)),
        "no method": refused(lambda: Accelerator(method="gosip")),
        "not JSON": refused(lambda: accelerator.gather_for_metrics(object())),
    }
    model = nn.Linear(1, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    accelerator.prepare(model, first)
    report["two optimizers"] = refused(lambda: accelerator.prepare(second))
    accelerator.finish()
    return report


def main(out):
    report = {
        "allreduce": train("allreduce"),
        "gossip": train("gossip"),
        "told": what_workers_tell_each_other(out),
        "resumed": resume(out),
        "loaders": loaders(),
        "mistakes": mistakes(),
    }
    sys.argv[1:] = ["--out", str(Path(out, "digits.pt"))]
    # It has another precision, and Accelerate keeps that of the first Accelerator in a process.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_digits.main()
    # Last, as it makes Accelerate's own process group.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    report["accelerate alone"] = with_accelerate_alone()
    report["mistakes"]["too late"] = refused(lambda: Accelerator(cpu=True))
    torch.distributed.destroy_process_group()
    Path(out, f"{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
