"""Reads the recordings of a run: one of a virtual cluster, or one per real worker, joined on one time axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.recording import KINDS
from gossamer.recording.timeline import MAX_BINS, pack, unpack
from gossamer.runs.run_folder import RANKS, RECORDING, WORKERS

SILENCE_OF_DEAD_S = 5.0
"""A worker that wrote nothing for longer than this, without having finished, is dead."""


def read_recording(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """Return what the workers of a run did; None if that was not recorded. Files that cannot be read become notes."""
    paths = (folder / RECORDING, *sorted((folder / WORKERS).glob(f"*.{RECORDING}")))
    recordings = [recording for path in paths if (recording := _read(folder, path, notes)) is not None]
    return join_recordings(recordings) if recordings else None


def read_ranks(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return what the ranks of replicas did apart from the first ones, whose recordings are those of the workers.

    Each entry has the number of the replica, the rank in it, steps, and seconds by kind.
    """
    ranks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for path in sorted((folder / WORKERS / RANKS).glob(f"*.{RECORDING}")):
        replica, _, shard = path.name.partition(".")[0].partition("-")
        recording = _read(folder, path, notes)
        if recording is not None and replica.isdigit() and shard.isdigit():
            ranks.setdefault((int(replica), int(shard)), []).append(recording)
    rows = []
    for (replica_number, rank), recordings in sorted(ranks.items()):
        joined = join_recordings(recordings)
        seconds = {kind: joined["time"][kind][0] for kind in KINDS}
        rows.append({"worker": replica_number, "rank": rank, "steps": joined["steps"][0], "time": seconds})
    return rows


def _read(folder: Path, path: Path, notes: list[str]) -> dict[str, Any] | None:
    """Return one recording; None if there is none, or none that can be read, which becomes a note."""
    if not path.is_file():
        return None
    try:
        recording: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check(recording)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        notes.append(f"{path.relative_to(folder)} could not be read and is left out")
        return None
    return recording


def _check(recording: dict[str, Any]) -> None:
    if len(recording["steps"]) != len(recording["workers"]) or set(recording["time"]) != set(KINDS):
        raise ValueError
    for kind in KINDS:
        unpack(recording, kind)


def join_recordings(recordings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join recordings of different workers, or of one worker before and after its restart.

    Their times count from the same moment. A worker that stopped writing without having finished is dead since then.
    """
    if len(recordings) == 1:
        return recordings[0]
    ordered = sorted(recordings, key=lambda recording: (recording["workers"][0], recording["until"]))
    ranks = sorted({rank for recording in ordered for rank in recording["workers"]})
    row = {rank: k for k, rank in enumerate(ranks)}
    until = max(recording["until"] for recording in ordered)
    counts: dict[int, int] = {}
    edges: dict[tuple[int, int], list[int]] = {}
    steps, means = [0] * len(ranks), [None] * len(ranks)
    times = {kind: [0.0] * len(ranks) for kind in KINDS}
    for recording in ordered:
        for k, rank in enumerate(recording["workers"]):
            steps[row[rank]] += recording["steps"][k]
            means[row[rank]] = recording["staleness"]["worker_mean"][k]
            for kind in KINDS:
                times[kind][row[rank]] += recording["time"][kind][k]
        for staleness, count in recording["staleness"]["counts"]:
            counts[staleness] = counts.get(staleness, 0) + count
        for a, b, sent_bytes, exchanges in recording["edges"]:
            edge = edges.setdefault((a, b), [0, 0])
            edge[0] += sent_bytes
            # Both ends record the same exchanges, each with the bytes that it sent.
            edge[1] = max(edge[1], exchanges)
    dead_since = {row[rank]: since for rank, since in _dead_since(ordered, until).items()}
    for k, since in dead_since.items():
        times["dead"][k] += until - since
    return {
        "format": ordered[0]["format"],
        "workers": ranks,
        "until": until,
        "steps": steps,
        "time": times,
        "staleness": {
            "counts": [[staleness, counts[staleness]] for staleness in sorted(counts)],
            "worker_mean": means,
            "max": max(recording["staleness"]["max"] for recording in ordered),
        },
        "edges": sorted(([a, b, *sums] for (a, b), sums in edges.items()), key=lambda edge: (-edge[2], edge[:2])),
        "other_bytes": sum(recording["other_bytes"] for recording in ordered),
        "timeline": _join_timelines(ordered, row, dead_since, until),
        "events": sorted((event for recording in ordered for event in recording["events"]), key=lambda event: event[0]),
    }


def _dead_since(recordings: Sequence[dict[str, Any]], until: float) -> dict[int, float]:
    """The ranks of dead workers, and the time of their last recording."""
    newest = {recording["workers"][0]: recording for recording in recordings}
    return {
        rank: recording["until"]
        for rank, recording in newest.items()
        if recording.get("ended") is False and until - recording["until"] > SILENCE_OF_DEAD_S
    }


def _join_timelines(
    recordings: Sequence[dict[str, Any]], row: dict[int, int], dead_since: dict[int, float], until: float
) -> dict[str, Any]:
    """Join on the widest bins; since bins are nested, each narrower one lies within one of them."""
    width = max(recording["timeline"]["width"] for recording in recordings)
    bins = min(MAX_BINS, int(np.ceil(until / width)))
    shares = {}
    for kind in KINDS:
        levels = np.zeros((len(row), bins))
        for recording in recordings:
            narrow = unpack(recording, kind).astype(np.float64)
            factor = round(width / recording["timeline"]["width"])
            padded = np.zeros((len(narrow), bins * factor))
            padded[:, : narrow.shape[1]] = narrow[:, : bins * factor]
            levels[[row[rank] for rank in recording["workers"]]] += padded.reshape(-1, bins, factor).mean(axis=2)
        if kind == "dead":
            ends = np.arange(1, bins + 1) * width
            for k, since in dead_since.items():
                levels[k] += 255 * np.clip((np.minimum(ends, until) - since) / width, 0, 1)
        shares[kind] = pack(levels)
    return {"width": width, "bins": bins, "shares": shares}
