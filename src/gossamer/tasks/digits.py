"""Digits: 1,797 handwritten digits of 8×8 pixels, which come with the package (``data/README.md``)."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import nn

from gossamer.errors import unknown
from gossamer.tasks.task import Task, TaskConfig, accuracy, cross_entropy


def mlp() -> nn.Module:
    """5,018 parameters in three matrices: small, so that hundreds of workers batch well."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))


def conv() -> nn.Module:
    """Two convolutions with batch normalisation, so with buffers that are not parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


MODELS = {"mlp": mlp, "conv": conv}


def digits(workers: int, seed: int, config: TaskConfig) -> Task:
    name = config.model or "mlp"
    if name not in MODELS:
        raise unknown("model of digits", name, MODELS)
    # The split does not depend on the seed, so that accuracies of different runs can be compared.
    with (resources.files("gossamer.tasks") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
        x_train, x_test = (arrays[part][:, None] / 16 for part in ("x_train", "x_test"))
        y_train, y_test = (arrays[part].astype(np.int64) for part in ("y_train", "y_test"))
    # Centred on the mean image, the first hundred steps make more progress than centred on zero.
    mean_image, deviation = x_train.mean(0), x_train.std()

    def scaled(images: np.ndarray) -> torch.Tensor:
        return torch.from_numpy((images - mean_image) / deviation).float()

    return Task(
        name="digits",
        model=MODELS[name],
        train=(scaled(x_train), torch.from_numpy(y_train)),
        test=(scaled(x_test), torch.from_numpy(y_test)),
        loss=cross_entropy,
        correct=accuracy,
        labels=y_train,
        defaults={
            "optimizer": "sgd",
            "lr": {"sgd": 0.05, "adam": 2e-3},
            "momentum": 0.9,
            "batch": 32,
            "steps": 300,
            "weight_decay": 0.0,
        },
    )
