"""Pictures of topologies: every layout, their text, and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gossamer.errors import InputError
from gossamer.topology import build, draw


@pytest.mark.parametrize(
    ("text", "workers", "nodes"),
    [
        ("ring", 1, None),
        ("path", 2, None),
        ("torus", 12, None),
        ("star", 9, None),
        ("base", 6, None),
        ("alternating-exponential-ring", 8, 4),
        ("alternating-exponential-ring", 4, 1),
        ("erdos-renyi", 200, None),
    ],
)
def test_every_layout_gives_a_picture(tmp_path: Path, text: str, workers: int, nodes: int | None) -> None:
    path = tmp_path / "picture.png"
    draw(build(text, workers=workers, nodes=nodes), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_contains_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "base.svg"
    draw(build("base", workers=6), path)
    text = path.read_text(encoding="utf-8")
    for expected in ("base, 6 workers", "χ1 2.4", "spectral gap 0.25", "used in round (of 4)", "1, 3", ">5<"):
        assert expected in text
    pdf = tmp_path / "ring.pdf"
    draw(build("ring", workers=4), str(pdf))
    assert pdf.read_bytes().startswith(b"%PDF")


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = build("ring", workers=4)
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        draw(ring, tmp_path / "ring.bmp")
    with pytest.raises(InputError, match="folder that exists"):
        draw(ring, tmp_path / "nowhere" / "ring.png")
    with pytest.raises(InputError, match="fewer workers"):
        draw(build("complete", workers=10_000), tmp_path / "complete.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install matplotlib"):
        draw(ring, tmp_path / "ring.png")
