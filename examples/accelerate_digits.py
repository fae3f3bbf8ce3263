"""Handwritten digits in a loop with Accelerate, trained by several workers that do not wait for each other.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py

Three lines belong to Gossamer: the import, the arguments of the Accelerator, and ``finish``.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer import tasks
from gossamer.integrations.accelerate import Accelerator  # instead of: from accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="a2cid2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate.pt"))
    options = parser.parse_args()

    accelerator = Accelerator(
        method=options.method, topology="ring", cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    set_seed(0)
    digits = tasks.build("digits", workers=1, seed=0)
    loader = DataLoader(TensorDataset(*digits.train), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(*digits.test), batch_size=64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader) // 2)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )

    for epoch in range(options.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = []
        for x, y in test_loader:
            with torch.no_grad():
                guesses = model(x).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, y))
            correct.append(guesses == labels)
        score = torch.cat(correct).float()
        accelerator.print(f"epoch {epoch}: accuracy {score.mean():.3f} on {len(score)} digits", flush=True)

    accelerator.finish()  # now all workers hold the same, averaged model
    options.out.parent.mkdir(parents=True, exist_ok=True)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), options.out)
    metrics = accelerator.swarm.metrics()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(
        f"worker {accelerator.process_index} of {accelerator.num_processes}: {metrics.steps} steps, "
        f"{metrics.exchanges} exchanges, lr {scheduler.get_last_lr()[0]:.6f}, "
        f"weights {weights.double().sum().item():.12f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
