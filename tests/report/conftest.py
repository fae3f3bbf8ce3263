"""Run folders to report on, and their pages in a real browser."""

import shutil
from pathlib import Path

import pytest

from gossamer.cli import main


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """The folder of a comparison of three methods in which a worker dies and joins again; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "comparison"
    options = (
        "--workers 6 --steps 40 --batch 8 --straggler 1:3 --fail 2@0.5 --join 2@1 --method gossip,a2cid2,allreduce"
    )
    assert main(["simulate", *options.split(), "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def copied(comparison, tmp_path):
    """A copy of one of its runs, for tests that change it."""
    return Path(shutil.copytree(comparison / "gossip", tmp_path / "copied"))


class OpenPage:
    """A page in the browser, with its errors and requests."""

    def __init__(self, browser, url, *, width=1200, scheme="light"):
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-drawn]", timeout=60_000)

    def close(self):
        self.context.close()

    def evaluate(self, script):
        return self.page.evaluate(script)

    def text(self, selector):
        return self.page.locator(selector).text_content()

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()

    def curves(self, plot):
        """The curves of a picture by name: lists of x and y."""
        curves = self.evaluate(f"document.getElementById('{plot}').curves.map(c => [c.name, c.points, c.end])")
        return {
            name: ([point["x"] for point in points], [point["y"] for point in points]) for name, points, _ in curves
        }

    def assert_well(self):
        """Nothing went wrong, and nothing was loaded from another machine."""
        assert self.errors == []
        here = ("file:", "data:", "blob:", "http://127.0.0.1:")
        assert [url for url in self.requests if not url.startswith(here)] == []


@pytest.fixture
def open_page(browser):
    opened = []

    def open_url(url, **settings):
        opened.append(OpenPage(browser, url, **settings))
        return opened[-1]

    yield open_url
    for page in opened:
        page.close()
