"""The page: one HTML file that contains everything it needs and loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

LIBRARIES = {"d3.min.js": "LICENSE.d3", "plot.umd.min.js": "LICENSE.plot"}
"""The chart library and what it needs, with their licences (assets/vendor/README.md says where they come from)."""

SCRIPTS = ("text.js", "curves.js", "timelines.js", "workers.js", "tables.js", "page.js")


def page(document: Mapping[str, Any]) -> str:
    """Return the page for a ``report_document``; it refreshes itself if the document has an entry ``live``."""
    title = ", ".join(str(run["name"]) for run in document["runs"]) + " · gossamer"
    # Within a script element HTML interprets only these two.
    data = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "title": html.escape(title),
        "connect": "'self'" if document.get("live") else "'none'",
        "style": _asset("page.css"),
        "libraries": _libraries(),
        "data": data.replace("<!--", "<\\u0021--"),
        "scripts": "\n".join(f"<script>\n{_asset(name)}</script>" for name in SCRIPTS),
    }
    text = _asset("page.html")
    chunks = []
    while "{{" in text:
        before, _, rest = text.partition("{{")
        name, _, text = rest.partition("}}")
        chunks += [before, parts[name]]
    return "".join([*chunks, text])


@cache
def _libraries() -> str:
    return "\n".join(
        f"<script>\n/*\n{_asset(f'vendor/{licence}')}*/\n{_asset(f'vendor/{name}')}</script>"
        for name, licence in LIBRARIES.items()
    )


@cache
def _asset(path: str) -> str:
    return resources.files("gossamer.report").joinpath("assets", path).read_text(encoding="utf-8")
