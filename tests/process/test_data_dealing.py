"""How the data of an epoch is dealt: nothing twice, nothing left out, whoever dies or comes back."""

import hypothesis.strategies as st
import pytest
import torch
from data_workers import Job, seen
from hypothesis import given, settings
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler, Subset, WeightedRandomSampler

from gossamer.errors import InputError
from gossamer.process.data.dealing import check_size, common_order, cut, deal, num_batches

SIZES = {"workers": st.integers(1, 9), "batch_size": st.integers(1, 8), "extra": st.integers(0, 60)}


@given(**SIZES)
def test_every_item_goes_to_one_worker_in_the_same_number_of_batches(workers, batch_size, extra):
    items = list(range(workers + extra))
    dealt = [deal(items, position, workers, batch_size) for position in range(workers)]
    assert {len(batches) for batches in dealt} == {num_batches(len(items), workers, batch_size, False)}
    assert all(1 <= len(batch) <= batch_size for batches in dealt for batch in batches)
    shares = [[item for batch in batches for item in batch] for batches in dealt]
    assert sorted(item for share in shares for item in set(share)) == items
    if batch_size > 1:
        assert sum(map(len, shares)) == len(items)
    else:
        # A batch of one cannot be made smaller: a worker may repeat one of its own.
        assert all(len(share) - len(set(share)) <= 1 for share in shares)


@given(**SIZES)
def test_full_batches_only(workers, batch_size, extra):
    items = list(range(workers * batch_size + extra))
    dealt = [deal(items, position, workers, batch_size, drop_last=True) for position in range(workers)]
    taken = [item for batches in dealt for batch in batches for item in batch]
    assert len(taken) == len(set(taken))
    assert all(len(batch) == batch_size for batches in dealt for batch in batches)
    assert len({len(batches) for batches in dealt}) == 1
    assert len(items) - len(taken) < workers * batch_size + workers


@given(size=st.integers(0, 40), batch_size=st.integers(1, 9), drop_last=st.booleans())
def test_a_pool_is_cut_as_torch_does_it(size, batch_size, drop_last):
    expected = list(torch.utils.data.BatchSampler(range(size), batch_size, drop_last))
    assert cut(list(range(size)), batch_size, drop_last) == expected


