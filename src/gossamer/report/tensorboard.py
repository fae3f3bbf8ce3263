"""A run's figures for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from gossamer.errors import InputError


class TensorBoard:
    """Writes event files into a folder (a ``Tracker``)."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise InputError(
                "--tensorboard needs TensorBoard, which is not installed: pip install 'gossamer[tensorboard]'"
            ) from None
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise InputError(
                f"--tensorboard {folder} cannot be written to: {error.strerror}; give a folder you may write to"
            ) from None

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
