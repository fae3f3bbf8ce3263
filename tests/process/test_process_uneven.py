"""Workers with different numbers of batches: what their models count in the end, and batch norm's statistics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import join_script
import pytest
import torch
from ending_script import train
from real_workers import RealWorkers
from torch import Tensor, nn

from gossamer import InputError
from gossamer.process.averages.final_average import FinalAverage
from gossamer.process.averages.model_average import COUNTS, EXCLUDED, HAS_AVERAGE, ModelCopy, model_shares
from gossamer.process.averages.recalibration import recalibrate
from gossamer.process.averages.step_history import MAX_SAMPLES, Contributions, StepHistory, contributions
from gossamer.process.runtime.flat_model import FlatModel

CASES = [
    ("allreduce", (69, 10)),
    ("gossip", (69, 10)),
    ("lasgd", (69, 10)),
    ("divisible", (0, 1, 37, 100)),
    ("sgp", (0, 1, 37, 100)),
]


@pytest.mark.parametrize(("method", "steps"), CASES)
def test_uneven_batches_cost_nothing(method: str, steps: tuple[int, ...], tmp_path: Path) -> None:
    with RealWorkers(len(steps), script=train, method=method, steps=steps, ended=tmp_path) as workers:
        ends = workers.finished()
    most = ends[steps.index(max(steps))]
    assert most["before"] > 0.9
    assert most["after"] >= most["before"] - 0.01
    # Counts too: they are those of the worker with the most steps.
    assert all(end["state"] == most["state"] for end in ends)
    assert most["state"]["1.num_batches_tracked"] == max(steps)


def test_statistics_are_recalibrated_in_the_middle_and_after_the_end() -> None:
    with RealWorkers(2, script=train, method="gossip", steps=(60, 60), recalibrates=True) as workers:
        ends = workers.finished()
    assert all(end["restored"] for end in ends)
    assert ends[0]["state"] == ends[1]["state"]
    assert ends[0]["state"]["1.num_batches_tracked"] == 4
    assert ends[0]["after"] >= ends[0]["before"] - 0.02


def test_a_mask_of_minus_infinity_does_not_make_a_model_broken() -> None:
    order = {"method": "allreduce", "mask": True, "ranks": {1: {"poisoned": float("nan")}}}
    with RealWorkers(2, script=join_script.run, **order) as workers:
        ends = [worker.at("finished") for worker in workers]
    # If the mask made both workers broken, both would count.
    for end in ends:
        assert all(torch.tensor(weights).isfinite().all() for weights in end["weights"])
        assert end["buffers"]["mask"] == torch.full((3, 3), float("-inf")).triu(1).tolist()
    assert ends[0]["weights"] == ends[1]["weights"]


def test_only_what_was_not_finite_at_the_start_may_be_so_later() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([float("-inf"), float("nan"), 0.0]))
    flat_model = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), two_vectors=False)
    assert not ModelCopy.of(flat_model).is_finite(flat_model)
    flat_model.note_start_buffers()
    assert ModelCopy.of(flat_model).is_finite(flat_model)
    for buffer, value in ((model.running_var, float("inf")), (model.mask, float("nan"))):
        kept = buffer.clone()
        buffer.fill_(value)
        assert not ModelCopy.of(flat_model).is_finite(flat_model)
        buffer.copy_(kept)


# How much workers count


def row(
    *step_times: float, touched_half: tuple[float, ...] = (), total: int | None = None, now: float = 100.0
) -> Tensor:
    history = StepHistory()
    history._joined_at = 0.0
    for time in step_times:
        history.add_step(time, 0.0)
    for time in touched_half:
        history.touch_half(time)
    return history.row(now, len(step_times) if total is None else total)


def evenly(start: float, end: float, count: int) -> tuple[float, ...]:
    return tuple(start + (end - start) * (number + 1) / count for number in range(count))


ALL = row(*evenly(0, 100, 400))


@pytest.mark.parametrize("lockstep", [False, True])
def test_equal_workers_count_the_same(lockstep: bool) -> None:
    late = row(*evenly(0.2, 99.9, 400))
    assert contributions([ALL, late], lockstep) == Contributions([1.0, 1.0], [1.0, 1.0], 0)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("steps", "share"), [(0, 0.0), (1, 0.0), (290, 0.0), (325, 0.5), (350, 1.0), (399, 1.0)])
def test_who_stopped_counts_by_how_long_ago(steps: int, share: float, lockstep: bool) -> None:
    # The last quarter are 100 of 400 steps.
    stopped = row(*evenly(0, 100, 400)[:steps])
    found = contributions([stopped, ALL], lockstep)
    assert found.weights == [pytest.approx(share, abs=0.02), 1.0]
    assert found.buffers == [pytest.approx(share, abs=0.02), 1.0]
    assert found.most_advanced == 1


def test_a_slow_worker_in_touch_counts_and_its_buffers_count_less() -> None:
    slow = row(*evenly(0, 100, 40))
    found = contributions([ALL, slow], lockstep=False)
    assert found.weights == [1.0, 1.0]
    assert found.buffers == [1.0, pytest.approx(0.2, abs=0.02)]


def test_exchanges_keep_the_weights_of_a_worker_that_is_done_new_but_not_its_buffers() -> None:
    steps = evenly(0, 100, 400)[:40]
    served = row(*steps, touched_half=tuple(range(11, 100)))
    found = contributions([ALL, served], lockstep=False)
    assert (found.weights, found.buffers) == ([1.0, 1.0], [1.0, 0.0])
    # One exchange is only half the way.
    once = row(*steps, touched_half=(99.0,))
    assert contributions([ALL, once], lockstep=False).weights == [1.0, 0.0]


def test_who_did_as_many_steps_earlier_is_not_behind() -> None:
    fast = row(*evenly(0, 50, 400))
    assert contributions([ALL, fast], lockstep=False).weights == [1.0, 1.0]


def test_weights_from_before_the_training_do_not_count_however_short_it_was() -> None:
    for lockstep in (False, True):
        assert contributions([row(), row(1.0, 2.0)], lockstep).weights == [0.0, 1.0]
        # Unless nobody has trained.
        assert contributions([row(), row()], lockstep) == Contributions([1.0, 1.0], [1.0, 1.0], 0)


def test_in_lockstep_the_common_number_of_steps_decides() -> None:
    # It came back, took over the others' step count, and did two steps.
    back = row(99.0, 99.9, total=400)
    assert contributions([ALL, back], lockstep=True) == Contributions([1.0, 1.0], [1.0, 1.0], 0)


def test_a_long_history_keeps_few_samples() -> None:
    history = StepHistory()
    for step in range(10_000):
        history.add_step(step / 100, 0.0)
    assert len(history.row(100.0, 10_000)) == 5 + MAX_SAMPLES
    stopped = StepHistory()
    for step in range(8_100):
        stopped.add_step(step / 100, 0.0)
    rows = [history.row(100.0, 10_000), stopped.row(100.0, 8_100)]
    assert contributions(rows, lockstep=False).weights[1] == pytest.approx(2 * (1 - 1900 / 2500), abs=0.04)


def test_busy_time_is_without_waits_and_without_the_first_step() -> None:
    history = StepHistory()
    for now, idle_s in ((10.0, 1.0), (12.0, 1.5), (13.0, 1.5)):
        history.add_step(now, idle_s)
    assert history.busy_s == pytest.approx(2.5)


def test_standings_come_before_histories() -> None:
    def with_standing(standing: int, norm: float, history: Tensor) -> Tensor:
        return torch.cat([torch.tensor([standing, norm], dtype=torch.float64), history])

    stopped = row(*evenly(0, 10, 40))
    nan = float("nan")
    shares = model_shares([with_standing(EXCLUDED, nan, ALL), with_standing(COUNTS, 1.0, stopped)], False)
    assert (shares.weights, shares.buffers, shares.most_advanced) == ([0.0, 1.0], [0.0, 1.0], 1)
    shares = model_shares([with_standing(COUNTS, 1.0, ALL), with_standing(HAS_AVERAGE, 1.0, stopped)], False)
    assert shares.weights == [0.0, 1.0]
    shares = model_shares([with_standing(COUNTS, 1.0, stopped)] * 2 + [with_standing(COUNTS, 1e9, ALL)], False)
    assert shares.weights == [1.0, 1.0, 0.0]


def test_weights_that_were_trained_unseen_are_not_replaced_by_those_before() -> None:
    model = nn.Linear(2, 2)
    flat_model = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), two_vectors=True)
    with torch.no_grad():
        model.weight.fill_(7.0)
    state = SimpleNamespace(history=StepHistory())
    runtime = SimpleNamespace(
        flat_model=flat_model, state=state, rank=0, store=None, groups=SimpleNamespace(finish=None)
    )
    FinalAverage(runtime)._take_unseen_weights()  # type: ignore[arg-type]
    assert float(flat_model.x[flat_model.flat.parts[0].start]) == 7.0


def test_buffers_that_are_no_floats_keep_every_bit() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("flags", torch.tensor([True, False, True]))
            self.register_buffer("count", torch.tensor(2**62 + 1))
            self.register_buffer("mean", torch.tensor(1.5))
            self.register_buffer("table", torch.tensor([[1, -2], [3, 4]], dtype=torch.int16))

    one, other = Counting(), Counting()
    for buffer in other.buffers():
        buffer.zero_()
    flats = [FlatModel(m, torch.optim.SGD(m.parameters(), lr=0.1), two_vectors=False) for m in (one, other)]
    flats[1].load_exact_buffers(flats[0].exact_buffer_vector())
    for name in ("flags", "count", "table"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert other.mean == 0.0


# Recalibration

CPU = torch.device("cpu")
BATCHES = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [8.0]])]


def layered() -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.3), nn.Dropout(0.5))
    model.eval()
    model[1].train()
    return model


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.norm(pixels)


@pytest.mark.parametrize(
    ("batches", "forward"),
    [
        (BATCHES, False),
        ([(batch, "label") for batch in BATCHES], False),
        ([[batch, 3] for batch in BATCHES], False),
        (["first", "second"], True),
    ],
)
def test_recalibration_gives_the_mean_over_the_batches(batches: list[object], forward: bool) -> None:
    model = layered()
    run = (lambda name: model(BATCHES[["first", "second"].index(name)])) if forward else None
    recalibrate(model, CPU, batches, forward=run)
    # Means 1 and 6, unbiased variances 2 and 8.
    assert model[0].running_mean.item() == 3.5
    assert model[0].running_var.item() == 5.0
    assert model[0].num_batches_tracked.item() == 2
    assert (model[0].momentum, model.training, model[0].training, model[1].training) == (0.3, False, False, True)


def test_recalibration_with_keyword_arguments_and_fewer_batches() -> None:
    model = Named()
    recalibrate(model, CPU, ({"pixels": batch, "labels": None} for batch in BATCHES), batches=1)
    assert model.norm.running_mean.item() == 1.0


@pytest.mark.parametrize(
    ("loader", "batches", "why"),
    [([], None, "no mini-batch"), (["text"], None, "type str"), (BATCHES, 0, "batches is 0")],
)
def test_recalibration_that_cannot_be_leaves_the_statistics(
    loader: list[object], batches: int | None, why: str
) -> None:
    model = layered()
    model[0].running_mean.fill_(9.0)
    with pytest.raises(InputError, match=why):
        recalibrate(model, CPU, loader, batches)
    assert model[0].running_mean.item() == 9.0
    assert model[0].momentum == 0.3


def test_a_model_without_batch_norm_has_nothing_to_recalibrate() -> None:
    recalibrate(nn.Linear(1, 1), CPU, [])
