"""Cluster files: read and write.

A cluster file, TOML or JSON, describes a cluster that ``gossamer probe`` has measured, or one that a person has written
down. Required are the nodes, the workers per node, a compute time and the links. With ``[replica]`` each worker is a
replica of several ranks, and compute times are those of one rank::

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

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.hardware import Link
from gossamer.plan.cluster_parser import ClusterParser
from gossamer.plan.cluster_spec import NO_LINK, ClusterSpec

COMMENTS = {
    "step": "seconds of one step alone: forward, backward, optimizer",
    "factors": "how many times slower each worker, or rank of a replica, is than the typical one",
    "correlation": "how strongly workers are slow in the same step, 0 to 1",
    "slowdown": "of compute while a message is in flight",
    "mixing": "per second, when a worker moves its parameters to a mean",
    "compressing": "per second, when it compresses a gradient",
    "overhead": "any other time that a step takes, in seconds",
    "memory": "free memory of one worker",
    "blocks": "of the model, which FSDP2 gathers one after another",
    "overlap": "FSDP2's messages travel beside compute",
    "wait": "seconds of a step beyond the compute of the slowest rank",
    "in_a_row": "seconds, back to back",
    "at_once": "such groups on one node at the same time",
}


def read(path: Path) -> ClusterSpec:
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
    return ClusterParser(str(path), document).parse()


def write(spec: ClusterSpec, path: Path) -> None:
    """Write a cluster file: JSON if its name ends in .json, else TOML."""
    text = json.dumps(document(spec), indent=1) + "\n" if path.suffix.lower() == ".json" else as_toml(spec)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; give a file in an existing folder") from None


def document(spec: ClusterSpec) -> dict[str, Any]:
    compute, costs = spec.compute, spec.costs
    content: dict[str, Any] = {
        "cluster": {"nodes": spec.nodes, "workers_per_node": spec.per_node},
        "compute": {"step": _rounded(compute.mean_s)},
    }
    if spec.source:
        content["cluster"]["source"] = spec.source
    if spec.memory_bytes:
        content["cluster"]["memory"] = f"{spec.memory_bytes / 1e9:.3g}GB"
    if compute.backward_s:
        content["compute"]["backward"] = _rounded(compute.backward_s)
    if compute.sample_s:
        content["compute"]["sample"] = [_rounded(time) for time in compute.sample_s]
    elif compute.spread:
        content["compute"]["spread"] = compute.spread
    if compute.factors:
        content["compute"]["factors"] = [_rounded(factor) for factor in compute.factors]
    if compute.correlation:
        content["compute"]["correlation"] = _rounded(compute.correlation)
    links = {"inside": spec.inside, "between": spec.between}
    content["links"] = {name: _link_text(link) for name, link in links.items() if link != NO_LINK}
    replica = spec.replica
    if replica is not None:
        about = {"ranks": replica.ranks, "inside": replica.inside, "link": _link_text(replica.link)}
        content["replica"] = {**about, "blocks": replica.blocks, "overlap": replica.overlaps}
        if replica.measured_s is not None:
            content["replica"]["wait"] = _rounded(replica.measured_s)
    content["costs"] = {"slowdown": _rounded(costs.slowdown)}
    for name, speed in (("mixing", costs.mixing_bytes_per_s), ("compressing", costs.compressing_bytes_per_s)):
        if math.isfinite(speed):
            content["costs"][name] = f"{speed / 1e9:.4g}GB"
    if costs.overhead_s:
        content["costs"]["overhead"] = _rounded(costs.overhead_s)
    if spec.parameters:
        content["model"] = {"parameters": spec.parameters}
    content["measured"] = [
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
        for table in spec.tables
    ]
    return content


def as_toml(spec: ClusterSpec) -> str:
    """Return the content as TOML, with a comment at the first use of some fields."""
    lines: list[str] = []
    commented: set[str] = set()
    for section, content in document(spec).items():
        for table in content if isinstance(content, list) else [content]:
            lines += ["", f"[[{section}]]" if isinstance(content, list) else f"[{section}]"]
            for name, value in table.items():
                comment = f"    # {COMMENTS[name]}" if name in COMMENTS and name not in commented else ""
                commented.add(name)
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}{comment}")
    return "\n".join(lines[1:]) + "\n"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _link_text(link: Link) -> str:
    speed = "inf" if math.isinf(link.bytes_per_s) else f"{8 * link.bytes_per_s / 1e6:.5g}mbit"
    return f"{speed}/{link.latency_s * 1e6:.4g}us"
