"""The hardware of a cluster: compute times, nodes and links, and how they are written on the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gossamer.errors import InputError, unknown
from gossamer.settings import Settings, option

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}
_BYTES_PER_SECOND = {
    "bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8,
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?|inf)\s*([a-zµ]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Settings):
    """The hardware that the virtual cluster imitates (``clock = hardware``)."""

    compute: str = option(
        "lognormal:50ms,0.1",
        "time of one gradient: T, constant:T, lognormal:MEAN,SIGMA, exponential:MEAN or sample:FILE (a time per line)",
    )
    straggler: str = option("", "slow workers and their slow-down factors: RANK:FACTOR,…", metavar="RANK:FACTOR,…")
    nodes: int = option(0, "number of machines, each with one network card; 0: one machine per worker", minimum=0)
    link: str = option("1gbit/0.1ms", "links between nodes: BANDWIDTH/LATENCY")
    node_link: str = option("100gbit/0.01ms", "links inside a node: BANDWIDTH/LATENCY")
    replica_link: str = option("", "links inside a replica, if not --node-link: BANDWIDTH/LATENCY")
    replica_blocks: int = option(12, "blocks of the model that FSDP2 gathers one after another", minimum=1)
    slow_link: str = option("", "exceptions to --link: NODE-NODE:BANDWIDTH/LATENCY,…", metavar="A-B:LINK,…")
    fail: str = option("", "workers that die, and at which simulated time: RANK@TIME,…", metavar="RANK@TIME,…")
    join: str = option(
        "", "workers that join or rejoin, and at which simulated time: RANK@TIME,…", metavar="RANK@TIME,…"
    )


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of a link, for one flow that has it to itself."""

    bytes_per_s: float
    latency_s: float


def parse_seconds(text: str, what: str) -> float:
    """Return ``100ms``, ``0.1s`` or ``0.1`` in seconds. ``what`` names the option in errors."""
    return _quantity(text, _SECONDS, what, "a time such as 100ms or 0.1s")


def parse_duration(text: str, what: str) -> float:
    """Return ``90s``, ``5min`` or ``1h`` in seconds. ``what`` names the option in errors."""
    units = {**_SECONDS, "min": 60.0, "h": 3600.0}
    seconds = _quantity(text, units, what, "a time such as 90s, 5min or 1h")
    if not 0 < seconds < math.inf:
        raise InputError(f"{what} is {text!r}: expected a time above 0, such as 5min")
    return seconds


def parse_link(text: str, what: str) -> Link:
    """Return the link written as ``200mbit/5ms``; the latency may be omitted. ``what`` names the option in errors."""
    speed, _, latency = text.partition("/")
    bytes_per_s = _quantity(speed, _BYTES_PER_SECOND, what, "a link such as 200mbit/5ms, 1gbit or inf")
    if bytes_per_s <= 0:
        raise InputError(f"{what} is {text!r}: expected a bandwidth above 0")
    return Link(bytes_per_s, parse_seconds(latency, what) if latency else 0.0)


def _quantity(text: str, units: dict[str, float], what: str, expected: str) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else None
    try:
        number = float(match.group(1)) if match else math.nan
    except ValueError:
        number = math.nan
    if math.isnan(number) or (unit not in units and not math.isinf(number)):
        raise InputError(f"{what} is {text!r}: expected {expected}")
    return number if math.isinf(number) else number * units[unit or ""]


def parse_ranked(text: str, separator: str, what: str, workers: int) -> list[tuple[int, float]]:
    """Return ``3:5,7:2`` as pairs of a rank and a number. ``what`` names the option in errors."""
    pairs = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        rank, _, number = item.partition(separator)
        try:
            pair = (int(rank), float(number))
        except ValueError:
            pair = (0, math.nan)
        if math.isnan(pair[1]):
            raise InputError(f"{what} has {item!r}: expected RANK{separator}NUMBER, such as 3{separator}5")
        if not 0 <= pair[0] < workers:
            raise InputError(f"{what} names worker {pair[0]}: expected 0 to {workers - 1}")
        if not 0 <= pair[1] < math.inf:
            raise InputError(f"{what} has {item!r}: expected a finite number of 0 or more")
        pairs.append(pair)
    return pairs


