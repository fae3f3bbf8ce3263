"""One worker of several that train with Lightning, started by torchrun; what it saw goes to a file."""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
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


class Telling(Line):
    """Logs, gathers and decides together with the other workers."""

    def __init__(self):
        super().__init__()
        self.told = {}

    def on_validation_epoch_end(self):
        rank = torch.tensor(float(self.global_rank))
        gathered = self.all_gather({"a": torch.stack([rank, rank + 10]), "b": rank})
        self.told["gathered"] = {name: tensor.tolist() for name, tensor in gathered.items()}
        for kind in ("mean", "sum", "max", "min"):
            self.log(kind, rank, sync_dist=True, reduce_fx=kind)
        # The worst worker decides when to stop: score rises on one of them only.
        self.log("score", rank * self.current_epoch)


def fit_together(out):
    """Checkpoints in a folder that rank 0 names, early stopping by any worker, shorter epochs on rank 1."""
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    checkpoints = ModelCheckpoint(dirpath=Path(out, f"of rank {rank}"), monitor="score", mode="max", save_top_k=1)
    stop = EarlyStopping("score", mode="max", patience=0)
    strategy = GossamerStrategy(method="gossip")
    trainer = L.Trainer(
        max_epochs=6,
        strategy=strategy,
        accelerator="cpu",
        limit_train_batches=5 if rank == 0 else 1,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[checkpoints, stop],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Telling()
    trainer.fit(model)
    return {
        "folder": checkpoints.dirpath,
        "epochs": trainer.current_epoch,
        "logged": {name: float(trainer.callback_metrics[name]) for name in ("mean", "sum", "max", "min")},
        "gathered": model.told["gathered"],
        "steps": strategy.swarm.metrics().steps,
        "weights": flat(model),
    }


def uneven():
    """Rank 1 is done after its first epoch: the other does not wait for it."""
    epochs = 3 if os.environ["RANK"] == "0" else 1
    strategy = GossamerStrategy(method="gossip")
    trainer = L.Trainer(
        max_epochs=epochs, strategy=strategy, accelerator="cpu", num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Telling()
    trainer.fit(model)
    return {"gathered": model.told["gathered"]["b"], "mean": float(trainer.callback_metrics["mean"])}


def told_of(mistake):
    try:
        mistake()
    except InputError as error:
        return str(error)
    return None


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
    report = {
        "allreduce": fit("allreduce"),
        "gossip": fit("gossip", validate_mean=True),
        "together": fit_together(out),
        "uneven": uneven(),
        "refused": refused(),
        "typo": told_of(lambda: GossamerStrategy(method="gossip", validate_means=True)),
        "gradients": told_of(lambda: GossamerStrategy().all_gather(torch.ones(1), sync_grads=True)),
        "object": told_of(lambda: GossamerStrategy().broadcast(object(), src=int(os.environ["RANK"]))),
    }
    rank = report["gossip"]["rank"]
    Path(out, f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
