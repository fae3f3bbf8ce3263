"""Every fact that workers compare makes a difference, and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.methods import build, find
from gossamer.process.joining import join_facts
from gossamer.process.joining.join_facts import Facts, difference, find_facts, from_text, name_ranks
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.settings import from_values
from gossamer.topology import build as build_topology
from gossamer.wire import find as find_codec

METHOD_FILE = """
from gossamer import Method

class Mine(Method):
    name = "mine"
    summary = "for a test"
    # {comment}
"""


def conv(channels_last: bool = False, momentum: float = 0.1, wide: bool = False) -> nn.Module:
    norm = nn.BatchNorm2d(4, momentum=momentum, track_running_stats=not wide)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def reordered() -> nn.Module:
    model = nn.Module()
    model.add_module("1", nn.BatchNorm2d(4))
    model.add_module("0", nn.Conv2d(3, 4, 3))
    return model


def facts(model: nn.Module | None = None, method: Any = "gossip", workers: int = 4, **given: Any) -> Facts:
    model = model or conv()
    topology = build_topology(given.get("topology", "ring"), workers=workers, seed=0)
    kind = find(method)
    built = build(kind, from_values(kind.Config, given.get("settings", {})), topology)
    optimizer = given.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    codec = find_codec(given.get("wire", "float32"))
    return find_facts(
        FlatModel(model, optimizer, True), built, topology, given.get("seed", 0), given.get("transport", "tcp"), codec
    )


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"method": "lasgd"}, "method"),
        ({"settings": {"rate": 2.0}}, "rate"),
        ({"settings": {"quasi_global": 0.5}}, "quasi_global"),
        ({"topology": "complete"}, "topology"),
        ({"workers": 5}, "number of workers"),
        ({"wire": "int8"}, "wire"),
        ({"transport": "nccl"}, "transport"),
        ({"seed": 1}, "seed"),
        ({"optimizer": torch.optim.AdamW}, "optimizer"),
        ({"model": conv(channels_last=True)}, "parameter 0.weight"),
        ({"model": conv().double()}, "parameter 0.weight"),
        ({"model": conv(wide=True)}, "buffer 1.running_mean"),
        ({"model": nn.Sequential(conv())}, "parameter 0.weight"),
        ({"model": reordered()}, "order of the parameters"),
    ],
)
def test_a_difference_is_named(other: dict[str, Any], named: str) -> None:
    line = difference({0: facts(), 1: facts(**other), 2: facts()})
    assert line is not None
    assert line.startswith(f"workers differ in {named}: ")
    assert "on ranks 0, 2; " in line
    assert "\n" not in line


def test_what_may_differ() -> None:
    compiled = nn.Sequential(torch.compile(conv(), backend="eager"))
    plain = nn.Sequential(conv(momentum=0.2))
    assert difference({0: facts(compiled), 1: facts(plain)}) is None


def test_the_file_of_a_method_counts(tmp_path: Path) -> None:
    found = []
    for comment in ("one", "two"):
        path = tmp_path / comment / "mine.py"
        path.parent.mkdir()
        path.write_text(METHOD_FILE.format(comment=comment))
        found.append(facts(method=str(path)))
    assert str(difference(dict(enumerate(found)))).startswith("workers differ in file of the method: mine.py ")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"3", b'{"method": 3}', b'{"a": {}}', b"{"])
def test_only_facts_are_read(text: bytes) -> None:
    assert from_text(text) is None


def test_ranks_and_values_stay_short() -> None:
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([0, 1, 3, 4, 5, 9]) == "ranks 0, 1, 3-5, 9"
    line = difference({0: {"seed": "x" * 500}, 1: {"seed": "a\nb"}})
    assert line is not None
    assert len(line) < 2 * join_facts.MAX_VALUE_CHARS
    assert "\n" not in line
