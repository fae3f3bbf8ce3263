"""The event queue: events run in the order of time, then of kind, then of scheduling."""

from hypothesis import given
from hypothesis import strategies as st

from gossamer.virtual.sim.event_queue import GRADIENT_BEGIN, GRADIENT_END, MESSAGE, OBSERVE, EventQueue

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([MESSAGE, GRADIENT_END, GRADIENT_BEGIN, OBSERVE]),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3),
    ),
    max_size=12,
)
"""Time, kind, and the delay and kind of the events that this one schedules."""


@given(events=EVENTS)
def test_events_run_by_time_kind_and_sequence_number(events):
    """Events that schedule others, at once or later, against a list that is sorted before every event."""
    queue, seen, expected, scheduled = EventQueue(), [], [], []

    def schedule(time, kind, followers):
        number = len(scheduled)
        scheduled.append((time, kind, number, followers))
        queue.schedule(time, kind, run, number)

    def run(now, number):
        seen.append((now, number))
        for delay, kind in scheduled[number][3]:
            schedule(now + delay, kind, ())

    for event in events:
        schedule(*event)
    done = set()
    while True:
        pending = [event for event in scheduled if event[2] not in done]
        assert queue.run_next() == bool(pending)
        if not pending:
            break
        time, _, number, _ = min(pending, key=lambda event: event[:3])
        done.add(number)
        expected.append((time, number))
        due_now = [
            event
            for event in scheduled
            if event[2] not in done and event[0] == time and event[1] in (MESSAGE, GRADIENT_END)
        ]
        assert queue.settled() == (not due_now)
    assert seen == expected
