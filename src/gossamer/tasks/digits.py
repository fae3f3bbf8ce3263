"""Digits: scikit-learn's 1,797 handwritten digits of 8×8 pixels. Real data that needs no download."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gossamer.errors import unknown
from gossamer.tasks.scores import accuracy, cross_entropy
from gossamer.tasks.task import Task, TaskConfig


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
    # scikit-learn takes a second to import: only those who train on it wait for it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    name = config.model or "mlp"
    if name not in MODELS:
        raise unknown("model of digits", name, MODELS)
    pixels, classes = load_digits(return_X_y=True)
    # The split is the same whatever the run's seed, so that accuracies of different runs compare.
    x_train, x_test, y_train, y_test = train_test_split(
        pixels.reshape(-1, 1, 8, 8) / 16, classes, test_size=0.2, stratify=classes, random_state=0
    )
    # Around the mean image the first hundred steps get further than around zero.
    mean_image, deviation = x_train.mean(0), x_train.std()

    def scaled(images: np.ndarray) -> torch.Tensor:
        return torch.from_numpy((images - mean_image) / deviation).float()

    return Task(
        name="digits",
        model=MODELS[name],
        train=(scaled(x_train), torch.from_numpy(y_train).long()),
        test=(scaled(x_test), torch.from_numpy(y_test).long()),
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
