"""What the site adds to the pages: formulas as MathML, docstrings of methods, and pages for files outside ``docs``.

A page may link to any file of the repository (``../src/gossamer/methods/gossip.py``, ``../ARCHITECTURE.md``). Each such
file becomes a page of the site, and every link leads to the page of its target.
"""

from __future__ import annotations

import html
import inspect
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from gossamer.methods import METHODS

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?P<target>[\w./-]+)(?P<anchor>#[^)\s]+)?\)")
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml"}
SOURCES = "source/"
"""Where the site shows files that are not Markdown."""


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside ``docs`` that a page links to."""
    repo_paths = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    for repo_path in repo_paths:
        for target in link_targets(repo_path):
            if not target.startswith("docs/") and target not in repo_paths:
                repo_paths.append(target)
                files.append(File.generated(config, site_path(target), content=outside_page(target)))
    return files


def link_targets(repo_path: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to. Source files have no links."""
    if repo_path.endswith(".md"):
        for link in LINK.finditer((ROOT / repo_path).read_text(encoding="utf-8")):
            target = resolve(repo_path, link["target"])
            if (ROOT / target).is_file():
                yield target


def resolve(repo_path: str, target: str) -> str:
    """Return the path in the repository that a link on the page ``repo_path`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(repo_path), target))


def site_path(repo_path: str) -> str:
    """Return the path in the site of a file of the repository."""
    if repo_path.startswith("docs/"):
        return repo_path.removeprefix("docs/")
    return repo_path if repo_path.endswith(".md") else f"{SOURCES}{repo_path}.md"


def outside_page(repo_path: str) -> str:
    """Return the Markdown of the page of a file outside ``docs``."""
    text = (ROOT / repo_path).read_text(encoding="utf-8")
    if repo_path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(repo_path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {repo_path}\n\n````{language}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith(SOURCES):
        return markdown
    repo_path = uri if page.file.generated_by else f"docs/{uri}"

    def in_site(link: re.Match[str]) -> str:
        target = resolve(repo_path, link["target"])
        if not (ROOT / target).is_file():
            return link[0]
        return f"]({posixpath.relpath(site_path(target), posixpath.dirname(uri) or '.')}{link['anchor'] or ''})"

    markdown = LINK.sub(in_site, markdown)
    method = uri.removesuffix(".md")
    return markdown + docstring(method) if method in METHODS else markdown


def docstring(method: str) -> str:
    """Return the section with the docstring of a method's module."""
    text = inspect.getdoc(sys.modules[METHODS[method].__module__])
    return f"\n\n## In the source\n\nWhat `gossamer methods {method}` prints:\n\n```text\n{text}\n```\n"


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    return FORMULA.sub(mathml, content)


def mathml(formula: re.Match[str]) -> str:
    """Return one formula as MathML."""
    tex = html.unescape(formula["tex"]).strip()
    display = "block" if formula["tag"] == "div" else "inline"
    return convert(tex.removeprefix("\\(").removeprefix("\\[").removesuffix("\\)").removesuffix("\\]"), display=display)
