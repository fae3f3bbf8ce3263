"""The page: one HTML file that needs nothing else, neither the network nor a server."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs


def page(document: Mapping[str, Any]) -> str:
    """The page that shows ``figures.figures``; it refreshes itself if the document says that it is ``live``."""
    title = ", ".join(str(run["name"]) for run in document["runs"]) + " · gossamer"
    # Within a script only its end means something to HTML.
    data = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "title": html.escape(title),
        "connect": "'self'" if document.get("live") else "'none'",
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        "plotly": _plotly(),
        "data": data.replace("<!--", "<\\u0021--"),
    }
    text = _asset("page.html")
    chunks = []
    while "{{" in text:
        before, _, rest = text.partition("{{")
        name, _, text = rest.partition("}}")
        chunks += [before, parts[name]]
    return "".join([*chunks, text])


@cache
def _asset(name: str) -> str:
    return resources.files("gossamer.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")
