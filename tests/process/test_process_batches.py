"""``swarm.batches``: mini-batches shared out among workers until all have made so many steps together."""

import threading
import time

import pytest
import torch

import gossamer
from gossamer.errors import InputError
from gossamer.process.data.shared_batches import MAX_RESERVED, batch_numbers


@pytest.fixture
def swarm():
    model = torch.nn.Linear(2, 1)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="gossip") as joined:
        yield joined


def test_a_single_worker_gets_all_batches_and_restarts_its_loader(swarm):
    assert list(swarm.batches([1, 2, 3], total_steps=7)) == [1, 2, 3, 1, 2, 3, 1]


def test_no_batch_is_handed_out_twice_or_lost(swarm):
    numbers = batch_numbers(swarm._runtime, total=1000)
    mine, others = [], []
    for _ in range(40):
        mine.append(next(numbers))
        others.append(swarm._runtime.store.add("batches", 1))  # another worker, as fast as we are
    assert mine == sorted(mine)
    assert not set(mine) & set(others)
    # Only numbers that we have reserved ahead are missing.
    missing = set(range(1, max(mine + others) + 1)) - set(mine) - set(others)
    assert len(missing) <= 2 * MAX_RESERVED
    numbers.close()


def test_the_next_numbers_are_reserved_during_the_step(swarm, monkeypatch):
    add, calls = swarm._runtime.store.add, threading.Semaphore(0)

    def counted(key, amount):
        calls.release()
        return add(key, amount)

    monkeypatch.setattr(swarm._runtime.store, "add", counted)
    batches = swarm.batches(range(5), total_steps=5)
    assert next(batches) == 0
    for _ in range(2):
        assert calls.acquire(timeout=60), "nothing is reserved before this step is over"
    assert list(batches) == [1, 2, 3, 4]


def test_slow_answers_reserve_several_numbers(swarm, monkeypatch):
    add, amounts = swarm._runtime.store.add, []

    def slowly(key, amount):
        amounts.append(amount)
        time.sleep(0.02)
        return add(key, amount)

    monkeypatch.setattr(swarm._runtime.store, "add", slowly)
    swarm._runtime.worker.step_s = 0.005
    assert len(list(swarm.batches(range(60), total_steps=60))) == 60
    assert amounts[0] == 1
    # At least twice the steps that fit into an answer's time.
    assert 9 <= max(amounts) <= 1 + MAX_RESERVED
    # And fewer towards the end: at most one and half of what is left.
    assert all(amount <= 1 + max(0, 60 - sum(amounts[:number])) / 2 for number, amount in enumerate(amounts))


def test_an_empty_loader_is_an_error(swarm):
    with pytest.raises(InputError, match="iterated again"):
        list(swarm.batches([], total_steps=3))
