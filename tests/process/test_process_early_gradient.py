"""Gradients that are sent while backward still runs: the result is that of sending them afterwards."""

import early_loops
import pytest
from early_loops import EARLY, KINDS, STEPS
from real_workers import RealWorkers

from gossamer.process.collectives.bucket_mean import divide


# A sum of three is made around a ring, one of two in an exchange.
@pytest.mark.parametrize(("count", "kinds"), [(2, list(KINDS)), (3, ["plain", "clipping", "some accumulated"])])
def test_any_loop_ends_with_the_weights_that_it_has_without_buckets(count, kinds, tmp_path):
    with RealWorkers(count, script=early_loops.train, kinds=kinds, folder=str(tmp_path)) as workers:
        for name in kinds:
            reports = [worker.at(name) for worker in workers]
            assert all(report["steps"] == STEPS and report["repeated"] == 0 for report in reports), name
            assert len({report["digest"] for report in reports}) == 1, name
            if count == 2:
                # A sum of two has one order only.
                assert all(report["same"] for report in reports), name
            early_steps = [sum(number > 0 for number in report["sent"]) for report in reports]
            # Where what was sent did not hold, the following steps send nothing early.
            assert all(number == STEPS if name in EARLY else 0 < number < STEPS for number in early_steps), name


def test_buckets_go_from_the_last_parameter_to_the_first():
    assert [tuple(bucket) for bucket in divide([4, 6, 7, 20, 22], 5)] == [(20, 22, 4), (7, 20, 3), (4, 7, 1), (0, 4, 0)]
    assert [tuple(bucket) for bucket in divide([4, 6], 10)] == [(0, 6, 0)]
