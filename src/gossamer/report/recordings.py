"""Recordings, read back: of a virtual run all in one, of real workers one each, put together on one time axis."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.recording import KINDS
from gossamer.recording.timeline import MOST_BINS
from gossamer.runfolder import RECORDING, WORKERS

SILENT_S = 5.0
"""A worker that has written nothing for so long, and has not said that it ended, is dead."""


def read_recording(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """What the workers of a run did; None if that was not recorded."""
    found = []
    paths = [folder / RECORDING, *sorted((folder / WORKERS).glob(f"*.{RECORDING}"))]
    for path in paths:
        if not path.is_file():
            continue
        try:
            recording = json.loads(path.read_text(encoding="utf-8"))
            _check(recording)
            found.append(recording)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            notes.append(f"{path.relative_to(folder)} could not be read and is left out")
    return joined(found) if found else None


def _check(recording: dict[str, Any]) -> None:
    rows, bins = len(recording["workers"]), recording["timeline"]["bins"]
    if len(recording["steps"]) != rows or set(recording["time"]) != set(KINDS):
        raise ValueError
    for kind in KINDS:
        unpacked(recording, kind).reshape(rows, bins)


def unpacked(recording: dict[str, Any], kind: str) -> np.ndarray:
    """The shares of a timeline in 255ths: workers × bins."""
    shape = len(recording["workers"]), int(recording["timeline"]["bins"])
    return np.frombuffer(base64.b64decode(recording["timeline"]["shares"][kind]), np.uint8).reshape(shape)


def joined(recordings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Recordings of different workers, or of one before and after it was started again, as one.

    Their times count from the same moment. A worker that stopped writing without a last word is dead since then.
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
        for age, count in recording["staleness"]["counts"]:
            counts[age] = counts.get(age, 0) + count
        for a, b, sent_bytes, exchanges in recording["edges"]:
            known = edges.setdefault((a, b), [0, 0])
            known[0] += sent_bytes
            # Both ends tell of the same exchanges, each of what it sent.
            known[1] = max(known[1], exchanges)
    silent = _silent(ordered, until)
    for rank, since in silent.items():
        times["dead"][row[rank]] += until - since
    return {
        "format": ordered[0]["format"],
        "workers": ranks,
        "until": until,
        "steps": steps,
        "time": times,
        "staleness": {
            "counts": [[age, counts[age]] for age in sorted(counts)],
            "worker_mean": means,
            "max": max(recording["staleness"]["max"] for recording in ordered),
        },
        "edges": sorted(([a, b, *sums] for (a, b), sums in edges.items()), key=lambda edge: (-edge[2], edge[:2])),
        "other_bytes": sum(recording["other_bytes"] for recording in ordered),
        "timeline": _joined_timeline(ordered, row, {row[rank]: since for rank, since in silent.items()}, until),
        "events": sorted((item for recording in ordered for item in recording["events"]), key=lambda item: item[0]),
    }


def _silent(recordings: Sequence[dict[str, Any]], until: float) -> dict[int, float]:
    """Since when a worker is dead, of those that are."""
    newest = {recording["workers"][0]: recording for recording in recordings}
    return {
        rank: recording["until"]
        for rank, recording in newest.items()
        if recording.get("ended") is False and until - recording["until"] > SILENT_S
    }


def _joined_timeline(
    recordings: Sequence[dict[str, Any]], row: dict[int, int], silent: dict[int, float], until: float
) -> dict[str, Any]:
    """On the widest bins; since widths are nested, bins of the others go into them whole."""
    width = max(recording["timeline"]["width"] for recording in recordings)
    bins = min(MOST_BINS, int(np.ceil(until / width)))
    shares = {}
    for kind in KINDS:
        sums = np.zeros((len(row), bins))
        for recording in recordings:
            levels = unpacked(recording, kind).astype(np.float64)
            factor = round(width / recording["timeline"]["width"])
            padded = np.zeros((len(levels), bins * factor))
            padded[:, : levels.shape[1]] = levels[:, : bins * factor]
            sums[[row[rank] for rank in recording["workers"]]] += padded.reshape(len(levels), bins, factor).mean(axis=2)
        if kind == "dead":
            ends = np.arange(1, bins + 1) * width
            for k, since in silent.items():
                sums[k] += 255 * np.clip((np.minimum(ends, until) - since) / width, 0, 1)
        packed = np.rint(np.clip(sums, 0, 255)).astype(np.uint8)
        shares[kind] = base64.b64encode(packed.tobytes()).decode()
    return {"width": width, "bins": bins, "shares": shares}
