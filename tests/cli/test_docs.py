"""The examples of the README and the docs run as they are written, and links lead to files and headings that exist.

Blocks of one page run in order, in one folder. A block whose first line is ``# name.ext`` is written to that file. A
block after ``<!-- not run: why -->`` is not run.
"""

import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from gossamer.methods import METHODS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTSIDE_PAGES = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
BLOCK = re.compile(
    r"^(?P<skip><!-- not run: (?P<why>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
FILE = re.compile(r"# (?P<name>[\w.-]+\.(py|toml|edges))\n")


def page_id(page):
    return page.relative_to(ROOT).as_posix()


def commands(text):
    """Return the lines of a shell block; a line that ends in a backslash is joined to the next."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_examples_of_a_page_run(page, gossamer, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    methods_before, modules_before = dict(METHODS), set(sys.modules)
    namespace = {"__name__": "page"}
    try:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            kind, text = block["kind"], block["text"]
            if block["skip"]:
                continue
            file = FILE.match(text)
            if file:
                (tmp_path / file["name"]).write_text(text, encoding="utf-8")
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
        METHODS.update(methods_before)
        for name in set(sys.modules) - modules_before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]


@pytest.mark.parametrize("name", ["README.md", "docs/your-own-loop.md"])
def test_the_training_loop_on_a_page_is_that_of_the_example(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    example = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")
    (shown,) = [block["text"] for block in BLOCK.finditer(page) if block["why"] == "a part of examples/train.py"]
    assert textwrap.indent(shown, "    ") in example
    for part in ("gossamer.join", "swarm.shard(", "swarm.averaged()", "swarm.state_dict()", "swarm.finish()"):
        assert part in shown


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE_PAGES], ids=page_id)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        if anchor:
            text = other.read_text(encoding="utf-8")
            assert anchor in anchors(text), target


def anchors(text):
    """Return the anchors of a page: its headings, and the objects whose docstrings it shows."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    return [*slugs, *re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


def test_every_method_and_option_is_documented():
    import dataclasses

    overview = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        page = ROOT / "docs" / f"{name}.md"
        if page.exists():
            section = page.read_text(encoding="utf-8")
        else:
            section = overview.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for field in dataclasses.fields(method.Config):
            assert f"| `--{field.name.replace('_', '-')}` |" in section


def test_every_public_name_is_in_the_api_reference():
    import gossamer

    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    for name in set(gossamer.__all__) - {"__version__"}:
        assert any(path == f"gossamer.{name}" or path.startswith(f"gossamer.{name}.") for path in shown), name


def test_the_example_in_the_docstring_of_simulate():
    import doctest

    from gossamer import api

    assert doctest.testmod(api).failed == 0
