"""Batch norm on a GPU in one with an addition and a ReLU, forwards and backwards (``fused_resnet``).

The images are a matrix, with a row for every pixel and a column for every channel. Each direction takes three kernels:
one sums over chunks of the rows, a small one adds up the chunks of each column, one goes over all numbers with the
result. There are no atomic additions: the same numbers give the same result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, COLUMNS = 64, 32
"""Of the block that a kernel takes at once."""

PROGRAMS = 512
"""That sum side by side, at most."""


class Normalised(torch.autograd.Function):
    """``relu(norm(x) + skip)``; writes the running statistics as torch does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        skip: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        shape = _Shape(x)
        sums, (mean, scale), out = shape.sums(), x.new_empty(2, shape.columns, dtype=torch.float32), torch.empty_like(x)
        with torch.cuda.device(x.device):
            _sum[shape.chunks](x, sums, shape.rows, shape.columns, shape.length, ROWS, COLUMNS)
            _finish[shape.strips](
                x, sums, shape.num_pieces, mean, scale, running_mean, running_var,
                shape.rows, shape.columns, momentum, eps, COLUMNS,
            )  # fmt: skip
            _normalise[shape.blocks](
                x, x if skip is None else skip, out, mean, scale, weight, bias, shape.rows, shape.columns,
                relu, skip is not None, ROWS, COLUMNS,
            )  # fmt: skip
        # Without an addition the sign of the output follows from the input.
        ctx.from_output = relu and skip is not None
        ctx.relu, ctx.has_skip = relu, skip is not None
        ctx.save_for_backward(x, weight, bias, mean, scale, out if ctx.from_output else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor) -> Any:
        x, weight, bias, mean, scale, out = ctx.saved_tensors
        shape, g_out = _Shape(x), g_out.contiguous(memory_format=torch.channels_last)
        # Where the output is needed to know what passed the ReLU, that is found out once.
        passed = torch.empty_like(g_out) if ctx.from_output else g_out
        masks = ctx.relu and not ctx.from_output
        sums, g_x = shape.sums(), torch.empty_like(x)
        g_weight, g_bias = torch.empty_like(weight), torch.empty_like(bias)
        with torch.cuda.device(x.device):
            _sum_backward[shape.chunks](
                x, g_out, x if out is None else out, passed, mean, scale, weight, bias, sums,
                shape.rows, shape.columns, shape.length, masks, ctx.from_output, ROWS, COLUMNS,
            )  # fmt: skip
            _finish_backward[shape.strips](sums, shape.num_pieces, g_weight, g_bias, shape.columns, COLUMNS)
            _normalise_backward[shape.blocks](
                x, passed, g_x, mean, scale, weight, bias, g_weight, g_bias, shape.rows, shape.columns,
                masks, ROWS, COLUMNS,
            )  # fmt: skip
        return g_x, passed if ctx.has_skip else None, g_weight, g_bias, None, None, None, None, None


