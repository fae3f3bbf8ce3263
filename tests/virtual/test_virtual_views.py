"""Rows and their views behave like tensors; operations through views are in order with recorded ones."""

import numpy as np
import pytest
import torch
from test_virtual_rows import WIDTH, Both

from gossamer.errors import MethodError
from gossamer.vectors.vector_math import combine
from gossamer.virtual.compute.rows import copy_of


def test_a_view_that_is_kept_is_in_order_with_recorded_operations():
    """The same arithmetic on rows and on plain tensors."""

    def arithmetic(x, y):
        head, tail = x[:1], x[1:]
        x.mul_(2.0)
        head.add_(1.0)
        y.add_(x, alpha=0.5)
        tail.copy_(y[1:]).mul_(3.0)
        x.lerp_(y, 0.25)
        combine((y, 1.0, ((2.0, x),)))
        head += tail[:1]
        y[1:] -= head
        x.sub_(y)
        return head.clone(), tail * 1.0

    both = Both()
    found = arithmetic(both.rows[0], both.rows[7])
    expected = arithmetic(both.plain[0], both.plain[7])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    both.check()


def test_in_place_functions_return_the_row():
    both = Both()
    x, y = both.rows[0], both.rows[1]
    for result in (x.clamp_(-1, 1), x.zero_(), x.div_(2.0), torch.add(x, y, out=x), x.mul_(y), x.lerp_(y, y)):
        assert result is x
    x += y
    assert x is both.rows[0]
    assert both.rows[0].contiguous() is both.rows[0]


@pytest.mark.parametrize("function", [lambda x, y: x.numpy(), lambda x, y: torch.meshgrid(x, y, indexing="ij")])
def test_a_view_that_could_be_read_out_of_order_is_refused(function):
    both = Both()
    with pytest.raises(
        MethodError, match=r"would return a view of a worker's vector .* use a slice, as x\[a:b\], or a copy"
    ):
        function(both.rows[0], both.rows[1])
    # A copy is a tensor of its own.
    function(both.rows[0].clone(), both.rows[1].clone())


def test_comparisons_and_conversions_are_those_of_a_tensor():
    both = Both()
    x, plain = both.rows[0], both.plain[0]
    assert torch.equal(x == x, plain == plain)
    assert torch.equal(x > 0, plain > 0)
    assert torch.equal((x != 0) & (x <= 1), (plain != 0) & (plain <= 1))
    assert [float(value) for value in x] == plain.tolist()
    array = np.asarray(x)
    x.mul_(0.0)
    assert array.tolist() == plain.tolist()
    with pytest.raises(IndexError):
        x[WIDTH]
    with pytest.raises(RuntimeError):
        bool(x)


def test_what_is_sent_and_what_is_received_share_memory_until_one_is_written_to():
    both = Both()
    (pool,) = both.tape._pools.values()
    sent = both.rows[0].clone()
    num_free = len(pool.free)
    received = copy_of(sent)
    assert len(pool.free) == num_free
    both.rows[1].copy_(received)
    combine((sent, 1.0, ((2.0, both.rows[2]),)))
    assert len(pool.free) == num_free - 1
    received.mul_(3.0)
    assert len(pool.free) == num_free - 1, "the other one has left"
    expected, third = both.plain[0], both.plain[2]
    torch.testing.assert_close(both.rows[1].tensor(), expected)
    torch.testing.assert_close(sent + 0.0, expected + 2.0 * third)
    torch.testing.assert_close(received + 0.0, 3.0 * expected)
    del sent, received
    assert len(pool.free) == num_free + 1


@pytest.mark.parametrize("weights", [(1.0, 2.0, 5.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("kind", ["rows", "views", "tensors", "mixed"])
def test_weighted_means(weights, kind):
    both = Both()
    rows, plain = both.rows[:3], both.plain[:3]
    if kind == "views":
        rows = [row[:] for row in rows]
    elif kind != "rows":
        rows = [row + 0.0 if kind == "tensors" or k == 1 else row for k, row in enumerate(rows)]
    mean = both.tape.mean(rows, weights)
    expected = sum(w * v for w, v in zip(weights, plain, strict=True)) / (sum(weights) or 1.0)
    torch.testing.assert_close(mean + 0.0, expected)
