import sys

import numpy as np
import pytest
import torch

from gossamer.errors import InputError
from gossamer.tasks import TaskConfig, build, partition

# What the documentation shows: two moons, separated by a small perceptron.
MOONS = """\
import numpy as np
import torch
from torch import nn

from gossamer.tasks import Task, accuracy, cross_entropy


def moons(num: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    side, angle = rng.integers(0, 2, num), rng.uniform(0, np.pi, num)
    x, y = np.cos(angle) + side, np.sin(angle) * (1 - 2 * side) + side / 2
    points = np.stack([x, y], axis=1) + rng.normal(0, 0.1, (num, 2))
    return torch.from_numpy(points).float(), torch.from_numpy(side)


def task(workers: int, seed: int) -> Task:
    rng = np.random.default_rng(seed)
    train, test = moons(100 * workers, rng), moons(500, rng)
    return Task(
        name="moons", model=lambda: nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)),
        train=train, test=test, loss=cross_entropy, correct=accuracy, labels=train[1].numpy(),
        defaults={"optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "batch": 32, "steps": 100},
    )
"""


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "mine.py"

    def written(text):
        path.write_text(text)
        return str(path)

    return written


def test_the_documented_example_trains(write):
    task = build(write(MOONS), workers=4, seed=0)
    assert task.name == "moons"
    assert len(task.train[0]) == 400
    torch.manual_seed(0)
    net = task.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=task.defaults["lr"], momentum=0.9)
    for _ in range(task.defaults["steps"]):
        optimizer.zero_grad()
        task.loss(net(task.train[0]), task.train[1]).backward()
        optimizer.step()
    assert task.correct(net(task.test[0]), task.test[1]).item() > 0.97
    parts = partition("by-class", task.labels, len(task.train[0]), 2, seed=0)
    assert [len(np.unique(task.labels[part])) for part in parts].count(1) >= 1


def test_a_module_level_task_and_imports_from_the_same_folder(write, tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("NAME = 'ready'\n")
    path = write(
        "import torch\nfrom gossamer.tasks import Task\nfrom neighbour_of_mine import NAME\n"
        "pair = (torch.zeros(1, 1), torch.zeros(1))\n"
        "task = Task(name=NAME, model=torch.nn.Identity, train=pair, test=pair, loss=torch.sub)\n"
    )
    before = list(sys.path)
    assert build(path, workers=1, seed=0).name == "ready"
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.py defines no `task`"),
        ("task = 3", "`task` is a int"),
        ("task = None", "`task` is a NoneType"),
        ("def task(workers, seed):\n    return 3", r"task\(\) returned a int"),
        ("def task(workers, seed):\n    pass", r"task\(\) returned a NoneType"),
        ("def task():\n    pass", "mine.py: TypeError: .*unexpected keyword"),
        ("x = 1\ny = x / 0", "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("x = 1\nimport no_such_module", "mine.py, line 2: ModuleNotFoundError"),
        ("x = 1\n\ndef f(:\n    pass", "mine.py, line 3: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(1)", "mine.py, line 2: SystemExit: 1"),
        ("def task(workers, seed):\n    raise OSError('first\\nsecond')", "mine.py, line 2: OSError: first$"),
        (
            "from gossamer.tasks import Task\nimport torch\npair = (torch.zeros(1), torch.zeros(2))\n"
            "task = Task(name='t', model=None, train=pair, test=pair, loss=None)",
            "mine.py, line 4: InputError: task 't': train has 1 inputs and 2 targets",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(write, text, message):
    with pytest.raises(InputError, match=message) as caught:
        build(write(text), workers=2, seed=0)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.py does not exist"):
        build(str(tmp_path / "none.py"), workers=2, seed=0)


def test_options_do_not_reach_a_file(write):
    with pytest.raises(InputError, match="does not use dim"):
        build(write(MOONS), workers=2, seed=0, config=TaskConfig(dim=3))
