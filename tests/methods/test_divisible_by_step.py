"""Divisible communication in the virtual cluster: what becomes of every gradient, step by step."""

import pytest
import torch

from gossamer import compress
from gossamer.compress import topk
from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.methods.divisible import Divisible, common_share
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import simulate
from plain_training import each_step, make_precise_run, make_run, precise_task, simulated, trajectory

RUN = {"task": "digits", "method": "divisible", "workers": 4, "batch": 8, "clock": "ideal", "ratio": 16.0}


@pytest.mark.parametrize("compressor", compress.names())
@pytest.mark.parametrize(("period", "delay"), [(4, -1), (4, 2), (3, 0)])
def test_gradient_mass_is_conserved_and_replicas_are_equal_at_every_step(compressor, period, delay, monkeypatch):
    run = make_precise_run(**RUN, compressor=compressor, period=period, delay=delay, warmup=3, steps=13)
    arrived, gradients = [], []
    original = Divisible.adam_step

    def adam_step(self, worker, what):
        # Read on all of them: what is read is computed at once, and maybe rounded in another way than later.
        copied = torch.zeros(worker.x.numel(), dtype=worker.x.dtype)
        compress.add_parts(copied, what)
        if worker.rank == 0:
            arrived.append(copied)
        original(self, worker, what)

    monkeypatch.setattr(Divisible, "adam_step", adam_step)
    with each_step("divisible", lambda worker: gradients.append(worker.gradient + 0.0)):
        cluster = Cluster(run)
        for t in range(1, 14):
            cluster.run_until(float(t))
            size = cluster.evaluator.flat.size
            assert len(gradients) == 4 * t, "not every worker did its step"
            left = [w.vector("undelivered") + w.vector("in_flight", 2 * size + 1)[:size] for w in cluster.workers]
            torch.testing.assert_close(
                sum(gradients) / 4, sum(arrived) + sum(left) / 4, rtol=0, atol=1e-12, msg=f"after step {t}"
            )
            first, *others = cluster.workers
            for other in others:
                assert torch.equal(first.x + 0.0, other.x + 0.0)
                assert torch.equal(first.vector("m") + 0.0, other.vector("m") + 0.0)
                assert torch.equal(first.vector("v") + 0.0, other.vector("v") + 0.0)
                assert first.scalars == other.scalars
        cluster.finish()
    torch.testing.assert_close(sum(gradients) / 4, sum(arrived), rtol=0, atol=1e-12)
    assert cluster.consensus() == 0.0


@pytest.mark.parametrize("gradients", ["batched", "loop"])
def test_replicas_are_equal_to_the_bit_in_float32_too(gradients):
    result = simulate(make_run(**{**RUN, "clock": "hardware"}, steps=30, straggler="1:4", gradient_backend=gradients))
    assert [point.consensus for point in result.history] == [0.0] * len(result.history)


def test_a_long_vector_takes_the_same_way(monkeypatch):
    """From some length on, top-k looks at candidates only, and all arithmetic goes chunk by chunk on real workers."""
    run = {"task": "quadratic", "method": "divisible", "workers": 2, "dim": topk.MIN_LENGTH + 77, "steps": 9}
    run |= {"period": 3, "warmup": 2, "ratio": 64.0, "clock": "ideal"}
    quick = simulated(**run).model
    monkeypatch.setattr(topk, "MIN_LENGTH", 1 << 30)
    assert torch.equal(quick, simulated(**run).model)


def written_out(b, *, steps, period, delay, warmup, lookahead, clip, keep, lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8):
    """The formulas of methods.md on the quadratic, with top-k; x after every step."""
    n, dim = b.shape
    x, m, v = (torch.zeros(dim, dtype=torch.float64) for _ in range(3))
    a, in_flight = (torch.zeros(n, dim, dtype=torch.float64) for _ in range(2))
    w, started, sent_gradients = 0.0, None, None

    def bounded(vector):
        return vector.clamp(-clip, clip)

    for t in range(steps):
        y = x.expand(n, dim)
        if w:
            y = x - lookahead * lr * bounded((a + in_flight) / ((v / w).sqrt() + eps))
        g = y - b
        if t < warmup:
            arrived = g.mean(0)
            v, w = beta2 * v + (1 - beta2) * arrived**2, beta2 * w + (1 - beta2)
        else:
            p = g + a
            c = torch.zeros_like(p)
            for i in range(n):
                largest = p[i].abs().topk(keep).indices
                c[i, largest] = p[i, largest]
            a = p - c
            arrived = c.mean(0)
            due = (t - warmup) % period == 0
            for departing in (False, True) if delay else (True, False):
                if departing and due:
                    in_flight, a, sent_gradients, started = a, torch.zeros_like(a), g, t
                elif not departing and started is not None and t == started + delay:
                    arrived = arrived + in_flight.mean(0)
                    in_flight = torch.zeros_like(in_flight)
                    v = beta2**period * v + (1 - beta2**period) * sent_gradients.mean(0) ** 2
                    w = beta2**period * w + (1 - beta2**period)
        m = beta1 * m + (1 - beta1) * arrived
        x = x - lr * bounded(m / (1 - beta1 ** (t + 1)) / ((v / w).sqrt() + eps))
        yield x


