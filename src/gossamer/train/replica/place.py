"""Where a process of a replica is that this command started: which rank it has, and where the ranks meet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaPlace:
    shard: int
    """The rank in its replica."""
    size: int
    rendezvous: str
    """Where its ranks meet: a file that is not there yet, or HOST:PORT where its first rank is. Each start of a replica
    has a place of its own."""

    def environment(self, replica: int) -> dict[str, str]:
        """Return what torchrun would say to this rank of replica number ``replica``."""
        ranks = {"RANK": self.shard, "LOCAL_RANK": replica * self.size + self.shard, "WORLD_SIZE": self.size}
        return {**{name: str(value) for name, value in ranks.items()}, "REPLICA": str(replica)}


def shard_prefix(run: str, shard: int) -> str:
    """Return the name of the run of rank ``shard`` of all replicas."""
    return f"{run}/shard{shard}"
