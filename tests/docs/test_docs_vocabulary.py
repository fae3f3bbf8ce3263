"""The documentation uses the field's terms, not private words for them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]

PRIVATE_WORDS = {
    "news": "event",
    "lanes?": "channel",
    "couriers?": "async channel",
    "aside": "in the background",
    "beside the training": "in the background",
    "levelling": "state transfer",
    "come level": "state transfer",
    "meeting[- ](point|place)s?": "store",
    "beats": "heartbeat",
    "looks? at": "evaluate, check",
    "looks": "evaluation",
    "diary": "recorder",
    "ways? to a gradient": "gradient backend",
    "asking": "generator",
    "strands?": "coroutine",
    "shel(f|ves)": "pool",
    "under way": "in flight",
    "whoever": "who",
    "giv(e|es|ing) way": "lower priority",
    "let go": "close",
    "last words": "last status",
    "sick|tainted": "not finite",
    "afresh": "empty",
    "for ever": "endlessly",
}
"""Words that earlier versions used for something that has a name, and that name."""


def prose(page):
    """Return the text of a page without code, comments and link targets."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def private_words(text):
    return [word for word in PRIVATE_WORDS if re.search(rf"\b({word})\b", re.sub(r"\s+", " ", text), re.IGNORECASE)]


def glossary_terms():
    titles = re.findall(r"^### (.*)$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [term.strip() for title in titles for term in title.split(",")]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_no_private_word(page):
    defined = glossary_terms()
    for word in private_words(prose(page)):
        known = any(re.fullmatch(word, term, re.IGNORECASE) for term in defined)
        assert known, f"{page.name} uses {word!r}: say {PRIVATE_WORDS[word]!r}, or define it in the glossary"


def test_the_glossary_defines_each_term_once_in_a_few_lines():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = glossary_terms()
    assert len(terms) > 50
    assert len(terms) == len(set(terms))
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        definition = entry.partition("\n")[2].partition("\n## ")[0].strip()
        assert 20 < len(definition) < 420, entry
