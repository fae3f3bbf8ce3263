"""Cluster files: read, checked and written.

A file, TOML or JSON, describes machines that were measured (``gossamer probe`` writes it) or that nobody has yet (a
person writes it). All that has to be there is nodes, workers per node, a compute time and the links::

    [cluster]
    nodes = 8
    workers_per_node = 4

    [compute]
    step = "60ms"                    # or forward, backward and optimizer; or sample = [0.058, 0.061, …]
    spread = 0.05

    [links]
    inside = "100gbit/10us"
    between = "25gbit/50us"
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.hardware import Link, parse_link, parse_seconds
from gossamer.plan.machines import KINDS, NOWHERE, ComputeProfile, Costs, Machines, Shape, Table

FIELDS = {
    "cluster": ("nodes", "workers_per_node", "memory", "source"),
    "compute": ("step", "forward", "backward", "optimizer", "spread", "sample", "factors", "correlation"),
    "links": ("inside", "between"),
    "costs": ("slowdown", "mixing", "compressing", "overhead"),
    "model": ("parameters",),
    "measured": ("what", "members", "nodes", "at_once", "bytes", "seconds", "in_a_row", "spread"),
}
PARTS = ("forward", "backward", "optimizer")


def read(path: Path) -> Machines:
    """The machines that a cluster file describes."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--cluster {path} cannot be read: {error.strerror}; give a file, or write one") from None
    except UnicodeDecodeError:
        raise InputError(f"--cluster {path} is not text: expected TOML, or JSON in a .json file") from None
    try:
        document = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise InputError(f"--cluster {path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    return Reader(str(path), document).machines()


class Reader:
    """One document, and errors that name its fields."""

    def __init__(self, name: str, document: Any) -> None:
        self.name = name
        if not isinstance(document, dict):
            raise self.error("", "is not a table: expected [cluster], [compute] and [links]")
        self.document = document
        self._known(document, tuple(FIELDS), "")
        for section, fields in FIELDS.items():
            rows = document.get(section, [] if section == "measured" else {})
            if section == "measured":
                if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                    raise self.error("measured", "is not a list of tables: write [[measured]] above each")
                for number, row in enumerate(rows):
                    self._known(row, fields, f"measured[{number}].")
            elif not isinstance(rows, dict):
                raise self.error(section, f"is not a table: write [{section}] above its fields")
            else:
                self._known(rows, fields, f"{section}.")

    def error(self, field: str, problem: str) -> InputError:
        return InputError(f"cluster file {self.name}: {field + ' ' if field else ''}{problem}")

    def _known(self, table: dict[str, Any], fields: tuple[str, ...], prefix: str) -> None:
        for key in table:
            if key not in fields:
                close = difflib.get_close_matches(key, fields, n=1)
                hint = f"did you mean {close[0]}?" if close else f"expected some of {', '.join(fields)}"
                raise self.error(f"{prefix}{key}", f"is not a field: {hint}")

    def machines(self) -> Machines:
        nodes = self._count("cluster.nodes")
        per_node = self._count("cluster.workers_per_node")
        workers = nodes * per_node
        return Machines(
            nodes=nodes,
            per_node=per_node,
            compute=self._compute(workers),
            inside=self._link("links.inside", per_node > 1),
            between=self._link("links.between", nodes > 1),
            costs=Costs(
                slowdown=self._number("costs.slowdown", 1.0, least=1.0),
                mixing_bytes_per_s=self._speed("costs.mixing"),
                compressing_bytes_per_s=self._speed("costs.compressing"),
                overhead_s=self._seconds("costs.overhead", 0.0),
            ),
            tables=tuple(self._table(number, nodes, workers) for number in range(len(self._get("measured", [])))),
            parameters=self._count("model.parameters", 0),
            memory_bytes=self._speed("cluster.memory", 0.0),
            source=str(self._get("cluster.source", "")),
        )

    def _get(self, field: str, default: Any = None) -> Any:
        section, _, key = field.partition(".")
        found = self.document.get(section)
        return default if found is None else (found.get(key, default) if key else found)

    def _required(self, field: str, example: str) -> Any:
        value = self._get(field)
        if value is None:
            raise self.error(field, f"is missing: give it, such as {example}")
        return value

    def _count(self, field: str, default: int | None = None) -> int:
        value = self._required(field, "4") if default is None else self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default is None else 0):
            raise self.error(field, f"is {value!r}: expected a whole number of {1 if default is None else 0} or more")
        return value

    def _number(self, field: str, default: float, least: float = 0.0, most: float = math.inf) -> float:
        return self._checked(field, self._get(field, default), least, most)

    def _checked(self, field: str, value: Any, least: float, most: float = math.inf) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(field, f"is {value!r}: expected a number")
        if not least <= value <= most:
            bounds = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
            raise self.error(field, f"is {value:g}: expected a number {bounds}")
        return float(value)

    def _seconds(self, field: str, default: float | None = None) -> float:
        """A time above 0, as seconds or as text such as 60ms."""
        value = self._required(field, '"60ms"') if default is None else self._get(field, default)
        if isinstance(value, str):
            try:
                value = parse_seconds(value, field)
            except InputError:
                raise self.error(field, f"is {value!r}: expected a time such as 60ms or 0.06") from None
        seconds = self._checked(field, value, 0.0)
        if seconds == 0 and default is None:
            raise self.error(field, "is 0: expected a time above 0")
        return seconds

    def _speed(self, field: str, default: float = math.inf) -> float:
        value = self._get(field)
        return default if value is None else self._parsed_link(field, value).bytes_per_s

    def _link(self, field: str, needed: bool) -> Link:
        value = self._get(field)
        if value is None and not needed:
            return NOWHERE
        return self._parsed_link(field, self._required(field, '"25gbit/50us"'))

    def _parsed_link(self, field: str, value: Any) -> Link:
        if not isinstance(value, str):
            raise self.error(field, f"is {value!r}: expected text such as 25gbit/50us or 4GB")
        try:
            link = parse_link(value, field)
        except InputError:
            raise self.error(field, f"is {value!r}: expected text such as 25gbit/50us or 4GB") from None
        if not math.isfinite(link.latency_s):
            raise self.error(field, f"is {value!r}: expected a finite latency")
        return link

    def _list(self, field: str, values: Any, least: float) -> tuple[float, ...]:
        if not isinstance(values, list) or not values:
            raise self.error(field, f"is {values!r}: expected a list of numbers")
        return tuple(self._checked(f"{field}[{k}]", value, least) for k, value in enumerate(values))

    def _compute(self, workers: int) -> ComputeProfile:
        given = [name for name in PARTS if self._get(f"compute.{name}") is not None]
        sample = self._get("compute.sample")
        step = self._get("compute.step")
        parts = {name: self._seconds(f"compute.{name}", 0.0) for name in given}
        spread = self._number("compute.spread", 0.0)
        times: tuple[float, ...] = ()
        if sample is not None:
            if self._get("compute.spread") is not None:
                raise self.error("compute.spread", "contradicts compute.sample, which has its own: keep one of them")
            times = self._list("compute.sample", sample, 0.0)
            if min(times) == 0:
                raise self.error("compute.sample", "has a time of 0: expected times above 0")
        if step is not None:
            mean = self._seconds("compute.step")
            for name, other in (
                ("compute.sample", sum(times) / max(1, len(times))),
                ("its parts", sum(parts.values())),
            ):
                whole = name == "compute.sample" or len(parts) == len(PARTS)
                if other and whole and abs(other - mean) > 0.2 * mean:
                    raise self.error("compute.step", f"is {mean:g} s but {name} come to {other:g} s: keep one of them")
            if sum(parts.values()) > 1.2 * mean:
                fields = ", ".join(f"compute.{name}" for name in parts)
                raise self.error("compute.step", f"is {mean:g} s, less than {fields}: {sum(parts.values()):g} s")
        elif times:
            mean = sum(times) / len(times)
        elif "forward" in parts and "backward" in parts:
            mean = sum(parts.values())
        else:
            self._required("compute.step", '"60ms"')
            raise AssertionError
        if not mean > 0:
            raise self.error("compute", "takes no time: expected forward and backward above 0")
        factors = self._get("compute.factors")
        scale: tuple[float, ...] = ()
        if factors is not None:
            scale = self._list("compute.factors", factors, 0.0)
            if len(scale) != workers:
                raise self.error(
                    "compute.factors", f"has {len(scale)} entries for {workers} workers: expected one each"
                )
            if min(scale) == 0:
                raise self.error("compute.factors", "has a 0: expected factors above 0, 1 for a typical worker")
        return ComputeProfile(
            mean_s=mean,
            spread=spread,
            sample_s=times,
            factors=scale,
            correlation=self._number("compute.correlation", 0.0, most=1.0),
            backward_s=parts.get("backward", 0.0),
        )

    def _table(self, number: int, nodes: int, workers: int) -> Table:
        row, field = self.document["measured"][number], f"measured[{number}]"
        for name in ("what", "members", "bytes", "seconds"):
            if name not in row:
                raise self.error(f"{field}.{name}", "is missing: give it")
        if row["what"] not in KINDS:
            raise self.error(f"{field}.what", f"is {row['what']!r}: expected one of {', '.join(KINDS)}")
        counts = {"members": 0, "nodes": 1, "at_once": 1}
        for name in counts:
            value = row.get(name, counts[name])
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.error(f"{field}.{name}", f"is {value!r}: expected a whole number of 1 or more")
            counts[name] = value
        if not 2 <= counts["members"] <= workers:
            raise self.error(f"{field}.members", f"is {counts['members']}: expected 2 to {workers}, all workers")
        if row["what"] == "exchange" and counts["members"] != 2:
            raise self.error(f"{field}.members", f"is {counts['members']}: an exchange has 2")
        if counts["nodes"] > min(nodes, counts["members"]):
            raise self.error(
                f"{field}.nodes", f"is {counts['nodes']}: expected at most {min(nodes, counts['members'])}"
            )
        sizes = self._list(f"{field}.bytes", row["bytes"], 1)
        seconds = self._list(f"{field}.seconds", row["seconds"], 0.0)
        row_seconds = self._list(f"{field}.in_a_row", row["in_a_row"], 0.0) if "in_a_row" in row else ()
        for name, times in (("seconds", seconds), ("in_a_row", row_seconds or seconds)):
            if len(sizes) != len(times):
                raise self.error(f"{field}.{name}", f"has {len(times)} times for {len(sizes)} sizes: expected one each")
        if list(sizes) != sorted(set(sizes)):
            raise self.error(f"{field}.bytes", "is not in ascending order")
        return Table(
            kind=row["what"],
            shape=Shape(counts["members"], counts["nodes"], counts["at_once"]),
            sizes_bytes=tuple(int(size) for size in sizes),
            seconds=seconds,
            in_a_row=row_seconds,
            spread=self._checked(f"{field}.spread", row.get("spread", 0.0), 0.0),
        )


