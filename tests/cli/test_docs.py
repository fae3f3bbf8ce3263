"""The examples of the README and the docs run as they stand.

Blocks of one page run in order, in one folder. A block whose first line is ``# name.ext`` is also written to that file.
A block after ``<!-- not run: why -->`` is left alone.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from gossamer.methods import METHODS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<skip><!-- not run: .*-->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (?P<name>[\w.-]+\.(py|toml|edges))\n")
each_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def commands(text):
    """The lines of a shell block, those that end in a backslash joined to the next."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


@each_page
def test_the_examples_of_a_page_run(page, gossamer, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before, modules = dict(METHODS), set(sys.modules)
    namespace = {"__name__": "page"}
    try:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            kind, text = block["kind"], block["text"]
            if block["skip"]:
                continue
            named = FILE.match(text)
            if named:
                (tmp_path / named["name"]).write_text(text, encoding="utf-8")
            elif kind == "python":
                exec(compile(text, f"{page.name} ({kind})", "exec"), namespace)
            elif kind == "bash":
                for line in commands(text):
                    program, *arguments = shlex.split(line, comments=True)
                    assert program == "gossamer", f"{page.name} shows {line!r}: mark the block as not run"
                    outcome = gossamer(*arguments)
                    assert outcome.code == 0, f"{line}\n{outcome.err}"
    finally:
        METHODS.clear()
        METHODS.update(before)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


def test_every_method_and_option_has_its_place_in_the_docs():
    import dataclasses

    overview = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        own = ROOT / "docs" / f"{name}.md"
        if own.exists():
            section = own.read_text(encoding="utf-8")
        else:
            section = overview.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for field in dataclasses.fields(method.Config):
            assert f"| `--{field.name.replace('_', '-')}` |" in section


def test_the_example_in_the_docstring_of_simulate():
    import doctest

    from gossamer import api

    assert doctest.testmod(api).failed == 0
