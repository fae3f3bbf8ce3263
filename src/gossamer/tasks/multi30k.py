"""Multi30k: translate English sentences into German, word by word, with a transformer of about 2.6 M parameters.

The data is the folder given by ``--data``: ``train`` and ``test_2016_flickr`` or ``val``, each with the endings ``.en``
and ``.de``, gzipped or not; line n of one is the translation of line n of the other. A sample is the English sentence,
a mark, and the German one; the loss counts the German words and the mark at their end. The transformer is decoder-only
(``transformer``): it reads the English words like words that it has written itself. The class of a sample is its length
among ten classes of equal size: with the partition by class, each worker has sentences of other lengths.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import InputError
from gossamer.tasks.task import Task, TaskConfig
from gossamer.tasks.transformer import Transformer

MAX_WORDS = 24
"""Of a sentence: longer ones are cut."""
CONTEXT = 2 * MAX_WORDS + 2
VOCABULARY = 8000
PADDING, UNKNOWN, TRANSLATE, END = range(4)
"""What the first words of the vocabulary mean. A sentence that is too short is filled with the first."""
IGNORED = -100
"""The class of a position that the loss does not count."""
NUM_LABELS = 10

Sentence = list[str]


def read_sentences(folder: Path, part: str, language: str) -> list[Sentence] | None:
    """Return the words of each line of a file; None if there is no such file."""
    for path in (folder / f"{part}.{language}.gz", folder / f"{part}.{language}"):
        if not path.exists():
            continue
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path} ({error}): expected text in UTF-8, gzipped or not.") from None
        return [re.findall(r"\w+|[^\w\s]", line.lower())[:MAX_WORDS] for line in text.splitlines()]
    return None


def read_pairs(data: str, parts: tuple[str, ...]) -> tuple[list[Sentence], list[Sentence]]:
    """Return the English and the German sentences of the first of these parts that is there."""
    if not data:
        raise InputError("task multi30k needs its data: give the folder with train.en and train.de as --data.")
    for part in parts:
        english, german = (read_sentences(Path(data), part, language) for language in ("en", "de"))
        if english is None or german is None:
            continue
        if len(english) != len(german) or not english:
            raise InputError(
                f"{data}: {part} has {len(english)} English and {len(german)} German lines: "
                "expected the same number, at least one."
            )
        return english, german
    raise InputError(f"{data} has no {parts[0]}.en and {parts[0]}.de (or .gz): expected the files of Multi30k there.")


def build_vocabulary(sentences: list[Sentence]) -> dict[str, int]:
    """Return the indices of the most frequent words of both languages."""
    counts = Counter(word for sentence in sentences for word in sentence)
    # Words that are equally frequent are in the order of the alphabet.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: index for index, word in enumerate(ranked[: VOCABULARY - END - 1], start=END + 1)}


def encode(pairs: tuple[list[Sentence], list[Sentence]], vocabulary: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [sentences, CONTEXT]; targets are ``IGNORED`` outside of the German sentence."""
    samples = np.full((len(pairs[0]), CONTEXT + 1), PADDING, dtype=np.int16)
    counted = np.zeros(samples.shape, dtype=bool)
    for row, (english, german) in enumerate(zip(*pairs, strict=True)):
        source = [vocabulary.get(word, UNKNOWN) for word in english]
        target = [*(vocabulary.get(word, UNKNOWN) for word in german), END]
        line = [*source, TRANSLATE, *target]
        samples[row, : len(line)] = line
        counted[row, len(source) + 1 : len(line)] = True
    targets = np.where(counted[:, 1:], samples[:, 1:], IGNORED).astype(np.int16)
    return torch.from_numpy(samples[:, :-1].copy()), torch.from_numpy(targets)


def loss_of_translation(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the words that count."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), ignore_index=IGNORED)


def word_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the words that count whose largest logit is the right one."""
    counted = targets != IGNORED
    return ((logits.argmax(-1) == targets) & counted).sum() / counted.sum().clamp(min=1)


def multi30k(workers: int, seed: int, config: TaskConfig) -> Task:
    train = read_pairs(config.data, ("train",))
    vocabulary = build_vocabulary([*train[0], *train[1]])
    lengths = np.array([len(english) + len(german) for english, german in zip(*train, strict=True)])
    order = np.empty(len(lengths), dtype=np.int64)
    order[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
    return Task(
        name="multi30k",
        model=partial(
            Transformer,
            vocabulary=len(vocabulary) + END + 1,
            context=CONTEXT,
            width=128,
            heads=4,
            layers=3,
        ),
        train=encode(train, vocabulary),
        test=encode(read_pairs(config.data, ("test_2016_flickr", "val")), vocabulary),
        loss=loss_of_translation,
        correct=word_accuracy,
        labels=order * NUM_LABELS // len(lengths),
        prepare=Tensor.long,
        defaults={
            "optimizer": "adam",
            "lr": {"sgd": 0.1, "adam": 1e-3},
            "momentum": 0.9,
            "batch": 32,
            "steps": 1000,
            "weight_decay": 0.0,
        },
    )
