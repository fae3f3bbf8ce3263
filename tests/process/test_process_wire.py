"""Real workers whose models are rounded on the wire."""

import pytest
from real_workers import RealWorkers

from gossamer import wire

PARAMETERS = 16 * 400 + 400 + 400 * 4 + 4
HEADER_BYTES = 88
"""Round, weight and scalars in front of the messages of a mean."""

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", ["gossip", "lasgd", "overlap"])
def test_models_are_rounded_on_the_wire(method, codec):
    with RealWorkers(3, method=method, wire=codec, steps=60, compute_s=0.02, width=400, momentum=0.9, lr=0.02) as job:
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
        assert report["exchanges"] > 1
        # An exchange of which a worker waits for the last part is sent, but not counted yet; a mean may be repeated.
        assert 0 <= report["bytes_sent"] - report["exchanges"] * expected <= 3 * expected


def test_a_worker_that_comes_back_is_understood():
    """What it has is far from what its neighbours expect of it."""
    with RealWorkers(3, method="gossip", wire="int8", steps=400, width=400, compute_s=0.02) as job:
        job[0].step(50)
        job.kill(2)
        job.restart(2).until(lambda report: report.get("exchanges", 0) > 2, 30)
        ends = job.finished()
    assert all(end["weights"] == ends[0]["weights"] and end["accuracy"] > 0.9 for end in ends)


def test_gradients_are_not():
    with RealWorkers(2, method="allreduce", wire="int8", steps=5) as job:
        for worker in job:
            assert "leave it out" in worker.at("refused")["why"]
