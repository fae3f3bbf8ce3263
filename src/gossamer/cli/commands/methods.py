"""``gossamer methods``: list the methods, or describe one of them, or check it."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from gossamer.cli.output import print_json, print_note, print_table
from gossamer.errors import InputError
from gossamer.methods import BUILT_IN, METHODS, Method, Source, locate
from gossamer.methods.loading.method_contract import PARTS, declared
from gossamer.methods.loading.method_source import package_of, plugins


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if parsed.check:
        return _check(parsed)
    broken: dict[str, str] = {}
    sources = _all(broken) if parsed.name is None else [locate(parsed.name)]
    if parsed.json:
        print_json({"methods": [_document(source) for source in sources], "broken": broken})
    elif parsed.name is not None:
        _describe(sources[0])
    else:
        rows = [[source.name, _waits(source.method), source.origin, source.method.summary] for source in sources]
        print_table("", ["method", "waits", "from", "description"], rows)
        for problem in broken.values():
            print_note(f"note: {problem}")
    return 0


def _all(broken: dict[str, str]) -> list[Source]:
    """Return the methods of the table and of installed packages; ``broken`` gets the problems of others, by name."""
    sources = [locate(name) for name in METHODS]
    for name, entries in plugins().items():
        if name in METHODS:
            packages = ", ".join(map(package_of, entries))
            broken[name] = f"method {name} of {packages} has the name of a built-in method, which is used instead of it"
            continue
        try:
            sources.append(locate(name))
        except InputError as error:
            broken[name] = str(error)
    return sources


def _check(parsed: argparse.Namespace) -> int:
    """Check a method; return 1 if it does not pass."""
    from gossamer.testing import MethodCheckError, check_method

    if parsed.name is None:
        raise InputError("--check needs a method: give its name, or its file as path.py")
    try:
        report = check_method(parsed.name, callback=None if parsed.json else lambda result: print(result, flush=True))
    except MethodCheckError as error:
        report = error.report
    if parsed.json:
        print_json({"method": report.method, "checks": [dataclasses.asdict(result) for result in report.results]})
    else:
        print(f"\n{report.explain()}")
    return 1 if report.failures else 0


def _document(source: Source) -> dict[str, Any]:
    method = source.method
    return {
        "method": source.name,
        "summary": method.summary,
        "waits": method.lockstep,
        "from": source.origin,
        "options": {field.name: field.default for field in dataclasses.fields(method.Config)},
        "yields": {part: _effects(method, part) for part in PARTS if getattr(method, part) is not None},
    }


def _waits(method: type[Method]) -> str:
    return "yes" if method.lockstep else "no"


def _effects(method: type[Method], part: str) -> list[str]:
    return sorted(effect.__name__ for effect in declared(method, part))


def _describe(source: Source) -> None:
    method = source.method
    texts = [inspect.getdoc(sys.modules[method.__module__])]
    if source.origin != BUILT_IN:
        # The file may be about more than this method.
        texts.append(inspect.cleandoc(method.__doc__ or ""))
    print("\n\n".join(text for text in texts if text) or method.summary, end="\n\n")
    for part in PARTS:
        if getattr(method, part) is not None:
            print(f"{part} yields {', '.join(_effects(method, part)) or 'nothing'}")
    print(f"workers wait for each other: {_waits(method)}")
    print(f"from {source.origin}")
    for field in dataclasses.fields(method.Config):
        help = field.metadata.get("help", "")
        print(f"\n--{field.name.replace('_', '-')}: {help} (default: {field.default})", end="")
    print()
