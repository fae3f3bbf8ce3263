"""How well a plan averages: how far apart its workers are kept.

Let every worker's step add noise of its own, of size 1. ``V`` is the share of that noise, summed over all past steps,
that is still a disagreement between the workers: 1 where only the newest step's is left, more where averaging is slow
or rare. One number then compares a schedule that agrees exactly after a few rounds, an average every H steps and random
exchanges: a plan that left the share ρ² of a disagreement's energy after each step would have ``V = 1/(1 − ρ²)``. That
ρ is the *contraction per step*; 0 is as good as averaging everything at every step.
"""

from __future__ import annotations

import math

import numpy as np

from gossamer.topology import Topology

EXACT_WORKERS = 64
NUM_PROBES = 8
NUM_PHASES = 4
NUM_ROUNDS = 256
NEGLIGIBLE = 1e-4


def contraction(disagreement: float) -> float:
    """ρ of V."""
    return math.sqrt(max(0.0, 1.0 - 1.0 / disagreement)) if disagreement > 1 else 0.0


def of_schedule(topology: Topology) -> float:
    """V of rounds of group means, one round per step."""
    n = topology.workers
    if n == 1:
        return 1.0
    steps = topology.mixing_rounds()
    phases = range(0, len(steps), max(1, math.ceil(len(steps) / NUM_PHASES)))
    start = np.eye(n) if n <= EXACT_WORKERS else np.random.default_rng(0).standard_normal((n, NUM_PROBES))
    start = start - start.mean(axis=0)
    whole = float((start**2).sum())
    total = 0.0
    for phase in phases:
        values = start.copy()
        left = before = 1.0
        summed = 1.0
        for count in range(NUM_ROUNDS):
            steps[(phase + count) % len(steps)].mix(values)
            left = float((values**2).sum()) / whole
            summed += left
            if left < NEGLIGIBLE:
                break
            if count == NUM_ROUNDS // 2:
                before = left
        else:
            # What is left goes on as it went over the last half.
            kept = (left / before) ** (2 / NUM_ROUNDS)
            summed += left * kept / max(1e-6, 1 - kept)
        total += summed
    return total / len(phases)


def of_gossip(topology: Topology, rate: float, accelerated: bool) -> float:
    """V of random exchanges, ``rate`` per worker and step; ``accelerated``: by A²CiD²'s momentum.

    An exchange takes ½(x_i − x_j)² off the energy, so that in expectation eigenmode k of the exchange rates' Laplacian
    loses ½λ_k of its energy per step; what exchanges move between modes is left out, so V comes out a little too large.
    The momentum changes how fast the mean of a mode decays; its gain over plain
    gossip is taken from the two-by-two system (x, x̃) of each mode.
    """
    if topology.workers == 1:
        return 1.0
    if rate <= 0:
        return math.inf
    modes = np.maximum(rate * topology.rate_spectrum, 1e-12)
    if accelerated:
        constants = topology.constants(rate)
        modes = modes * acceleration(modes, constants.eta, constants.alpha_tilde)
    return float(np.mean(1.0 / -np.expm1(-modes / 2)))


def acceleration(modes: np.ndarray, eta: float, alpha_tilde: float) -> np.ndarray:
    """How many times less noise A²CiD² leaves in each mode than plain gossip.

    With d(x, x̃)/dt = A (x, x̃) and noise that enters both, the covariance P solves A P + P Aᵀ + 1 1ᵀ = 0.
    """
    a, b, c, d = -(eta + 0.5 * modes), eta, eta - alpha_tilde * modes, -eta
    zero = np.zeros_like(modes)
    system = np.stack(
        [
            np.stack([2 * a, 2 * b + zero, zero], -1),
            np.stack([c, a + d, b + zero], -1),
            np.stack([zero, 2 * c, 2 * d + zero], -1),
        ],
        axis=-2,
    )
    covariance = np.linalg.solve(system, -np.ones((len(modes), 3, 1)))[:, 0, 0]
    gain: np.ndarray = np.maximum(1.0, 1.0 / (modes * covariance))
    return gain


def of_period(period: float, delay: float = 0.0) -> float:
    """V of an exact average of all every ``period`` steps, which takes effect ``delay`` steps after its snapshot."""
    return (max(1.0, period) + 1.0) / 2.0 + delay
