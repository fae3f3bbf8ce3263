"""What happens next: by time, then by kind, then by making, whenever it was planned."""

from hypothesis import given
from hypothesis import strategies as st

from gossamer.virtual.sim.event_queue import GRADIENT_BEGIN, GRADIENT_END, MESSAGE, OBSERVE, EventQueue

PLANS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([MESSAGE, GRADIENT_END, GRADIENT_BEGIN, OBSERVE]),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3),
    ),
    max_size=12,
)


@given(plans=PLANS)
def test_the_order_is_that_of_time_kind_and_making(plans):
    """EventQueue that plan others, at once or later, against a list that is sorted anew each time."""
    queue, seen, expected, planned = EventQueue(), [], [], []

    def plan(time, kind, next_ones):
        number = len(planned)
        planned.append((time, kind, number, next_ones))
        queue.schedule(time, kind, happen, number)

    def happen(now, number):
        seen.append((now, number))
        for after, kind in planned[number][3]:
            plan(now + after, kind, ())

    for one in plans:
        plan(*one)
    done = set()
    while True:
        left = [event for event in planned if event[2] not in done]
        assert queue.run_next() == bool(left)
        if not left:
            break
        time, _, number, _ = min(left, key=lambda event: event[:3])
        done.add(number)
        expected.append((time, number))
        open_ones = [event for event in planned if event[2] not in done]
        at_once = [event for event in open_ones if event[0] == time and event[1] in (MESSAGE, GRADIENT_END)]
        assert queue.settled() == (not at_once)
    assert seen == expected
