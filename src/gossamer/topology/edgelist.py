"""Graphs from files: one edge ``i j`` per line, ``#`` starts a comment."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from gossamer.errors import InputError
from gossamer.topology.structures import EdgeGraph

SUFFIXES = (".txt", ".edges", ".edgelist", ".csv")


def looks_like_a_path(text: str) -> bool:
    """Whether a topology's name means a file: by its suffix, a path separator, or because the file is there."""
    return text.lower().endswith(SUFFIXES) or "/" in text or os.sep in text or os.path.isfile(text)


def read_edge_list(path: str, workers: int | None = None) -> EdgeGraph:
    """Read an edge list. ``workers``: how many there must be; None: as many as the largest number in the file says."""
    edges = _parse(path)
    num_named = max(max(edge) for edge in edges) + 1
    if workers is not None and num_named > workers:
        raise InputError(
            f"{path} has an edge of worker {num_named - 1}, but there are {workers} workers (0..{workers - 1}): "
            f"ask for {num_named} workers, or remove the edge"
        )
    missing = sorted(set(range(num_named)) - {i for edge in edges for i in edge})
    if workers is None and missing:
        raise InputError(
            f"{path} names worker {num_named - 1} but has no edge of worker {missing[0]}: expected workers "
            "0..n-1 without gaps; renumber them, or add its edges"
        )
    return EdgeGraph(workers or num_named, np.array(edges, dtype=np.int64))


def _parse(path: str) -> list[tuple[int, int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no file {path}: expected an edge list, one 'i j' per line; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} ({error}): expected an edge list as text, one 'i j' per line") from None
    edges = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            raise InputError(
                f"{path}, line {number}: cannot read {line.strip()!r}: expected two worker numbers, as in '0 1'"
            )
        i, j = int(words[0]), int(words[1])
        if i == j:
            raise InputError(f"{path}, line {number}: joins worker {i} to itself; remove the line")
        edges.append((i, j))
    if not edges:
        raise InputError(f"{path} has no edges: expected one 'i j' per line; add some")
    return edges
