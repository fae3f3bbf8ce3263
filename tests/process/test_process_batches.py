"""``swarm.batches``: mini-batches shared out among workers until all have made so many steps together."""

import threading

import pytest
import torch

import gossamer
from gossamer.errors import InputError


@pytest.fixture
def swarm():
    model = torch.nn.Linear(2, 1)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="gossip") as joined:
        yield joined


def test_a_lone_worker_gets_all_of_them_and_begins_its_loader_again(swarm):
    assert list(swarm.batches([1, 2, 3], total_steps=7)) == [1, 2, 3, 1, 2, 3, 1]


def test_batches_that_others_have_taken_are_not_taken_again(swarm):
    mine = []
    for batch in swarm.batches(range(100), total_steps=10):
        mine.append(batch)
        swarm.point.add("batches", 1)  # another worker, as fast as we are
    assert len(mine) in (5, 6)


def test_the_next_is_asked_for_while_the_last_is_worked_on(swarm, monkeypatch):
    ask, asked = swarm.point.add, threading.Semaphore(0)

    def heard(key, amount):
        asked.release()
        return ask(key, amount)

    monkeypatch.setattr(swarm.point, "add", heard)
    for number, _ in enumerate(swarm.batches(range(5), total_steps=5)):
        if number == 0:
            assert asked.acquire(timeout=10)
        assert asked.acquire(timeout=10), "nobody asks before this step is over"


def test_a_loader_without_batches_is_said(swarm):
    with pytest.raises(InputError, match="begun again"):
        list(swarm.batches([], total_steps=3))
