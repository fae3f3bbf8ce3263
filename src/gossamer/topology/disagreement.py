"""How far apart workers stay, from the spectrum of their graph or from their rounds.

V is the mean of ‖x_i − x̄‖² over the workers, the square of the consensus distance. A model answers two questions with
the same equations: how V develops over a run (``trajectory``), and how well steady noise is averaged (``contraction``).

**Pairwise exchanges.** Edges fire at rates λ_ij, and an exchange takes both peers to their mean. Let λ_k and v_k be the
eigenvalues and eigenvectors of Λ = Σ λ_ij (e_i − e_j)(e_i − e_j)ᵀ, and e_k the expected energy of the parameters along
v_k, so that V = 1/n · Σ_{k≥2} e_k. Gradients add noise of variance q per worker and step::

    de_k/dt = −λ_k e_k + ½ λ_k D + q        D = Σ_l λ_l e_l / Σ_l λ_l

An exchange takes the peers' difference out of mode k and leaves a part of its energy in all modes: the term with D. It
takes E (x_i − x_j)² to be the same on every edge, which holds where all edges look alike (ring, complete, hypercube,
square torus). On the other named graphs, of 8 to 256 workers, the contraction is within 0.002 of one that follows every
edge. For A²CiD² each e_k is the 2 × 2 covariance P_k of (x, x̃), with a = (½, α̃)ᵀ and M = η((−1, 1), (1, −1))::

    dP_k/dt = M P_k + P_k Mᵀ − λ_k (a p_kᵀ + p_k aᵀ) + 2 λ_k a aᵀ D + q 1 1ᵀ        p_k: first column of P_k

**Rounds.** The covariance Σ of the workers follows Σ ← W Σ Wᵀ + q (I − J), with the W of each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gossamer.topology.topology import Topology

MAX_TRAJECTORY_WORKERS = 256
"""Beyond this, trajectories take too long: they need dense matrices."""

MAX_ROUNDS = 2_000
"""Rounds that a trajectory follows one by one; after that, accumulated noise has levelled off."""

EXACT_WORKERS = 64
NUM_SAMPLES = 8
"""Up to ``EXACT_WORKERS`` the contraction of rounds is exact, beyond it is estimated from random vectors."""
NUM_STARTS = 4
"""Rounds of the period from which the decay is followed."""
MAX_DECAY_ROUNDS = 256
NEGLIGIBLE = 1e-4
"""Share of V below which a decay is followed no further."""


class Disagreement(Protocol):
    """A model of how far apart workers are."""

    def trajectory(self, steps: np.ndarray, noise: np.ndarray, rate_scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return what is left of V = 1 at each of ``steps``, and the V that noise has accumulated by then.

        Args:
            steps: evenly spaced, from 0.
            noise: variance that a step adds to each worker, one value per interval between ``steps``.
            rate_scale: achieved exchange rate over the configured one.

        The initial V is spread evenly over all directions.
        """

    def contraction(self, rate_scale: float = 1.0) -> float:
        """Return ρ: averaging that left ρ² of V after every step would keep workers as far apart under steady noise.

        0 is an exact mean of all workers at every step, 1 is no averaging (or averaging that amplifies noise).
        """


def periodic_contraction(period: float, delay: float = 0.0) -> float:
    """Return ρ of an exact mean of all workers every ``period`` steps, applied ``delay`` steps after its snapshot."""
    return contraction_of((max(1.0, period) + 1.0) / 2.0 + delay)


def contraction_of(accumulated: float) -> float:
    """Return ρ, given the noise that is left right after a step, in units of one step's: 1/(1 − ρ²)."""
    return math.sqrt(1.0 - 1.0 / accumulated) if accumulated > 1 else 0.0


def accumulated_noise(decay: Sequence[float]) -> float:
    """Return the noise that is left right after a step, in units of one step's.

    ``decay``: the share of V that is left 1, 2, … steps after it arose. If it does not end near 0, it goes on as in its
    second half.
    """
    total, half = 1.0 + sum(decay), len(decay) // 2
    if decay[-1] > NEGLIGIBLE and half:
        kept = (decay[-1] / decay[-1 - half]) ** (1 / half)
        total += decay[-1] * kept / max(1e-6, 1 - kept)
    return total


