"""What ``join`` checks of a replica: the model in it, the method between replicas, and that all ranks have the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.methods.divisible import Divisible
from gossamer.process.joining import join_facts
from gossamer.process.joining.join_facts import Facts
from gossamer.process.replica.inner_group import InnerGroup
from gossamer.process.replica.place import Place
from gossamer.process.runtime.flat_model import plain_name
from gossamer.vectors.flat import Flat, is_sharded


def unwrap_ddp(model: Any, place: Place) -> tuple[Any, bool]:
    """Return the module inside DDP, and whether it was; InputError if DDP averages over other ranks than the replica.

    A model that was compiled after it was wrapped is found too.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.parallel.DistributedDataParallel):
        return model, False
    ranks = dist.get_process_group_ranks(inner.process_group)
    if sorted(ranks) != sorted(place.ranks):
        raise InputError(
            f"DDP averages over ranks {sorted(ranks)}, and this replica has ranks {sorted(place.ranks)}: give DDP the "
            "group of the replica, as process_group=mesh['shard'].get_group()"
        )
    return inner.module, True


def check_model(model: nn.Module, in_ddp: bool, place: Place) -> None:
    """Check that the parameters are spread over the ranks of this replica, and over no others."""
    own, covered = set(place.ranks), in_ddp or len(place.ranks) == 1
    in_fsdp = not covered and any(isinstance(module, FSDPModule) for module in model.modules())
    for name, tensor in model.named_buffers():
        if is_sharded(tensor):
            raise InputError(f"the buffer {plain_name(name)} is a DTensor: only parameters may be, keep buffers whole")
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            if in_fsdp and parameter.requires_grad:
                # In tensor parallel all ranks see the same data, so a parameter may be whole. FSDP2 deals the data out.
                raise InputError(
                    f"the parameter {plain_name(name)} is in no module that fully_shard has wrapped, so nothing keeps "
                    "it the same on the ranks of the replica: call fully_shard(model, …) on the whole model last"
                )
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        ranks = set(mesh.mesh.flatten().tolist())
        if not ranks <= own:
            raise InputError(
                f"the parameter {plain_name(name)} is spread over ranks {sorted(ranks)}, and this replica has ranks "
                f"{sorted(own)}: shard it over the inner dimensions of the mesh only, as mesh['shard']"
            )
        if any(placement.is_partial() for placement in parameter.placements):  # type: ignore[attr-defined]
            raise InputError(
                f"the parameter {plain_name(name)} is a sum over ranks: expected one sharded or replicated"
            )
        covered = covered or ranks == own
    if not covered:
        raise InputError(
            f"nothing keeps the models of ranks {sorted(own)} together: wrap the model in DDP over them, or shard it "
            "over all inner dimensions of the mesh (fully_shard, parallelize_module)"
        )
    if Flat.of_parameters(model).size == 0:
        raise InputError("this rank holds no part of any parameter: use fewer shards")


def check_method(method: Method, model: nn.Module, transport: str, has_wire: bool) -> None:
    """Check that the replicas may use this method."""
    if isinstance(method, Divisible) and any(map(is_sharded, model.parameters())):
        raise InputError(
            "divisible compresses a gradient as a whole, and a shard has a part of it: take another method"
        )
    if transport != "tcp":
        raise InputError(f"transport {transport} does not work with mesh yet: leave it out")
    if has_wire:
        raise InputError("wire does not work with mesh yet: leave it out")


def find_inner_facts(model: nn.Module, method: Method, topology: str, seed: int, in_ddp: bool) -> Facts:
    """Return what has to be the same on all ranks of all replicas. What differs from shard to shard is not in it."""
    return {
        "method": f"{method.name} {getattr(method, 'config', '')}",
        "topology": topology,
        "seed": str(seed),
        "DDP": "in DDP" if in_ddp else "not in DDP",
        **{f"parameter {plain_name(name)}": _layout(p) for name, p in model.named_parameters() if p.requires_grad},
    }


def _layout(parameter: Any) -> str:
    shape = f"{'x'.join(map(str, parameter.shape)) or 'scalar'} {str(parameter.dtype).removeprefix('torch.')}"
    return f"{shape} {tuple(map(str, parameter.placements))}" if is_sharded(parameter) else shape


def check_fragments(method: Method, model: nn.Module, inner: InnerGroup) -> Facts:
    """Check that fragments of the vector are the same parts of the model on all ranks of the replica."""
    if getattr(getattr(method, "config", None), "fragments", 1) == 1:
        return {}
    sizes = json.dumps([part.end - part.start for part in Flat.of_parameters(model).parts]).encode()
    if len(set(inner.gather_bytes(sizes))) > 1:
        raise InputError(
            "fragments need parts of equal size on all ranks of a replica, and some parameters do not divide by the "
            "number of shards: use fragments=1, or make the first dimension of each parameter divisible"
        )
    return {}


def agree(world: InnerGroup, find: Callable[[], tuple[Any, Facts]]) -> Any:
    """Return the first of what ``find()`` returns, if its facts are the same on all ranks.

    InputError on every rank, with the same line, if they differ or if ``find`` raised one on any of them.
    """
    result: Any = None
    try:
        result, facts = find()
        own = {"facts": join_facts.to_text(facts)}
    except InputError as error:
        own = {"error": str(error)}
    answers = [json.loads(message) for message in world.gather_bytes(json.dumps(own).encode())]
    failed = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if failed:
        rank, line = next(iter(failed.items()))
        raise InputError(line if set(failed.values()) == {line} else f"rank {rank} cannot join: {line}")
    sides = {rank: json.loads(answer["facts"]) for rank, answer in enumerate(answers)}
    line = join_facts.difference(sides)
    if line is not None:
        raise InputError(line.replace("workers differ", "ranks differ", 1))
    return result
