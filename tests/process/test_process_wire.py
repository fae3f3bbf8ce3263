"""Real workers whose models are rounded on the wire."""

import pytest
from real_workers import RealWorkers

from gossamer import wire

PARAMETERS = 16 * 400 + 400 + 400 * 4 + 4
HEADER_BYTES = 88
"""Round, weight and scalars in front of the messages of a mean."""


@pytest.mark.parametrize(
    ("method", "codec"), [("gossip", "bfloat16"), ("gossip", "int8"), ("lasgd", "int8"), ("overlap", "bfloat16")]
)
def test_models_are_rounded_on_the_wire(method, codec, tmp_path):
    order = {"steps": 100_000, "until": tmp_path / "enough", "width": 400, "momentum": 0.9, "lr": 0.02}
    with RealWorkers(3, method=method, wire=codec, **order) as job:
        for worker in job:
            worker.step(40)
            worker.exchanged(1)
        (tmp_path / "enough").touch()
        ends = job.finished()
        trained = [worker.reports[-2] for worker in job]
    assert all(end["weights"] == ends[0]["weights"] and end["accuracy"] > 0.9 for end in ends)
    found = wire.find(codec)
    if method == "gossip":
        expected = wire.exchange_bytes(found, PARAMETERS)
    else:
        size = 3 if method == "lasgd" else 2
        expected = wire.mean_bytes(found, PARAMETERS, size) + (size - 1) * HEADER_BYTES
    for report in trained:
        # An exchange of which a worker waits for the last part is sent, but not counted yet; a mean may be repeated.
        assert 0 <= report["bytes_sent"] - report["exchanges"] * expected <= 3 * expected


def test_a_worker_that_comes_back_is_understood(tmp_path):
    """What it has is far from what its neighbours expect of it."""
    order = {"steps": 100_000, "until": tmp_path / "enough", "width": 400}
    with RealWorkers(3, method="gossip", wire="int8", **order) as job:
        job[0].step(50)
        job.kill(2)
        job.restart(2).exchanged(2)
        (tmp_path / "enough").touch()
        ends = job.finished()
    assert all(end["weights"] == ends[0]["weights"] and end["accuracy"] > 0.9 for end in ends)


def test_gradients_are_not():
    with RealWorkers(2, method="allreduce", wire="int8", steps=5) as job:
        for worker in job:
            assert "leave it out" in worker.at("refused")["why"]
