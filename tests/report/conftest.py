"""Run folders to report on, and their pages in a real browser."""

import json
import shutil
from pathlib import Path

import pytest

from gossamer.cli import main


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """A comparison of three methods in which a worker dies and comes back; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "kept"
    options = (
        "--workers 6 --steps 40 --batch 8 --straggler 1:3 --fail 2@0.5 --join 2@1 --method gossip,a2cid2,allreduce"
    )
    assert main(["simulate", *options.split(), "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def copied(kept, tmp_path):
    """A copy of one of them, to be spoilt."""
    return Path(shutil.copytree(kept / "gossip", tmp_path / "copied"))


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Look:
    """One page in the browser, and what went wrong on it."""

    def __init__(self, browser, url, *, width=1200, scheme="light"):
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-drawn]", timeout=20_000)

    def close(self):
        self.context.close()

    def ask(self, script):
        return self.page.evaluate(script)

    def curves(self, plot):
        """What a plot shows: for each trace its type, and the numbers along x and y."""
        return self.ask(
            f"document.getElementById('{plot}').data.map(t => ({{type: t.type, name: t.name, mode: t.mode,"
            " x: Array.from(t.x), y: Array.from(t.y || [])}))"
        )

    def left_the_machine(self):
        """The requests that went anywhere else."""
        here = ("file:", "data:", "blob:", "http://127.0.0.1:")
        return [url for url in self.requests if not url.startswith(here)]


@pytest.fixture
def look(browser):
    opened = []

    def open_page(url, **settings):
        opened.append(Look(browser, url, **settings))
        return opened[-1]

    yield open_page
    for each in opened:
        each.close()
