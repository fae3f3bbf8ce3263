"""Reading CIFAR-10, or other images in the same shape, from several layouts of files."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from gossamer.errors import InputError

NUM_CLASSES = 10
IMAGE_BYTES = 3 * 32 * 32
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = (
    "a folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin (CIFAR-10's binary version), "
    "a folder with train/CLASS/*.png (or jpg) and test/CLASS/*.png, "
    f"{', '.join(ARRAYS)} in one .npz file or as .npy files in a folder, "
    "or data_batch_1.jpg to test_batch.jpg, mosaics of the images, with labels_train.npy and labels_test.npy"
)

Images = tuple[np.ndarray, np.ndarray]
"""Images uint8 [N, 3, 32, 32] and labels int64 [N]."""


def read_cifar10(data: str) -> tuple[Images, Images]:
    """Return train and test images from the path ``data``, which may have any of the layouts."""
    if not data:
        raise InputError(f"task cifar10 needs its images: give --data with {LAYOUTS}.")
    path = Path(data)
    if not path.exists():
        raise InputError(f"{data} does not exist: expected {LAYOUTS}.")
    if (path / "cifar-10-batches-bin").is_dir():
        path = path / "cifar-10-batches-bin"
    if path.is_file():
        return _read_arrays(dict.fromkeys(ARRAYS, path))
    if (path / "data_batch_1.bin").exists():
        train = [_read_binary(path / f"{name}.bin") for name in TRAIN_BATCHES]
        return _concatenate(train), _read_binary(path / "test_batch.bin")
    if (path / "data_batch_1.jpg").exists():
        train_images = np.concatenate([_read_mosaic(path / f"{name}.jpg") for name in TRAIN_BATCHES])
        test_images = _read_mosaic(path / "test_batch.jpg")
        return (
            _check(train_images, _read_array("labels_train", path / "labels_train.npy"), path),
            _check(test_images, _read_array("labels_test", path / "labels_test.npy"), path),
        )
    if (path / "x_train.npy").exists():
        return _read_arrays({name: path / f"{name}.npy" for name in ARRAYS})
    if (path / "train").is_dir():
        classes = sorted(folder.name for folder in (path / "train").iterdir() if folder.is_dir())
        return _read_folder(path / "train", classes), _read_folder(path / "test", classes)
    if (path / "data_batch_1").exists() or (path / "cifar-10-batches-py").is_dir():
        raise InputError(
            f"{data} is CIFAR-10's python version: its files are pickles, which can run code, so they are not read; "
            "get the binary version, cifar-10-binary.tar.gz."
        )
    raise InputError(f"{data} has no images in a known layout: expected {LAYOUTS}.")


def _check(images: np.ndarray, labels: np.ndarray, path: Path) -> Images:
    """Return images (channels first or last) and labels in the form that the task uses, or raise ``InputError``."""
    if images.shape[1:] == (32, 32, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8 or images.shape[1:] != (3, 32, 32):
        raise InputError(
            f"{path}: images are {images.dtype} of shape {images.shape}: "
            "expected uint8 of shape (N, 3, 32, 32) or (N, 32, 32, 3)."
        )
    if labels.dtype.kind not in "iu" or labels.size != len(images) or labels.size == 0:
        raise InputError(
            f"{path}: labels are {labels.dtype} of shape {labels.shape} for {len(images)} images: "
            "expected one whole number per image."
        )
    if labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise InputError(f"{path}: labels go from {labels.min()} to {labels.max()}: expected 0 to {NUM_CLASSES - 1}.")
    return np.ascontiguousarray(images), labels.reshape(-1).astype(np.int64)


def _concatenate(parts: list[Images]) -> Images:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_binary(path: Path) -> Images:
    """Read one file of CIFAR-10's binary version: for each image a byte with its class, then its pixels."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): expected {LAYOUTS}.") from None
    if content.size == 0 or content.size % (1 + IMAGE_BYTES):
        raise InputError(f"{path} has {content.size} bytes: expected {1 + IMAGE_BYTES} for each image.")
    rows = content.reshape(-1, 1 + IMAGE_BYTES)
    return _check(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], path)


def _read_array(name: str, path: Path) -> np.ndarray:
    try:
        # Pickles could run code.
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            array: np.ndarray = loaded[name]
            return array
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise InputError(f"cannot read {name} from {path} ({error}): expected {LAYOUTS}.") from None


def _read_arrays(paths: dict[str, Path]) -> tuple[Images, Images]:
    arrays = {name: _read_array(name, path) for name, path in paths.items()}
    return (
        _check(arrays["x_train"], arrays["y_train"], paths["x_train"]),
        _check(arrays["x_test"], arrays["y_test"], paths["x_test"]),
    )


def _read_image(path: Path) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("reading image files needs Pillow: pip install pillow") from None
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read image {path} ({error}): replace or remove it.") from None


def _read_mosaic(path: Path) -> np.ndarray:
    """Return the 32×32 tiles of one large image, row by row."""
    pixels = _read_image(path)
    if pixels.shape[0] % 32 or pixels.shape[1] % 32:
        raise InputError(f"{path} has {pixels.shape[1]}×{pixels.shape[0]} pixels: expected tiles of 32×32.")
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    return pixels.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)


def _read_folder(folder: Path, classes: list[str]) -> Images:
    """Read one subfolder per class. The number of a class is the position of its name in ``classes``."""
    images, labels = [], []
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            continue
        if path.parent.name not in classes:
            raise InputError(f"{path}: class {path.parent.name!r} has no folder in train; give it one.")
        pixels = _read_image(path)
        if pixels.shape != (32, 32, 3):
            raise InputError(
                f"{path} has {pixels.shape[1]}×{pixels.shape[0]} pixels: expected 32×32; resize your images."
            )
        images.append(pixels)
        labels.append(classes.index(path.parent.name))
    if not images:
        raise InputError(f"{folder} has no images: expected {folder}/CLASS/*.png or *.jpg.")
    return _check(np.stack(images), np.array(labels), folder)