@dataclass(frozen=True)
class Pairwise:
    """Pairwise exchanges, ``rate`` per worker and step: A²CiD² with its ``eta`` and ``alpha_tilde``, else gossip."""

    topology: Topology
    rate: float
    eta: float = 0.0
    alpha_tilde: float = 0.5

    def _system(self, rate_scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ``decay`` [modes, state, state], ``scatter`` [modes, state] and ``weights`` [modes] of the equations

            dP_k/dt = decay_k P_k + scatter_k D + noise        D = Σ_k weights_k (P_k)_xx

        The state P_k of a mode is (P_xx,), or (P_xx, P_xx̃, P_x̃x̃) with momentum.
        """
        # A²CiD²'s η and α̃ stay those of the configured rate, whatever rate is achieved.
        values = np.maximum(self.rate * rate_scale * self.topology.rate_spectrum, 1e-12)
        a, b = 0.5, self.alpha_tilde
        if self.eta:
            momentum = self.eta * np.array([[-2.0, 2.0, 0.0], [1.0, -2.0, 1.0], [0.0, 2.0, -2.0]])
            exchange = np.array([[2 * a, 0.0, 0.0], [b, a, 0.0], [0.0, 2 * b, 0.0]])
            scattered = np.array([a * a, a * b, b * b])
        else:
            momentum, exchange, scattered = np.zeros((1, 1)), np.array([[2 * a]]), np.array([a * a])
        decay = momentum - values[:, None, None] * exchange
        return decay, 2 * values[:, None] * scattered, values / values.sum()

    def trajectory(self, steps: np.ndarray, noise: np.ndarray, rate_scale: float) -> tuple[np.ndarray, np.ndarray]:
        from scipy import linalg

        decay, scatter, weights = self._system(rate_scale)
        num_modes, size = scatter.shape
        energy, mean_difference = np.zeros((2, num_modes * size))
        energy[::size], mean_difference[::size] = 1.0, weights
        system = linalg.block_diag(*decay) + np.outer(scatter, mean_difference)
        interval = float(steps[1] - steps[0])
        # One exponential gives both the propagator and the response to noise over an interval.
        extended = np.zeros((len(system) + 1, len(system) + 1))
        extended[:-1, :-1], extended[:-1, -1] = interval * system, interval
        exponential = linalg.expm(extended)
        propagator, response = exponential[:-1, :-1], exponential[:-1, -1]
        initial, accumulated = np.full(len(system), 1.0 / num_modes), np.zeros(len(system))
        left, piled = [1.0], [0.0]
        for variance in noise:
            initial, accumulated = propagator @ initial, propagator @ accumulated + variance * response
            left.append(float(energy @ initial))
            piled.append(float(energy @ accumulated))
        return np.array(left), np.array(piled) / self.topology.workers

    def contraction(self, rate_scale: float = 1.0) -> float:
        if self.topology.workers == 1:
            return 0.0
        decay, scatter, weights = self._system(rate_scale)
        sources = np.stack([np.ones_like(scatter), scatter], axis=-1)
        by_noise, by_scatter = np.linalg.solve(-decay, sources)[:, 0].T
        gain = float(weights @ by_scatter)
        if gain >= 1:  # exchanges scatter more than they take out
            return 1.0
        energy = float(np.mean(by_noise + weights @ by_noise / (1 - gain) * by_scatter))
        # A decay of e^(−t/E), the same for all modes, would keep the energy E under the same noise.
        return math.exp(-0.5 / energy)


@dataclass(frozen=True)
class InRounds:
    """One round of the topology's schedule per step; its means are applied in the next step."""

    topology: Topology

    def trajectory(self, steps: np.ndarray, noise: np.ndarray, rate_scale: float) -> tuple[np.ndarray, np.ndarray]:
        workers = self.topology.workers
        rounds = self.topology.mixing_rounds
        unit = np.eye(workers) - 1.0 / workers
        initial, accumulated = unit / (workers - 1), np.zeros((workers, workers))
        left, piled = [1.0], [0.0]
        noise_gain = 0.0
        for number in range(round(float(steps[-1]))):
            interval = int(np.searchsorted(steps, number, side="right")) - 1
            variance = noise[min(interval, len(noise) - 1)]
            if number < MAX_ROUNDS:
                for covariance in (initial, accumulated) if number else ():
                    rounds[(number - 1) % len(rounds)].mix(covariance)
                    rounds[(number - 1) % len(rounds)].mix(covariance.T)
                accumulated += variance * unit
                left.append(float(np.trace(initial)))
                piled.append(float(np.trace(accumulated)) / workers)
                noise_gain = piled[-1] / variance if variance else noise_gain
            else:
                left.append(0.0)
                piled.append(noise_gain * variance)
        at = np.arange(len(left))
        return np.interp(steps, at, left), np.interp(steps, at, piled)

    def contraction(self, rate_scale: float = 1.0) -> float:
        if self.topology.workers == 1:
            return 0.0
        period = self.topology.period
        starts = range(0, period, max(1, math.ceil(period / NUM_STARTS)))
        return contraction_of(sum(accumulated_noise(self._decay(start)) for start in starts) / len(starts))

    def _decay(self, start: int) -> list[float]:
        """Return the share of V that is left after 1, 2, … rounds, from round ``start`` on."""
        workers, rounds = self.topology.workers, self.topology.mixing_rounds
        values = np.eye(workers)
        if workers > EXACT_WORKERS:
            values = np.random.default_rng(0).standard_normal((workers, NUM_SAMPLES))
        values -= values.mean(axis=0)
        initial = float((values**2).sum())
        decay: list[float] = []
        while len(decay) < MAX_DECAY_ROUNDS and (not decay or decay[-1] > NEGLIGIBLE):
            rounds[(start + len(decay)) % len(rounds)].mix(values)
            decay.append(float((values**2).sum()) / initial)
        return decay
