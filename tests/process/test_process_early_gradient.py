"""Gradients that are sent while backward still runs: the result is that of sending them afterwards."""

import early_loops
import pytest
from early_loops import EARLY, KINDS, STEPS
from real_workers import RealWorkers

from gossamer.process.collectives.bucket_mean import divide


@pytest.mark.parametrize("count", [2, 3])
def test_any_loop_ends_with_the_weights_that_it_has_without_buckets(count):
    with RealWorkers(count, script=early_loops.train) as workers:
        for name in KINDS:
            reports = [worker.at(name, within_s=120.0) for worker in workers]
            print(name, reports[0]["sent"])
            assert all(report["steps"] == STEPS and report["repeated"] == 0 for report in reports), name
            for report in reports:
                # All workers have the same to the bit. The order of a sum of two is that without buckets.
                assert report["early"] == reports[0]["early"], name
                if count == 2:
                    assert report["early"] == report["whole"], name
                assert report["early"] == pytest.approx(report["whole"], rel=1e-4, abs=1e-6), name
            sent = [sum(report["sent"]) for report in reports]
            steps_with_early = [sum(number > 0 for number in report["sent"]) for report in reports]
            if name in EARLY:
                assert steps_with_early == [STEPS] * count, name
            else:
                assert sent and max(steps_with_early) < STEPS, name


def test_buckets_go_from_the_last_parameter_to_the_first():
    assert [tuple(bucket) for bucket in divide([4, 6, 7, 20, 22], 5)] == [(20, 22, 4), (7, 20, 3), (4, 7, 1), (0, 4, 0)]
    assert [tuple(bucket) for bucket in divide([4, 6], 10)] == [(0, 6, 0)]
