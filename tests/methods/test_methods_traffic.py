"""How much methods send, and how often they exchange, as their docstrings say."""

import math

import pytest

from gossamer.methods.divisible import Divisible
from gossamer.testing import check_method
from gossamer.virtual.simulation import simulate
from plain_training import make_run, simulated

# Bytes sent by all workers together: P parameters of 4 bytes, n workers.


def ring_allreduce(size_bytes, workers):
    return workers * round(2 * (workers - 1) / workers * size_bytes)


def swaps(result, run, parameters):
    return result.final.exchanges * 2 * 4 * parameters


def allreduce_bytes(result, run, parameters):
    return run.config.steps * ring_allreduce(4 * parameters, run.config.workers)


def localsgd_bytes(result, run, parameters):
    return run.config.steps // run.method_config.period * ring_allreduce(4 * parameters, run.config.workers)


def lasgd_bytes(result, run, parameters):
    return result.final.exchanges * ring_allreduce(4 * parameters, run.config.workers)


def overlap_bytes(result, run, parameters):
    pairs = [len(groups) for groups in run.topology.rounds]
    exchanges = sum(pairs[step % len(pairs)] for step in range(run.config.steps))
    return exchanges * 2 * 4 * parameters


def divisible_bytes(result, run, parameters):
    c, n = run.method_config, run.config.workers
    dense = ring_allreduce(4 * parameters, n)
    compressed = n * (n - 1) * 8 * math.ceil(parameters / c.ratio)
    background = ring_allreduce(4 * (2 * parameters + 1), n)
    late = run.config.steps - c.warmup
    # One dense vector more to drain what is left at the end.
    return c.warmup * dense + late * compressed + math.ceil(late / c.period) * background + dense


@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a2cid2", swaps),
        ("gossip", swaps),
        ("overlap", overlap_bytes),
        ("lasgd", lasgd_bytes),
        ("divisible", divisible_bytes),
        ("allreduce", allreduce_bytes),
        ("localsgd", localsgd_bytes),
    ],
)
def test_bytes_sent_are_those_of_the_docstring(name, expected, workers):
    run = make_run(task="digits", method=name, workers=workers, topology="ring", clock="ideal", steps=32, batch=4)
    result = simulate(run)
    assert result.final.bytes_sent == expected(result, run, result.model.numel()) > 0
    assert sum(result.worker_bytes_sent) == result.final.bytes_sent


@pytest.mark.parametrize("name", ["gossip", "a2cid2"])
@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_gossip_exchanges_at_its_rate(name, rate):
    for clock in ("ideal", "hardware"):
        result = simulated(
            task="consensus", dim=1, method=name, rate=rate, workers=32, topology="complete", clock=clock, steps=100,
            link="inf",
        )  # fmt: skip
        expected = rate * 32 * 100 / 2
        # Poisson, and on hardware those who find nobody at once fall behind a little.
        assert expected - 6 * math.sqrt(expected) < result.final.exchanges < expected + 4 * math.sqrt(expected)


class Synchronous(Divisible):
    """Divisible, with settings with which one worker alone is plain training."""

    gives_up = ("mean",)


def test_synchronous_divisible_alone_is_adam():
    check_method(Synchronous, only="alone", real=False, period=1, delay=0, warmup=0)
