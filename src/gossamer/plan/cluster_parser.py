"""Check the content of a cluster file and turn it into a ClusterSpec; every error names the field."""

from __future__ import annotations

import difflib
import math
from typing import Any

from gossamer.errors import InputError
from gossamer.hardware import Link, parse_link, parse_seconds
from gossamer.plan.cluster_spec import (
    COMM_KINDS,
    ELEMENT_BYTES,
    EXCHANGE,
    NO_LINK,
    ClusterSpec,
    ComputeProfile,
    Costs,
    GroupShape,
    TimingTable,
)
from gossamer.replica_time import BLOCKS, INSIDE, ReplicaShape

FIELDS = {
    "cluster": ("nodes", "workers_per_node", "memory", "source"),
    "compute": ("step", "forward", "backward", "optimizer", "spread", "sample", "factors", "correlation"),
    "links": ("inside", "between"),
    "replica": ("ranks", "inside", "link", "blocks", "overlap", "wait"),
    "costs": ("slowdown", "mixing", "compressing", "overhead"),
    "model": ("parameters",),
    "measured": ("what", "members", "nodes", "at_once", "bytes", "seconds", "in_a_row", "spread"),
}
STEP_PARTS = ("forward", "backward", "optimizer")
MAX_CONTRADICTION = 0.2
"""Relative difference between two statements about the step time up to which they do not contradict each other."""


