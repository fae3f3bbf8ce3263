"""``gossamer report``: turn runs into one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.output import print_json
from gossamer.errors import InputError
from gossamer.report.document import report_document
from gossamer.report.formats import counted, size
from gossamer.report.page import page
from gossamer.report.runs import find_runs, read_run


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    folders = list(dict.fromkeys(folder for name in parsed.runs for folder in find_runs(Path(name))))
    runs = [read_run(folder) for folder in folders]
    document = report_document(runs)
    if parsed.out is not None or not parsed.json:
        target = Path(parsed.out if parsed.out is not None else "report.html")
        written = page(document)
        try:
            target.write_text(written, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {target} cannot be written to: {error.strerror}; give another file") from None
    if parsed.json:
        print_json(document)
        return 0
    for shown in document["runs"]:
        for note in shown["notes"]:
            print(f"note: {shown['name']}: {note}")
    print(f"{counted(len(runs), 'run')} in {target} ({size(len(written.encode()))}): open it in a browser")
    return 0