class ComputeTimes:
    """Distribution of the time that a gradient takes, per worker."""

    def __init__(self, spec: str, straggler: str, workers: int) -> None:
        kind, _, numbers = spec.partition(":")
        if spec[:1].isdigit():
            kind, numbers = "constant", spec
        self.kind = kind
        self.factor = np.ones(workers)
        for rank, factor in parse_ranked(straggler, ":", "--straggler", workers):
            if factor == 0:
                raise InputError(f"--straggler makes worker {rank} infinitely fast: expected a factor above 0")
            self.factor[rank] = factor
        self.sigma, self.sample = 0.0, np.zeros(0)
        if kind == "sample":
            self.sample = _read_sample(numbers)
            self.mean_s = float(self.sample.mean())
            return
        if kind not in ("constant", "lognormal", "exponential"):
            raise unknown(
                "value for --compute", spec, ("constant:T", "lognormal:MEAN,SIGMA", "exponential:MEAN", "sample:FILE")
            )
        mean, _, sigma = numbers.partition(",")
        self.mean_s = parse_seconds(mean or "50ms", "--compute")
        if kind == "lognormal":
            self.sigma = parse_seconds(sigma or "0.1", "--compute")
            if not self.sigma < math.inf:
                raise InputError(f"--compute is {spec!r}: expected a finite spread")
        elif sigma:
            raise InputError(f"--compute is {spec!r}: {kind} takes one number, such as {kind}:50ms")
        if not 0 < self.mean_s < math.inf:
            raise InputError(f"--compute is {spec!r}: expected a time above 0")

    def mean(self, rank: int) -> float:
        return self.mean_s * float(self.factor[rank])

    def draw(self, rank: int, rng: np.random.Generator) -> float:
        return self.draw_many(rank, rng, 1)[0]

    def draw_many(self, rank: int, rng: np.random.Generator, count: int) -> list[float]:
        """Draw the times of this worker's next ``count`` gradients, in seconds."""
        mean = self.mean(rank)
        if self.kind == "constant":
            return [mean] * count
        if self.kind == "lognormal":
            # exp(N(−σ²/2, σ)) has mean 1. Not numpy's exp, whose last bit depends on the machine.
            half = self.sigma / 2
            return [mean * math.exp(self.sigma * (normal - half)) for normal in rng.standard_normal(count).tolist()]
        if self.kind == "exponential":
            return [mean * number for number in rng.standard_exponential(count).tolist()]
        times: list[float] = (self.factor[rank] * self.sample[rng.integers(len(self.sample), size=count)]).tolist()
        return times


def _read_sample(path: str) -> np.ndarray:
    try:
        sample = np.loadtxt(Path(path), ndmin=1)
    except OSError:
        raise InputError(
            f"--compute sample: cannot read {path!r}: expected a file with one time in seconds per line"
        ) from None
    except ValueError as error:
        raise InputError(f"--compute sample: {path!r} contains something that is not a number: {error}") from None
    if sample.size == 0 or not ((sample > 0) & np.isfinite(sample)).all():
        raise InputError(f"--compute sample: {path!r} needs times above 0, one per line")
    return sample.ravel()


class NodeLayout:
    """Assignment of workers to nodes, and the links between them."""

    def __init__(self, config: HardwareConfig, workers: int) -> None:
        nodes = config.nodes or workers
        if workers % nodes:
            raise InputError(
                f"--nodes is {nodes}: expected a divisor of the {workers} workers, so that nodes have equal shares"
            )
        self.num_nodes, self.per_node = nodes, workers // nodes
        self.between = parse_link(config.link, "--link")
        self.inside = parse_link(config.node_link, "--node-link")
        self.exceptions: dict[tuple[int, int], Link] = {}
        for item in filter(None, (item.strip() for item in config.slow_link.split(","))):
            pair, _, link = item.partition(":")
            first, _, second = pair.partition("-")
            if not (first.strip().isdigit() and second.strip().isdigit() and link):
                raise InputError(f"--slow-link has {item!r}: expected NODE-NODE:LINK, such as 0-1:10mbit/20ms")
            ends = (int(first), int(second))
            if max(ends) >= nodes or ends[0] == ends[1]:
                raise InputError(f"--slow-link has {item!r}: expected two different nodes from 0 to {nodes - 1}")
            self.exceptions[min(ends), max(ends)] = parse_link(link, "--slow-link")

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def link(self, a: int, b: int) -> Link:
        first, second = sorted((self.node(a), self.node(b)))
        if first == second:
            return self.inside
        return self.exceptions.get((first, second), self.between)
