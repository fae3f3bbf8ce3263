import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from gossamer.errors import InputError
from gossamer.tasks import TaskConfig, build


def load(path):
    return build("cifar10", workers=2, seed=0, config=TaskConfig(data=str(path), model="conv"))


def refusal(path):
    with pytest.raises(InputError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(task, images):
    assert task.train[0].dtype == torch.uint8
    np.testing.assert_array_equal(task.train[0].numpy(), images["x_train"])
    np.testing.assert_array_equal(task.train[1].numpy(), images["y_train"])
    np.testing.assert_array_equal(task.test[0].numpy(), images["x_test"])
    np.testing.assert_array_equal(task.test[1].numpy(), images["y_test"])
    np.testing.assert_array_equal(task.labels, images["y_train"])


def write_binary(folder, images):
    folder.mkdir(parents=True, exist_ok=True)

    def write(name, x, y):
        rows = np.concatenate([y.astype(np.uint8)[:, None], x.reshape(len(x), -1)], axis=1)
        (folder / name).write_bytes(rows.tobytes())

    for number in range(5):
        part = slice(4 * number, 4 * number + 4)
        write(f"data_batch_{number + 1}.bin", images["x_train"][part], images["y_train"][part])
    write("test_batch.bin", images["x_test"], images["y_test"])
    return folder


def test_the_binary_version(tmp_path, images):
    assert_holds(load(write_binary(tmp_path, images)), images)


def test_the_binary_version_inside_the_folder_of_the_archive(tmp_path, images):
    write_binary(tmp_path / "cifar-10-batches-bin", images)
    assert_holds(load(tmp_path), images)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (bytes(3072), "3072 bytes: expected 3073 for each image"),
        (bytes([10]) + bytes(3072), "expected 0 to 9"),
    ],
)
def test_a_damaged_binary_file_is_refused(tmp_path, images, content, message):
    folder = write_binary(tmp_path, images)
    (folder / "test_batch.bin").write_bytes(content)
    error = refusal(folder)
    assert message in error
    assert "test_batch.bin" in error


def test_a_missing_binary_file_is_named(tmp_path, images):
    folder = write_binary(tmp_path, images)
    (folder / "data_batch_5.bin").unlink()
    assert "data_batch_5.bin (No such file" in refusal(folder)


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-py"])
def test_pickles_are_not_read_and_the_error_names_the_binary_version(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "data_batch_1").write_bytes(pickle.dumps({}))
    assert "cifar-10-binary.tar.gz" in refusal(tmp_path)


def write_mosaics(folder, images):
    """Write sheets of two columns of images, compressed without visible loss, and the labels."""

    def write(name, x):
        tiles = x.transpose(0, 2, 3, 1).reshape(-1, 2, 32, 32, 3).swapaxes(1, 2).reshape(-1, 64, 3)
        Image.fromarray(tiles).save(folder / f"{name}.jpg", quality=95, subsampling=0)

    for number in range(5):
        write(f"data_batch_{number + 1}", images["x_train"][4 * number : 4 * number + 4])
    write("test_batch", images["x_test"])
    np.save(folder / "labels_train.npy", images["y_train"])
    np.save(folder / "labels_test.npy", images["y_test"])


def test_mosaics(tmp_path, images):
    # Smooth images: noise does not survive JPEG.
    for part in ("x_train", "x_test"):
        shades = np.linspace(0, 255, len(images[part])).astype(np.uint8)
        images[part] = np.broadcast_to(shades[:, None, None, None], images[part].shape)
    write_mosaics(tmp_path, images)
    task = load(tmp_path)
    for read, written in ((task.train[0], images["x_train"]), (task.test[0], images["x_test"])):
        assert np.abs(read.numpy().astype(int) - written).max() <= 2
    np.testing.assert_array_equal(task.train[1].numpy(), images["y_train"])
    np.testing.assert_array_equal(task.test[1].numpy(), images["y_test"])
    (tmp_path / "labels_test.npy").unlink()
    assert "labels_test" in refusal(tmp_path)


