"""The disagreement model, compared with brute force and closed forms."""

import numpy as np
import pytest
from scipy import linalg

from gossamer.topology import build
from gossamer.topology.disagreement import MAX_ROUNDS, InRounds, Pairwise, contraction_of, periodic_contraction

STEPS = np.linspace(0.0, 30.0, 61)
NO_NOISE = np.zeros(len(STEPS) - 1)


def exact(topology, rate, eta, alpha_tilde, times):
    """Return V over time from the full covariance of all workers' x and x̃."""
    n = topology.workers
    identity = np.eye(2 * n)
    drift = eta * np.kron([[-1, 1], [1, -1]], np.eye(n))
    change = np.kron(drift, identity) + np.kron(identity, drift)
    for (i, j), fires in zip(topology.edges, topology.rates(rate), strict=True):
        apart = np.eye(n)[i] - np.eye(n)[j]
        exchange = identity - np.kron([[0.5, 0], [alpha_tilde, 0]], np.outer(apart, apart))
        change += fires * (np.kron(exchange, exchange) - np.eye(4 * n * n))
    covariance = np.kron(np.ones((2, 2)), (np.eye(n) - 1 / n) / (n - 1)).ravel()
    propagator = linalg.expm(change * (times[1] - times[0]))
    traces = []
    for _ in times:
        traces.append(np.trace(covariance.reshape(2 * n, 2 * n)[:n, :n]))
        covariance = propagator @ covariance
    return np.array(traces)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize(
    ("name", "tolerance"), [("ring", 1e-6), ("complete", 1e-6), ("hypercube", 1e-6), ("star", 0.5)]
)
def test_pairwise_agrees_with_the_full_covariance(name, tolerance, accelerated):
    topology = build(name, workers=8, seed=0)
    rate = 1.5
    constants = topology.constants(rate)
    eta, alpha_tilde = (constants.eta, constants.alpha_tilde) if accelerated else (0.0, 0.5)
    times = STEPS[:25]
    left, accumulated = Pairwise(topology, rate, eta, alpha_tilde).trajectory(times, NO_NOISE[:24], 1.0)
    assert not accumulated.any()
    expected = exact(topology, rate, eta, alpha_tilde, times)
    assert expected[-1] < 0.01
    np.testing.assert_allclose(left, expected, rtol=tolerance)


def test_two_workers_in_closed_form():
    # Every exchange makes them agree: V falls as e^{−rate·t}, and noise q accumulates to q/rate in one direction.
    topology, rate = build("ring", workers=2, seed=0), 0.7
    left, accumulated = Pairwise(topology, rate).trajectory(STEPS, np.full(len(STEPS) - 1, 3.0), 1.0)
    np.testing.assert_allclose(left, np.exp(-rate * STEPS), rtol=1e-9)
    np.testing.assert_allclose(accumulated, 3.0 / (2 * rate) * (1 - np.exp(-rate * STEPS)), rtol=1e-9)


def test_half_the_rate_is_half_the_time_for_gossip():
    topology = build("ring", workers=8, seed=0)
    half, _ = Pairwise(topology, 1.0).trajectory(STEPS, NO_NOISE, 0.5)
    full, _ = Pairwise(topology, 1.0).trajectory(STEPS / 2, NO_NOISE, 1.0)
    np.testing.assert_allclose(half, full, rtol=1e-9)


@pytest.mark.parametrize("name", ["ring", "one-peer-exponential", "star"])
def test_rounds_agree_with_brute_force(name):
    topology = build(name, workers=8, seed=0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4000))
    x -= x.mean(0)
    first = (x**2).sum()
    noisy = np.zeros_like(x)
    expected, expected_accumulated = [1.0], [0.0]
    for step in range(30):
        if step:
            for values in (x, noisy):
                for group in topology.rounds[(step - 1) % topology.period]:
                    members = list(group.members)
                    values[members] += group.strength * (values[members].mean(0) - values[members])
        noisy += 2.0 * rng.normal(size=noisy.shape)
        expected.append((x**2).sum() / first)
        expected_accumulated.append(((noisy - noisy.mean(0)) ** 2).sum() / noisy.size)
    left, accumulated = InRounds(topology).trajectory(np.arange(31.0), np.full(30, 4.0), 1.0)
    np.testing.assert_allclose(left, expected, rtol=0.1, atol=1e-9)
    np.testing.assert_allclose(accumulated, expected_accumulated, rtol=0.05)


def test_long_runs_level_off():
    topology = build("ring", workers=4, seed=0)
    steps = np.linspace(0.0, 2.0 * MAX_ROUNDS, 101)
    noise = np.where(np.arange(100) < 80, 1.0, 0.25)
    left, accumulated = InRounds(topology).trajectory(steps, noise, 1.0)
    assert left[-1] == 0.0
    assert accumulated[-1] == pytest.approx(accumulated[60] / 4, rel=0.3)


def noise_after_rounds(topology, num_steps=4000):
    """Return the variance between workers right after a step, when each step adds noise of variance 1."""
    rng = np.random.default_rng(1)
    x = np.zeros((topology.workers, 64))
    rounds = topology.mixing_rounds
    total = 0.0
    for step in range(num_steps):
        x += rng.standard_normal(x.shape)
        total += float(((x - x.mean(axis=0)) ** 2).sum() / (topology.workers - 1) / x.shape[1])
        rounds[step % len(rounds)].mix(x)
    return total / num_steps


