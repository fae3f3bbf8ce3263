"""A complete training script in plain PyTorch, on workers that do not wait for each other.

    torchrun --nproc-per-node 4 examples/train.py --out runs/example     # four workers
    python examples/train.py                                             # one worker, the same code

An ordinary loop: AdamW, a cosine schedule with warm-up, gradient clipping, bfloat16 autocast, a checkpoint per epoch,
evaluation. What belongs to Gossamer is called ``gossamer.join`` and ``swarm.…``: ``shard`` gives each worker its own
share of the data, ``epochs`` counts the epochs that are left, ``schedule`` follows that count, ``averaged`` evaluates
the mean model, ``state_dict`` and ``load_state_dict`` are for the checkpoint, ``finish`` averages all models.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer import tasks


def load_data():
    """Return training and test set: 1,797 handwritten digits that come with Gossamer."""
    digits = tasks.build("digits", workers=1, seed=0)
    return TensorDataset(*digits.train), TensorDataset(*digits.test)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(model, dataset, device):
    """Return the accuracy of the model on a data set."""
    model.eval()
    correct = 0
    for x, y in DataLoader(dataset, batch_size=256):
        correct += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
    model.train()
    return correct / len(dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="a2cid2", help="see `gossamer methods`")
    parser.add_argument("--topology", default="ring", help="see `gossamer topology`")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--out", type=Path, help="run folder, for `gossamer report`; checkpoints and the final model too"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if world_size > 1 and device.type == "cpu":
        torch.set_num_threads(1)

    train_set, test_set = load_data()
    loader = DataLoader(train_set, batch_size=args.batch, shuffle=True, drop_last=True)

    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    where = {"out": args.out, "resume": args.resume}  # the run folder, for `gossamer report`
    swarm = gossamer.join(model, optimizer, method=args.method, topology=args.topology, **where)
    loader = swarm.shard(loader)  # this worker's share, another one in every epoch
    schedule = swarm.schedule("cosine", warmup=0.05)
    checkpoint = args.out / f"checkpoint-{rank}.pt" if args.out else None
    if args.resume and checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        swarm.load_state_dict(state["swarm"])

    for epoch in swarm.epochs(args.epochs):  # those that are left, if this run was resumed
        for x, y in loader:
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            swarm.log(loss=loss)
        # All workers enter this block and evaluate the mean of their models; training goes on from their own.
        with swarm.averaged():
            accuracy = evaluate(model, test_set, device)
            swarm.log(accuracy=accuracy)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy of the averaged model {accuracy:.3f}", flush=True)
        if checkpoint is not None:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "swarm": swarm.state_dict(),
            }
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)

    swarm.finish()  # now all workers hold the same, averaged model
    accuracy, metrics = evaluate(model, test_set, device), swarm.metrics()
    print(
        f"worker {rank}: accuracy {accuracy:.3f}, {metrics.steps} steps, {metrics.exchanges} exchanges, "
        f"{metrics.bytes_sent / 1e6:.1f} MB sent",
        flush=True,
    )
    if args.out and rank == 0:
        torch.save(model.state_dict(), args.out / "model.pt")


if __name__ == "__main__":
    main()
