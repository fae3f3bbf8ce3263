"""Where this process is: in which replica, and which rank of it. As a device mesh says, or as the user does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gossamer.errors import InputError
from gossamer.process.net.tls import TlsFiles
from gossamer.process.store.home_store import Host
from gossamer.process.store.rank_info import RankInfo, find_rank_info

EXAMPLE = 'init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replica", "shard"))'


@dataclass(frozen=True)
class Replica:
    """One replica of a run in which every replica is a job of its own, for example a ``torchrun``.

    Such a replica can be restarted without the others. ``gossamer.join(…, mesh=mesh, between=Replica(…))``, where the
    mesh has the ranks of this replica only.
    """

    index: int
    """The number of this replica, from 0."""
    count: int
    """How many replicas there are."""
    address: str
    """HOST:PORT, the same in all replicas: a machine of replica 0, and a port that is free there."""


@dataclass(frozen=True)
class Place:
    """The replica and the rank in it of this process."""

    replica: int
    replicas: int
    ranks: tuple[int, ...]
    """The ranks of this replica in the user's process group, in the order of their shards."""
    shard: int
    between: Replica | None
    """Given if this replica is a job of its own."""

    def rank_info(self, tls: TlsFiles | None = None) -> RankInfo:
        """Return this rank's info for one more join, in the run of its shard: its rank there is that of its replica.

        All ranks of all replicas must call this equally often.
        """
        info = find_rank_info(tls)
        run, prefix = f"{info.run}/shard{self.shard}", f"{info.prefix}shard{self.shard}/"
        if self.between is None:
            return replace(info, rank=self.replica, workers=self.replicas, run=run, prefix=prefix)
        # A replica that is restarted must find the run: no restart count of its own torchrun.
        number = info.prefix.rstrip("/").rpartition("/")[2]
        host, port = parse_address(self.between.address)
        return replace(
            info,
            rank=self.replica,
            workers=self.replicas,
            host=host,
            port=port,
            run="replicas",
            prefix=f"gossamer/replicas/{number}/shard{self.shard}/",
            # All shards share the store of the first one.
            store_host=Host.RANK_0 if self.shard == 0 else Host.LAUNCHER,
        )


def find_place(mesh: Any, between: Any) -> Place:
    """Return the place of this process. InputError if the mesh cannot be used, the same line on every rank."""
    if mesh is None:
        raise InputError(f"between is given without a mesh: give mesh={EXAMPLE}, and between its name of the replicas")
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh is a {type(mesh).__name__}: expected a DeviceMesh, such as {EXAMPLE}")
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("mesh needs a process group: call init_device_mesh or init_process_group before join")
    names = mesh.mesh_dim_names
    world = dist.get_world_size()
    if not names:
        raise InputError(f"the dimensions of mesh have no names: create it with mesh_dim_names, as {EXAMPLE}")
    if mesh.size() != world:
        raise InputError(
            f"mesh has {mesh.size()} ranks and the process group {world}: give join the mesh of all ranks, not a slice "
            "of it such as mesh['shard']"
        )
    if isinstance(between, Replica):
        return _place_of_job(mesh, between)
    if not isinstance(between, str) or not between:
        raise InputError(
            f"mesh needs between, the name of its dimension of replicas: expected one of {', '.join(names)}, or a "
            "gossamer.Replica if each replica is a job of its own"
        )
    if between not in names:
        raise InputError(f"between is {between!r}: expected one of the dimensions of mesh, {', '.join(names)}")
    if len(names) < 2:
        raise InputError(
            f"mesh has the dimension {between} only, so a replica has one rank: leave mesh out, or add a dimension for "
            f"the ranks inside, as {EXAMPLE}"
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "all ranks are in the mesh"
    at = names.index(between)
    inner = tuple(mesh.mesh.select(at, coordinate[at]).flatten().tolist())
    return Place(coordinate[at], mesh.size(at), inner, inner.index(dist.get_rank()), None)


def _place_of_job(mesh: DeviceMesh, between: Replica) -> Place:
    if not 0 <= between.index < between.count:
        raise InputError(
            f"between has index {between.index} of {between.count} replicas: expected 0 to {between.count - 1}"
        )
    parse_address(between.address)
    inner = tuple(mesh.mesh.flatten().tolist())
    return Place(between.index, between.count, inner, inner.index(dist.get_rank()), between)


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InputError(f"between has the address {address!r}: expected HOST:PORT, such as host0:29400")
    return host.strip("[]"), int(port)
