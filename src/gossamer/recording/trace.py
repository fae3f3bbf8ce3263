"""Every single occurrence of a run in the Trace Event format, for Perfetto and chrome://tracing.

Each worker is a process of the trace. Its tracks (threads of the format) hold its steps, its snapshots and merges, and
its exchanges: one track, or more where several exchanges are in flight at once. Arrows lead from the sender of a vector
to its receiver. Times are microseconds since ``baseTimeNanoseconds``, as in the torch profiler's traces, which ``join``
puts on the same axis. The file is complete after every write, so that a killed run leaves one that opens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.recording.recorder import EventBatch

FIRST_PID = 5_000_000
"""The pid of worker 0: above those of operating systems, so that traces of real processes can be joined."""

TRAINING, MERGES, EXCHANGES = 1, 2, 3
"""Tracks of a worker; concurrent exchanges have the numbers above."""

MIN_EXCHANGE_US = 0.001
"""Duration of exchanges that take no simulated time, so that viewers can attach arrows to them."""

FILE_END = "\n]}\n"


class TraceFile:
    """A trace that grows during the run (a ``Sink`` of the recorder)."""

    def __init__(self, path: Path, workers: Sequence[int], *, began_ns: int, title: str) -> None:
        self.path = path
        self._num_exchanges = 0
        self._busy_until_us: dict[int, list[float]] = {rank: [] for rank in workers}
        """When the last exchange on each exchange track of a worker ends."""
        self._head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "otherData": {"producer": "gossamer", "title": title},
        }
        self._track_names = list(track_names(workers))
        try:
            self._file = path.open("w+", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"--trace {path} cannot be written to: {error.strerror}; give a file in a folder that exists"
            ) from None
        self.start_at(began_ns)

    def start_at(self, began_ns: int) -> None:
        """Set time 0, in nanoseconds since 1970; before the first occurrence."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({**self._head, "baseTimeNanoseconds": began_ns})[:-1] + ', "traceEvents": [')
        self._is_empty = True
        self._end = self._file.tell()
        self._append(self._track_names)

    def write(self, ranks: Sequence[int], batch: EventBatch) -> None:
        self._append(self._trace_events(set(ranks), batch))

    def close(self) -> None:
        self._file.close()

    def _append(self, trace_events: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(event, separators=(",", ":")) for event in trace_events]
        if not lines:
            return
        self._file.seek(self._end)
        self._file.write(("\n" if self._is_empty else ",\n") + ",\n".join(lines))
        self._is_empty = False
        self._end = self._file.tell()
        self._file.write(FILE_END)
        self._file.flush()

    def _trace_events(self, ranks: set[int], batch: EventBatch) -> Iterator[dict[str, Any]]:
        for rank, began, computed, ended in batch.steps.tolist():
            yield _slice("compute", rank, TRAINING, began, computed)
            yield _slice("step", rank, TRAINING, computed, ended)
        spans = (("wait", TRAINING, batch.waits), ("dead", TRAINING, batch.absences))
        for kind, track, rows in (*spans, ("snapshot", MERGES, batch.snapshots)):
            for rank, start, end in rows.tolist():
                yield _slice(kind, rank, track, start, end)
        for rank, start, end, staleness in batch.merges.tolist():
            yield _slice("merge", rank, MERGES, start, end, {"staleness_steps": int(staleness)})
        for (group, start, end, sent_bytes), name in zip(batch.exchanges.tolist(), batch.exchange_names, strict=False):
            yield from self._exchange(ranks, batch.groups[int(group)], start, end, int(sent_bytes), name)

    def _exchange(
        self, ranks: set[int], members: tuple[int, ...], start: float, end: float, sent_bytes: int, name: str
    ) -> Iterator[dict[str, Any]]:
        self._num_exchanges += 1
        name = name or str(self._num_exchanges)
        start_us = _microseconds(start)
        end_us = max(_microseconds(end), round(start_us + MIN_EXCHANGE_US, 3))
        for index, rank in enumerate(members):
            if rank not in ranks:
                continue
            track = EXCHANGES + self._free_track(rank, start_us, end_us)
            if track > EXCHANGES and len(self._busy_until_us[rank]) == track - EXCHANGES + 1:
                yield _name(rank, track, "thread_name", "exchanges")
            receiver, sender = members[(index + 1) % len(members)], members[index - 1]
            peers = receiver if len(members) == 2 else [peer for peer in members if peer != rank]
            on_track = {"pid": FIRST_PID + rank, "tid": track}
            arguments = {"with": peers, "sent_bytes": sent_bytes}
            span = {"ts": start_us, "dur": round(end_us - start_us, 3), "args": arguments}
            yield {"ph": "X", "name": "exchange", "cat": "gossamer", **on_track, **span}
            vector = {"name": "vector", "cat": "exchange"}
            yield {"ph": "s", **vector, **on_track, "ts": start_us, "id": f"{name}:{rank}>{receiver}"}
            # Just before the end of the receiver's slice: viewers do not count the end itself as part of it.
            arrival = {"ts": round(end_us - MIN_EXCHANGE_US, 3), "id": f"{name}:{sender}>{rank}"}
            yield {"ph": "f", "bp": "e", **vector, **on_track, **arrival}

    def _free_track(self, rank: int, start_us: float, end_us: float) -> int:
        """Reserve and return the first exchange track of the worker that is free at ``start_us``."""
        tracks = self._busy_until_us[rank]
        for track, busy_until_us in enumerate(tracks):
            if busy_until_us <= start_us:
                tracks[track] = end_us
                return track
        tracks.append(end_us)
        return len(tracks) - 1


def track_names(workers: Iterable[int]) -> Iterator[dict[str, Any]]:
    for rank in workers:
        yield _name(rank, 0, "process_name", f"worker {rank}")
        yield {"ph": "M", "pid": FIRST_PID + rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, name in ((TRAINING, "training"), (MERGES, "merges"), (EXCHANGES, "exchanges")):
            yield _name(rank, track, "thread_name", name)


def _name(rank: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": FIRST_PID + rank, "tid": track, "name": kind, "args": {"name": name}}


def _slice(
    name: str, rank: float, track: int, start: float, end: float, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    on_track = {"ph": "X", "name": name, "cat": "gossamer", "pid": FIRST_PID + int(rank), "tid": track}
    event = {**on_track, "ts": _microseconds(start), "dur": round(_microseconds(end) - _microseconds(start), 3)}
    return {**event, "args": dict(arguments)} if arguments else event


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def join(paths: Sequence[Path], out: Path) -> int:
    """Join traces of workers or of the torch profiler on one time axis; return the number of trace events."""
    traces = [_read(path) for path in paths]
    base_ns = min(trace.get("baseTimeNanoseconds", 0) for trace in traces)
    trace_events: list[dict[str, Any]] = []
    for trace in traces:
        shift_us = (trace.get("baseTimeNanoseconds", 0) - base_ns) / 1000
        for event in trace["traceEvents"]:
            trace_events.append({**event, "ts": round(event["ts"] + shift_us, 3)} if "ts" in event else event)
    head = {name: value for trace in reversed(traces) for name, value in trace.items() if name != "traceEvents"}
    document = {**head, "baseTimeNanoseconds": base_ns, "traceEvents": trace_events}
    try:
        out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written to: {error.strerror}; give another file") from None
    return len(trace_events)


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give trace files") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): expected a trace in the Trace Event format") from None
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise InputError(f"{path} holds no traceEvents: expected a trace in the Trace Event format")
    return trace
