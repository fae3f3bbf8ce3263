"""The disagreement that the spectrum predicts, against brute force and what is known in closed form."""

import numpy as np
import pytest
from scipy import linalg

from gossamer.topology import build
from gossamer.topology.disagreement import MAX_ROUNDS, InRounds, Pairwise

STEPS = np.linspace(0.0, 30.0, 61)
SILENCE = np.zeros(len(STEPS) - 1)


def exact(topology, rate, eta, alpha_tilde, times):
    """V over time from the whole covariance of all workers' x and x̃, correlations included."""
    n = topology.workers
    identity = np.eye(2 * n)
    drift = eta * np.kron([[-1, 1], [1, -1]], np.eye(n))
    change = np.kron(drift, identity) + np.kron(identity, drift)
    for (i, j), fires in zip(topology.edges, topology.rates(rate), strict=True):
        apart = np.eye(n)[i] - np.eye(n)[j]
        exchange = identity - np.kron([[0.5, 0], [alpha_tilde, 0]], np.outer(apart, apart))
        change += fires * (np.kron(exchange, exchange) - np.eye(4 * n * n))
    covariance = np.kron(np.ones((2, 2)), (np.eye(n) - 1 / n) / (n - 1)).ravel()
    turn = linalg.expm(change * (times[1] - times[0]))
    found = []
    for _ in times:
        found.append(np.trace(covariance.reshape(2 * n, 2 * n)[:n, :n]))
        covariance = turn @ covariance
    return np.array(found)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize(
    ("name", "tolerance"), [("ring", 1e-6), ("complete", 1e-6), ("hypercube", 1e-6), ("star", 0.5)]
)
def test_pairs_against_the_whole_covariance(name, tolerance, accelerated):
    topology = build(name, workers=8, seed=0)
    rate = 1.5
    constants = topology.constants(rate)
    eta, alpha_tilde = (constants.eta, constants.alpha_tilde) if accelerated else (0.0, 0.5)
    times = STEPS[:25]
    left, piled = Pairwise(topology, rate, eta, alpha_tilde).trajectory(times, SILENCE[:24], 1.0)
    assert not piled.any()
    expected = exact(topology, rate, eta, alpha_tilde, times)
    assert expected[-1] < 0.01
    np.testing.assert_allclose(left, expected, rtol=tolerance)


def test_two_workers_in_closed_form():
    # Every exchange makes them agree: V falls as e^{−rate·t}, and noise q piles up to q/rate in their one direction.
    topology, rate = build("ring", workers=2, seed=0), 0.7
    left, piled = Pairwise(topology, rate).trajectory(STEPS, np.full(len(STEPS) - 1, 3.0), 1.0)
    np.testing.assert_allclose(left, np.exp(-rate * STEPS), rtol=1e-9)
    np.testing.assert_allclose(piled, 3.0 / (2 * rate) * (1 - np.exp(-rate * STEPS)), rtol=1e-9)


def test_the_pace_is_time_for_gossip():
    topology = build("ring", workers=8, seed=0)
    half, _ = Pairwise(topology, 1.0).trajectory(STEPS, SILENCE, 0.5)
    whole, _ = Pairwise(topology, 1.0).trajectory(STEPS / 2, SILENCE, 1.0)
    np.testing.assert_allclose(half, whole, rtol=1e-9)


@pytest.mark.parametrize("name", ["ring", "one-peer-exponential", "star"])
def test_rounds_against_brute_force(name):
    topology = build(name, workers=8, seed=0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4000))
    x -= x.mean(0)
    first = (x**2).sum()
    noisy = np.zeros_like(x)
    expected, expected_piled = [1.0], [0.0]
    for step in range(30):
        if step:
            for values in (x, noisy):
                for group in topology.rounds[(step - 1) % topology.period]:
                    members = list(group.members)
                    values[members] += group.strength * (values[members].mean(0) - values[members])
        noisy += 2.0 * rng.normal(size=noisy.shape)
        expected.append((x**2).sum() / first)
        expected_piled.append(((noisy - noisy.mean(0)) ** 2).sum() / noisy.size)
    left, piled = InRounds(topology).trajectory(np.arange(31.0), np.full(30, 4.0), 1.0)
    np.testing.assert_allclose(left, expected, rtol=0.1, atol=1e-9)
    np.testing.assert_allclose(piled, expected_piled, rtol=0.05)


def test_long_runs_are_followed_to_their_end():
    topology = build("ring", workers=4, seed=0)
    steps = np.linspace(0.0, 2.0 * MAX_ROUNDS, 101)
    noise = np.where(np.arange(100) < 80, 1.0, 0.25)
    left, piled = InRounds(topology).trajectory(steps, noise, 1.0)
    assert left[-1] == 0.0
    assert piled[-1] == pytest.approx(piled[60] / 4, rel=0.3)