def write(machines: Machines, path: Path) -> None:
    """Write a cluster file: TOML, or JSON if it is called so."""
    text = json.dumps(document(machines), indent=1) + "\n" if path.suffix.lower() == ".json" else as_toml(machines)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; give a file in a folder that is there") from None


def document(machines: Machines) -> dict[str, Any]:
    """The machines as a cluster file holds them."""
    compute, costs = machines.compute, machines.costs
    made: dict[str, Any] = {
        "cluster": {"nodes": machines.nodes, "workers_per_node": machines.per_node},
        "compute": {"step": _rounded(compute.mean_s)},
    }
    if machines.source:
        made["cluster"]["source"] = machines.source
    if machines.memory_bytes:
        made["cluster"]["memory"] = f"{machines.memory_bytes / 1e9:.3g}GB"
    if compute.backward_s:
        made["compute"]["backward"] = _rounded(compute.backward_s)
    if compute.sample_s:
        made["compute"]["sample"] = [_rounded(time) for time in compute.sample_s]
    elif compute.spread:
        made["compute"]["spread"] = compute.spread
    if compute.factors:
        made["compute"]["factors"] = [_rounded(factor) for factor in compute.factors]
    if compute.correlation:
        made["compute"]["correlation"] = _rounded(compute.correlation)
    links = {"inside": machines.inside, "between": machines.between}
    made["links"] = {name: _link_text(link) for name, link in links.items() if link != NOWHERE}
    made["costs"] = {"slowdown": _rounded(costs.slowdown)}
    for name, speed in (("mixing", costs.mixing_bytes_per_s), ("compressing", costs.compressing_bytes_per_s)):
        if math.isfinite(speed):
            made["costs"][name] = f"{speed / 1e9:.4g}GB"
    if costs.overhead_s:
        made["costs"]["overhead"] = _rounded(costs.overhead_s)
    if machines.parameters:
        made["model"] = {"parameters": machines.parameters}
    made["measured"] = [
        {
            "what": table.kind,
            "members": table.shape.members,
            "nodes": table.shape.nodes,
            "at_once": table.shape.at_once,
            "bytes": list(table.sizes_bytes),
            "seconds": [_rounded(time) for time in table.seconds],
            **({"in_a_row": [_rounded(time) for time in table.in_a_row]} if table.in_a_row else {}),
            "spread": _rounded(table.spread),
        }
        for table in machines.tables
    ]
    return made


