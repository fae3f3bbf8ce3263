"""``swarm.batches``: mini-batches shared out among workers until all have made so many steps together."""

import threading
import time

import pytest
import torch

import gossamer
from gossamer.errors import InputError
from gossamer.process.runtime.shared_batches import MAX_RESERVED


@pytest.fixture
def swarm():
    model = torch.nn.Linear(2, 1)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="gossip") as joined:
        yield joined


def test_a_lone_worker_gets_all_of_them_and_begins_its_loader_again(swarm):
    assert list(swarm.batches([1, 2, 3], total_steps=7)) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_handed_out_twice_or_lost(swarm):
    tickets = swarm._tickets(total=1000)
    mine, others = [], []
    for _ in range(40):
        mine.append(next(tickets))
        others.append(swarm._runtime.store.add("batches", 1))  # another worker, as fast as we are
    assert mine == sorted(mine)
    assert not set(mine) & set(others)
    # Up to the last of ours only what we have asked for ahead is missing.
    missing = set(range(1, max(mine + others) + 1)) - set(mine) - set(others)
    assert len(missing) <= 2 * MAX_RESERVED
    tickets.close()


def test_the_next_is_asked_for_while_the_last_is_worked_on(swarm, monkeypatch):
    ask, asked = swarm._runtime.store.add, threading.Semaphore(0)

    def heard(key, amount):
        asked.release()
        return ask(key, amount)

    monkeypatch.setattr(swarm._runtime.store, "add", heard)
    batches = swarm.batches(range(5), total_steps=5)
    assert next(batches) == 0
    for _ in range(2):
        assert asked.acquire(timeout=10), "nobody asks before this step is over"
    assert list(batches) == [1, 2, 3, 4]


def test_answers_that_come_late_are_asked_for_together(swarm, monkeypatch):
    ask, amounts = swarm._runtime.store.add, []

    def slowly(key, amount):
        amounts.append(amount)
        time.sleep(0.02)
        return ask(key, amount)

    monkeypatch.setattr(swarm._runtime.store, "add", slowly)
    swarm._runtime.worker.step_s = 0.005
    assert len(list(swarm.batches(range(60), total_steps=60))) == 60
    assert amounts[0] == 1
    # At least twice as many as steps fit into an answer's time.
    assert 9 <= max(amounts) <= 1 + MAX_RESERVED
    # And ever fewer towards the end: at most one and half of what is left.
    assert all(amount <= 1 + max(0, 60 - sum(amounts[:number])) / 2 for number, amount in enumerate(amounts))


def test_a_loader_without_batches_is_said(swarm):
    with pytest.raises(InputError, match="begun again"):
        list(swarm.batches([], total_steps=3))
