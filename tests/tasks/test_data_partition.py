import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import InputError
from gossamer.tasks import Batches, partition

SPECS = st.sampled_from(["iid", "dirichlet", "dirichlet:0.01", "dirichlet:1", "dirichlet:1e6", "by-class"])


@st.composite
def deals(draw):
    workers = draw(st.integers(1, 20))
    num_samples = draw(st.integers(workers, 200))
    classes = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**40))
    labels = np.random.default_rng(draw(st.integers(0, 9))).integers(0, classes, num_samples)
    return labels, num_samples, workers, seed


@settings(max_examples=60, deadline=None)
@given(SPECS, deals())
def test_every_sample_goes_to_one_worker_and_every_worker_gets_one(spec, deal):
    labels, num_samples, workers, seed = deal
    parts = partition(spec, labels, num_samples, workers, seed)
    assert len(parts) == workers
    assert min(len(part) for part in parts) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_samples))
    if not spec.startswith("dirichlet"):
        assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1
    again = partition(spec, labels, num_samples, workers, seed)
    for part, same in zip(parts, again, strict=True):
        np.testing.assert_array_equal(part, same)


def test_the_seed_changes_the_deal():
    labels = np.arange(100) % 10
    for spec in ("iid", "dirichlet:0.5", "by-class"):
        first, second = (partition(spec, labels, 100, 4, seed)[0] for seed in (0, 1))
        assert not np.array_equal(first, second)


def test_by_class_separates():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 30))
    for part in partition("by-class", labels, 300, 10, seed=0):
        assert len(np.unique(labels[part])) == 1
    for part in partition("by-class", labels, 300, 20, seed=0):
        assert len(np.unique(labels[part])) == 1
    for part in partition("by-class", labels, 300, 5, seed=0):
        assert len(np.unique(labels[part])) == 2


def test_iid_does_not_separate():
    labels = np.repeat(np.arange(10), 100)
    for part in partition("iid", labels, 1000, 5, seed=0):
        assert np.bincount(labels[part], minlength=10).min() >= 5


def test_small_alpha_is_skewed_and_large_alpha_is_even():
    labels = np.repeat(np.arange(10), 100)

    def share_of_top_class(spec):
        counts = [np.bincount(labels[part], minlength=10) for part in partition(spec, labels, 1000, 10, seed=0)]
        return np.mean([count.max() / count.sum() for count in counts])

    assert share_of_top_class("dirichlet:0.05") > 0.6
    assert share_of_top_class("dirichlet:0.05") > share_of_top_class("dirichlet:0.5") > 0.2
    assert share_of_top_class("dirichlet:1000") < 0.15


@pytest.mark.parametrize(
    ("spec", "labelled", "num_samples", "workers", "seed", "message"),
    [
        ("idd", True, 10, 2, 0, "Did you mean 'iid'"),
        ("iid:3", True, 10, 2, 0, "unknown partition"),
        ("by-class:3", True, 10, 2, 0, "unknown partition"),
        ("dirichlet:0", True, 10, 2, 0, "0 < ALPHA"),
        ("dirichlet:-1", True, 10, 2, 0, "0 < ALPHA"),
        ("dirichlet:", True, 10, 2, 0, "0 < ALPHA"),
        ("dirichlet:nan", True, 10, 2, 0, "0 < ALPHA"),
        ("dirichlet:inf", True, 10, 2, 0, "0 < ALPHA"),
        ("by-class", False, 10, 2, 0, "use iid"),
        ("dirichlet", False, 10, 2, 0, "use iid"),
        ("iid", False, 10, 11, 0, "fewer workers"),
        ("iid", False, 10, 0, 0, "at least 1"),
        ("iid", False, 10, 2, -1, "seed is -1"),
        ("by-class", True, 9, 2, 0, "10 labels for 9"),
    ],
)
def test_bad_partitions_are_refused(spec, labelled, num_samples, workers, seed, message):
    labels = np.arange(10) if labelled else None
    with pytest.raises(InputError, match=message) as caught:
        partition(spec, labels, num_samples, workers, seed)
    assert "\n" not in str(caught.value)


def test_an_epoch_takes_each_sample_once():
    indices = np.arange(100, 112)
    batches = Batches(indices, 4, seed=0, rank=3)
    epochs = [np.concatenate([batches.take(3 * epoch + step) for step in range(3)]) for epoch in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), indices)
    assert not np.array_equal(epochs[0], epochs[1])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 15), st.integers(1, 20), st.integers(0, 100), st.lists(st.integers(0, 40), max_size=8))
def test_batches_are_one_stream_of_epochs_cut_into_pieces(num_samples, batch, seed, jumps):
    indices = np.arange(num_samples) * 7
    batches = Batches(indices, batch, seed, rank=1)
    in_turn = [batches.take(step) for step in range(41)]
    assert all(len(taken) == batch for taken in in_turn)
    stream = np.concatenate(in_turn)
    for epoch in range(len(stream) // num_samples):
        one = stream[epoch * num_samples : (epoch + 1) * num_samples]
        np.testing.assert_array_equal(np.sort(one), indices)
    resumed = Batches(indices, batch, seed, rank=1)
    for step in jumps:
        np.testing.assert_array_equal(resumed.take(step), in_turn[step])


def test_workers_and_seeds_have_their_own_order():
    orders = [Batches(np.arange(50), 50, seed, rank).take(0) for seed, rank in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3


def test_changing_a_taken_batch_changes_no_later_one():
    batches = Batches(np.arange(4), 2, seed=0, rank=0)
    first = batches.take(0).copy()
    batches.take(0)[:] = -1
    np.testing.assert_array_equal(batches.take(0), first)


def test_bad_batches_are_refused():
    with pytest.raises(InputError, match="batch is 0"):
        Batches(np.arange(3), 0, seed=0, rank=0)
    with pytest.raises(InputError, match="worker 2 has no samples"):
        Batches(np.arange(0), 1, seed=0, rank=2)
