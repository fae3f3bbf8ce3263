"""The protocol of replicas that do not wait, in any order of events: an exchange is merged whole or not at all."""

import pytest
import torch
from replica_world import World

from gossamer.methods import METHODS
from gossamer.topology import build

STEPS = 20


def world(name, seed, replicas=4, shards=2, losses=0.0, **settings):
    method = METHODS[name](METHODS[name].Config(**settings), build("ring", replicas))
    return World(method, shards, seed, steps=STEPS, losses=losses)


@pytest.mark.parametrize("name", ["gossip", "a2cid2"])
@pytest.mark.parametrize("losses", [0.0, 0.3])
def test_exchanges_keep_the_mean_of_all_replicas_shard_for_shard_in_any_order(name, losses):
    exchanges = 0
    for seed in range(25):
        run = world(name, seed, shards=1 + seed % 3, losses=losses)
        start = [sum(ranks[shard].worker.x.clone() for ranks in run.ranks) for shard in range(1 + seed % 3)]
        run.run()
        for shard, before in enumerate(start):
            ranks = [ranks[shard] for ranks in run.ranks]
            conserved = sum(run.method.conserved(rank.worker) for rank in ranks)
            assert torch.allclose(conserved, before + sum(rank.added for rank in ranks), rtol=1e-12)
        for first, *others in run.ranks:
            assert all(other.merged == first.merged for other in others)
        for number, ends in run.met.items():
            assert (number in ends[0].merged) == (number in ends[1].merged)
        exchanges += sum(len(ranks[0].merged) for ranks in run.ranks)
    assert exchanges > 200


@pytest.mark.parametrize("period", [0, 1, 3])
def test_an_average_in_the_background_keeps_the_mean_of_all_replicas_shard_for_shard_in_any_order(period):
    means = 0
    for seed in range(25):
        shards = 1 + seed % 3
        run = world("lasgd", seed, shards=shards, period=period)
        start = [sum(ranks[shard].worker.x.clone() for ranks in run.ranks) for shard in range(shards)]
        run.run()
        for shard, before in enumerate(start):
            ranks = [ranks[shard] for ranks in run.ranks]
            conserved = sum(run.method.conserved(rank.worker) for rank in ranks)
            assert torch.allclose(conserved, before + sum(rank.added for rank in ranks), rtol=1e-12)
        merges = {rank.worker.scalars["merges"] for ranks in run.ranks for rank in ranks}
        assert merges == {run.num_means / shards}
        means += run.num_means / shards
    assert means > 30


@pytest.mark.parametrize("name", ["gossip", "a2cid2", "noloco"])
def test_no_replica_is_torn_by_one_that_dies_and_comes_back(name):
    taken = 0
    for seed in range(40):
        run = world(name, seed, losses=0.2)
        run.run(deaths=(seed % 4, (seed + 1) % 4))
        for ranks in (ranks for ranks in run.ranks if ranks[0].replica not in run.dead):
            assert all(rank.merged == ranks[0].merged for rank in ranks)
            assert [rank.worker.step for rank in ranks] == [STEPS] * len(ranks)
            taken += ranks[0].incarnation
    assert taken > 30


@pytest.mark.parametrize("losses", [0.0, 0.2])
def test_an_average_that_is_lost_on_one_shard_counts_on_none_and_those_left_average_on(losses):
    means = 0
    for seed in range(40):
        dead = seed % 4
        run = world("lasgd", seed, shards=2 + seed % 2, losses=losses)
        run.run(deaths=(dead,), comes_back=False)
        left = [ranks for ranks in run.ranks if ranks[0].replica not in run.dead]
        for ranks in left:
            assert [rank.worker.step for rank in ranks] == [STEPS] * len(ranks)
            assert len({rank.worker.scalars.get("merges", 0) for rank in ranks}) == 1
            # Whoever has averaged since has done so without the dead one.
            means += sum(dead not in rank.members for rank in ranks)
    assert means > 100
