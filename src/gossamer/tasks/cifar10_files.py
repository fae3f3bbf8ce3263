"""Read CIFAR-10, or images of one's own in the same shape, from any of the layouts it is kept in."""

from __future__ import annotations

import pickle
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from gossamer.errors import InputError
from gossamer.tasks.array_pickle import load_arrays

NUM_CLASSES = 10
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
LAYOUTS = (
    "a folder with the published data_batch_1 to data_batch_5 and test_batch, "
    "a folder with train/CLASS/*.png (or jpg) and test/CLASS/*.png, "
    f"or {', '.join(ARRAYS)} in one .npz file or as .npy files in a folder"
)

# Images uint8 [N, 3, 32, 32] and labels int64 [N].
Images = tuple[np.ndarray, np.ndarray]


def read_cifar10(data: str) -> tuple[Images, Images]:
    """Train and test images from the path `data`, in whichever of the layouts it is."""
    if not data:
        raise InputError(f"task cifar10 needs its images: give --data with {LAYOUTS}.")
    path = Path(data)
    if not path.exists():
        raise InputError(f"{data} does not exist: expected {LAYOUTS}.")
    if (path / "cifar-10-batches-py").is_dir():
        path = path / "cifar-10-batches-py"
    if path.is_file():
        return read_arrays(dict.fromkeys(ARRAYS, path))
    if (path / "data_batch_1").exists():
        return (
            read_batches([path / f"data_batch_{number}" for number in range(1, 6)]),
            read_batches([path / "test_batch"]),
        )
    if (path / "x_train.npy").exists():
        return read_arrays({name: path / f"{name}.npy" for name in ARRAYS})
    if (path / "train").is_dir():
        classes = sorted(folder.name for folder in (path / "train").iterdir() if folder.is_dir())
        return read_folder(path / "train", classes), read_folder(path / "test", classes)
    raise InputError(f"{data} holds no images in a known layout: expected {LAYOUTS}.")


def check(images: np.ndarray, labels: np.ndarray, where: Path) -> Images:
    """Images with channels first or last, and their labels, in the one form that the task keeps."""
    if images.shape[1:] == (32, 32, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8 or images.shape[1:] != (3, 32, 32):
        raise InputError(
            f"{where}: images are {images.dtype} of shape {images.shape}: "
            "expected uint8 of shape (N, 3, 32, 32) or (N, 32, 32, 3)."
        )
    if labels.dtype.kind not in "iu" or labels.size != len(images) or labels.size == 0:
        raise InputError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape} for {len(images)} images: "
            "expected one whole number per image."
        )
    if labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise InputError(f"{where}: labels go from {labels.min()} to {labels.max()}: expected 0 to {NUM_CLASSES - 1}.")
    return np.ascontiguousarray(images), labels.reshape(-1).astype(np.int64)


def read_batches(paths: list[Path]) -> Images:
    images, labels = [], []
    for path in paths:
        try:
            content = load_arrays(path)
            pixels, classes = np.asarray(content["data"]), np.asarray(content["labels"])
        except OSError as error:
            raise InputError(f"cannot read {path} ({error.strerror}): expected {LAYOUTS}.") from None
        except pickle.UnpicklingError as error:
            raise InputError(f"{path} was refused: {error}; get CIFAR-10's python version again.") from None
        except (KeyError, ValueError):
            raise InputError(f"{path} has no 'data' and 'labels': expected a CIFAR-10 python batch.") from None
        if pixels.ndim == 2 and pixels.shape[1] == 3 * 32 * 32:
            pixels = pixels.reshape(-1, 3, 32, 32)
        batch_images, batch_labels = check(pixels, classes, path)
        images.append(batch_images)
        labels.append(batch_labels)
    return np.concatenate(images), np.concatenate(labels)


def read_arrays(paths: dict[str, Path]) -> tuple[Images, Images]:
    arrays = {}
    for name, path in paths.items():
        try:
            # Without pickle, which could run anything.
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                arrays[name] = loaded
            else:
                with loaded:
                    arrays[name] = loaded[name]
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise InputError(f"cannot read {name} from {path} ({error}): expected {LAYOUTS}.") from None
    return (
        check(arrays["x_train"], arrays["y_train"], paths["x_train"]),
        check(arrays["x_test"], arrays["y_test"], paths["x_test"]),
    )


def read_folder(folder: Path, classes: list[str]) -> Images:
    """One subfolder per class; the class number is the position of its name in `classes`."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("reading image files needs Pillow: pip install 'gossamer[images]'.") from None

    images, labels = [], []
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            continue
        if path.parent.name not in classes:
            raise InputError(f"{path}: class {path.parent.name!r} has no folder in train; give it one.")
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"cannot read image {path} ({error}): replace or remove it.") from None
        if pixels.shape != (32, 32, 3):
            raise InputError(
                f"{path} has {pixels.shape[1]}×{pixels.shape[0]} pixels: expected 32×32; resize your images."
            )
        images.append(pixels)
        labels.append(classes.index(path.parent.name))
    if not images:
        raise InputError(f"{folder} holds no images: expected {folder}/CLASS/*.png or *.jpg.")
    return check(np.stack(images), np.array(labels), folder)
