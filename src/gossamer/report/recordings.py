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
    """Recordings of different workers as one. Their times count from the same moment."""
    if len(recordings) == 1:
        return recordings[0]
    ordered = sorted(recordings, key=lambda recording: recording["workers"][0])
    counts: dict[int, int] = {}
    edges: dict[tuple[int, int], list[int]] = {}
    for recording in ordered:
        for age, count in recording["staleness"]["counts"]:
            counts[age] = counts.get(age, 0) + count
        for a, b, sent_bytes, exchanges in recording["edges"]:
            known = edges.setdefault((a, b), [0, 0])
            known[0] += sent_bytes
            # Both ends tell of the same exchanges, each of what it sent.
            known[1] = max(known[1], exchanges)
    return {
        "format": ordered[0]["format"],
        "workers": [rank for recording in ordered for rank in recording["workers"]],
        "until": max(recording["until"] for recording in ordered),
        "steps": [steps for recording in ordered for steps in recording["steps"]],
        "time": {kind: [time for recording in ordered for time in recording["time"][kind]] for kind in KINDS},
        "staleness": {
            "counts": [[age, counts[age]] for age in sorted(counts)],
            "worker_mean": [mean for recording in ordered for mean in recording["staleness"]["worker_mean"]],
            "max": max(recording["staleness"]["max"] for recording in ordered),
        },
        "edges": sorted(([a, b, *sums] for (a, b), sums in edges.items()), key=lambda edge: (-edge[2], edge[:2])),
        "other_bytes": sum(recording["other_bytes"] for recording in ordered),
        "timeline": _joined_timeline(ordered),
        "news": sorted((item for recording in ordered for item in recording["news"]), key=lambda item: item[0]),
    }


def _joined_timeline(recordings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """On the widest bins; since widths are nested, bins of the others go into them whole."""
    width = max(recording["timeline"]["width"] for recording in recordings)
    bins = max(int(np.ceil(r["timeline"]["bins"] * r["timeline"]["width"] / width)) for r in recordings)
    bins = min(bins, MOST_BINS)
    shares = {}
    for kind in KINDS:
        rows = []
        for recording in recordings:
            levels = unpacked(recording, kind).astype(np.float64)
            factor = round(width / recording["timeline"]["width"])
            padded = np.zeros((len(levels), bins * factor))
            padded[:, : levels.shape[1]] = levels[:, : bins * factor]
            rows.append(padded.reshape(len(levels), bins, factor).mean(axis=2))
        packed = np.rint(np.concatenate(rows)).astype(np.uint8)
        shares[kind] = base64.b64encode(packed.tobytes()).decode()
    return {"width": width, "bins": bins, "shares": shares}
