"""A thread that gives way to the training is called back while that waits for it."""

import contextlib
import os
import sys
import threading

import pytest

from gossamer.process import thread_priority
from gossamer.process.thread_priority import NICENESS_STEP, PriorityBoost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own here")


def niceness(thread):
    return os.getpriority(os.PRIO_PROCESS, thread)


@pytest.fixture
def background():
    """A modest thread: what it is, and its number."""
    modest, ended, begun = PriorityBoost(), threading.Event(), threading.Event()
    number = []

    def run():
        modest.enter()
        number.append(threading.get_native_id())
        begun.set()
        ended.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30)
    yield modest, number[0]
    ended.set()
    thread.join(30)


def test_it_gives_way_except_while_it_is_waited_for(background):
    if not thread_priority._can_raise_priority():
        pytest.skip("needs the right to raise a priority (CAP_SYS_NICE)")
    modest, thread = background
    usual = niceness(os.getpid())
    assert niceness(thread) == min(19, usual + NICENESS_STEP)
    with modest.boosted():
        assert niceness(thread) == usual
    assert niceness(thread) == min(19, usual + NICENESS_STEP)


def test_where_it_could_not_be_called_back_it_does_not_give_way(monkeypatch):
    usual = niceness(os.getpid())
    set_priority = os.setpriority

    def no_way_back(which, who, to):
        if to <= usual:
            raise PermissionError
        set_priority(which, who, to)

    monkeypatch.setattr(os, "setpriority", no_way_back)
    thread_priority._can_raise_priority.cache_clear()
    found = []

    def run():
        modest = PriorityBoost()
        modest.enter()
        with modest.boosted():
            found.append(niceness(threading.get_native_id()))
        found.append(niceness(threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    thread_priority._can_raise_priority.cache_clear()
    assert found == [usual, usual]


def test_the_training_calls_it_back_only_where_it_has_to_wait():
    from gossamer.process.runtime.driver import Driver

    driver = Driver.__new__(Driver)
    driver.lock = threading.RLock()
    asked = []

    class Told:
        @contextlib.contextmanager
        def boosted(self):
            asked.append(True)
            over.set()
            yield

    driver._background_priority = Told()
    held, over = threading.Event(), threading.Event()
    driver._acquire_lock()
    driver.lock.release()
    assert not asked

    def hold():
        with driver.lock:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    driver._acquire_lock()
    driver.lock.release()
    thread.join(30)
    assert asked == [True]
