"""Shakespeare: predict the next character of a text, with a transformer of about 0.24 M parameters.

The text is the file given by ``--data``; tiny Shakespeare (1.1 MB) is the usual one. The first 90% are for training.
A sample is a window of 64 characters; its targets are the characters that follow each of them. The class of a window is
the tenth of the text in which it starts: with the partition by class, each worker has its own acts. The transformer is
decoder-only (``transformer``).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import InputError
from gossamer.tasks.task import Task, TaskConfig, accuracy, cross_entropy
from gossamer.tasks.transformer import Transformer

CONTEXT = 64
TRAIN_STRIDE = 16
"""Windows of the training text overlap, so that a character appears in several contexts."""
MIN_CHARACTERS = 10 * (CONTEXT + 1)
"""The last tenth of the text must contain one test window."""
NUM_LABELS = 10


def read_text(data: str) -> str:
    if not data:
        raise InputError("task shakespeare needs a text: give any plain text file, such as --data input.txt.")
    try:
        text = Path(data).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{data} is not text in UTF-8: expected a plain text file.") from None
    except OSError as error:
        raise InputError(f"cannot read {data} ({error.strerror}): expected a plain text file.") from None
    if len(text) < MIN_CHARACTERS:
        raise InputError(f"{data} has {len(text)} characters: expected at least {MIN_CHARACTERS}; use a longer text.")
    return text


def encode(text: str) -> tuple[Tensor, int]:
    """Return the characters as indices into the sorted alphabet of the text, and the size of that alphabet."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    alphabet, indices = np.unique(codes, return_inverse=True)
    small = np.uint8 if len(alphabet) <= 256 else np.int32
    return torch.from_numpy(indices.astype(small)), len(alphabet)


def windows(indices: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [windows, CONTEXT]: overlapping views of the text, which is in memory once."""
    pairs = indices.unfold(0, CONTEXT + 1, stride)
    return pairs[:, :-1], pairs[:, 1:]


def shakespeare(workers: int, seed: int, config: TaskConfig) -> Task:
    indices, vocabulary = encode(read_text(config.data))
    split = len(indices) * 9 // 10
    train = windows(indices[:split], TRAIN_STRIDE)
    num_windows = len(train[0])
    return Task(
        name="shakespeare",
        model=partial(Transformer, vocabulary=vocabulary, context=CONTEXT, width=96, heads=4, layers=2),
        train=train,
        test=windows(indices[split:], CONTEXT),
        loss=cross_entropy,
        correct=accuracy,
        labels=np.arange(num_windows) * NUM_LABELS // num_windows,
        prepare=Tensor.long,
        defaults={
            "optimizer": "adam",
            "lr": {"sgd": 0.1, "adam": 2e-3},
            "momentum": 0.9,
            "batch": 32,
            "steps": 1000,
            "weight_decay": 0.0,
        },
    )
