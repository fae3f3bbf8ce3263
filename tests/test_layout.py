"""The tree stays readable: few modules side by side, and short ones."""

from collections import Counter
from pathlib import Path

import gossamer

ROOT = Path(gossamer.__file__).parent

MAX_MODULES = 12
MAX_LINES = 365


def test_no_package_has_more_than_a_dozen_modules_side_by_side():
    counts = Counter(path.parent for path in ROOT.rglob("*.py") if not path.stem.startswith("__"))
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_no_module_is_longer_than_a_reader_holds_in_mind():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.rglob("*.py")}
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MAX_LINES} == {}
