"""How often recordings are written."""

from gossamer.runs import run_folder
from gossamer.runs.run_folder import WriteThrottle


class Clock:
    """Stands in for ``time``: what passes while a write waits, and what it computes."""

    def __init__(self):
        self.now = self.busy = 0.0

    def monotonic(self):
        return self.now

    def thread_time(self):
        return self.busy


def next_write(monkeypatch, *, waits_s, computes_s):
    """Return how long after a write the next one is due."""
    clock = Clock()
    monkeypatch.setattr(run_folder, "time", clock)
    throttle = WriteThrottle()
    with throttle:
        clock.now += waits_s + computes_s
        clock.busy += computes_s
    ended = clock.now
    while not throttle.due:
        clock.now += 0.5
    return clock.now - ended


def test_a_write_that_waited_for_a_busy_machine_does_not_put_off_the_next(monkeypatch):
    assert next_write(monkeypatch, waits_s=5.0, computes_s=0.001) == 1.0


def test_a_write_that_takes_much_cpu_does(monkeypatch):
    assert next_write(monkeypatch, waits_s=0.0, computes_s=0.1) == 20.0
