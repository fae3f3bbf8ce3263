"""The same cluster with one thing changed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.errors import InputError, unknown
from gossamer.hardware import Link, parse_link, parse_seconds
from gossamer.plan.machines import Machines, Table

EXAMPLES = {
    "bandwidth": "bandwidth=2x or bandwidth=100gbit",
    "latency": "latency=0.5x or latency=1ms",
    "compute": "compute=0.5x or compute=30ms",
    "workers": "workers=64",
    "straggler": "straggler=3x",
    "spread": "spread=0.2",
    "parameters": "parameters=4x or parameters=1e9",
}
"""What can be changed, and how it is written."""

NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*[x×]?", re.IGNORECASE)


@dataclass(frozen=True)
class Changed:
    """The cluster and the model after the change."""

    machines: Machines
    parameters: int


def change(text: str, machines: Machines, parameters: int) -> Changed:
    """Apply one change, such as ``bandwidth=2x``."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if name not in EXAMPLES:
        raise unknown("--what-if", name, EXAMPLES)
    if not equals or not value:
        raise InputError(f"--what-if {text!r} does not say to what: write {EXAMPLES[name]}")
    return CHANGES[name](machines, parameters, value)


def scaled_bandwidth(machines: Machines, factor: float) -> Machines:
    """The links between nodes so many times as fast; those inside the node if there is only one."""
    between = machines.nodes > 1

    def faster(table: Table) -> Table:
        if (table.shape.nodes > 1) != between:
            return table
        latency = table.latency_s
        seconds, in_a_row = (
            tuple(latency + max(0.0, each - latency) / factor for each in times)
            for times in (table.seconds, table.in_a_row)
        )
        return dataclasses.replace(table, seconds=seconds, in_a_row=in_a_row)

    link = machines.between if between else machines.inside
    changed = Link(link.bytes_per_s * factor, link.latency_s)
    return dataclasses.replace(
        machines,
        between=changed if between else machines.between,
        inside=machines.inside if between else changed,
        tables=tuple(map(faster, machines.tables)),
    )


def _bandwidth(machines: Machines, parameters: int, value: str) -> Changed:
    factor = _factor(value)
    if factor is None:
        link = machines.between if machines.nodes > 1 else machines.inside
        factor = parse_link(value, "--what-if bandwidth").bytes_per_s / link.bytes_per_s
        if not 0 < factor < math.inf:
            raise InputError(
                f"--what-if bandwidth={value} is no change that can be made: write {EXAMPLES['bandwidth']}"
            )
    return Changed(scaled_bandwidth(machines, factor), parameters)


def _latency(machines: Machines, parameters: int, value: str) -> Changed:
    between = machines.nodes > 1
    link = machines.between if between else machines.inside
    factor = _factor(value)
    if factor is None:
        if link.latency_s == 0:
            raise InputError("--what-if latency: the file has no latency to change; write one there")
        factor = parse_seconds(value, "--what-if latency") / link.latency_s

    def slower(table: Table) -> Table:
        if (table.shape.nodes > 1) != between:
            return table
        more = table.latency_s * (factor - 1)
        seconds, in_a_row = (tuple(each + more for each in times) for times in (table.seconds, table.in_a_row))
        return dataclasses.replace(table, seconds=seconds, in_a_row=in_a_row)

    changed = Link(link.bytes_per_s, link.latency_s * factor)
    made = dataclasses.replace(
        machines,
        between=changed if between else machines.between,
        inside=machines.inside if between else changed,
        tables=tuple(map(slower, machines.tables)),
    )
    return Changed(made, parameters)


def _compute(machines: Machines, parameters: int, value: str) -> Changed:
    compute = machines.compute
    factor = _factor(value)
    if factor is None:
        factor = parse_seconds(value, "--what-if compute") / compute.mean_s
    if not 0 < factor < math.inf:
        raise InputError(f"--what-if compute={value}: expected a time above 0; write {EXAMPLES['compute']}")
    made = dataclasses.replace(
        compute,
        mean_s=compute.mean_s * factor,
        backward_s=compute.backward_s * factor,
        sample_s=tuple(time * factor for time in compute.sample_s),
    )
    return Changed(dataclasses.replace(machines, compute=made), parameters)


def _workers(machines: Machines, parameters: int, value: str) -> Changed:
    if not value.isdigit() or int(value) < 1:
        raise InputError(
            f"--what-if workers={value}: expected a whole number of 1 or more; write {EXAMPLES['workers']}"
        )
    return Changed(machines.with_workers(int(value)), parameters)


def _straggler(machines: Machines, parameters: int, value: str) -> Changed:
    factor = _factor(value)
    if factor is None:
        raise InputError(f"--what-if straggler={value}: expected how many times slower; write {EXAMPLES['straggler']}")
    factors = machines.compute.worker_factors(machines.workers)
    factors[-1] *= factor
    compute = dataclasses.replace(machines.compute, factors=tuple(factors.tolist()))
    return Changed(dataclasses.replace(machines, compute=compute), parameters)


def _spread(machines: Machines, parameters: int, value: str) -> Changed:
    sigma = _factor(value)
    if sigma is None:
        raise InputError(f"--what-if spread={value}: expected a number; write {EXAMPLES['spread']}")
    compute = dataclasses.replace(machines.compute, sample_s=(), spread=sigma)
    return Changed(dataclasses.replace(machines, compute=compute), parameters)


def _parameters(machines: Machines, parameters: int, value: str) -> Changed:
    number = _factor(value)
    if number is None or number < 1e-12:
        raise InputError(f"--what-if parameters={value}: expected a number; write {EXAMPLES['parameters']}")
    times = value.lower().endswith(("x", "×"))
    return Changed(machines, max(1, round(number * parameters if times else number)))


def _factor(value: str) -> float | None:
    """``2x`` or ``2`` as a number; None if it is something else."""
    match = NUMBER.fullmatch(value)
    try:
        number = float(match.group(1)) if match else math.nan
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


CHANGES: dict[str, Callable[[Machines, int, str], Changed]] = {
    "bandwidth": _bandwidth,
    "latency": _latency,
    "compute": _compute,
    "workers": _workers,
    "straggler": _straggler,
    "spread": _spread,
    "parameters": _parameters,
}
