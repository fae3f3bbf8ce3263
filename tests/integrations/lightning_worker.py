"""One worker of several that train with Lightning, started by torchrun; what it saw goes to a file."""

import json
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_digits
from gossamer.errors import InputError
from gossamer.integrations.lightning import GossamerStrategy


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


class Line(L.LightningModule):
    """A line through points, who remembers what it has seen."""

    def __init__(self, optimizers=1):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.optimizers_wanted = optimizers
        self.trained_on, self.validated_on, self.validated_with = [], [], []

    def training_step(self, batch, index):
        (x,) = batch
        self.trained_on += x.flatten().tolist()
        return nn.functional.mse_loss(self.net(x / 40), 3 * x / 40 + 1)

    def validation_step(self, batch, index):
        (x,) = batch
        self.validated_on += x.flatten().tolist()
        self.validated_with = flat(self)
        self.log("rank", float(self.global_rank), sync_dist=True)

    def on_train_end(self):
        self.before_the_end = flat(self)

    def configure_optimizers(self):
        made = [torch.optim.Adam(self.parameters(), lr=0.1) for _ in range(self.optimizers_wanted)]
        if len(made) > 1:
            return made
        return made, [torch.optim.lr_scheduler.ExponentialLR(made[0], 0.9)]

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(40.0)[:, None]), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(7.0)[:, None]), batch_size=7)


def fit(method, **options):
    torch.manual_seed(0)
    strategy = GossamerStrategy(method=method, **options)
    trainer = L.Trainer(
        max_epochs=2,
        strategy=strategy,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model)
    return {
        "rank": trainer.global_rank,
        "workers": trainer.world_size,
        "trained_on": model.trained_on,
        "validated_on": model.validated_on,
        "validated_with": model.validated_with,
        "before_the_end": model.before_the_end,
        "weights": flat(model),
        "mean_of_ranks": float(trainer.callback_metrics["rank"]),
        "steps": strategy.swarm.metrics().steps,
        "exchanges": strategy.swarm.metrics().exchanges,
    }


def refused():
    trainer = L.Trainer(
        strategy=GossamerStrategy(method="gossip"), accelerator="cpu", logger=False, enable_checkpointing=False
    )
    model = Line(optimizers=2)
    model.automatic_optimization = False
    try:
        trainer.fit(model)
    except InputError as error:
        return str(error)
    return None


def main(out):
    # Lightning says much about loaders with few workers.
    warnings.simplefilter("ignore")
    sys.argv[1:] = ["--epochs", "2"]
    lightning_digits.main()
    report = {"allreduce": fit("allreduce"), "gossip": fit("gossip", validate_mean=True), "refused": refused()}
    rank = report["gossip"]["rank"]
    Path(out, f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
