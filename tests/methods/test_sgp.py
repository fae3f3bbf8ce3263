"""SGP: what push-sum keeps whoever is gone, and runs against their recursion written out."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.effects import Shifted, Start, Ticket, Update, Wait
from gossamer.errors import InputError
from gossamer.methods.sgp import SGP, SGPConfig
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.testing.worlds.any_order_worker import Peer
from gossamer.topology import build
from gossamer.virtual.simulation import simulate
from plain_training import (
    batches_of,
    each_step,
    flat,
    fresh_model,
    gradient_at,
    make_precise_run,
    make_run,
    recording_cluster,
    train_alone,
    trajectory,
)

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CHOICES = st.lists(st.integers(0, 1 << 16), max_size=120)
GRAPHS = st.sampled_from(["exponential", "ring", "pairs"])
DIM = 4


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def make(graph, workers, overlap=False):
    return SGP(SGPConfig(graph=graph, overlap=overlap), build("ring", workers))


# Rounds in which some workers are gone


class Rounds:
    """Drives SGP in synchronous rounds. Whoever is not in ``alive`` neither sends nor receives."""

    def __init__(self, method, seed):
        n, self.method = method.topology.workers, method
        self.numbers = torch.Generator().manual_seed(seed)
        self.workers = [Peer(rank, method.topology, seed, DIM, self.draw()) for rank in range(n)]
        self.alive = set(range(n))
        self.sent = {}
        self.added = torch.zeros(DIM, dtype=torch.float64)

    def draw(self):
        return torch.randn(DIM, generator=self.numbers, dtype=torch.float64)

    def members(self):
        return [self.workers[rank] for rank in sorted(self.alive)]

    def step(self):
        running = {worker.rank: self.method.step(worker) for worker in self.members()}
        answers = dict.fromkeys(running)
        while running:
            # Everybody sends before anybody receives.
            for rank, generator in list(running.items()):
                try:
                    answers[rank] = self.request(self.workers[rank], generator.send(answers[rank]))
                except StopIteration:
                    del running[rank]
            for rank in running:
                if isinstance(answers[rank], Wait):
                    answers[rank] = self.answer(answers[rank].ticket.effect)
        for worker in self.members():
            worker.step += 1

    def request(self, worker, effect):
        if isinstance(effect, Update):
            displacement = self.draw()
            worker.x.add_(displacement)
            self.added += displacement
            return None
        if isinstance(effect, Start):
            shift = effect.effect
            self.sent[shift.round, worker.rank, shift.to] = (shift.vector.clone(), shift.scalars)
            return Ticket(shift)
        return effect

    def answer(self, shift):
        (rank,) = {to for round, source, to in self.sent if (round, source) == (shift.round, shift.source)} or {None}
        vector, scalars = self.sent.get((shift.round, shift.source, rank), (None, ()))
        return Shifted(vector, scalars, shift.to in self.alive)

    def kept(self):
        """(Σ w z, Σ w), with what is in flight."""
        weights = [
            worker.scalars.get("weight", 1.0) + worker.scalars.get("in_flight", 0.0) for worker in self.members()
        ]
        return sum(w * worker.x for w, worker in zip(weights, self.members(), strict=True)), sum(weights)


@given(
    graph=GRAPHS, overlap=st.booleans(), workers=st.integers(1, 7), seed=st.integers(0, 99),
    gone=st.sets(st.integers(0, 6), max_size=3),
)  # fmt: skip
@settings(max_examples=50)
def test_the_weighted_mean_moves_only_by_updates_whoever_is_gone(graph, overlap, workers, seed, gone):
    rounds = Rounds(make(graph, workers, overlap), seed)
    rounds.alive -= gone if len(gone) < workers else set()
    (total, weight), rounds.added = rounds.kept(), torch.zeros(DIM, dtype=torch.float64)
    for _ in range(12):
        rounds.step()
        now, weight_now = rounds.kept()
        close(now, total + rounds.added, 1e-10)
        assert weight_now == pytest.approx(weight, abs=1e-12)
    if not gone:
        assert all(worker.scalars["weight"] in ((0.5, 1.0) if overlap else (1.0,)) for worker in rounds.workers)


@pytest.mark.parametrize("graph", ["exponential", "ring"])
def test_weights_stay_away_from_zero_if_a_worker_is_gone(graph):
    rounds = Rounds(make(graph, 8), seed=1)
    rounds.alive.remove(3)
    for _ in range(200):
        rounds.step()
        assert min(worker.scalars["weight"] for worker in rounds.members()) > 0.05
    assert {worker.scalars["weight"] for worker in rounds.members()} != {1.0}


def test_without_updates_all_survivors_agree_on_the_weighted_mean():
    rounds = Rounds(make("ring", 5), seed=2)
    rounds.draw = lambda: torch.zeros(DIM, dtype=torch.float64)
    rounds.alive.remove(2)
    total, weight = rounds.kept()
    for _ in range(300):
        rounds.step()
    for worker in rounds.members():
        close(worker.x, total / weight, 1e-6)


# Steps that are abandoned


@pytest.mark.parametrize("overlap", [False, True])
def test_a_membership_change_gives_back_what_was_in_flight(overlap):
    rounds = Rounds(make("ring", 4, overlap), seed=3)
    rounds.alive.remove(1)
    for _ in range(5):
        rounds.step()
    total, weight = rounds.kept()
    if not overlap:
        rounds.added.zero_()
        for worker in rounds.members():
            generator = rounds.method.step(worker)
            answer = None
            while not isinstance(effect := generator.send(answer), Wait):
                answer = rounds.request(worker, effect)
            generator.close()
        total = total + rounds.added
    assert all(worker.tickets for worker in rounds.members())
    for worker in rounds.members():
        rounds.method.on_membership_change(worker)
        assert not worker.tickets
    now, weight_now = rounds.kept()
    close(now, total)
    assert weight_now == weight
    assert not any("in_flight" in worker.scalars for worker in rounds.members())


def test_a_step_that_is_abandoned_at_its_update_leaves_the_model():
    method = make("ring", 4)
    worker = Peer(0, method.topology, 0, DIM, torch.ones(DIM, dtype=torch.float64))
    worker.scalars["weight"] = 0.25
    generator = method.step(worker)
    assert isinstance(next(generator), Update)
    close(worker.x, torch.full((DIM,), 0.25, dtype=torch.float64))
    generator.close()
    close(worker.x, torch.ones(DIM, dtype=torch.float64))


# Known answers


def mixing(run, round):
    """W of one round: column j is what worker j keeps and sends."""
    n, graph = run.config.workers, run.method_config.graph
    w = torch.zeros(n, n, dtype=torch.float64)
    for j in range(n):
        if graph == "pairs":
            to = sum(run.topology.group(round, j).members) - j if len(run.topology.group(round, j).members) == 2 else j
        elif graph == "ring":
            to = (j + (-1) ** round) % n
        else:
            to = (j + 2 ** (round % torch.tensor(n).log2().ceil().int().item())) % n
        w[j, j] += 0.5
        w[to, j] += 0.5
    return w


def recursion(run):
    """x(t+1) = W (x(t) + u(t)), or W x(t) + u(t) with overlap; one torch optimizer per worker."""
    n, model, batches = run.config.workers, fresh_model(run), batches_of(run)
    x = flat(model).repeat(n, 1)
    parameters = [torch.nn.Parameter(row.clone()) for row in x]
    optimizers = [SGD([parameter]) for parameter in parameters]
    for t in range(run.config.steps):
        gradients = [gradient_at(run, model, x[i], batches[i].take(t)) for i in range(n)]
        if run.method_config.overlap and t > 0:
            x = mixing(run, t - 1) @ x
        for i in range(n):
            parameters[i].data.copy_(x[i])
            parameters[i].grad = gradients[i]
            optimizers[i].step()
        x = torch.stack([parameter.detach().clone() for parameter in parameters])
        if not run.method_config.overlap:
            x = mixing(run, t) @ x
        yield x


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("graph", "topology", "workers"),
    [
        ("pairs", "ring", 6),
        ("pairs", "ring", 5),
        ("pairs", "one-peer-exponential", 8),
        ("exponential", "ring", 5),
        ("exponential", "ring", 8),
        ("ring", "ring", 5),
    ],
)
def test_it_is_its_recursion(graph, topology, workers, overlap):
    run = make_precise_run(
        task="digits", batch=4, steps=9, method="sgp", graph=graph, topology=topology, workers=workers, overlap=overlap,
        partition="by-class", clock="ideal",
    )  # fmt: skip
    got, _ = trajectory(run)
    assert len(got) == 9 * workers
    for t, rows in enumerate(recursion(run)):
        close(torch.stack([got[t, rank] for rank in range(workers)]), rows)


def test_overlapped_pairs_are_the_method_overlap():
    same = {"task": "digits", "batch": 4, "steps": 9, "workers": 6, "clock": "ideal", "partition": "by-class"}
    expected, _ = trajectory(make_precise_run(**same, method="overlap"))
    got, _ = trajectory(make_precise_run(**same, method="sgp", graph="pairs", overlap=True))
    for key in expected:
        close(got[key], expected[key], 1e-12)


@pytest.mark.parametrize(("workers", "steps"), [(4, 2), (8, 3), (16, 4)])
def test_the_exponential_graph_agrees_after_log2_n_steps(workers, steps):
    run = make_run(task="consensus", dim=5, method="sgp", workers=workers, clock="ideal", steps=steps)
    result = simulate(run)
    assert result.history[-2].consensus > 0.1 * result.history[0].consensus
    assert result.final.consensus < 1e-6 * result.history[0].consensus


def test_weights_stay_exactly_one_on_slow_and_uneven_machines():
    weights = set()
    with each_step("sgp", lambda worker: weights.add(worker.scalars["weight"])):
        run = make_run(
            task="quadratic", dim=5, workers=6, steps=20, method="sgp", straggler="1:3,4:7", link="1kbit/30ms",
            compute="exponential:20ms",
        )  # fmt: skip
        simulate(run)
    assert weights == {1.0}


@pytest.mark.parametrize("overlap", [False, True])
def test_one_worker_alone_is_plain_training(overlap):
    run = make_precise_run(task="digits", workers=1, method="sgp", steps=7, overlap=overlap)
    close(simulate(run).model, flat(train_alone(run, SGD, steps=7)), 1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", ["exponential", "ring"])
def test_training_may_be_ended_at_any_moment(graph, overlap):
    """Some have received a message of the last round and some have not, and some have not sent theirs."""
    differ = False
    for end in (0.7 * k for k in range(1, 20)):
        cluster, added = recording_cluster(
            method="sgp", graph=graph, overlap=overlap, compute="exponential:1s", straggler="1:5", link="24b/300ms",
            workers=4, seed=1,
        )  # fmt: skip
        before = sum(worker.x + 0.0 for worker in cluster.workers)
        cluster.run_until(end)
        cluster.finish()
        weights = [worker.scalars.get("weight", 1.0) for worker in cluster.workers]
        assert sum(weights) == 4.0
        close(sum(w * (worker.x + 0.0) for w, worker in zip(weights, cluster.workers, strict=True)), before + added)
        differ |= len(set(weights)) > 1
    assert differ


def test_every_step_sends_one_vector_and_one_number():
    result = simulate(make_run(task="digits", workers=4, batch=4, steps=10, method="sgp"))
    assert result.final.bytes_sent == 10 * 4 * (4 * result.model.numel() + 8)


def test_pairs_need_a_schedule_of_pairs():
    with pytest.raises(InputError, match="--graph is pairs, but the schedule of complete has other groups"):
        SGP(SGPConfig(graph="pairs"), build("complete", 4))


@given(
    choices=CHOICES, graph=GRAPHS, overlap=st.booleans(), workers=st.integers(1, 6), seed=st.integers(0, 99)
)  # fmt: skip
@settings(max_examples=60)
def test_the_sum_of_all_models_moves_only_by_updates_in_any_order(choices, graph, overlap, workers, seed):
    world = AnyOrderWorld(make(graph, workers, overlap), steps=6, choices=choices, seed=seed)
    before = sum(worker.x.clone() for worker in world.workers)
    world.run()
    world.finish()
    close(sum(worker.x for worker in world.workers), before + world.added, 1e-12)
    assert all(worker.scalars["weight"] == 1.0 and not worker.tickets for worker in world.workers)
