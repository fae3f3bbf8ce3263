import numpy as np
import pytest


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "input.txt"
    rng = np.random.default_rng(0)
    path.write_text("".join(rng.choice(list("abcdefgh \n"), 3000)))
    return path


@pytest.fixture
def sentences(tmp_path):
    """A folder of 40 + 10 random sentence pairs of 2 to 6 words."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "sentences"
    folder.mkdir()
    for part, count in (("train", 40), ("val", 10)):
        for language, words in (("en", ["a", "dog", "runs", "fast"]), ("de", ["ein", "hund", "rennt", "schnell"])):
            lines = [" ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(count)]
            (folder / f"{part}.{language}").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def images():
    """x_train, y_train, x_test, y_test: 20 and 10 random images, two and one per class."""
    rng = np.random.default_rng(0)

    def draw(num):
        return rng.integers(0, 256, (num, 3, 32, 32), dtype=np.uint8), np.arange(num) % 10

    return dict(zip(("x_train", "y_train", "x_test", "y_test"), (*draw(20), *draw(10)), strict=True))


@pytest.fixture
def image_file(tmp_path, images):
    path = tmp_path / "cifar.npz"
    np.savez(path, **images)
    return path