def test_arrays_in_one_file_or_in_a_folder(tmp_path, images):
    np.savez(tmp_path / "all.npz", **images)
    assert_holds(load(tmp_path / "all.npz"), images)
    channels_last = {
        name: array.transpose(0, 2, 3, 1) if name.startswith("x") else array[:, None] for name, array in images.items()
    }
    for name, array in channels_last.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert_holds(load(tmp_path), images)


def test_bad_arrays_are_refused(tmp_path, images):
    path = tmp_path / "all.npz"
    np.savez(path, **{name: array for name, array in images.items() if name != "y_test"})
    assert "y_test" in refusal(path)
    np.savez(path, **images | {"x_train": images["x_train"].astype(np.float32)})
    assert "float32" in refusal(path)
    np.savez(path, **images | {"y_train": np.array([{}] * 20)})
    assert "y_train" in refusal(path)
    path.write_bytes(b"PK damaged")
    assert "cannot read" in refusal(path)
    path.write_bytes(b"")
    assert "cannot read" in refusal(path)


def write_folder(folder, images):
    for part in ("train", "test"):
        for number, (image, label) in enumerate(zip(images[f"x_{part}"], images[f"y_{part}"], strict=True)):
            path = folder / part / f"class{label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(path)


def test_image_folder(tmp_path, images):
    write_folder(tmp_path, images)
    (tmp_path / "train" / "class0" / "notes.txt").write_text("not an image")
    task = load(tmp_path)
    order = np.argsort(images["y_train"], kind="stable")
    np.testing.assert_array_equal(task.train[0].numpy(), images["x_train"][order])
    np.testing.assert_array_equal(task.train[1].numpy(), images["y_train"][order])
    np.testing.assert_array_equal(task.test[0].numpy(), images["x_test"])


def test_bad_image_folders_are_refused(tmp_path, images):
    write_folder(tmp_path, images)
    odd = tmp_path / "train" / "class4" / "odd.jpg"
    Image.new("RGB", (40, 30)).save(odd)
    assert "odd.jpg has 40×30 pixels" in refusal(tmp_path)
    odd.write_bytes(b"no image")
    assert "odd.jpg" in refusal(tmp_path)
    odd.unlink()
    (tmp_path / "test" / "class5").rename(tmp_path / "test" / "unheard")
    assert "'unheard' has no folder in train" in refusal(tmp_path)
    for path in (tmp_path / "test").glob("*/*"):
        path.unlink()
    assert "has no images" in refusal(tmp_path)


def test_other_paths_are_refused_with_the_layouts(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none")
    assert "train/CLASS" in refusal(tmp_path)


def test_prepare_normalises(image_file):
    task = load(image_file)
    ready = task.prepare(task.train[0])
    assert ready.dtype == torch.float32
    expected = (task.train[0][:, 1] / 255 - 0.4822) / 0.2435
    torch.testing.assert_close(ready[:, 1], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.vmap(task.prepare)(task.train[0]), ready)


def test_augment_crops_and_flips_by_the_generator(image_file):
    task = load(image_file)
    inputs = task.train[0]
    before = inputs.clone()
    first, again = (task.augment(inputs, np.random.default_rng(0)) for _ in range(2))
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert torch.equal(inputs, before)
    assert not torch.equal(first, task.augment(inputs, np.random.default_rng(1)))
    padded = torch.nn.functional.pad(inputs, [4] * 4)
    mirrored = 0
    for image, original in zip(first, padded, strict=True):
        crops = [original[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
        plain = any(torch.equal(image, crop) for crop in crops)
        flipped = any(torch.equal(image, crop.flip(-1)) for crop in crops)
        assert plain or flipped
        mirrored += flipped
    assert 0 < mirrored < len(first)


def test_several_mini_batches_are_augmented_at_once_as_one_by_one(image_file):
    task = load(image_file)
    inputs = torch.stack([task.train[0], task.train[0].flip(0), task.train[0].roll(1, 0)])
    together = task.augment_many(inputs, [np.random.default_rng([7, rank]) for rank in range(3)])
    for rank, batch in enumerate(inputs):
        assert torch.equal(together[rank], task.augment(batch, np.random.default_rng([7, rank])))