def test_workers_draw_the_same_order_whatever_their_random_state():
    own = torch.Generator().manual_seed(5)
    samplers = [RandomSampler(range(50)), RandomSampler(range(50), generator=own), WeightedRandomSampler([1.0] * 9, 20)]
    for sampler in samplers:
        torch.manual_seed(1)
        before = torch.get_rng_state(), own.get_state()
        first = common_order(sampler, 7, 0, 3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(own.get_state(), before[1])
        torch.manual_seed(2)
        assert common_order(sampler, 7, 0, 3) == first
        assert common_order(sampler, 7, 0, 4) != first
        assert common_order(sampler, 8, 0, 3) != first
    assert common_order(SequentialSampler(range(5)), 7, 0, 3) == [0, 1, 2, 3, 4]


def test_too_little_data_is_refused():
    with pytest.raises(InputError, match="3 examples cannot be dealt among 4 workers"):
        check_size(3, 4, 1, False)
    with pytest.raises(InputError, match="no full batch of 8 for each of 4 workers"):
        check_size(31, 4, 8, True)
    check_size(32, 4, 8, True)


@settings(max_examples=40)
@given(data=st.data(), workers=st.integers(1, 5), size=st.integers(5, 40), lockstep=st.booleans())
def test_workers_come_and_go(data, workers, size, lockstep):
    job = Job(workers, lockstep=lockstep)
    alive = dict(enumerate(job.workers()))
    loaders = {rank: worker.shard(list(range(size)), 3, True, False) for rank, worker in alive.items()}
    passes: dict[int, dict[int, set[int]]] = {}
    members: dict[int, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        rank = data.draw(st.sampled_from(range(workers)))
        happens = data.draw(st.sampled_from(["pass", "pass", "die", "return"]))
        if happens == "die" and rank in alive and len(alive) > 1:
            del alive[rank]
            job.lost.add(rank)
        elif happens == "return" and rank not in alive:
            job.lost.discard(rank)
            alive[rank] = job.worker(rank, came_back=True)
            loaders[rank] = alive[rank].shard(list(range(size)), 3, True, False)
        elif happens == "pass" and rank in alive:
            share = set(seen(loaders[rank]))
            epoch = loaders[rank].resume_at[0] - 1
            members[epoch] = set(alive[rank]._epochs.members(epoch))
            if rank in members[epoch]:
                # A worker that came back begins its share of the epoch again.
                assert passes.setdefault(epoch, {}).setdefault(rank, share) == share
            else:
                assert lockstep
    for epoch, shares in passes.items():
        items = [item for share in shares.values() for item in share]
        assert len(items) == len(set(items))
        if set(shares) == members[epoch]:
            assert set(items) == set(range(size))


def test_after_a_death_the_others_get_everything_and_after_a_return_their_share():
    job = Job(3)
    first, second, third = job.workers()
    loaders = [worker.shard(list(range(10)), 2, True, False) for worker in (first, second, third)]
    assert sorted(item for loader in loaders for item in seen(loader)) == list(range(10))
    job.lost.add(2)
    assert sorted(seen(loaders[0]) + seen(loaders[1])) == list(range(10))
    (dealt,) = first._runtime.state.events
    assert (dealt.kind, dealt.text) == ("dealt", "the data of epoch 1 is dealt among workers 0, 1")
    job.lost.clear()
    loaders[2] = job.worker(2, came_back=True).shard(list(range(10)), 2, True, False)
    assert sorted(item for loader in loaders for item in seen(loader)) == list(range(10))


def test_who_begins_an_epoch_decides_for_all():
    job = Job(3)
    loaders = [worker.shard(list(range(12)), 2, True, False) for worker in job.workers()]
    first = seen(loaders[0])
    job.lost.add(2)
    # The second worker begins the same epoch later, and knows that the third has died.
    second = seen(loaders[1])
    assert len(first) == len(second) == 4
    assert not set(first) & set(second)


def test_a_worker_in_lockstep_comes_back_to_the_batch_of_the_others():
    loader = Job(2, lockstep=True).worker(1, came_back=True, at=(2, 3)).shard(list(range(24)), 3, True, False)
    assert loader.resume_at == (2, 3)
    assert len(list(loader)) == 1
    assert len(list(loader)) == 4


class Foreign(Sampler):
    """A sampler that draws from elsewhere."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


@pytest.mark.parametrize("use", ["shard", "batches"])
def test_workers_with_other_data_or_another_order_are_told(use):
    def train(worker, dataset, sampler=None):
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        batches = worker.shard(loader, None, True, False) if use == "shard" else worker.batches(loader, 9, None)
        for _ in zip(range(3), batches, strict=False):
            pass

    job = Job(2)
    train(job.worker(0), list(range(8)))
    with pytest.raises(InputError, match=r"7 examples here, 8 elsewhere.*give each the whole data set"):
        train(job.worker(1), list(range(7)))
    job = Job(2)
    train(job.worker(0), list(range(4)), Foreign([0, 1, 2, 3]))
    with pytest.raises(InputError, match=r"another order or subset.* draws from torch's generator"):
        train(job.worker(1), list(range(4)), Foreign([0, 2, 1, 3]))
    job = Job(2)
    train(job.worker(0), Subset(range(8), [0, 2, 4, 6]))
    with pytest.raises(InputError, match="another order or subset"):
        train(job.worker(1), Subset(range(8), [1, 3, 5, 7]))


@pytest.mark.parametrize("bad", ["x", "9" * 5000, "[" * 100_000], ids=["text", "digits", "nested"])
def test_what_no_worker_has_published_is_refused_and_the_data_is_dealt_as_ever(bad):
    job = Job(2)
    job.entries |= dict.fromkeys(["epoch", "epoch/0", "epoch/1", "order/0", "batches", f"numbers/{2**31}"], bad)
    loader = DataLoader(range(12), batch_size=2)
    shares = [worker.shard(loader, None, True, False) for worker in job.workers()]
    for _ in range(2):
        assert sorted(seen(shares[0]) + seen(shares[1])) == list(range(12))
    assert {line.split()[6].rstrip(":") for line in job.refused} == {"epoch", "epoch/0", "epoch/1", "order/0"}
    pools = [worker.batches(loader, 6, None) for worker in job.workers()]
    assert sorted(seen(pools[0]) + seen(pools[1])) == list(range(12))
    assert any("at batches" in line for line in job.refused)
    assert any(f"at numbers/{2**31}" in line for line in job.refused)
    job.entries["batches"] = bad
    late = job.worker(0, came_back=True).batches(loader, 6, None)
    assert len(seen(late)) == 12
