"""A method that breaks the contract gets one line that says what it did, and who else is concerned."""

import math
import re

import pytest
import torch
from adhoc_methods import make_cluster, make_method, run_step

from gossamer.effects import Gather, Mean, Pair, Shift, Start, Swap, Update, Wait, WaitSteps
from gossamer.errors import MethodError


def refused(message):
    return pytest.raises(MethodError, match="^" + re.escape(message))


# One worker


def test_a_generator_that_declares_nothing_is_refused_before_anything_starts():
    method = make_method((Mean,))
    method.step = lambda self, worker: iter(())
    with refused("step of method mine does not say which effects it yields"):
        make_cluster(method)


@pytest.mark.parametrize("part", ["step", "background", "finish"])
def test_a_part_that_is_no_generator_is_refused(part):
    cluster = None
    with refused(f"{part} of method mine is not a generator: it contains no yield"):
        cluster = make_cluster(make_method((Mean,), **{part: lambda self, worker: None}))
        cluster.run_until(1.5)
        cluster.finish()


def test_an_undeclared_effect_is_refused():
    def step(self, worker):
        yield Mean(worker.x, round=0)

    with refused("step of method mine yielded Mean, which it does not declare: expected Gather, Update; add it to"):
        run_step((Gather,), step)


def test_an_undeclared_start_is_refused():
    def step(self, worker):
        yield Start(Gather((worker.x,), round=0))

    with refused("step of method mine started Gather, which it does not declare: expected Mean, Start, Update"):
        run_step((Mean, Start), step)


@pytest.mark.parametrize(("effect", "message"), [(WaitSteps(1), "WaitSteps: only background may"), (3, "3, which is")])
def test_what_a_step_may_not_yield_is_refused(effect, message):
    def step(self, worker):
        yield effect

    with refused(f"step of method mine yielded {message}"):
        run_step((Mean,), step)


def test_two_updates_in_a_step_are_refused():
    def step(self, worker):
        yield Update()
        yield Update()

    with refused("step of method mine yielded Update twice: expected at most one in a step"):
        run_step((Mean,), step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: Mean([1.0], round=0), "Mean of list: expected a tensor"),
        (lambda x: Mean(torch.zeros(2, 3), round=0), "Mean of a tensor of shape (2, 3): expected a vector; use view("),
        (lambda x: Shift(x[0], 0, 0, round=0), "Shift of a tensor of shape (): expected a vector; use view(-1)"),
        (lambda x: Mean(torch.zeros(2, device="meta"), round=0), "Mean of a tensor on meta: expected one on the wor"),
        (lambda x: Gather((x, 3.0), round=0), "Gather of float: expected a tensor"),
    ],
)  # fmt: skip
def test_what_is_not_a_vector_is_refused(make, message):
    def step(self, worker):
        yield make(worker.x)

    with refused(f"step of method mine on worker 0 yielded {message}"):
        run_step((Mean, Shift, Gather), step)


def test_a_negative_weight_is_refused():
    def step(self, worker):
        yield Mean(worker.x, round=0, weight=-1.0)

    with refused("step of method mine yielded Mean with weight -1.0: expected 0 or more"):
        run_step((Mean,), step)


# Exchanges in pairs


def background_of(*yielded):
    """A background part that yields what these functions of the worker and the last peer return."""

    def background(self, worker):
        peer = None
        for make in yielded:
            answer = yield make(worker, peer)
            peer = answer if isinstance(answer, int) else peer

    return make_method((Pair, Swap, Start, Wait, WaitSteps), background=background)


def pair(worker, peer):
    return Pair(math.inf)


def swap(worker, peer):
    return Swap(worker.snapshot(), peer)


def start(worker, peer):
    return Start(swap(worker, peer))


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        (
            (pair, start, pair),
            "yielded Pair on worker 0, which has not waited for the Swap that it started with worker 1: each answer of "
            "Pair is for one Swap, which ends before the next Pair",
        ),
        ((pair, pair), "yielded Pair on worker 0, which has not swapped with worker 1: each answer of Pair"),
        (
            (lambda worker, peer: swap(worker, 1 - worker.rank),),
            "yielded Swap on worker 0 with worker 1, but no Pair has been answered: each answer of Pair is for one",
        ),
        (
            (pair, swap, swap),
            "yielded Swap on worker 0 with worker 1, but no Pair has been answered: each answer of Pair is for one",
        ),
        ((pair, lambda worker, peer: swap(worker, 2)), "yielded Swap on worker 0 with worker 2, but Pair answered 1"),
        ((lambda worker, peer: Pair(0.0),), "yielded Pair(rate=0.0): expected exchanges per gradient, more than 0"),
        ((lambda worker, peer: Pair(math.nan),), "yielded Pair(rate=nan): expected exchanges per gradient"),
    ],
)
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_each_answer_of_pair_is_for_one_swap(yielded, message, clock):
    with refused(f"background of method mine {message}"):
        make_cluster(background_of(*yielded), workers=2, clock=clock).run_until(2.0)


@pytest.mark.parametrize(
    ("content", "sides"),
    [
        (lambda rank: (torch.zeros(3 + rank), ()), ("4 float32", "3 float32")),
        (lambda rank: (torch.zeros(3, dtype=(torch.float32, torch.float64)[rank]), ()), ("3 float64", "3 float32")),
        (lambda rank: (torch.zeros(3), (1.0,) * (1 + rank)), ("3 float32 and 2 scalars", "3 float32 and 1 scalar")),
        (lambda rank: (torch.zeros(3), (1.0,) * rank), ("3 float32 and 1 scalar", "3 float32")),
    ],
)
def test_both_sides_of_a_swap_must_fit(content, sides):
    def background(self, worker):
        peer = yield Pair(math.inf)
        vector, scalars = content(worker.rank)
        yield Swap(vector, peer, scalars)

    one, zero = sides
    with refused(
        f"method mine: worker 1 sends {one} in Swap with worker 0, worker 0 sends {zero}: both must send the same "
        "lengths and dtypes"
    ):
        make_cluster(make_method((Pair, Swap), background=background), workers=2).run_until(1.0)


def test_all_swaps_have_one_length():
    def background(self, worker):
        for size in (3, 4):
            peer = yield Pair(math.inf)
            yield Swap(torch.zeros(size), peer)

    with refused(
        "method mine: workers 1 and 0 swap 4 numbers, earlier swaps had 3: all swaps of a run have one length"
    ):
        make_cluster(make_method((Pair, Swap), background=background), workers=2).run_until(1.0)


@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_exchanges_without_end_at_one_moment_are_refused(clock):
    def background(self, worker):
        while True:
            peer = yield Pair(math.inf)
            yield Swap(worker.snapshot(), peer)

    with pytest.raises(
        MethodError, match="yielded Pair\\(rate=inf\\) 1001 times while no time passed: expected WaitSt"
    ):
        make_cluster(make_method((Pair, Swap), background=background), workers=2, clock=clock).run_until(1.0)


def test_the_ideal_clock_has_one_rate():
    def background(self, worker):
        peer = yield Pair(1.0 + worker.rank)
        yield Swap(worker.snapshot(), peer)

    method = make_method((Pair, Swap), background=background)
    with refused("worker 1 yielded Pair(rate=2) after Pair(rate=1): on the ideal clock all workers have one rate"):
        make_cluster(method, clock="ideal")
    make_cluster(method, clock="hardware").run_until(5.0)
