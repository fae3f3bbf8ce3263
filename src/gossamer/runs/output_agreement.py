"""Before the first step all workers agree whether each of them can write its files: all begin, or none does.

Each publishes its problem. The first one to know all answers publishes the *verdict*, which all obey. So they say the
same, even if one of them was taken for dead meanwhile because its machine was busy.
"""

from __future__ import annotations

import time

from gossamer.process.runtime.worker_runtime import WorkerRuntime

AGREE_TIMEOUT_S = 10.0
"""How long a worker waits for the others to say whether they can write their files."""

LINGER_S = 3.0
"""How long the host of the store waits for the others to read why the run does not begin."""

POLL_S = 0.01
MAX_CHARS = 1000
NONE = "none"
VERDICT = "output/verdict"


def agreed_problem(runtime: WorkerRuntime, problem: str) -> str:
    """Return the line that every worker raises; empty if there is no problem. ``problem``: of this worker."""
    store, rank = runtime.store, runtime.rank
    store.set(f"output/problem/{rank}", problem or NONE)
    problems, until = {rank: problem}, time.monotonic() + AGREE_TIMEOUT_S
    while (verdict := store.get(VERDICT)) is None:
        missing = _read_answers(runtime, problems)
        if not missing or time.monotonic() > until:
            late = "it did not say in time whether it can write its files: look at its output"
            line = _line(problems | dict.fromkeys(missing, late)) or NONE
            verdict = store.compare_set(VERDICT, line) or line.encode()
            break
        time.sleep(POLL_S)
    text = verdict.decode(errors="replace")[:MAX_CHARS]
    if text == NONE:
        return problem
    _stay_until_read(runtime)
    return text


def _read_answers(runtime: WorkerRuntime, problems: dict[int, str]) -> list[int]:
    """Add what the others have said; return those that are alive and have not."""
    missing = []
    for rank in runtime.everybody:
        if rank in problems:
            continue
        answer = runtime.store.get(f"output/problem/{rank}")
        if answer is not None:
            problems[rank] = "" if answer == NONE.encode() else answer.decode(errors="replace")[:MAX_CHARS]
        elif rank not in runtime.heartbeats.lost:
            missing.append(rank)
    return missing


def _line(problems: dict[int, str]) -> str:
    """Return what is wrong, in one line: with the first rank that has it, unless all have the same."""
    wrong = {rank: text for rank, text in sorted(problems.items()) if text}
    if not wrong:
        return ""
    rank, text = next(iter(wrong.items()))
    is_common = len(wrong) == len(problems) and len(set(wrong.values())) == 1
    return text if is_common else f"worker {rank}: {text}"


def _stay_until_read(runtime: WorkerRuntime) -> None:
    """If this process hosts the store, stay until the others have read the verdict."""
    runtime.store.set(f"output/read/{runtime.rank}", "1")
    until = time.monotonic() + LINGER_S
    everybody = [f"output/read/{rank}" for rank in runtime.everybody]
    while runtime.store.hosted_here and time.monotonic() < until and not runtime.store.has_all(everybody):
        time.sleep(POLL_S)