@pytest.mark.parametrize(("period", "delay"), [(3, 3), (3, 1), (4, 2), (3, 0), (1, 1)])
@pytest.mark.parametrize("lookahead", [0.0, 0.6])
def test_training_follows_the_formulas_written_out(period, delay, lookahead):
    task = precise_task(3, dim=7)
    same = {"period": period, "delay": delay, "warmup": 2, "lookahead": lookahead, "clip": 1.5, "steps": 25}
    (run,) = resolve(
        {"method": "divisible", "workers": 3, "ratio": 3.0, "lr": 0.05, "clock": "ideal", **same}, task=task
    )
    found, _ = trajectory(run)
    for t, expected in enumerate(written_out(task.train[0], keep=3, **same)):
        torch.testing.assert_close(found[t, 1], expected, rtol=0, atol=1e-12, msg=f"after step {t}")


def test_a_late_background_message_is_waited_for():
    """Merging at an agreed step, not when it has arrived: the network's speed must not change what is learnt."""
    quick, slow = (
        simulated(**{**RUN, "clock": "hardware"}, steps=20, period=4, delay=1, link=link)
        for link in ("inf", "10mbit/5ms")
    )
    assert torch.equal(quick.model, slow.model)
    assert slow.final.time > 1.5 * quick.final.time


@pytest.mark.parametrize("compressor", compress.names())
def test_steps_stay_bounded_where_v_has_seen_nothing(compressor):
    """Pixels that are always empty and units that were silent have v = 0; noise there must not be divided by ε."""
    result = simulated(task="digits", method="divisible", workers=4, compressor=compressor, ratio=16.0, steps=60)
    assert result.diverged is None
    assert result.model.abs().max() < 10
    assert result.final.accuracy > 0.7


@pytest.mark.parametrize(
    ("share", "workers", "expected"),
    [(1.0, 4, 1.0), (0.25, 4, 0.0), (0.1, 4, 0.0), (0.625, 4, 0.5), (0.3, 1, 1.0), (2.0, 4, 1.0)],
)
def test_lookahead_is_the_share_that_all_workers_have_in_common(share, workers, expected):
    assert common_share(share, workers) == pytest.approx(expected)


def test_lookahead_is_measured_by_its_rule(monkeypatch):
    """λ ← ½λ + ½·clamp((n·q − 1)/(n − 1), 0, 1), q = n‖B‖²/Σ‖A_i‖², from the vectors as they were sent."""
    sent, seen = {}, []
    start, merge = Divisible.start_background_mean, Divisible.merge

    def starting(self, worker):
        sent.setdefault(worker.step, []).append(worker.vector("undelivered") + 0.0)
        yield from start(self, worker)

    def merging(self, worker):
        late = yield from merge(self, worker)
        if worker.rank == 0:
            seen.append(worker.scalars["lookahead"])
        return late

    monkeypatch.setattr(Divisible, "start_background_mean", starting)
    monkeypatch.setattr(Divisible, "merge", merging)
    simulate(make_precise_run(**RUN, period=3, warmup=2, steps=15))
    expected, lookahead = [], 0.0
    for step in sorted(sent):
        parts = torch.stack(sent[step])
        q = 4 * parts.mean(0).square().sum() / parts.square().sum()
        lookahead = lookahead / 2 + min(max((4 * float(q) - 1) / 3, 0.0), 1.0) / 2
        expected.append(lookahead)
    assert len(seen) >= 4
    assert seen == pytest.approx(expected[: len(seen)], abs=1e-12)
    assert max(seen) > 0.05


def test_gradients_are_taken_where_the_lookahead_points(monkeypatch):
    """y_i = x − λ·lr·clip((a_i + A_i)/(√(v/w) + ε), ±c)."""
    run = make_precise_run(**RUN, period=3, warmup=2, steps=10, lookahead=0.7, clip=0.5)
    cluster = Cluster(run)
    cluster.run_until(9.5)
    for worker in cluster.workers:
        size = len(worker.x)
        undelivered = worker.vector("undelivered") + worker.vector("in_flight", 2 * size + 1)[:size]
        scaled = undelivered / ((worker.vector("v") / worker.scalars["w"]).sqrt() + 1e-8)
        assert (scaled.abs() > 0.5).any()
        expected = (worker.x + 0.0) - 0.7 * 0.002 * scaled.clamp(-0.5, 0.5)
        out = torch.empty(size, dtype=torch.float64)
        cluster.method.eval_point(worker, out)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"delay": 9}, "--delay is 9: expected at most --period, which is 8"),
        ({"lookahead": -0.5}, "--lookahead is -0.5: expected a share from 0 to 1, or -1 to measure it"),
        ({"warmup": 0}, "--warmup is 0"),
        ({"optimizer": "sgd"}, "divisible is a form of Adam and cannot use SGD"),
        ({"weight_decay": 0.1}, "use --optimizer adamw"),
        ({"compressor": "top"}, "Did you mean 'topk'"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        make_run(task="quadratic", workers=2, method="divisible", **values)
