"""Every single event of a run in the Trace Event format, for Perfetto and chrome://tracing.

Each worker is a process with threads for what it does step after step, for its snapshots and merges, and for its
exchanges: one, or more where several are under way at once. Arrows lead from the sender
of a vector to its receiver. Times are microseconds since ``baseTimeNanoseconds``, as in the torch profiler's traces, so
that the two can be joined (``join``). The file is whole after every write, so that a killed run leaves one that opens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.recording.recorder import EventBatch

FIRST_PID = 5_000_000
"""The pid of worker 0: above what an operating system gives, so that traces of real processes can be joined."""

TRAINING, MERGING, EXCHANGING = 1, 2, 3
"""Threads of a worker; further exchanges have the numbers above."""

LEAST_US = 0.001
"""Exchanges that take no simulated time are this long, so that arrows find them."""

END = "\n]}\n"


class TraceFile:
    """A trace that grows as the run goes on (a ``Sink`` of the recorder)."""

    def __init__(self, path: Path, workers: Sequence[int], *, began_ns: int, title: str) -> None:
        self.path = path
        self._num_flows = 0
        self._lanes: dict[int, list[float]] = {rank: [] for rank in workers}
        """Until when the threads of each worker's exchanges are taken."""
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
        self._head = head
        self._names = list(names(workers))
        self.start_at(began_ns)

    def start_at(self, began_ns: int) -> None:
        """Say when time 0 was, in nanoseconds since 1970; before the first event."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({**self._head, "baseTimeNanoseconds": began_ns})[:-1] + ', "traceEvents": [')
        self._first = True
        self._end = self._file.tell()
        self._append(self._names)

    def write(self, own: Sequence[int], events: EventBatch) -> None:
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

    def _lines(self, own: set[int], events: EventBatch) -> Iterator[dict[str, Any]]:
        for rank, began, computed, ended in events.steps.tolist():
            yield _slice("compute", rank, TRAINING, began, computed)
            yield _slice("step", rank, TRAINING, computed, ended)
        spans = (("wait", TRAINING, events.waits), ("dead", TRAINING, events.absences))
        for kind, thread, rows in (*spans, ("snapshot", MERGING, events.snapshots)):
            for rank, start, end in rows.tolist():
                yield _slice(kind, rank, thread, start, end)
        for rank, start, end, staleness in events.merges.tolist():
            yield _slice("merge", rank, MERGING, start, end, {"staleness_steps": int(staleness)})
        named = zip(events.exchanges.tolist(), events.exchange_names, strict=False)
        for (number, start, end, sent_bytes), name in named:
            yield from self._exchange(own, events.groups[int(number)], start, end, int(sent_bytes), name)

    def _exchange(
        self, own: set[int], members: tuple[int, ...], start: float, end: float, sent_bytes: int, name: str
    ) -> Iterator[dict[str, Any]]:
        self._num_flows += 1
        name = name or str(self._num_flows)
        first = _us(start)
        last = max(_us(end), round(first + LEAST_US, 3))
        for place, rank in enumerate(members):
            if rank not in own:
                continue
            thread = EXCHANGING + self._lane(rank, first, last)
            if thread > EXCHANGING and len(self._lanes[rank]) == thread - EXCHANGING + 1:
                yield _named(rank, thread, "thread_name", "exchanges")
            receiver, sender = members[(place + 1) % len(members)], members[place - 1]
            peers = receiver if len(members) == 2 else [other for other in members if other != rank]
            way = {"pid": FIRST_PID + rank, "tid": thread}
            arguments = {"with": peers, "sent_bytes": sent_bytes}
            length = {"ts": first, "dur": round(last - first, 3), "args": arguments}
            yield {"ph": "X", "name": "exchange", "cat": "gossamer", **way, **length}
            vector = {"name": "vector", "cat": "exchange"}
            yield {"ph": "s", **vector, **way, "ts": first, "id": f"{name}:{rank}>{receiver}"}
            # Just inside the receiver's exchange, whose end is not part of it.
            ends = {"ts": round(last - LEAST_US, 3), "id": f"{name}:{sender}>{rank}"}
            yield {"ph": "f", "bp": "e", **vector, **way, **ends}

    def _lane(self, rank: int, first: float, last: float) -> int:
        """The first thread of the worker's exchanges that is free."""
        lanes = self._lanes[rank]
        for lane, taken_until in enumerate(lanes):
            if taken_until <= first:
                lanes[lane] = last
                return lane
        lanes.append(last)
        return len(lanes) - 1


def names(workers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What the rows of the picture are called, and their order."""
    for rank in workers:
        yield _named(rank, 0, "process_name", f"worker {rank}")
        yield {"ph": "M", "pid": FIRST_PID + rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, name in ((TRAINING, "training"), (MERGING, "merges"), (EXCHANGING, "exchanges")):
            yield _named(rank, thread, "thread_name", name)


def _named(rank: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": FIRST_PID + rank, "tid": thread, "name": what, "args": {"name": name}}


def join(paths: Sequence[Path], out: Path) -> int:
    """Put traces, of workers or of the torch profiler, into one on one time axis; returns the number of events."""
    traces = [_read(path) for path in paths]
    base = min(trace.get("baseTimeNanoseconds", 0) for trace in traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1000
        for event in trace["traceEvents"]:
            events.append({**event, "ts": round(event["ts"] + shift, 3)} if "ts" in event else event)
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
    event = {**place, "ts": _us(start), "dur": round(_us(end) - _us(start), 3)}
    return {**event, "args": dict(arguments)} if arguments else event
