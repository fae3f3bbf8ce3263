"""Quasi-global momentum: known answers, the formula in any interleaving, and what it leaves to the inner method."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config import resolve
from gossamer.effects import Start, Ticket, Update, Wait, yields
from gossamer.errors import InputError
from gossamer.methods import METHODS, Method, build
from gossamer.methods.loading.method_contract import check_declaration, declared
from gossamer.methods.quasi_global import LAST, MOMENTUM, AveragingConfig, QuasiGlobal, longest_period
from gossamer.optim import AccumAdam
from gossamer.settings import from_values
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.topology import build as build_graph
from gossamer.virtual.compute.rows import Row
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import simulate
from plain_training import (
    INSTANT,
    batches_of,
    flat,
    fresh_model,
    gradient_at,
    kept_sum,
    make_precise_run,
    make_run,
    precise_task,
)

AVERAGING = sorted(name for name, method in METHODS.items() if issubclass(method.Config, AveragingConfig))
BETA = 0.9
ON = {"quasi_global": BETA}


def make(name, graph="ring", workers=4, **values):
    config = from_values(METHODS[name].Config, {"quasi_global": BETA, **values})
    return build(METHODS[name], config, build_graph(graph, workers))


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def quasi_hyperbolic(x, gradient, lrs, beta=BETA):
    """The trajectory of one worker: m = β(2−β) m + (1−β) g, from gradients alone; where lr is 0, m stays."""
    m = torch.zeros_like(x)
    for step, lr in enumerate(lrs):
        g = gradient(x, step)
        x = x - lr * (g + beta * m)
        m = beta * (2 - beta) * m + (1 - beta) * g if lr else m
        yield x


# Known answers


@pytest.mark.parametrize("schedule", [lambda step: 1.0, lambda step: (0.3, 1.0, 0.0, 0.0, 2.0)[step % 5]])
@pytest.mark.parametrize("beta", [0.5, 0.9])
@pytest.mark.parametrize("name", AVERAGING)
def test_one_worker_has_quasi_hyperbolic_momentum(name, beta, schedule):
    values = {"method": name, "workers": 1, "topology": "complete", "lr": 0.1, "quasi_global": beta, **INSTANT}
    task = precise_task(1)
    (run,) = resolve(values, task=task, schedule=schedule)
    cluster = Cluster(run)
    lrs = [0.1 * schedule(step) for step in range(20)]
    start, b = torch.zeros(3, dtype=torch.float64), task.train[0][0]
    for step, expected in enumerate(quasi_hyperbolic(start, lambda x, step: x - b, lrs, beta)):
        cluster.run_until(step + 1.5)
        close(cluster.replicas.rows()[0], expected)


def quasi_global_adam(x, gradient, lrs, betas, eps=1e-8, decay=0.0, decoupled=False, mu=BETA):
    """The same for Adam: its first moment is the mean of its bias-corrected directions u, not taken from the moves."""
    beta1, beta2 = betas
    m, v, first, weight = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x), 0.0
    for done, lr in enumerate(lrs):
        g = gradient(x, done) + (0.0 if decoupled else decay) * x
        if weight:
            first = m / weight * (1 - beta1**done)
        first, v = beta1 * first + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        u = first / (1 - beta1 ** (done + 1))
        shrunk = x * (1 - lr * decay) if decoupled else x
        x = shrunk - lr * u / ((v / (1 - beta2 ** (done + 1))).sqrt() + eps)
        if lr:
            m, weight = mu * m + (1 - mu) * u, mu * weight + 1 - mu
        yield x


@pytest.mark.parametrize(
    ("make_optimizer", "settings"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"weight_decay": 0.3, "eps": 1e-3}),
        (torch.optim.AdamW, {"weight_decay": 0.3}),
        (torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.7, 0.95)}),
    ],
)
@pytest.mark.parametrize("name", AVERAGING)
def test_with_adam_one_worker_averages_the_directions(name, make_optimizer, settings):
    task = precise_task(1)
    (run,) = resolve(
        {"method": name, "workers": 1, "topology": "complete", **ON, **INSTANT},
        task=task,
        make_optimizer=lambda parameters: make_optimizer(parameters, lr=0.02, **settings),
        schedule=lambda step: float(step % 4),
    )
    cluster = Cluster(run)
    start, b = torch.zeros(3, dtype=torch.float64), task.train[0][0]
    lrs = [0.02 * (step % 4) for step in range(30)]
    options = {"betas": settings.get("betas", (0.9, 0.999)), "eps": settings.get("eps", 1e-8)}
    options |= {"decay": settings.get("weight_decay", 0.0), "decoupled": make_optimizer is torch.optim.AdamW}
    for step, expected in enumerate(quasi_global_adam(start, lambda x, step: x - b, lrs, **options)):
        cluster.run_until(step + 1.5)
        close(cluster.replicas.rows()[0], expected)


@pytest.mark.parametrize("name", ["localsgd", "lasgd"])
def test_averaging_after_every_step_is_quasi_hyperbolic_momentum_on_the_joint_batch(name):
    steps = 8
    run = make_precise_run(
        method=name, period=1, workers=4, batch=8, steps=steps, partition="by-class", **ON, **INSTANT
    )
    cluster = Cluster(run)
    cluster.run_until(steps + 0.5)
    model, batches = fresh_model(run), batches_of(run)

    def gradient(x, step):
        return torch.stack([gradient_at(run, model, x, own.take(step)) for own in batches]).mean(0)

    *_, expected = quasi_hyperbolic(flat(model), gradient, [run.config.lr] * steps)
    close(cluster.replicas.rows(), expected.expand(4, -1))


@pytest.mark.parametrize("name", AVERAGING)
@given(
    choices=st.lists(st.integers(0, 1 << 16), max_size=120),
    graph=st.sampled_from(["ring", "complete", "base", "path"]),
    workers=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_in_any_order_the_momentum_follows_where_the_model_went(name, choices, graph, workers, seed):
    """The formula, from the models seen at every Update. The sum of all models still moves only by the updates."""
    method, lrs, seen, num_checked = make(name, graph, workers, period=2), (0.1, 0.2, 0.0, 0.4), {}, 0

    def check(worker, plain):
        nonlocal num_checked
        model = worker.x.clone()
        if method.eval_point is not None:
            method.eval_point(worker, model)
        m, last, lr = seen.get(worker.rank, (torch.zeros_like(model), model, 0.0))
        if lr:
            m = BETA * m + (1 - BETA) * (last - model) / lr
        seen[worker.rank] = m, model, lrs[worker.step % len(lrs)]
        close(worker.gradient, plain + BETA * m, 1e-12)
        num_checked += 1

    before_each_update(method, check)
    world = AnyOrderWorld(method, steps=6, choices=choices, seed=seed)
    for worker in world.workers:
        worker.optimizer_setting = lambda name, worker=worker: {"lr": lrs[worker.step % len(lrs)]}[name]
    before = kept_sum(method, world.workers)
    world.run()
    world.finish()
    assert num_checked == 6 * workers
    close(kept_sum(method, world.workers), before + world.added, 1e-12)


def before_each_update(method, check):
    """Call ``check(worker, gradient)`` before every Update, with the gradient as it was before the step."""
    original = method.step

    @yields(*declared(method, "step"))
    def step(worker):
        generator, plain, answer = original(worker), worker.gradient.clone(), None
        while True:
            try:
                effect = generator.send(answer)
            except StopIteration:
                return
            if isinstance(effect, Update):
                check(worker, plain)
            answer = yield effect

    method.step = step


@pytest.mark.parametrize("name", AVERAGING)
def test_small_moves_of_a_large_model_survive_in_float32(name):
    """Moves of 1e-6 of the weights, which are exact in float32: so is the momentum."""
    method = make(name, "complete", 1)
    worker = AnyOrderWorld(make(name, "complete", 1), steps=1, choices=[]).workers[0]
    worker.x, worker.gradient, worker.vectors = torch.full((4,), 0.75), torch.zeros(4), {}
    method.begin(worker)
    move, m = torch.tensor([-4.0, -1.0, 1.0, 3.0]) * 2**-20, torch.zeros(4, dtype=torch.float64)
    for step in range(5):
        worker.gradient.zero_()
        method.prepare_update(worker)
        m = BETA * m + (1 - BETA) * (-move.double() if step else 0) / 0.1
        torch.testing.assert_close(worker.vector(MOMENTUM).double(), m, rtol=1e-6, atol=0)
        worker.x += move


@pytest.mark.parametrize("beta", [0.6, 0.8, 0.9])
def test_averages_that_are_too_rare_drive_the_workers_apart(beta, monkeypatch):
    """Without gradients: at the longest period the distance shrinks from average to average, at the next it grows."""
    longest = int(longest_period(beta))
    monkeypatch.setattr(AveragingConfig, "check_period", lambda self, period: None)

    def growth(period):
        method = make("localsgd", "complete", 3, quasi_global=beta, period=period)
        world = AnyOrderWorld(method, steps=1, choices=[])
        workers, distances = world.workers, []
        for step in range(40 * period):
            running = [method.step(worker) for worker in workers]
            for worker, each in zip(workers, running, strict=True):
                worker.gradient.zero_()
                assert isinstance(next(each), Update)
                worker.x -= 0.1 * worker.gradient
                worker.step = step
            if (step + 1) % period == 0:
                distances.append(float(torch.stack([worker.x for worker in workers]).std(0).norm()))
            mean = torch.stack([worker.x for worker in workers]).mean(0)
            for each in running:
                if next(each, None) is not None:
                    with pytest.raises(StopIteration):
                        each.send(mean)
        return distances[-1] / distances[9]

    assert growth(longest) < 1 < growth(longest + 1)
    assert longest_period(0.5) == math.inf


# The effect


def test_workers_with_different_classes_gain_20_points():
    def worst(**more):
        run = make_run(method="a2cid2", partition="by-class", workers=16, eval_every=1000, **more)
        return simulate(run).final.worker_accuracy.min

    assert worst(**ON) >= worst() + 0.2


# What it leaves to the inner method


@pytest.mark.parametrize("name", AVERAGING)
def test_everything_but_the_momentum_is_the_inner_method_s(name):
    method = make(name)
    inner = method.inner
    assert type(inner) is METHODS[name]
    assert type(method) is QuasiGlobal
    own = {"step", "begin", "check_optimizer", "on_topology_change", "inner", "gives_up"}
    public = {attribute for attribute in {*dir(Method), *Method.__annotations__} if not attribute.startswith("_")}
    assert {"name", "summary", "shared", "background", "finish", "eval_point", "disagreement", "topology"} <= public | {
        "topology"
    }
    for attribute in (public | {"topology"}) - own:
        assert getattr(method, attribute) == getattr(inner, attribute), attribute
    check_declaration(method)
    assert declared(method, "step") == declared(inner, "step") | {Update}


def test_a_method_without_the_setting_is_not_wrapped():
    for name, method in METHODS.items():
        built = build(method, from_values(method.Config, {}), build_graph("ring", 4))
        assert type(built) is method, name


def test_begin_and_check_optimizer_reach_the_inner_method(monkeypatch):
    method, called = make("gossip"), []
    monkeypatch.setattr(method.inner, "begin", lambda worker: called.append("begin"))
    monkeypatch.setattr(method.inner, "check_optimizer", lambda optimizer: called.append("check"))
    method.begin(AnyOrderWorld(make("gossip"), steps=1, choices=[]).workers[0])
    method.check_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    assert called == ["begin", "check"]


def test_a_step_that_is_abandoned_changes_no_momentum():
    """Overlap waits for its averaging before the Update; if a member dies meanwhile the step is repeated."""
    method = make("overlap")
    worker = AnyOrderWorld(make("overlap"), steps=1, choices=[]).workers[0]
    method.begin(worker)
    step = method.step(worker)
    assert isinstance(next(step), Update)
    worker.x += 1.0
    start = step.send(None)
    assert isinstance(start, Start)
    ticket = Ticket(start.effect)
    with pytest.raises(StopIteration):
        step.send(ticket)
    for _ in range(3):
        step = method.step(worker)
        assert isinstance(next(step), Wait)
        inner = step.gi_frame.f_locals["inner"]
        step.close()
        assert inner.gi_frame is None, "the inner generator is still open"
    worker.tickets.clear()
    worker.gradient.zero_()
    assert isinstance(next(method.step(worker)), Update)
    close(worker.gradient, torch.full_like(worker.x, BETA * (1 - BETA) * -1.0 / 0.1))


@pytest.mark.parametrize(
    ("name", "alone"), [("a2cid2", {"rate": 1e-9}), ("lasgd", {"period": 20}), ("localsgd", {"period": 20})]
)
def test_a_worker_that_joins_begins_without_momentum_at_its_own_model(name, alone):
    """No worker averages within these steps, so a worker's model moves by its own steps only."""
    run = make_run(
        task="quadratic", dim=4, workers=2, method=name, lr=0.1, compute="constant:1s", fail="1@7.5", join="1@10.5",
        steps=100, **alone, **ON,
    )  # fmt: skip
    cluster = Cluster(run)
    worker, peer = cluster.workers[1], cluster.workers[0]
    cluster.run_until(10.4)
    assert worker.vector(MOMENTUM).tensor().abs().max() > 0.01
    cluster.run_until(10.6)
    joined = worker.x + 0.0
    close(joined, peer.x + 0.0, 0)
    close(worker.vector(LAST) + 0.0, joined, 0)
    assert worker.vector(MOMENTUM).tensor().abs().max() == 0
    b = run.task.train[0][1]
    for step, expected in enumerate(quasi_hyperbolic(joined, lambda x, step: x - b, [0.1] * 4)):
        cluster.run_until(11.6 + step)
        close(worker.x + 0.0, expected, 1e-5)


