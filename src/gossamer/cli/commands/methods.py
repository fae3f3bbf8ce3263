"""``gossamer methods``: list the methods, or describe one of them."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Sequence

from gossamer.cli.output import print_json, print_table
from gossamer.methods import METHODS, find


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    chosen = list(METHODS.values()) if parsed.name is None else [find(parsed.name)]
    if parsed.json:
        rows = [
            {
                "method": method.name,
                "summary": method.summary,
                "waits": method.lockstep,
                "options": {field.name: field.default for field in dataclasses.fields(method.Config)},
            }
            for method in chosen
        ]
        print_json({"methods": rows})
    elif parsed.name:
        (method,) = chosen
        print(inspect.getdoc(sys.modules[method.__module__]))
        for field in dataclasses.fields(method.Config):
            print(f"\n--{field.name.replace('_', '-')}: {field.metadata['help']} (default: {field.default})", end="")
        print()
    else:
        print_table("", ["method", "description"], [[method.name, method.summary] for method in chosen])
    return 0
