"""What the site adds to the pages: maths drawn by the browser, docstrings, and the sources that pages link to."""

from __future__ import annotations

import html
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from gossamer.methods import METHODS

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./(?P<path>[\w./-]+)\)")
MATHS = re.compile(r'<(?P<tag>span|div) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Pages link to sources beside ``docs``: those become pages of the site."""
    pages = [file for file in files.documentation_pages() if not file.generated_by]
    for path in sorted({path for page in pages for path in linked(page.content_string)}):
        files.append(File.generated(config, place(path), content=source_page(path)))
    return files


def linked(markdown: str) -> Iterator[str]:
    yield from (link["path"] for link in OUTSIDE.finditer(markdown))


def place(path: str) -> str:
    """Where a file from outside ``docs`` is in the site."""
    return path if path.endswith(".md") else f"source/{path}.md"


def source_page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.generated_by:
        return markdown
    markdown = OUTSIDE.sub(lambda link: f"]({place(link['path'])})", markdown)
    method = page.file.src_uri.removesuffix(".md")
    return markdown + docstring(method) if method in METHODS else markdown


def docstring(method: str) -> str:
    """The docstring of a method, as it stands in its file."""
    text = inspect.getdoc(sys.modules[METHODS[method].__module__])
    return f"\n\n## In the source\n\nWhat `gossamer methods {method}` prints:\n\n```text\n{text}\n```\n"


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    return MATHS.sub(drawn, content)


def drawn(found: re.Match[str]) -> str:
    """One formula as MathML."""
    tex = html.unescape(found["tex"]).strip()
    display = "block" if found["tag"] == "div" else "inline"
    return convert(tex.removeprefix("\\(").removeprefix("\\[").removesuffix("\\)").removesuffix("\\]"), display=display)
