"""Every single event of a run in the Trace Event format, for Perfetto and chrome://tracing.

Each worker is a process with two threads: what it does step after step, and its exchanges. Arrows lead from the sender
of a vector to its receiver. Times are microseconds since ``baseTimeNanoseconds``, as in the torch profiler's traces, so
that the two can be joined (``join``). The file is whole after every write, so that a killed run leaves one that opens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.recording.recorder import Events

FIRST_PID = 5_000_000
"""The pid of worker 0: above what an operating system gives, so that traces of real processes can be joined."""

TRAINING, EXCHANGING = 1, 2
"""Threads of a worker."""

LEAST_US = 0.001
"""Events that take no simulated time are this long, so that arrows find them."""

END = "\n]}\n"


class TraceFile:
    """A trace that grows as the run goes on (a ``Sink`` of the recorder)."""

    def __init__(self, path: Path, workers: Sequence[int], *, began_ns: int, title: str) -> None:
        self.path = path
        self._num_flows = 0
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": began_ns,
            "otherData": {"producer": "gossamer", "title": title},
        }
        try:
            self._file = path.open("w+", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"--trace {path} cannot be written to: {error.strerror}; give a file in a folder that is there"
            ) from None
        self._file.write(json.dumps(head)[:-1] + ', "traceEvents": [')
        self._first = True
        self._end = self._file.tell()
        self._append(names(workers))

    def write(self, own: Sequence[int], events: Events) -> None:
        """Add what happened."""
        self._append(self._lines(set(own), events))

    def close(self) -> None:
        self._file.close()

    def _append(self, events: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(event, separators=(",", ":")) for event in events]
        if not lines:
            return
        self._file.seek(self._end)
        self._file.write(("\n" if self._first else ",\n") + ",\n".join(lines))
        self._first = False
        self._end = self._file.tell()
        self._file.write(END)
        self._file.flush()

    def _lines(self, own: set[int], events: Events) -> Iterator[dict[str, Any]]:
        for rank, began, computed, ended in events.steps.tolist():
            yield _slice("compute", rank, TRAINING, began, computed)
            yield _slice("step", rank, TRAINING, computed, ended)
        spans = (("wait", TRAINING, events.waits), ("dead", TRAINING, events.absences))
        for kind, thread, rows in (*spans, ("snapshot", EXCHANGING, events.snapshots)):
            for rank, start, end in rows.tolist():
                yield _slice(kind, rank, thread, start, end)
        for rank, start, end, staleness in events.merges.tolist():
            yield _slice("merge", rank, EXCHANGING, start, end, {"staleness_steps": int(staleness)})
        named = zip(events.exchanges.tolist(), events.exchange_names, strict=False)
        for (number, start, end, sent_bytes), name in named:
            yield from self._exchange(own, events.groups[int(number)], start, end, int(sent_bytes), name)

    def _exchange(
        self, own: set[int], members: tuple[int, ...], start: float, end: float, sent_bytes: int, name: str
    ) -> Iterator[dict[str, Any]]:
        self._num_flows += 1
        name = name or str(self._num_flows)
        first, last = _us(start), max(_us(end), round(_us(start) + LEAST_US, 3))
        for place, rank in enumerate(members):
            if rank not in own:
                continue
            receiver, sender = members[(place + 1) % len(members)], members[place - 1]
            peers = receiver if len(members) == 2 else [other for other in members if other != rank]
            arguments = {"with": peers, "sent_bytes": sent_bytes}
            yield _slice("exchange", rank, EXCHANGING, start, end, arguments)
            way = {"name": "vector", "cat": "exchange", "pid": FIRST_PID + rank, "tid": EXCHANGING}
            yield {"ph": "s", **way, "ts": first, "id": f"{name}:{rank}>{receiver}"}
            # Just inside the receiver's exchange, whose end is not part of it.
            yield {"ph": "f", "bp": "e", **way, "ts": round(last - LEAST_US, 3), "id": f"{name}:{sender}>{rank}"}


def names(workers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What the rows of the picture are called, and their order."""
    for rank in workers:
        place = {"ph": "M", "pid": FIRST_PID + rank, "ts": 0}
        yield {**place, "tid": 0, "name": "process_name", "args": {"name": f"worker {rank}"}}
        yield {**place, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, name in ((TRAINING, "training"), (EXCHANGING, "exchanges")):
            yield {**place, "tid": thread, "name": "thread_name", "args": {"name": name}}
            yield {**place, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def join(paths: Sequence[Path], out: Path) -> int:
    """Put traces, of workers or of the torch profiler, into one on one time axis; returns the number of events."""
    traces = [_read(path) for path in paths]
    base = min(trace.get("baseTimeNanoseconds", 0) for trace in traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1000
        for event in trace["traceEvents"]:
            moved = "ts" in event and event.get("ph") != "M"
            events.append({**event, "ts": round(event["ts"] + shift, 3)} if moved else event)
    head = {name: value for trace in reversed(traces) for name, value in trace.items() if name != "traceEvents"}
    document = {**head, "baseTimeNanoseconds": base, "traceEvents": events}
    try:
        out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written to: {error.strerror}; give another file") from None
    return len(events)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give trace files") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): expected a trace in the Trace Event format") from None
    if isinstance(found, list):
        found = {"traceEvents": found}
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise InputError(f"{path} holds no traceEvents: expected a trace in the Trace Event format")
    return found


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(
    name: str, rank: float, thread: int, start: float, end: float, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    place = {"ph": "X", "name": name, "cat": "gossamer", "pid": FIRST_PID + int(rank), "tid": thread}
    event = {**place, "ts": _us(start), "dur": max(round(_us(end) - _us(start), 3), LEAST_US)}
    return {**event, "args": dict(arguments)} if arguments else event
