"""The documentation as a site: built with warnings as errors, and opened in a real browser if there is one."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_docs_vocabulary import private_words

from gossamer import Swarm

ROOT = Path(__file__).parents[2]
METHODS = ("a2cid2", "overlap", "lasgd", "divisible")
PAGES = (
    "index",
    *METHODS,
    "topologies",
    "glossary",
    "your-own-loop",
    "comparison",
    "report",
    "ARCHITECTURE",
    "api/join",
)
"""Pages to open in the browser."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class LoadedFiles(HTMLParser):
    """Collects what a page loads without a click."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.found.append(given["href"])


def test_no_page_loads_anything_from_elsewhere(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 20
    for page in pages:
        loads = LoadedFiles()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.found
        for target in loads.found:
            assert not re.match(r"(https?:)?//", target), f"{page.name} loads {target}"
            assert (page.parent / target.partition("?")[0]).exists(), f"{page.name} loads {target}"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_maths_its_picture_and_its_docstring(site, method):
    text = (site / f"{method}.html").read_text(encoding="utf-8")
    assert text.count('display="block"') >= 1
    assert text.count("<math") >= 2
    assert f"images/timeline-{method}.svg" in text
    assert f'href="source/src/gossamer/methods/{method}.py.html"' in text
    docstring = text.partition('id="in-the-source"')[2]
    assert "What travels" in docstring
    assert "Reference:" in docstring


def test_architecture_diagrams_and_files_outside_docs_are_in_the_site(site):
    architecture = (site / "ARCHITECTURE.html").read_text(encoding="utf-8")
    pictures = re.findall(r'<img [^>]*src="(images/architecture-[^"]+)"', architecture)
    assert len(pictures) == 5
    assert all((site / picture).exists() for picture in pictures)
    contributing = (site / "CONTRIBUTING.html").read_text(encoding="utf-8")
    assert 'href="write-a-method.html"' in contributing
    assert 'href="benchmarks/index.html"' in contributing
    assert (site / "CHANGELOG.html").exists()


@pytest.mark.parametrize(
    "name", ["join", "simulate", "task", "method", "effects", "topology", "optimizers", "compressors"]
)
def test_api_pages_show_docstrings_and_link_types(site, name):
    text = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
    assert "doc-contents" in text
    assert not private_words(re.sub(r"<[^>]+>", " ", text.partition("<article")[2].partition("</article")[0]))


def test_the_reference_of_join_names_every_public_method_of_swarm(site):
    text = (site / "api" / "join.html").read_text(encoding="utf-8")
    public = [name for name in vars(Swarm) if not name.startswith("_")]
    assert len(public) > 8
    for name in public:
        assert f'id="gossamer.Swarm.{name}"' in text
    assert "gossamer.Swarm._" not in text


def test_every_formula_was_understood(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "arithmatex" not in text
        for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert "\\" not in formula, f"{page.name}: {formula}"
            assert "<mi>&</mi>" not in formula, f"{page.name}: {formula}"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 400)])
def test_pages_from_disk_in_a_browser(site, browser, scheme, width):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        # The page fits the window, all pictures are loaded, all formulas are drawn.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        heights = page.evaluate("[...document.querySelectorAll('math')].map(formula => formula.clientHeight)")
        assert all(height > 5 for height in heights)
        assert bool(heights) == (name in METHODS or name == "topologies")
        dark = page.evaluate("document.body.getAttribute('data-md-color-scheme')") == "slate"
        assert dark == (scheme == "dark")
    context.close()
    assert said == []
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_the_search_works_from_disk(site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(20_000)
    page.goto((site / "index.html").as_uri())
    # Key by key: the search reacts to keys. By itself it reads the field only once, when its index is ready.
    page.locator("input.md-search__input").press_sequentially("displacement")
    page.wait_for_selector(".md-search-result__item a")
    assert "glossary.html" in page.get_attribute(".md-search-result__item a >> nth=0", "href")
    page.close()