class _Shape:
    """The matrix that images are, and how kernels divide it among them."""

    def __init__(self, x: Tensor) -> None:
        self.device, self.columns = x.device, x.shape[1]
        self.rows = x.numel() // self.columns
        strips = triton.cdiv(self.columns, COLUMNS)
        self.strips, self.blocks = (strips,), (triton.cdiv(self.rows, ROWS), strips)
        self.length = ROWS * triton.cdiv(self.blocks[0], max(1, PROGRAMS // strips))
        """Rows of a piece."""
        self.num_pieces = triton.cdiv(self.rows, self.length)
        self.chunks = (self.num_pieces, strips)

    def sums(self) -> Tensor:
        """Two for every column of every piece."""
        return torch.empty(self.num_pieces, 2, self.columns, dtype=torch.float32, device=self.device)


@triton.jit
def _sum(x, sums, num_rows, num_columns, length, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of a piece, and of its squares; of the distance from the first row, since what is far from zero cancels."""
    columns, within = _strip(1, num_columns, width)
    pivot = tl.load(x + columns, within).to(tl.float32)
    total, squares = tl.zeros((height, width), tl.float32), tl.zeros((height, width), tl.float32)
    start = tl.program_id(0) * length
    for at in range(start, tl.minimum(start + length, num_rows), height):
        where, inside = _block(at, num_rows, columns, num_columns, height)
        value = tl.where(inside, tl.load(x + where, inside).to(tl.float32) - pivot[None, :], 0.0)
        total += value
        squares += value * value
    _store_sums(sums, total, squares, columns, num_columns)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    x, sums, num_pieces, mean, scale, running_mean, running_var, num_rows, num_columns, momentum, eps,
    width: tl.constexpr,
):  # fmt: skip
    """Mean, and one over the deviation, of every column."""
    columns, within = _strip(0, num_columns, width)
    total, squares = _load_sums(sums, num_pieces, columns, num_columns, width)
    shift = total / num_rows
    var = tl.maximum(squares / num_rows - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    centre = tl.load(x + columns, within).to(tl.float32) + shift
    tl.store(mean + columns, centre, within)
    tl.store(scale + columns, 1.0 / tl.sqrt(var + eps), within)
    old_mean, old_var = tl.load(running_mean + columns, within), tl.load(running_var + columns, within)
    tl.store(running_mean + columns, old_mean + momentum * (centre - old_mean), within)
    tl.store(running_var + columns, old_var + momentum * (var * num_rows / (num_rows - 1) - old_var), within)


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x, skip, out, mean, scale, weight, bias, num_rows, num_columns,
    relu: tl.constexpr, has_skip: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    columns, within = _strip(1, num_columns, width)
    where, inside = _block(tl.program_id(0) * height, num_rows, columns, num_columns, height)
    value = _standard(tl.load(x + where, inside).to(tl.float32), mean, scale, columns, within)
    value = _scaled(value, weight, bias, columns, within)
    if has_skip:
        value += tl.load(skip + where, inside).to(tl.float32)
    if relu:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + where, value, inside)


@triton.jit
def _sum_backward(  # type: ignore[no-untyped-def]
    x, g_out, out, passed, mean, scale, weight, bias, sums, num_rows, num_columns, length,
    masks: tl.constexpr, from_output: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient that passed the ReLU, and of that times the normalised input."""
    columns, within = _strip(1, num_columns, width)
    total, products = tl.zeros((height, width), tl.float32), tl.zeros((height, width), tl.float32)
    start = tl.program_id(0) * length
    for at in range(start, tl.minimum(start + length, num_rows), height):
        where, inside = _block(at, num_rows, columns, num_columns, height)
        value = _standard(tl.load(x + where, inside, 0.0).to(tl.float32), mean, scale, columns, within)
        g = tl.load(g_out + where, inside, 0.0).to(tl.float32)
        if from_output:
            g = tl.where(tl.load(out + where, inside, 0.0).to(tl.float32) > 0, g, 0.0)
            tl.store(passed + where, g, inside)
        if masks:
            g = tl.where(_scaled(value, weight, bias, columns, within) > 0, g, 0.0)
        total += g
        products += tl.where(inside, g * value, 0.0)
    _store_sums(sums, total, products, columns, num_columns)


@triton.jit
def _finish_backward(sums, num_pieces, g_weight, g_bias, num_columns, width: tl.constexpr):  # type: ignore[no-untyped-def]
    columns, within = _strip(0, num_columns, width)
    total, products = _load_sums(sums, num_pieces, columns, num_columns, width)
    tl.store(g_bias + columns, total, within)
    tl.store(g_weight + columns, products, within)


@triton.jit
def _normalise_backward(  # type: ignore[no-untyped-def]
    x, passed, g_x, mean, scale, weight, bias, g_weight, g_bias, num_rows, num_columns,
    masks: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    columns, within = _strip(1, num_columns, width)
    where, inside = _block(tl.program_id(0) * height, num_rows, columns, num_columns, height)
    value = _standard(tl.load(x + where, inside).to(tl.float32), mean, scale, columns, within)
    g = tl.load(passed + where, inside).to(tl.float32)
    if masks:
        g = tl.where(_scaled(value, weight, bias, columns, within) > 0, g, 0.0)
    factor = tl.load(weight + columns, within) * tl.load(scale + columns, within)
    mean_g = tl.load(g_bias + columns, within) / num_rows
    slope = tl.load(g_weight + columns, within) / num_rows
    tl.store(g_x + where, factor[None, :] * (g - mean_g[None, :] - value * slope[None, :]), inside)


@triton.jit
def _strip(axis: tl.constexpr, num_columns, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of this program, and which of them exist."""
    columns = tl.program_id(axis) * width + tl.arange(0, width)
    return columns, columns < num_columns


@triton.jit
def _block(first_row, num_rows, columns, num_columns, height: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the numbers of some rows are, and which of them exist."""
    rows = first_row + tl.arange(0, height)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return rows[:, None].to(tl.int64) * num_columns + columns[None, :], inside


@triton.jit
def _standard(x, mean, scale, columns, within):  # type: ignore[no-untyped-def]
    return (x - tl.load(mean + columns, within)[None, :]) * tl.load(scale + columns, within)[None, :]


@triton.jit
def _scaled(value, weight, bias, columns, within):  # type: ignore[no-untyped-def]
    return value * tl.load(weight + columns, within)[None, :] + tl.load(bias + columns, within)[None, :]


@triton.jit
def _store_sums(sums, first, second, columns, num_columns):  # type: ignore[no-untyped-def]
    at = sums + 2 * tl.program_id(0) * num_columns + columns
    tl.store(at, tl.sum(first, 0), columns < num_columns)
    tl.store(at + num_columns, tl.sum(second, 0), columns < num_columns)


@triton.jit
def _load_sums(sums, num_pieces, columns, num_columns, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Over all chunks."""
    count: tl.constexpr = 32
    first, second = tl.zeros((count, width), tl.float32), tl.zeros((count, width), tl.float32)
    for at in range(0, num_pieces, count):
        chunks = at + tl.arange(0, count)
        inside = (chunks < num_pieces)[:, None] & (columns < num_columns)[None, :]
        where = 2 * chunks[:, None] * num_columns + columns[None, :]
        first += tl.load(sums + where, inside, 0.0)
        second += tl.load(sums + where + num_columns, inside, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0)
