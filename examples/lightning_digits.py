"""A Lightning module on handwritten digits, trained by several workers that do not wait for each other.

    torchrun --nproc-per-node 2 examples/lightning_digits.py

The strategy is the only line that belongs to Gossamer.
"""

import argparse
import logging

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer import tasks
from gossamer.integrations.lightning import GossamerStrategy


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="a2cid2")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    digits = tasks.build("digits", workers=1, seed=0)
    train, test = TensorDataset(*digits.train), TensorDataset(*digits.test)

    strategy = GossamerStrategy(method=options.method, topology="ring", validate_mean=True)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        strategy=strategy,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=360))
    (scores,) = trainer.test(model, DataLoader(test, batch_size=360), verbose=False)

    metrics = strategy.swarm.metrics()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(
        f"worker {trainer.global_rank} of {trainer.world_size}: {metrics.steps} steps, {metrics.exchanges} exchanges, "
        f"accuracy {scores['accuracy']:.3f}, weights {weights.double().sum().item():.12f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
