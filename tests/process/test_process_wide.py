"""What a worker costs grows with its neighbours, not with the number of workers: threads, descriptors, requests."""

import wide

DEGREE = 2


def test_a_worker_among_many_on_a_ring_is_connected_with_few() -> None:
    reports = wide.train(8, "a2cid2", "ring", seconds=4.0, step_s=0.2)
    # Rank 0 serves the store to all others.
    for report in reports[1:]:
        assert report["threads"] <= 12
        # On a busy machine all may seem to be silent, and are pinged: for a moment there are more.
        assert report["fewest descriptors"] - report["before"] <= 4 * DEGREE + 4
        assert report["requests/s"] <= 5
