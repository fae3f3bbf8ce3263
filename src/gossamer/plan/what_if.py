"""``--what-if``: the same cluster with one thing changed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.errors import InputError, unknown
from gossamer.hardware import Link, parse_link, parse_seconds
from gossamer.plan.cluster_spec import ClusterSpec, TimingTable

EXAMPLES = {
    "bandwidth": "bandwidth=2x or bandwidth=100gbit",
    "latency": "latency=0.5x or latency=1ms",
    "compute": "compute=0.5x or compute=30ms",
    "workers": "workers=64",
    "straggler": "straggler=3x",
    "spread": "spread=0.2",
    "parameters": "parameters=4x or parameters=1e9",
}
"""What can be changed, with examples."""

NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*[x×]?", re.IGNORECASE)


@dataclass(frozen=True)
class Scenario:
    spec: ClusterSpec
    parameters: int


def apply_change(text: str, spec: ClusterSpec, parameters: int) -> Scenario:
    """Apply one change, such as ``bandwidth=2x``."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if name not in EXAMPLES:
        raise unknown("--what-if", name, EXAMPLES)
    if not equals or not value:
        raise InputError(f"--what-if {text!r} has no value: write {EXAMPLES[name]}")
    if name != "parameters":
        return Scenario(CHANGES[name](spec, value), parameters)
    number = _required_number(name, value)
    is_factor = value.lower().endswith(("x", "×"))
    return Scenario(spec, max(1, round(number * parameters if is_factor else number)))


def scaled_bandwidth(spec: ClusterSpec, factor: float) -> ClusterSpec:
    link = dataclasses.replace(spec.main_link, bytes_per_s=spec.main_link.bytes_per_s * factor)
    return _replace_main_link(spec, link, lambda seconds, latency_s: latency_s + max(0.0, seconds - latency_s) / factor)


def _bandwidth(spec: ClusterSpec, value: str) -> ClusterSpec:
    factor = _number(value)
    if factor is None:
        factor = parse_link(value, "--what-if bandwidth").bytes_per_s / spec.main_link.bytes_per_s
        if not 0 < factor < math.inf:
            raise InputError(f"--what-if bandwidth={value} cannot be applied: write {EXAMPLES['bandwidth']}")
    return scaled_bandwidth(spec, factor)


def _latency(spec: ClusterSpec, value: str) -> ClusterSpec:
    link, factor = spec.main_link, _number(value)
    if factor is None:
        if link.latency_s == 0:
            raise InputError("--what-if latency: the cluster file has no latency to change; add one to its links")
        factor = parse_seconds(value, "--what-if latency") / link.latency_s
    return _replace_main_link(
        spec,
        dataclasses.replace(link, latency_s=link.latency_s * factor),
        lambda seconds, latency_s: seconds + latency_s * (factor - 1),
    )


def _replace_main_link(spec: ClusterSpec, link: Link, rescale: Callable[[float, float], float]) -> ClusterSpec:
    """Replace the main link. ``rescale(seconds, latency_s)`` returns the new time of a message measured over it."""
    between = spec.nodes > 1

    def rescaled(table: TimingTable) -> TimingTable:
        if (table.shape.nodes > 1) != between:
            return table
        seconds, in_a_row = (
            tuple(rescale(time, table.latency_s) for time in times) for times in (table.seconds, table.in_a_row)
        )
        return dataclasses.replace(table, seconds=seconds, in_a_row=in_a_row)

    tables = tuple(map(rescaled, spec.tables))
    if between:
        return dataclasses.replace(spec, between=link, tables=tables)
    return dataclasses.replace(spec, inside=link, tables=tables)


def _compute(spec: ClusterSpec, value: str) -> ClusterSpec:
    compute, factor = spec.compute, _number(value)
    if factor is None:
        factor = parse_seconds(value, "--what-if compute") / compute.mean_s
    if not 0 < factor < math.inf:
        raise InputError(f"--what-if compute={value}: expected a time above 0; write {EXAMPLES['compute']}")
    sample_s = tuple(time * factor for time in compute.sample_s)
    mean_s, backward_s = compute.mean_s * factor, compute.backward_s * factor
    return _replace_compute(spec, mean_s=mean_s, backward_s=backward_s, sample_s=sample_s)


def _workers(spec: ClusterSpec, value: str) -> ClusterSpec:
    if not value.isdigit() or int(value) < 1:
        raise InputError(
            f"--what-if workers={value}: expected a whole number of 1 or more; write {EXAMPLES['workers']}"
        )
    return spec.with_workers(int(value))


def _straggler(spec: ClusterSpec, value: str) -> ClusterSpec:
    factors = spec.compute.worker_factors(spec.ranks)
    factors[-1] *= _required_number("straggler", value)
    return _replace_compute(spec, factors=tuple(factors.tolist()))


def _spread(spec: ClusterSpec, value: str) -> ClusterSpec:
    return _replace_compute(spec, sample_s=(), spread=_required_number("spread", value))


def _replace_compute(spec: ClusterSpec, **changes: Any) -> ClusterSpec:
    return dataclasses.replace(spec, compute=dataclasses.replace(spec.compute, **changes))


def _number(value: str) -> float | None:
    """Parse ``2x`` or ``2``; None if it is neither."""
    match = NUMBER.fullmatch(value)
    try:
        number = float(match.group(1)) if match else math.nan
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _required_number(name: str, value: str) -> float:
    number = _number(value)
    if number is None:
        raise InputError(f"--what-if {name}={value}: expected a number above 0; write {EXAMPLES[name]}")
    return number


CHANGES: dict[str, Callable[[ClusterSpec, str], ClusterSpec]] = {
    "bandwidth": _bandwidth,
    "latency": _latency,
    "compute": _compute,
    "workers": _workers,
    "straggler": _straggler,
    "spread": _spread,
}
