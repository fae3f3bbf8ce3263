"""CIFAR-10: 50,000 + 10,000 images of 32×32 pixels in ten classes, with the usual ResNet-18."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import unknown
from gossamer.tasks.cifar10_files import NUM_CLASSES, read_cifar10
from gossamer.tasks.task import Task, TaskConfig, accuracy, cross_entropy

MEAN = (0.4914, 0.4822, 0.4465)
"""Of each colour over the training images, with pixels from 0 to 1."""
DEVIATION = (0.2470, 0.2435, 0.2616)
"""Standard deviation, likewise."""
PADDING = 4


def conv() -> nn.Module:
    """Four convolutions and about 0.24 M parameters, for many workers or a machine without a GPU.

    Group normalisation has no buffers, and works when every worker has other classes.
    """

    def stage(channels_in: int, channels: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *stage(3, 32, 1),
        *stage(32, 64, 2),
        *stage(64, 128, 2),
        *stage(128, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, NUM_CLASSES),
    )


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015) for 32×32 images: [samples, 3, 32, 32] → logits [samples, classes].

    The stem is 3×3 without max pooling, instead of 7×7 for ImageNet, so the four stages have 32, 16, 8 and 4 pixels a
    side. 11,173,962 parameters for 10 classes.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks = []
        channels_in = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Block(channels_in, channels, stride), Block(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((-2, -1)))


def resnet18() -> nn.Module:
    """ResNet-18 in channels_last, the memory format that convolutions on a GPU use without conversions."""
    return ResNet18().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


MODELS = {"resnet18": resnet18, "conv": conv}


def normalise(images: Tensor) -> Tensor:
    """Convert uint8 [..., 3, 32, 32] to float with mean 0 and deviation 1 per colour.

    With Python numbers: a tensor of them would be a copy to the device, which a CUDA graph forbids.
    """
    colours = [
        (images[..., colour, :, :].float() - 255 * MEAN[colour]) / (255 * DEVIATION[colour]) for colour in range(3)
    ]
    # Channels last in memory, as in the models.
    return torch.stack(colours, dim=-1).movedim(-1, -3)


def crop_and_flip(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Shift every image by up to 4 pixels each way, black beyond its edge, and mirror half of the images."""
    return crop_and_flip_many(images[None], [rng])[0]


def crop_and_flip_many(images: Tensor, rngs: Sequence[np.random.Generator]) -> Tensor:
    """Do that for several mini-batches [batches, samples, 3, height, width], each with its own generator."""
    samples = images.shape[1]
    drawn = np.empty((3, len(rngs), samples), dtype=np.int64)
    for batch, rng in enumerate(rngs):
        drawn[:2, batch] = rng.integers(0, 2 * PADDING + 1, size=(2, samples))
        drawn[2, batch] = rng.random(samples) < 0.5
    # One small copy to the device, which the CPU does not wait for; pixels are looked up there.
    top, left, mirrored = torch.from_numpy(drawn.reshape(3, -1, 1)).to(images.device, non_blocking=True)
    row, column = (torch.arange(size, device=images.device) for size in images.shape[-2:])
    rows, columns = top + row, left + torch.where(mirrored == 1, column.flip(0), column)
    # Channels last, so that one lookup fetches all colours of a pixel.
    padded = F.pad(images.flatten(0, 1), [PADDING] * 4).permute(0, 2, 3, 1)
    sample_at = torch.arange(len(padded), device=images.device)
    moved = padded[sample_at[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).unflatten(0, images.shape[:2])


def cifar10(workers: int, seed: int, config: TaskConfig) -> Task:
    name = config.model or "resnet18"
    if name not in MODELS:
        raise unknown("model of cifar10", name, MODELS)
    (x_train, y_train), (x_test, y_test) = read_cifar10(config.data)
    return Task(
        name="cifar10",
        model=MODELS[name],
        train=(torch.from_numpy(x_train), torch.from_numpy(y_train)),
        test=(torch.from_numpy(x_test), torch.from_numpy(y_test)),
        loss=cross_entropy,
        correct=accuracy,
        labels=y_train,
        augment=crop_and_flip,
        augment_many=crop_and_flip_many,
        prepare=normalise,
        # Common settings for ResNet-18; 40 epochs for one worker.
        defaults={
            "optimizer": "sgd",
            "lr": {"sgd": 0.1, "adam": 1e-3},
            "momentum": 0.9,
            "batch": 128,
            "steps": 2000,
            "weight_decay": 5e-4,
        },
    )