@pytest.mark.parametrize("name", AVERAGING)
def test_no_operation_of_it_executes_the_tape(name, monkeypatch):
    cluster = Cluster(make_run(method=name, workers=4, batch=4, **ON))
    monkeypatch.setattr(Row, "tensor", lambda row: pytest.fail("a row was read as a tensor"))
    cluster.run_until(0.4)
    assert cluster.total_steps > 10


# Optimizers and options


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "create it with momentum=0"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "with maximize or amsgrad"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "with maximize or amsgrad"),
        (lambda p: torch.optim.RMSprop(p), "cannot use RMSprop: use SGD with momentum=0, Adam or AdamW"),
        (lambda p: AccumAdam(p), "cannot use AccumAdam: use SGD with momentum=0, Adam or AdamW"),
        (lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1), "differ in lr"),
        (
            lambda p: torch.optim.AdamW([{"params": p[:1], "weight_decay": 0}, {"params": p[1:]}]),
            "differ in weight_decay",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(make_optimizer, message):
    parameters = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    with pytest.raises(InputError, match=message) as error:
        make("lasgd").check_optimizer(make_optimizer(parameters))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda p: torch.optim.SGD([{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:]}], lr=0.1),
    ],
)
def test_an_optimizer_that_fits_is_accepted(optimizer):
    make("lasgd").check_optimizer(optimizer([torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]))


def test_the_optimizer_s_momentum_is_0_by_default():
    quasi, plain, other = resolve({"method": "gossip,allreduce,localsgd", "quasi_global": 0.5})
    assert quasi.config.momentum == other.config.momentum == 0.0
    assert plain.config.momentum == make_run(method="gossip").config.momentum == 0.9
    with pytest.raises(InputError, match="create it with momentum=0"):
        make_run(method="gossip", quasi_global=0.5, momentum=0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quasi_global": 1.0}, "--quasi-global is 1.0: expected less than 1"),
        ({"quasi_global": -0.1}, "--quasi-global is -0.1: expected 0 or more"),
        ({"method": "allreduce", "quasi_global": 0.9}, "--quasi-global does not apply to allreduce"),
        ({"method": "localsgd", "quasi_global": 0.9, "period": 23}, "--period is 23: .* expected 22 or less"),
        ({"method": "lasgd", "quasi_global": 0.8, "period": 13}, "--period is 13: .* expected 12 or less"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        make_run(**values)
