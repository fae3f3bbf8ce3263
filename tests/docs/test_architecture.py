"""ARCHITECTURE.md and its diagrams name only files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gossamer"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_exists():
    paths = re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", PAGE)
    assert len(paths) > 50
    missing = [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert not missing


def test_every_picture_of_the_page_exists():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE)
    assert len(pictures) == 5
    assert all((ROOT / picture).exists() for picture in pictures)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("architecture-*.svg")), ids=lambda p: p.stem)
def test_every_file_in_a_diagram_exists(picture):
    names = re.findall(r"[\w/]+\.py", picture.read_text(encoding="utf-8"))
    assert names
    known = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    missing = [name for name in names if not any(path == name or path.endswith(f"/{name}") for path in known)]
    assert not missing


def test_the_map_names_every_package():
    shown = PAGE[PAGE.index("```text") : PAGE.index("Imports go one way")]
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    missing = [name for name in packages if f"{name.rpartition('/')[2]}/" not in shown and "/" not in name]
    assert not missing
