"""What has to be the same on all workers of a run, as plain text that workers can compare.

The facts of a worker are an ordered dictionary from what people call a thing ("method", "parameter 0.weight") to its
value. They are compared in this order, so the first difference is the one that explains the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

import gossamer
from gossamer.methods import Method
from gossamer.methods.quasi_global import QuasiGlobal
from gossamer.process.runtime.flat_model import FlatModel, plain_name
from gossamer.process.store.parsing import read_json
from gossamer.topology import Topology
from gossamer.user_file import path_of
from gossamer.vectors.flat import Flat, Part, is_sharded
from gossamer.wire import Codec

Facts = dict[str, str]

MAX_FACTS_BYTES = 1 << 26
MAX_VALUE_CHARS = 120
"""Longer values are cut in messages."""

MAX_SCHEDULED_WORKERS = 256
"""The schedule of a larger topology takes long to compute, and follows from its edges and its name."""

MISSING = "none"

VERSION, WORKERS, METHOD, TOPOLOGY, WIRE = "version of gossamer", "number of workers", "method", "topology", "wire"
TRANSPORT, SEED, OPTIMIZER, OUTPUT = "transport", "seed", "optimizer", "out and tracker"
SETTING, PARAMETER, BUFFER = "setting ", "parameter ", "buffer "
"""What precedes the name of a setting of the method, of a parameter and of a buffer."""
RANKS, PLACEMENT = "number of ranks", "placement of "
"""Of workers that are replicas: how many ranks each has, and how each parameter lies on them."""

_REMEDIES = {
    VERSION: "install the same version on all of them",
    WORKERS: "start all of them with the same WORLD_SIZE",
    RANKS: "all replicas need the same number; start each with as many processes (torchrun --nproc-per-node)",
    PLACEMENT: "use the same parallelism inside all of them, over the same inner mesh",
    PARAMETER: "build the same model on all of them, with the same layers frozen; join several models in one order",
    BUFFER: "build the same model on all of them",
    OPTIMIZER: "create the same optimizer on all of them",
    OUTPUT: "give them on all of them, or on none",
}


def find_facts(
    flat_model: FlatModel,
    method: Method,
    topology: Topology,
    seed: int,
    transport: str,
    codec: Codec | None,
    has_output: bool = False,
    replica_size: int = 0,
) -> Facts:
    """Return the facts of a worker. ``has_output``: it reports to a run folder or a tracker. ``replica_size``: the
    ranks of its replica, if it is a rank of one.
    """
    return {
        **_run_facts(topology.workers, method.name),
        **(_replica_facts(flat_model.model, replica_size) if replica_size else {}),
        **_method_facts(method),
        **_topology_facts(topology),
        WIRE: _codec_name(codec),
        TRANSPORT: transport,
        SEED: str(seed),
        OUTPUT: "given" if has_output else "not given",
        **_model_facts(flat_model.flat, Flat(flat_model.model.named_buffers()), flat_model.optimizer),
    }


def find_facts_of_auto(model: nn.Module, optimizer: Optimizer, workers: int) -> Facts:
    """Return the facts of a worker that lets ``auto`` choose its method."""
    parameters, buffers = Flat.of_parameters(model), Flat(model.named_buffers())
    return {**_run_facts(workers, "auto"), **_model_facts(parameters, buffers, optimizer)}


def _run_facts(workers: int, method: str) -> Facts:
    return {VERSION: gossamer.__version__, WORKERS: str(workers), METHOD: method}


def _replica_facts(model: nn.Module, size: int) -> Facts:
    """Return what has to be the same in all replicas, whichever shard of them is compared."""
    named = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    return {RANKS: str(size), **{f"{PLACEMENT}{name}": _placement(p) for name, p in named}}


def _placement(parameter: Any) -> str:
    if not is_sharded(parameter):
        return "whole on each rank"
    shape = "x".join(map(str, parameter.device_mesh.mesh.shape))
    return f"{', '.join(map(str, parameter.placements))} over {shape} ranks"


def _method_facts(method: Method) -> Facts:
    settings: dict[str, Any] = {}
    inner = method
    while isinstance(inner, QuasiGlobal):
        settings["quasi_global"] = inner.momentum
        inner = inner.inner
    config = getattr(inner, "config", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        settings = {**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}, **settings}
    facts = {"class of the method": type(inner).__qualname__}
    path = path_of(type(inner))
    if path is not None:
        facts["file of the method"] = f"{path.name} {_digest(path.read_bytes())}"
    return {**facts, **{f"{SETTING}{name}": repr(value) for name, value in settings.items()}}


def _topology_facts(topology: Topology) -> Facts:
    facts = {TOPOLOGY: topology.name, "edges of the topology": _digest(topology.edges.tobytes())}
    if topology.workers <= MAX_SCHEDULED_WORKERS:
        rounds = [[group.members for group in groups] for groups in topology.rounds]
        facts["schedule of the topology"] = _digest(repr(rounds).encode())
    return facts


def _model_facts(parameters: Flat, buffers: Flat, optimizer: Optimizer) -> Facts:
    names = [plain_name(part.name) for part in parameters.parts]
    return {
        OPTIMIZER: type(optimizer).__qualname__,
        **{f"{PARAMETER}{plain_name(part.name)}": _layout(part) for part in parameters.parts},
        "order of the parameters": _digest(json.dumps(names).encode()),
        **{f"{BUFFER}{plain_name(part.name)}": _layout(part) for part in buffers.parts},
    }


def _layout(part: Part) -> str:
    """Return shape and dtype, and the strides if they are not the usual ones: they order the flat vector."""
    size, usual = 1, []
    for extent in reversed(part.shape):
        usual.append(size)
        size *= extent
    shape, dtype = "x".join(map(str, part.shape)) or "scalar", str(part.dtype).removeprefix("torch.")
    # The stride of an axis of length 1 means nothing.
    strides = [(own, other) for own, other, n in zip(part.strides, reversed(usual), part.shape, strict=True) if n > 1]
    order = "" if all(own == other for own, other in strides) else f" with strides {part.strides}"
    return f"{shape} {dtype}{order}"


def _codec_name(codec: Codec | None) -> str:
    if codec is None:
        return "float32"
    return f"{codec.name} ({type(codec).__qualname__}, blocks of {codec.block}, headroom {codec.headroom})"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# Text for the store


def to_text(facts: Facts) -> str:
    return json.dumps(facts)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def from_text(text: bytes) -> Facts | None:
    """Return the facts that another worker published; None if this is something else."""
    if len(text) > MAX_FACTS_BYTES:
        return None
    facts = read_json(text)
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        return None
    return facts


# Differences


def difference(sides: Mapping[int, Facts]) -> str | None:
    """Return the first difference between the facts of several ranks, and the ranks on each side; None if equal."""
    found = _first_difference(list(sides.values()))
    if found is None:
        return None
    ranks_of: dict[str, list[int]] = {}
    for rank, facts in sorted(sides.items()):
        ranks_of.setdefault(facts.get(found, MISSING), []).append(rank)
    who = _who(sides.values())
    values = "; ".join(f"{_shown(value)} on {name_ranks(ranks, who)}" for value, ranks in ranks_of.items())
    subject = "workers" if who == "rank" else "replicas"
    return f"{subject} differ in {found.removeprefix(SETTING)}: {values}: {_remedy(found)}"


def difference_from_run(own: Facts, run: Facts, rank: int) -> str:
    """Return the line for a worker that comes to a run which began without it, with other facts."""
    found, who = _first_difference([own, run]), _who([own, run])
    who = "worker" if who == "rank" else who
    if found is None:
        return f"{who} {rank} differs from the run that it comes to: start it as the others were started"
    here, there = (_shown(facts.get(found, MISSING)) for facts in (own, run))
    return (
        f"{who} {rank} comes to a run that has begun, and differs in {found.removeprefix(SETTING)}: {here} here; "
        f"{there} in the run: start it as the others were started"
    )


def _first_difference(sides: list[Facts]) -> str | None:
    names = dict.fromkeys(name for facts in sides for name in facts)
    # An item that one side only has is behind those that both have: another method has other settings.
    for shared in (True, False):
        for name in names:
            values = {facts.get(name) for facts in sides}
            if len(values) > 1 and (None not in values) is shared and _explains(name, shared, sides):
                return name
    return None


def _explains(name: str, shared: bool, sides: list[Facts]) -> bool:
    """Return whether a difference in ``name`` is one by itself: digests of lists come behind the list's items."""
    if not shared or name != "order of the parameters":
        return True
    own = [{key for key in facts if key.startswith(PARAMETER)} for facts in sides]
    return all(keys == own[0] for keys in own)


def _remedy(name: str) -> str:
    for start, remedy in _REMEDIES.items():
        if name.startswith(start):
            return remedy
    return "start all of them with the same"


def _shown(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= MAX_VALUE_CHARS else f"{line[:MAX_VALUE_CHARS]}…"


def _who(sides: Iterable[Facts]) -> str:
    """Return what the ranks in a message count."""
    return "replica" if any(RANKS in facts for facts in sides) else "rank"


def name_ranks(ranks: list[int], who: str = "rank") -> str:
    """Return "rank 1" or "ranks 0, 2, 5-9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        text for run in runs for text in ([str(rank) for rank in run] if len(run) <= 2 else [f"{run[0]}-{run[-1]}"])
    ]
    return f"{who}{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
