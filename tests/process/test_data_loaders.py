"""``swarm.shard``, ``swarm.epochs``, ``swarm.batches`` and ``swarm.schedule`` with all kinds of loaders."""

import math
import threading
import time

import pytest
import torch
from data_workers import Job, seen
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

import gossamer
from gossamer.errors import InputError

NUMBERS = list(range(23))


def shard(worker, data, batch_size=None, shuffle=True, drop_last=False):
    return worker.shard(data, batch_size, shuffle, drop_last)


def doubled(batch):
    return torch.tensor(batch) * 2


class Stream(IterableDataset):
    """Numbers, dealt among the processes of a loader as torch's documentation shows it."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(0 if info is None else info.id, 24, 1 if info is None else info.num_workers)


class Table(Dataset):
    """A data set as the library ``datasets`` has it: with a ``shard`` of its own."""

    def __len__(self):
        return 10

    def __getitem__(self, at):
        return {"x": at}

    def shard(self, num_shards, index):
        raise AssertionError("it would be dealt twice")


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(NUMBERS, batch_size=4, shuffle=True),
        DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=3),
        DataLoader(NUMBERS, batch_size=4, shuffle=True, generator=torch.Generator()),
        DataLoader(NUMBERS, batch_size=1),
        DataLoader(NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 4, False)),
        DataLoader(NUMBERS, batch_size=None, shuffle=True),
    ],
    ids=["plain", "processes", "generator", "ones", "batch_sampler", "unbatched"],
)
def test_shares_are_disjoint_and_complete_in_every_epoch(loader):
    shares = [shard(worker, loader) for worker in Job(2).workers()]
    for _ in range(2):
        first, second = (seen(share) for share in shares)
        assert not set(first) & set(second)
        assert set(first) | set(second) == set(NUMBERS)
    assert len(shares[0]) == len(shares[1]) == len(list(shares[0])) == len(list(shares[1]))
    assert isinstance(shares[0], DataLoader)


def test_the_order_changes_from_epoch_to_epoch_and_follows_the_seed():
    def orders(seed):
        loader = shard(Job(2, seed=seed).worker(0), NUMBERS, 4)
        return seen(loader), seen(loader)

    first, second = orders(1)
    assert first != second
    assert orders(1) == (first, second)
    assert orders(2) != (first, second)
    unshuffled = shard(Job(2).worker(1), NUMBERS, 4, shuffle=False)
    assert seen(unshuffled) == seen(unshuffled) == NUMBERS[1::2]


def test_a_share_has_the_settings_of_the_loader():
    loader = DataLoader(NUMBERS, batch_size=4, collate_fn=doubled, drop_last=True, num_workers=0, timeout=0)
    share = shard(Job(2).worker(0), loader)
    assert len(share) == 2
    assert [len(batch) for batch in share] == [4, 4]
    assert seen(share) == [2 * number for number in NUMBERS[0:16:2]]
    table = shard(Job(2).worker(1), Table(), 2)
    assert sorted(x for batch in table for x in batch["x"].tolist()) != list(range(10))
    assert sum(len(batch["x"]) for batch in table) == 5


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_is_dealt_by_striding_and_dealt_again(processes):
    job = Job(2)
    loader = DataLoader(Stream(), batch_size=3, num_workers=processes, persistent_workers=processes > 0)
    first, second = (shard(worker, loader) for worker in job.workers())
    assert sorted(seen(first) + seen(second)) == list(range(24))
    job.lost.add(1)
    assert sorted(seen(first)) == list(range(24))


def test_the_same_loader_is_dealt_once():
    worker, loader = Job(2).worker(0), DataLoader(NUMBERS, batch_size=4, shuffle=True)
    share = shard(worker, loader)
    assert shard(worker, loader) is share
    assert shard(worker, share) is share


class OwnWay(DataLoader):
    def __iter__(self):
        return iter(())


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(int, 1)


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (
            DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)),
            None,
            "DistributedSampler deals the data already",
        ),
        (OwnWay(NUMBERS), None, "OwnWay iterates in its own way"),
        (DataLoader(NUMBERS, sampler=Endless()), None, "Endless has no length"),
        (DataLoader(NUMBERS), 4, "batch_size is for a data set"),
        (NUMBERS, None, "give swarm.shard a batch_size"),
        ([1], 1, "1 examples cannot be dealt among 2 workers"),
        (iter(NUMBERS), 4, "deals a DataLoader or a data set, not a list_iterator"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_one_line(data, batch_size, message):
    with pytest.raises(InputError, match=message) as refused:
        shard(Job(2).worker(0), data, batch_size)
    assert "\n" not in str(refused.value)


# Epochs and progress


def test_epochs_tell_progress_and_are_not_moved_by_peeks_and_other_loaders():
    worker = Job(2).worker(1)
    train, test = shard(worker, NUMBERS, 4), shard(worker, list(range(6)), 2)
    with pytest.raises(InputError, match=r"swarm\.epochs\(E\).*swarm\.batches\(loader, total_steps=N\)"):
        _ = worker.progress
    next(iter(train))
    epochs, progress, orders = [], [], []
    for epoch in worker.epochs(2):
        epochs.append(epoch)
        orders.append([])
        for batch in train:
            progress.append(worker.progress)
            orders[-1] += batch.tolist()
        seen(test)
        seen(train)
        progress.append(worker.progress)
    assert epochs == [0, 1]
    assert progress == pytest.approx([1 / 6, 2 / 6, 3 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0, 1.0])
    assert worker.progress == 1.0
    other = Job(2).worker(0)
    again = shard(other, NUMBERS, 4)
    for epoch in other.epochs(2):
        assert not set(seen(again)) & set(orders[epoch])


def test_a_worker_that_comes_back_goes_on_at_the_epoch_of_the_others():
    job = Job(2)
    first = job.worker(0)
    loader = shard(first, NUMBERS, 4)
    job.lost.add(1)
    epochs = first.epochs(4)
    for _ in range(2):
        next(epochs)
        seen(loader)
    job.lost.clear()
    second = job.worker(1, came_back=True)
    other = shard(second, NUMBERS, 4)
    shares = {epoch: set(seen(other)) for epoch in second.epochs(4)}
    assert sorted(shares) == [2, 3]
    for epoch in epochs:
        assert shares[epoch] ^ set(seen(loader)) == set(NUMBERS)
    assert [*job.worker(1, came_back=True).epochs(2)] == []


def run(worker, loader, epochs, stop_at=None):
    """The batches of a run by epoch, and the state of its data where it was stopped."""
    taken = []
    for epoch in worker.epochs(epochs):
        for batch in loader:
            taken.append((epoch, batch.tolist()))
            if len(taken) == stop_at:
                return taken, worker.state_dict()
        if stop_at == 3 and len(taken) == 3:
            return taken, worker.state_dict()
    return taken, worker.state_dict()


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 6])
def test_a_run_resumes_where_it_stopped(stop_at):
    whole, _ = run(*(lambda worker: (worker, shard(worker, NUMBERS, 4)))(Job(2).worker(0)), epochs=3)
    before = Job(2).worker(0)
    first, state = run(before, shard(before, NUMBERS, 4), 3, stop_at)
    worker = Job(2).worker(0)
    worker.load_state_dict(torch.load(*saved(state), weights_only=True))
    second, _ = run(worker, shard(worker, NUMBERS, 4), 3)
    assert len(whole) == 9
    assert first + second == whole


def saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return (file,)


def test_a_plain_loop_resumes_too():
    worker = Job(2).worker(0)
    loader = shard(worker, NUMBERS, 4)
    orders = [seen(loader) for _ in range(3)]
    other = Job(2).worker(0)
    again = shard(other, NUMBERS, 4)
    seen(again)
    state = other.state_dict()
    resumed = Job(2).worker(0)
    resumed.load_state_dict(state)
    assert [seen(shard(resumed, NUMBERS, 4)) for _ in range(2)] == orders[1:]


# The common pool


@pytest.mark.parametrize("processes", [0, 1])
def test_workers_of_a_pool_take_different_batches_of_every_epoch(processes):
    job = Job(2)
    loader = DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=processes)
    fast, slow = (worker.batches(loader, None, 2) for worker in job.workers())
    taken = [next(fast), next(slow), next(fast), next(fast)]
    taken += [*fast, *slow]
    assert len(taken) == 12
    assert sorted(number for batch in taken for number in batch.tolist()) == sorted(NUMBERS * 2)


def test_the_progress_of_a_pool_is_that_of_all():
    job = Job(2)
    fast, slow = job.workers()
    batches = [worker.batches(DataLoader(NUMBERS, batch_size=4), 10, None) for worker in (fast, slow)]
    next(batches[1])
    # The slow one reserves its second batch while it works on the first.
    until = time.monotonic() + 60
    while job.entries["batches"] != "2" and time.monotonic() < until:
        time.sleep(0.001)
    reached = []
    for _ in batches[0]:
        reached.append(fast.progress)
    assert reached == sorted(reached)
    assert fast.progress == 1.0
    assert len(list(batches[1])) == 1
    assert slow.progress == 1.0


def test_loaders_that_are_dealt_already_are_taken_as_they_are():
    sampler = DistributedSampler(NUMBERS, 2, 0, shuffle=False)
    loader = DataLoader(NUMBERS, batch_size=6, sampler=sampler)
    assert seen(Job(2).worker(0).batches(loader, 2, None)) == NUMBERS[0::2]
    worker = Job(2).worker(0)
    share = shard(worker, NUMBERS, 4)
    assert len(set(seen(worker.batches(share, 3, None)))) == 12
    assert [event.kind for event in worker._runtime.state.events] == []
    worker = Job(2).worker(0)
    assert seen(worker.batches(DataLoader(Stream(), batch_size=2), 2, None)) == [0, 1, 2, 3]
    (event,) = worker._runtime.state.events
    assert event.kind == "not-dealt"


@pytest.mark.parametrize(
    ("loader", "total_steps", "epochs", "message"),
    [
        (DataLoader(NUMBERS), None, None, "either total_steps"),
        (DataLoader(NUMBERS), 5, 5, "either total_steps"),
        (iter(NUMBERS), None, 2, "give total_steps"),
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)), None, 2, "give total_steps"),
        (DataLoader(NUMBERS, batch_size=50, drop_last=True), 5, None, "gives no batches"),
    ],
)
def test_a_pool_without_an_end_or_without_batches_is_refused(loader, total_steps, epochs, message):
    with pytest.raises(InputError, match=message):
        Job(2).worker(0).batches(loader, total_steps, epochs)


def test_a_second_loop_over_work_that_is_done_is_refused():
    worker = Job(1).worker(0)
    loader = DataLoader(NUMBERS, batch_size=4)
    assert len(list(worker.batches(loader, None, 1))) == 6
    with pytest.raises(InputError, match="make one loop of all epochs"):
        worker.batches(loader, None, 1)
    assert list(worker.epochs(2)) == [0, 1]
    with pytest.raises(InputError, match="the 2 epochs of this run are done"):
        worker.epochs(2)
    assert list(worker.epochs(3)) == [2]


# Schedules


def factors(worker, schedule, steps):
    optimizer, found = schedule.optimizer, [schedule.get_last_lr()[0]]
    for _ in steps:
        optimizer.step()
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    return [*found, optimizer.param_groups[0]["lr"]]


def test_a_cosine_follows_progress():
    worker = Job(1).worker(0)
    loader = shard(worker, list(range(10)), 1)
    schedule = worker.schedule("cosine", 0.0, 0.1)
    found = factors(worker, schedule, (batch for _ in worker.epochs(2) for batch in loader))
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(21)]
    assert found == pytest.approx([*expected, expected[-1]])


def test_a_warm_up_rises_and_a_function_is_followed():
    worker = Job(1).worker(0)
    schedule = worker.schedule(lambda progress: 1 - progress / 2, 0.5, 0.0)
    found = factors(worker, schedule, worker.batches([0], 4, None))
    assert found == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.5])


def test_a_schedule_is_at_its_end_on_a_worker_that_did_not_take_the_last_batch():
    job = Job(2)
    fast, slow = job.workers()
    schedule = slow.schedule("linear", 0.0, 0.25)
    batches = slow.batches([0], 100, None)
    next(batches)
    list(fast.batches([0], 100, None))
    found = factors(slow, schedule, batches)
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0.25


def test_a_schedule_is_saved_and_needs_to_know_the_work():
    worker = Job(1).worker(0)
    schedule = worker.schedule("cosine", 0.0, 0.0)
    schedule.optimizer.step()
    with pytest.raises(InputError, match="progress is not known"):
        schedule.step()
    list(worker.batches([0], 3, None))
    state = torch.load(*saved(schedule.state_dict()), weights_only=True)
    other = Job(1).worker(0).schedule("cosine", 0.0, 0.0)
    other.load_state_dict(state)
    assert other.get_last_lr() == [0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cosin", 0.0, 0.0), "unknown schedule 'cosin': .* Did you mean 'cosine'"),
        (("cosine", 100, 0.0), "warmup is 100: expected a share of the whole training"),
        (("cosine", 0.0, 2.0), "min_factor is 2.0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Job(1).worker(0).schedule(*arguments)


# A real worker, alone


def test_the_parts_of_a_swarm_fit_together():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer, method="allreduce") as swarm:
        loader = swarm.shard(torch.arange(12.0).reshape(12, 1), batch_size=5)
        schedule = swarm.schedule(warmup=0.1)
        taken = []
        for epoch in swarm.epochs(2):
            for x in loader:
                model(x).sum().backward()
                optimizer.step()
                schedule.step()
                taken += [(epoch, number) for number in x.flatten().tolist()]
        assert sorted(taken) == [(epoch, float(number)) for epoch in range(2) for number in range(12)]
        assert swarm.progress == 1.0
        assert schedule.get_last_lr() == [0.0]
        assert swarm.state_dict()["epochs"] == {"epoch": 2, "loaders": [[2, 0]]}
        batches = swarm.batches(DataLoader(NUMBERS, batch_size=8), total_steps=9)
        next(batches)
        assert "gossamer-batches_0" in [thread.name for thread in threading.enumerate()]
        batches.close()
        assert "gossamer-batches_0" not in [thread.name for thread in threading.enumerate()]