EXPLAINED = {
    "step": "seconds of one step alone: forward, backward, optimizer",
    "factors": "how many times slower each worker is than the typical one",
    "correlation": "how strongly workers are slow together",
    "slowdown": "of compute while a message is under way",
    "mixing": "per second, when a worker moves its parameters to a mean",
    "compressing": "per second, when it compresses a gradient",
    "overhead": "seconds of a step, beside all that",
    "memory": "left for one worker",
    "in_a_row": "seconds, right after one another",
    "at_once": "such groups on one node at the same time",
}


def as_toml(machines: Machines) -> str:
    """The same as TOML, with a word on what is not plain."""
    lines: list[str] = []
    explained: set[str] = set()

    def put(name: str, value: Any) -> None:
        said = f"    # {EXPLAINED[name]}" if name in EXPLAINED and name not in explained else ""
        explained.add(name)
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}{said}")

    for section, content in document(machines).items():
        for table in content if isinstance(content, list) else [content]:
            lines += ["", f"[[{section}]]" if isinstance(content, list) else f"[{section}]"]
            for name, value in table.items():
                put(name, value)
    return "\n".join(lines[1:]) + "\n"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _link_text(link: Link) -> str:
    speed = "inf" if math.isinf(link.bytes_per_s) else f"{8 * link.bytes_per_s / 1e6:.5g}mbit"
    return f"{speed}/{link.latency_s * 1e6:.4g}us"
