"""``gossamer export``: write one safetensors file of a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.output import print_json
from gossamer.errors import InputError
from gossamer.runs.export import export


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if not parsed.out:
        raise InputError("--out is missing: give the name of a file, such as model.safetensors")
    what = export(Path(parsed.source), Path(parsed.out))
    if parsed.json:
        print_json({"out": parsed.out, "from": parsed.source, "model": what})
    else:
        print(f"written to {parsed.out}: {what}")
    return 0
