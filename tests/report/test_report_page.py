"""The page as a file: what it contains, what it weighs, and the libraries in it."""

import hashlib
import re
from importlib import resources

import pytest

from gossamer.report.document import report_document
from gossamer.report.page import LIBRARIES, SCRIPTS, page
from gossamer.report.runs import find_runs, read_run

ASSETS = resources.files("gossamer.report") / "assets"
VENDOR = ASSETS / "vendor"


@pytest.fixture(scope="module")
def text(comparison):
    return page(report_document([read_run(folder) for folder in find_runs(comparison)]))


def test_it_refers_to_no_other_file(text):
    body = re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"\b(?:src|href)\s*=|@import|url\(", body)
    assert "default-src 'none'" in body
    assert "connect-src 'none'" in body


def test_it_weighs_less_than_one_megabyte(text):
    assert len(text.encode()) < 1e6


def test_all_scripts_are_in_it(text):
    written = {path.name for path in ASSETS.iterdir() if path.name.endswith(".js")}
    assert written == set(SCRIPTS)
    for name in SCRIPTS:
        assert (ASSETS / name).read_text(encoding="utf-8") in text


def test_the_libraries_are_those_of_their_packages_and_have_their_licences(text):
    checksums = dict(
        re.findall(r"^([0-9a-f]{64})  (\S+)$", (VENDOR / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert set(checksums.values()) == set(LIBRARIES)
    for checksum, name in checksums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == checksum
        assert (VENDOR / LIBRARIES[name]).read_text(encoding="utf-8") in text