class ClusterParser:
    """Parses one document, as TOML or JSON readers return it."""

    def __init__(self, name: str, document: Any) -> None:
        """``name`` is that of the file, for errors."""
        self.name = name
        if not isinstance(document, dict):
            raise self._error("", "is not a table: expected [cluster], [compute] and [links]")
        self.document = document
        self._check_names(document, tuple(FIELDS), "")
        for section, fields in FIELDS.items():
            content = document.get(section, [] if section == "measured" else {})
            if section == "measured":
                if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
                    raise self._error("measured", "is not a list of tables: write [[measured]] above each")
                for number, row in enumerate(content):
                    self._check_names(row, fields, f"measured[{number}].")
            elif not isinstance(content, dict):
                raise self._error(section, f"is not a table: write [{section}] above its fields")
            else:
                self._check_names(content, fields, f"{section}.")

    def _error(self, field: str, problem: str) -> InputError:
        return InputError(f"cluster file {self.name}: {field + ' ' if field else ''}{problem}")

    def _check_names(self, table: dict[str, Any], fields: tuple[str, ...], prefix: str) -> None:
        for key in table:
            if key not in fields:
                close = difflib.get_close_matches(key, fields, n=1)
                hint = f"did you mean {close[0]}?" if close else f"expected some of {', '.join(fields)}"
                raise self._error(f"{prefix}{key}", f"is not a field: {hint}")

    def parse(self) -> ClusterSpec:
        nodes = self._count("cluster.nodes")
        per_node = self._count("cluster.workers_per_node")
        workers, replica = nodes * per_node, self._replica()
        return ClusterSpec(
            nodes=nodes,
            per_node=per_node,
            compute=self._compute(workers * (1 if replica is None else replica.ranks)),
            inside=self._link("links.inside", required=per_node > 1),
            between=self._link("links.between", required=nodes > 1),
            costs=Costs(
                slowdown=self._number("costs.slowdown", 1.0, minimum=1.0),
                mixing_bytes_per_s=self._bytes("costs.mixing", math.inf),
                compressing_bytes_per_s=self._bytes("costs.compressing", math.inf),
                overhead_s=self._seconds("costs.overhead", 0.0),
            ),
            tables=tuple(
                self._timing_table(row, f"measured[{number}]", nodes, workers)
                for number, row in enumerate(self.document.get("measured", []))
            ),
            parameters=self._count("model.parameters", 0),
            memory_bytes=self._bytes("cluster.memory", 0.0),
            source=str(self._get("cluster.source", "")),
            replica=replica,
        )

    def _replica(self) -> ReplicaShape | None:
        if "replica" not in self.document:
            return None
        inside, overlap = self._get("replica.inside", INSIDE[0]), self._get("replica.overlap", True)
        if inside not in INSIDE:
            raise self._error("replica.inside", f"is {inside!r}: expected {' or '.join(INSIDE)}")
        if not isinstance(overlap, bool):
            raise self._error("replica.overlap", f"is {overlap!r}: expected true or false")
        ranks, blocks = (
            self._count("replica.ranks"),
            self._checked_count("replica.blocks", self._get("replica.blocks", BLOCKS)),
        )
        link = self._link("replica.link", required=self._get("links.inside") is None and ranks > 1)
        if link == NO_LINK:
            link = self._link("links.inside", required=False)
        if self._get("replica.wait") is None:
            return ReplicaShape(ranks, inside, link, blocks, overlap)
        if self._get("model.parameters") is None:
            raise self._error("replica.wait", "is that of some model: give model.parameters too, or leave it out")
        wait_s, model_bytes = self._seconds("replica.wait", 0.0), ELEMENT_BYTES * self._count("model.parameters")
        return ReplicaShape(ranks, inside, link, blocks, overlap, wait_s, model_bytes)

    # Values

    def _get(self, field: str, default: Any = None) -> Any:
        section, _, key = field.partition(".")
        return self.document.get(section, {}).get(key, default)

    def _required(self, field: str, example: str) -> Any:
        value = self._get(field)
        if value is None:
            raise self._error(field, f"is missing: give it, such as {example}")
        return value

    def _count(self, field: str, default: int | None = None) -> int:
        value = self._required(field, "4") if default is None else self._get(field, default)
        return self._checked_count(field, value, minimum=1 if default is None else 0)

    def _checked_count(self, field: str, value: Any, minimum: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._error(field, f"is {value!r}: expected a whole number of {minimum} or more")
        return value

    def _number(self, field: str, default: float, minimum: float = 0.0, maximum: float = math.inf) -> float:
        return self._checked_number(field, self._get(field, default), minimum, maximum)

    def _checked_number(self, field: str, value: Any, minimum: float, maximum: float = math.inf) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._error(field, f"is {value!r}: expected a number")
        if not minimum <= value <= maximum:
            bounds = f"of {minimum:g} or more" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
            raise self._error(field, f"is {value:g}: expected a number {bounds}")
        return float(value)

    def _checked_numbers(self, field: str, values: Any, minimum: float = 0.0) -> tuple[float, ...]:
        if not isinstance(values, list) or not values:
            raise self._error(field, f"is {values!r}: expected a list of numbers")
        return tuple(self._checked_number(f"{field}[{k}]", value, minimum) for k, value in enumerate(values))

    def _positive_numbers(self, field: str) -> tuple[float, ...]:
        """Parse an optional list of numbers above 0."""
        values = self._get(field)
        numbers = () if values is None else self._checked_numbers(field, values)
        if 0 in numbers:
            raise self._error(field, "has a 0: expected numbers above 0")
        return numbers

    def _seconds(self, field: str, default: float | None = None) -> float:
        """Parse a time: seconds, or text such as 60ms. Without a default it is required and must be above 0."""
        value = self._required(field, '"60ms"') if default is None else self._get(field, default)
        if isinstance(value, str):
            try:
                value = parse_seconds(value, field)
            except InputError:
                raise self._error(field, f"is {value!r}: expected a time such as 60ms or 0.06") from None
        seconds = self._checked_number(field, value, 0.0)
        if seconds == 0 and default is None:
            raise self._error(field, "is 0: expected a time above 0")
        return seconds

    def _bytes(self, field: str, default: float) -> float:
        """Parse bytes, or bytes per second, such as 4GB."""
        value = self._get(field)
        return default if value is None else self._parsed_link(field, value).bytes_per_s

    def _link(self, field: str, required: bool) -> Link:
        value = self._required(field, '"25gbit/50us"') if required else self._get(field)
        return NO_LINK if value is None else self._parsed_link(field, value)

    def _parsed_link(self, field: str, value: Any) -> Link:
        try:
            link = parse_link(value, field) if isinstance(value, str) else None
        except InputError:
            link = None
        if link is None:
            raise self._error(field, f"is {value!r}: expected text such as 25gbit/50us or 4GB")
        if not math.isfinite(link.latency_s):
            raise self._error(field, f"is {value!r}: expected a finite latency")
        return link

    # Sections

    def _compute(self, ranks: int) -> ComputeProfile:
        parts = {
            name: self._seconds(f"compute.{name}", 0.0)
            for name in STEP_PARTS
            if self._get(f"compute.{name}") is not None
        }
        sample, factors = self._positive_numbers("compute.sample"), self._positive_numbers("compute.factors")
        if sample and self._get("compute.spread") is not None:
            raise self._error("compute.spread", "contradicts compute.sample, which has its own: keep one of them")
        if factors and len(factors) != ranks:
            what = "workers" if "replica" not in self.document else "ranks of replicas"
            raise self._error("compute.factors", f"has {len(factors)} entries for {ranks} {what}: expected one each")
        return ComputeProfile(
            mean_s=self._mean_step_s(parts, sample),
            spread=self._number("compute.spread", 0.0),
            sample_s=sample,
            factors=factors,
            correlation=self._number("compute.correlation", 0.0, maximum=1.0),
            backward_s=parts.get("backward", 0.0),
        )

    def _mean_step_s(self, parts: dict[str, float], sample: tuple[float, ...]) -> float:
        """Return ``compute.step``, or else the mean of the sample, or else the sum of the parts."""
        sample_s, parts_s = sum(sample) / max(1, len(sample)), sum(parts.values())
        if self._get("compute.step") is None:
            if not sample and not {"forward", "backward"} <= parts.keys():
                self._required("compute.step", '"60ms"')
            if sample_s == 0 and parts_s == 0:
                raise self._error("compute", "takes no time: expected forward and backward above 0")
            return sample_s or parts_s
        step_s = self._seconds("compute.step")
        complete = {"compute.sample": sample_s, "its parts": parts_s if len(parts) == len(STEP_PARTS) else 0.0}
        for name, other_s in complete.items():
            if other_s and abs(other_s - step_s) > MAX_CONTRADICTION * step_s:
                raise self._error("compute.step", f"is {step_s:g} s but {name} come to {other_s:g} s: keep one of them")
        if parts_s > (1 + MAX_CONTRADICTION) * step_s:
            fields = ", ".join(f"compute.{name}" for name in parts)
            raise self._error("compute.step", f"is {step_s:g} s, less than {fields}: {parts_s:g} s")
        return step_s

    def _timing_table(self, row: dict[str, Any], field: str, nodes: int, workers: int) -> TimingTable:
        for name in ("what", "members", "bytes", "seconds"):
            if name not in row:
                raise self._error(f"{field}.{name}", "is missing: give it")
        if row["what"] not in COMM_KINDS:
            raise self._error(f"{field}.what", f"is {row['what']!r}: expected one of {', '.join(COMM_KINDS)}")
        shape = GroupShape(
            *(self._checked_count(f"{field}.{name}", row.get(name, 1)) for name in ("members", "nodes", "at_once"))
        )
        if not 2 <= shape.members <= workers:
            raise self._error(f"{field}.members", f"is {shape.members}: expected 2 to {workers}, all workers")
        if row["what"] == EXCHANGE and shape.members != 2:
            raise self._error(f"{field}.members", f"is {shape.members}: an exchange has 2")
        if shape.nodes > min(nodes, shape.members):
            raise self._error(f"{field}.nodes", f"is {shape.nodes}: expected at most {min(nodes, shape.members)}")
        sizes = self._checked_numbers(f"{field}.bytes", row["bytes"], 1)
        if list(sizes) != sorted(set(sizes)):
            raise self._error(f"{field}.bytes", "is not in ascending order")
        times = {}
        for name in ("seconds", "in_a_row"):
            times[name] = self._checked_numbers(f"{field}.{name}", row[name]) if name in row else ()
            if name in row and len(times[name]) != len(sizes):
                problem = f"has {len(times[name])} times for {len(sizes)} sizes: expected one each"
                raise self._error(f"{field}.{name}", problem)
        return TimingTable(
            kind=row["what"],
            shape=shape,
            sizes_bytes=tuple(int(size) for size in sizes),
            seconds=times["seconds"],
            in_a_row=times["in_a_row"],
            spread=self._checked_number(f"{field}.spread", row.get("spread", 0.0), 0.0),
        )
