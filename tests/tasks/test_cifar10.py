import os
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


def write_batches(folder, images, protocol=2, keys=bytes):
    folder.mkdir(parents=True, exist_ok=True)
    data, labels = ("data", "labels") if keys is str else (b"data", b"labels")

    def write(name, x, y):
        content = {data: x.reshape(len(x), -1), labels: y.tolist(), b"batch_label": b"fake"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))

    for number in range(5):
        part = slice(4 * number, 4 * number + 4)
        write(f"data_batch_{number + 1}", images["x_train"][part], images["y_train"][part])
    write("test_batch", images["x_test"], images["y_test"])
    return folder


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("keys", [bytes, str])
def test_python_batches(tmp_path, images, protocol, keys):
    assert_holds(load(write_batches(tmp_path, images, protocol, keys)), images)


def test_python_batches_inside_the_folder_that_the_archive_makes(tmp_path, images):
    write_batches(tmp_path / "cifar-10-batches-py", images)
    assert_holds(load(tmp_path), images)


def test_python_batches_as_python_2_wrote_them(tmp_path, images):
    """The opcodes of the published files: strings of Python 2, numpy by its old module name."""

    def short(text):
        return b"U" + bytes([len(text)]) + text

    def batch(x, y):
        raw, labels = x.tobytes(), b"".join(b"K" + bytes([label]) for label in y)
        return (
            b"\x80\x02}(" + short(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n"
            b"cnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
            b"(K\x01" + b"K" + bytes([len(x)]) + b"M\x00\x0c\x86"
            b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xff"
            b"J\xff\xff\xff\xffK\x00tb\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
            + short(b"labels") + b"](" + labels + b"eu."
        )  # fmt: skip

    for number in range(5):
        part = slice(4 * number, 4 * number + 4)
        content = batch(images["x_train"][part], images["y_train"][part])
        (tmp_path / f"data_batch_{number + 1}").write_bytes(content)
    (tmp_path / "test_batch").write_bytes(batch(images["x_test"], images["y_test"]))
    assert_holds(load(tmp_path), images)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_that_would_run_something_is_refused(tmp_path, images):
    folder = write_batches(tmp_path / "data", images)
    witness = tmp_path / "witness"
    for evil in (Evil(os.mkdir, str(witness)), Evil(eval, f"__import__('os').mkdir({str(witness)!r})")):
        for content in (evil, {b"data": evil, b"labels": [0]}, {b"data": images["x_test"], b"more": [evil]}):
            (folder / "data_batch_3").write_bytes(pickle.dumps(content, protocol=2))
            said = refusal(folder)
            assert "data_batch_3 was refused: it asks for" in said
    assert not witness.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged"),
        (b"no pickle", "refused"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({"data": 1}), "'data' and 'labels'"),
        (pickle.dumps({"data": np.array([{}]), "labels": [0]}), "refused"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [0]}), "float64"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}), "expected 0 to 9"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1, 2]}), "one whole number per image"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8)})[:-200], "refused"),
    ],
)
def test_a_damaged_batch_is_refused(tmp_path, images, content, says):
    folder = write_batches(tmp_path, images)
    (folder / "test_batch").write_bytes(content)
    said = refusal(folder)
    assert says in said
    assert "test_batch" in said


def test_a_missing_batch_is_named(tmp_path, images):
    folder = write_batches(tmp_path, images)
    (folder / "data_batch_5").unlink()
    assert "data_batch_5 (No such file" in refusal(folder)


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
    assert "holds no images" in refusal(tmp_path)


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
