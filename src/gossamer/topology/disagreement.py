"""How far apart workers are expected to be, from the spectrum of their graph.

V is the mean of ‖x_i − x̄‖² over the workers. In the eigenvectors v_k of Λ = Σ λ_ij (e_i − e_j)(e_i − e_j)ᵀ, with
eigenvalues λ_k, let e_k be the expected energy of the workers' parameters along v_k, so that V = Σ_{k≥2} e_k. An
exchange of i and j takes them to their mean; edges fire at rates λ_ij; gradients add noise of variance q to all alike::

    de_k/dt = −λ_k e_k + ¼ Σ_l S_kl e_l + q        S_kl = Σ_ij λ_ij (v_k,i − v_k,j)² (v_l,i − v_l,j)²

The second term is what an exchange leaves behind in other directions. It is exact where all workers look alike (ring,
torus, complete, …) and neglects correlations between directions elsewhere. For A²CiD² each e_k is the 2 × 2 covariance
P_k of (x, x̃), with a = (½, α̃)ᵀ and M = η((−1, 1), (1, −1))::

    dP_k/dt = M P_k + P_k Mᵀ − λ_k (a p_kᵀ + p_k aᵀ) + a aᵀ Σ_l S_kl (P_l)_xx + q 1 1ᵀ        p_k: first column of P_k

In rounds, the covariance Σ of the workers follows Σ ← W Σ Wᵀ + q (I − J) with the W of each round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy import linalg

from gossamer.topology.laplacian import Laplacian
from gossamer.topology.mixing import MixingRound
from gossamer.topology.structures import EdgeGraph
from gossamer.topology.topology import Topology

MOST_WORKERS = 256
"""Beyond this the covariances take too long."""

MOST_ROUNDS = 2_000
"""Rounds that are followed one by one; what noise piles up hardly changes any more after that."""


class Disagreement(Protocol):
    """How the disagreement of workers develops."""

    def course(self, steps: np.ndarray, noise: np.ndarray, pace: float) -> tuple[np.ndarray, np.ndarray]:
        """At each of ``steps``, evenly spaced from 0: what is left of V = 1, spread evenly over all directions, and
        the V that ``noise`` per step, given for each interval, has piled up. ``pace`` scales the rate of exchanges.
        """


@dataclass(frozen=True)
class Pairwise:
    """Exchanges in pairs at ``rate`` per worker and step; with ``eta`` and ``alpha_tilde`` A²CiD²'s, without gossip."""

    topology: Topology
    rate: float
    eta: float = 0.0
    alpha_tilde: float = 0.5

    @cached_property
    def _spectrum(self) -> tuple[np.ndarray, np.ndarray]:
        """λ_k for k ≥ 2, and S."""
        edges, rates = self.topology.edges, self.topology.rates(self.rate)
        laplacian = Laplacian(EdgeGraph(self.topology.workers, edges), rates).matrix.toarray()
        values, vectors = linalg.eigh(laplacian)
        gaps = (vectors[edges[:, 0], 1:] - vectors[edges[:, 1], 1:]) ** 2
        return values[1:], gaps.T @ (rates[:, None] * gaps)

    def course(self, steps: np.ndarray, noise: np.ndarray, pace: float) -> tuple[np.ndarray, np.ndarray]:
        values, scattered = self._spectrum
        values, scattered = pace * values, pace * scattered
        count = len(values)
        if self.eta:
            # A²CiD²'s constants are those of the rate it was told, whatever the pace is.
            matrix, spread = self._accelerated(values, scattered), np.tile([1.0, 1.0, 1.0], count)
        else:
            matrix, spread = 0.25 * scattered - np.diag(values), np.ones(count)
        seen = np.zeros(len(matrix))
        seen[:: len(matrix) // count] = 1.0
        step = float(steps[1] - steps[0])
        forced = np.zeros((len(matrix) + 1, len(matrix) + 1))
        forced[:-1, :-1], forced[:-1, -1] = step * matrix, step * spread
        grown = linalg.expm(forced)
        turn, gain = grown[:-1, :-1], grown[:-1, -1]
        left, piled = spread / count, np.zeros(len(matrix))
        lefts, piles = [1.0], [0.0]
        for added in noise:
            left, piled = turn @ left, turn @ piled + added * gain
            lefts.append(float(seen @ left))
            piles.append(float(seen @ piled))
        # Noise comes to each of the n − 1 directions; V is the mean over n workers.
        return np.array(lefts), np.array(piles) / self.topology.workers

    def _accelerated(self, values: np.ndarray, scattered: np.ndarray) -> np.ndarray:
        """The matrix of the ODE for (P_xx, P_xx̃, P_x̃x̃) of all directions, those of one direction side by side."""
        eta, (a, b) = self.eta, (0.5, self.alpha_tilde)
        still = eta * np.array([[-2.0, 2.0, 0.0], [1.0, -2.0, 1.0], [0.0, 2.0, -2.0]])
        damped = np.array([[2 * a, 0.0, 0.0], [b, a, 0.0], [0.0, 2 * b, 0.0]])
        matrix = np.kron(np.eye(len(values)), still) - np.kron(np.diag(values), damped)
        given = np.zeros((3, 3))
        given[:, 0] = (a * a, a * b, b * b)
        scatter: np.ndarray = matrix + np.kron(scattered, given)
        return scatter


@dataclass(frozen=True)
class InRounds:
    """One round of the topology's schedule per step, merged in the step after it."""

    topology: Topology

    def course(self, steps: np.ndarray, noise: np.ndarray, pace: float) -> tuple[np.ndarray, np.ndarray]:
        workers = self.topology.workers
        rounds = [MixingRound(groups) for groups in self.topology.rounds]
        apart = np.eye(workers) - 1.0 / workers
        left, piled = apart / (workers - 1), np.zeros((workers, workers))
        lefts, piles = [1.0], [0.0]
        factor = 0.0
        for number in range(round(float(steps[-1]))):
            interval = int(np.searchsorted(steps, number, side="right")) - 1
            added = noise[min(interval, len(noise) - 1)]
            if number < MOST_ROUNDS:
                # What a step has sent is merged in the next.
                for covariance in (left, piled) if number else ():
                    rounds[(number - 1) % len(rounds)].mix(covariance)
                    rounds[(number - 1) % len(rounds)].mix(covariance.T)
                piled += added * apart
                lefts.append(float(np.trace(left)))
                piles.append(float(np.trace(piled)) / workers)
                factor = piles[-1] / added if added else factor
            else:
                lefts.append(0.0)
                piles.append(factor * added)
        at = np.arange(len(lefts))
        return np.interp(steps, at, lefts), np.interp(steps, at, piles)