@pytest.mark.parametrize("name", ["complete", "ring", "one-peer-exponential", "star", "exponential"])
def test_the_contraction_of_rounds_follows_from_the_noise_they_leave(name):
    topology = build(name, workers=8)
    expected = contraction_of(noise_after_rounds(topology))
    assert InRounds(topology).contraction() == pytest.approx(expected, abs=0.02)


def noise_after_exchanges(topology, rate, eta, alpha_tilde, num_steps):
    """The same for pairwise exchanges at random times, with A²CiD²'s momentum if ``eta`` is not 0."""
    rng = np.random.default_rng(2)
    edges, fires = topology.edges, topology.rates(rate)
    x = np.zeros((topology.workers, 64))
    companion, last, total = x.copy(), np.zeros(topology.workers), 0.0

    def advance(ranks, now):
        flow = -np.expm1(-2 * eta * (now - last[ranks]))[:, None] / 2 * (companion[ranks] - x[ranks])
        x[ranks] += flow
        companion[ranks] -= flow
        last[ranks] = now

    for step in range(num_steps):
        advance(np.arange(topology.workers), step)
        noise = rng.standard_normal(x.shape)
        x += noise
        companion += noise
        total += float(((x - x.mean(axis=0)) ** 2).sum() / (topology.workers - 1) / x.shape[1])
        count = rng.poisson(fires.sum())
        chosen = rng.choice(len(edges), size=count, p=fires / fires.sum())
        for edge, now in zip(chosen, step + np.sort(rng.random(count)), strict=True):
            advance(edges[edge], now)
            difference = x[edges[edge]] - x[edges[edge][::-1]]
            x[edges[edge]] -= 0.5 * difference
            companion[edges[edge]] -= alpha_tilde * difference
    return total / num_steps


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", ["ring", "exponential", "star", "path"])
def test_the_contraction_of_exchanges_follows_from_the_noise_they_leave(name, accelerated):
    topology = build(name, workers=12)
    constants = topology.constants(1.0)
    settings = (constants.eta, constants.alpha_tilde) if accelerated else (0.0, 0.5)
    expected = contraction_of(noise_after_exchanges(topology, 1.0, *settings, num_steps=1500))
    assert Pairwise(topology, 1.0, *settings).contraction() == pytest.approx(expected, abs=0.01)


def test_the_contraction_of_gossip_in_closed_form():
    # Without momentum, the energy per unit of noise is mean(1/λ) + 1/mean(λ).
    topology = build("torus", workers=12)
    values = 0.7 * topology.rate_spectrum
    energy = np.mean(1 / values) + 1 / np.mean(values)
    assert Pairwise(topology, 0.7).contraction() == pytest.approx(np.exp(-0.5 / energy), rel=1e-12)


@pytest.mark.parametrize("accelerated", [False, True])
def test_contraction_and_trajectory_are_one_model(accelerated):
    topology = build("exponential", workers=12)
    constants = topology.constants(1.0)
    model = Pairwise(topology, 1.0, constants.eta, constants.alpha_tilde) if accelerated else Pairwise(topology, 1.0)
    steps = np.linspace(0.0, 400.0, 101)
    _, accumulated = model.trajectory(steps, np.ones(100), 1.0)
    energy = accumulated[-1] * 12 / 11
    assert model.contraction() == pytest.approx(np.exp(-0.5 / energy), rel=1e-9)


def test_momentum_helps_on_a_long_ring_and_changes_nothing_on_a_complete_graph():
    ring, complete = build("ring", workers=64), build("complete", workers=64)
    for topology, rel in ((ring, None), (complete, 1e-9)):
        constants = topology.constants(1.0)
        plain = Pairwise(topology, 1.0).contraction()
        accelerated = Pairwise(topology, 1.0, constants.eta, constants.alpha_tilde).contraction()
        if rel is None:
            assert accelerated < plain
        else:
            assert accelerated == pytest.approx(plain, rel=rel)


def test_momentum_tuned_for_a_higher_rate_than_achieved_amplifies_noise():
    topology = build("ring", workers=32)
    constants = topology.constants(2.0)
    model = Pairwise(topology, 2.0, constants.eta, constants.alpha_tilde)
    assert model.contraction() < 0.95
    assert model.contraction(rate_scale=0.1) == 1.0


def test_many_workers_are_no_obstacle():
    assert Pairwise(build("ring", workers=100_000), 1.0).contraction() == pytest.approx(1.0, abs=1e-4)
    assert 0.7 < InRounds(build("torus", workers=1024)).contraction() < 0.9


def test_rare_means_contract_little():
    contractions = [periodic_contraction(period) for period in (1, 4, 8, 32)]
    assert contractions[0] == 0
    assert contractions == sorted(contractions)
    assert contractions[2] == pytest.approx(np.sqrt(1 - 2 / 9))
    assert contractions[3] > 0.96
    assert periodic_contraction(4, delay=2) > contractions[1]
