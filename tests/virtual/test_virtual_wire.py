"""Models that are rounded on the wire between virtual workers."""

import pytest
import torch

from gossamer import simulate, wire
from gossamer.errors import InputError
from plain_training import kept_sum, recording_cluster

HARDWARE = {"compute": "exponential:1s", "straggler": "1:3", "link": "1kb/100ms", "workers": 5, "topology": "ring"}


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
@pytest.mark.parametrize("method", ["gossip", "a2cid2"])
def test_the_sum_of_all_models_moves_only_by_updates(method, clock, codec):
    cluster, added = recording_cluster(method=method, clock=clock, wire=codec, **HARDWARE)
    before = kept_sum(cluster.method, cluster.workers)
    cluster.run_until(30.0)
    cluster.finish()
    assert cluster.exchanges.count > 20
    torch.testing.assert_close(kept_sum(cluster.method, cluster.workers), before + added, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["gossip", "overlap", "lasgd", "diloco"])
def test_fewer_bytes_give_the_same_accuracy(method):
    exact, half, quarter = (
        simulate(task="digits", method=method, workers=4, steps=100, wire=codec).final
        for codec in ("float32", "bfloat16", "int8")
    )
    for rounded, share in ((half, 0.5), (quarter, 0.25)):
        per_exchange = [point.bytes_sent / point.exchanges for point in (exact, rounded)]
        assert per_exchange[1] == pytest.approx(share * per_exchange[0], rel=0.02)
        assert rounded.accuracy == pytest.approx(exact.accuracy, abs=0.03)


def test_averaging_alone_comes_as_close():
    for codec in ("bfloat16", "int8"):
        result = simulate(
            task="consensus", dim=64, method="gossip", topology="exponential", workers=8, clock="ideal", steps=80,
            wire=codec,
        )  # fmt: skip
        assert result.final.consensus < 1e-4 * result.history[0].consensus


def test_replicas_that_must_be_alike_stay_so():
    result = simulate(task="digits", method="diloco", workers=4, steps=40, period=5, wire="int8")
    assert result.final.consensus < 1e-6


def test_a_codec_of_the_users_own_is_taken():
    assert simulate(task="quadratic", method="gossip", workers=4, steps=10, wire=wire.find("int8")).final.exchanges


def test_methods_that_send_no_models_have_no_wire():
    with pytest.raises(InputError, match="--wire is for models that are exchanged or averaged, which allreduce"):
        simulate(task="quadratic", method="allreduce", workers=4, steps=10, wire="int8")
