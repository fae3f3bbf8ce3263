"""``gossamer launch``: run a user's own script in workers of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.options import parse_number
from gossamer.cli.output import print_json
from gossamer.errors import InputError
from gossamer.launch.script import Script
from gossamer.launch.script_supervisor import Outcome, supervise
from gossamer.process.store.rank_info import LAUNCHER_STORE, find_rank
from gossamer.train.launcher import BAD_INPUT, counting_stop_signals, warm_up


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    num_workers = parse_number(parsed.workers, "--workers", int, 1)
    max_restarts = parse_number(parsed.restarts, "--restarts", int, 0)
    grace_s = parse_number(parsed.grace, "--grace", float, 0)
    _check(parsed)
    logs = None if parsed.logs is None else Path(parsed.logs)
    script = Script(parsed.script, tuple(parsed.arguments), parsed.module, prints_to_stderr=parsed.json)
    # What a script's first lines load.
    warm_up(["gossamer.launch.script", "gossamer.api", "gossamer.process.runtime.swarm"])
    with counting_stop_signals() as signals:
        outcome = supervise(script, num_workers, max_restarts, logs, signals, _say, grace_s)
    if parsed.json:
        print_json(_document(outcome))
    if outcome.failed:
        _say(outcome.failed)
    if outcome.interrupted:
        _say("stopped")
        return 130
    worst = [code if code in (0, BAD_INPUT) else 1 for code in outcome.exit_codes.values()]
    return BAD_INPUT if BAD_INPUT in worst else max(worst)


def _check(parsed: argparse.Namespace) -> None:
    if LAUNCHER_STORE in os.environ or find_rank() != (0, 1):
        raise InputError(
            "another launcher has started this process: gossamer launch starts the workers itself; run it alone"
        )
    if parsed.module:
        return
    if not Path(parsed.script).is_file():
        raise InputError(f"there is no file {parsed.script}: expected a Python script (or -m and the name of a module)")


def _say(text: str) -> None:
    print(f"gossamer: {text}", file=sys.stderr, flush=True)


def _document(outcome: Outcome) -> dict[str, object]:
    return {
        "seconds": round(outcome.seconds, 3),
        "failed": outcome.failed or None,
        "interrupted": outcome.interrupted,
        "workers": [
            {"rank": rank, "exit_code": code, "restarts": outcome.restarts[rank]}
            for rank, code in sorted(outcome.exit_codes.items())
        ],
    }
