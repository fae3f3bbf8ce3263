"""Measures how fast the codecs of ``gossamer.wire`` encode and decode, beside a plain copy. Prints markdown tables.

    python benchmarks/wire.py                          # one core
    python benchmarks/wire.py --device cuda

On the CPU the time is that of the thread, which excludes other processes; the fastest of several turns counts. GB/s are
bytes of the float32 vector, not of the message. *First* is an exchange with a peer about which nothing is known,
*later* one with a peer whose distance is known.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from gossamer import wire
from gossamer.wire.codec import num_blocks
from tables import table

SIZES = {"1M": 1_000_000, "25M": 25_000_000}
TURNS = 9
DISTANCE = 1e-3


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of the fastest of ``TURNS`` calls, after two that do not count."""
    best = float("inf")
    for turn in range(TURNS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        clock = time.perf_counter if device.type == "cuda" else time.thread_time
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:
            best = min(best, clock() - began)
    return best


def throughput(device: torch.device) -> str:
    rows = []
    for label, size in SIZES.items():
        vector = torch.randn(size, device=device)
        reference, out = vector + DISTANCE * torch.randn_like(vector), torch.empty_like(vector)

        def add(what: str, codec: wire.Codec | None, *calls: partial) -> None:
            speeds = [vector.nbytes / 1e9 / seconds(call, device) for call in calls]  # noqa: B023
            share = wire.exchange_bytes(codec, size) / vector.nbytes  # noqa: B023
            columns = ("elements", "", "encode GB/s", "decode GB/s", "bytes of float32")
            rows.append(dict(zip(columns, (label, what, speeds[0], speeds[-1], share), strict=True)))  # noqa: B023

        add("copy", None, partial(out.copy_, vector))
        for name in ("bfloat16", "int8"):
            codec = wire.find(name)
            assert codec is not None
            message = torch.empty(codec.size_bytes(size), dtype=torch.uint8, device=device)
            reaches = {
                "first": codec.first_reach(vector),
                "later": torch.full((num_blocks(size),), 0.02, device=device),
            }
            for when, reach in reaches.items():
                encode = partial(codec.encode, vector, reach, 0, message, out)
                add(f"{name}, {when}", codec, encode, partial(codec.decode, message, reference, out))
    return table(rows)


def small(device: torch.device) -> str:
    """Measure whole exchanges and means of a small model, all members in one process: calls, not elements, count."""
    rows, size = [], 5_018
    for name in ("bfloat16", "int8"):
        codec = wire.find(name)
        assert codec is not None
        vectors = [torch.randn(size, device=device) * DISTANCE + 1 for _ in range(16)]
        outs = [torch.empty_like(vector) for vector in vectors]
        links = tuple(wire.Links(codec, 0, rank).to(1 - rank) for rank in (0, 1))
        means = [wire.MeanLink(codec, seed) for seed in range(16)]
        exchange_s = seconds(partial(wire.exchange, links, tuple(vectors[:2]), tuple(outs[:2])), device)
        mean_s = seconds(partial(wire.average, means, vectors, outs), device)
        rows.append({"codec": name, "exchange of two, ms": 1e3 * exchange_s, "mean of 16, ms": 1e3 * mean_s})
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", type=torch.device)
    device = parser.parse_args().device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {name}\n")
    print(throughput(device), "\n")
    print(f"5,018 parameters\n\n{small(device)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
