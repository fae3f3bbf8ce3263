"""Operations on rows are recorded and executed later, in batches. The result is as if they were executed at once."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.vectors.vector_math import combine
from gossamer.virtual.compute.executor import TorchExecutor, make_executor, triton_works
from gossamer.virtual.compute.rows import Row
from gossamer.virtual.compute.tape import PENDING_LIMIT, Tape
from gossamer.virtual.compute.tensor_like import View

WORKERS, WIDTH = 6, 3
CPU = torch.device("cpu")


class Both:
    """The same vectors twice: rows of a tape, and plain tensors that change at once."""

    def __init__(self, width=WIDTH, device=CPU):
        self.tape = Tape(WORKERS, torch.float64, device)
        self.x, self.g = self.tape.matrix(width), self.tape.matrix(width)
        self.tape.run_gradients, self.tape.run_updates = self.run_gradients, self.run_updates
        for matrix, scale in ((self.x, 1.0), (self.g, 10.0)):
            matrix.data.copy_(scale * torch.randn(WORKERS, width, generator=torch.Generator().manual_seed(int(scale))))
        self.rows = [Row(self.tape, matrix.slots[i]) for matrix in (self.x, self.g) for i in range(WORKERS)]
        self.plain = [matrix.data[i].clone() for matrix in (self.x, self.g) for i in range(WORKERS)]
        self.views = []
        """Views of rows that are kept, each with the same view of the plain tensor."""

    def run_gradients(self, batch):
        for rank, job in zip(batch.rows, batch.arguments, strict=True):
            point = batch.target.data[rank]
            point.copy_(self.gradient_of(point, job))

    @staticmethod
    def gradient_of(point, job):
        return torch.sin(point) + job

    def run_updates(self, batch):
        for rank, lr in zip(batch.rows, batch.arguments, strict=True):
            self.x.data[rank] -= lr * self.g.data[rank]

    def temporary(self, row, plain):
        self.rows.append(row)
        self.plain.append(plain)

    def check(self):
        pairs = [*zip(self.rows, self.plain, strict=True), *self.views]
        for row, plain in pairs:
            torch.testing.assert_close(row + 0.0, plain, rtol=1e-9, atol=1e-9)

    def do(self, operation):
        kind, a, b, number, several = operation
        # The rows of the matrices come first and stay; temporary rows follow.
        i, j, rank = a % len(self.rows), b % len(self.rows), a % WORKERS
        y, v, plain_y, plain_v = self.rows[i], self.rows[j], self.plain[i], self.plain[j]
        plain_v = plain_v.clone()
        if kind == "copy":
            y.copy_(v)
            plain_y.copy_(plain_v)
        elif kind == "add":
            y.add_(v, alpha=number)
            plain_y.add_(plain_v, alpha=number)
        elif kind == "sub":
            y.sub_(v)
            plain_y.sub_(plain_v)
        elif kind == "lerp":
            y.lerp_(v, number)
            plain_y.lerp_(plain_v, number)
        elif kind == "mul":
            y.mul_(number)
            plain_y.mul_(number)
        elif kind == "sum":
            sums = []
            operands = [(number, b), (-number, b + 1), (0.3 * number, a + b)]
            for target, keep in ((i, (0.0, 1.0, 0.75, 1.0 - number)[a % 4]), (j, 0.5)):
                terms = [(c, k % len(self.rows)) for c, k in operands if k % len(self.rows) != target] or [
                    (1.0, target ^ 1)
                ]
                sums.append((target, keep, terms))
            combine(*((self.rows[k], keep, [(c, self.rows[m]) for c, m in terms]) for k, keep, terms in sums))
            for k, keep, terms in sums:
                self.plain[k].copy_(keep * self.plain[k] + sum(c * self.plain[m] for c, m in terms))
        elif kind == "clone":
            self.temporary(y.clone(), plain_y.clone())
        elif kind == "mean":
            base = WORKERS if a % 2 else 0
            members = sorted({base + member % WORKERS for member in several}) or [base]
            mean = self.tape.mean([self.rows[member] for member in members])
            self.temporary_or_tensor(mean, torch.stack([self.plain[member] for member in members]).mean(0))
        elif kind == "mixed mean":
            members = sorted({member % len(self.rows) for member in several}) or [0]
            mean = self.tape.mean([self.rows[member] for member in members])
            self.temporary_or_tensor(mean, torch.stack([self.plain[member] for member in members]).mean(0))
        elif kind == "gradient":
            self.rows[WORKERS + rank].copy_(self.rows[rank])
            self.tape.gradient(self.rows[WORKERS + rank], number)
            self.plain[WORKERS + rank].copy_(self.gradient_of(self.plain[rank], number))
        elif kind == "update":
            self.tape.update(self.rows[rank], self.rows[WORKERS + rank], number)
            self.plain[rank] -= number * self.plain[WORKERS + rank]
        elif kind == "drop" and len(self.rows) > 2 * WORKERS:
            at = 2 * WORKERS + a % (len(self.rows) - 2 * WORKERS)
            del self.rows[at], self.plain[at]
        elif kind == "read":
            torch.testing.assert_close(y.tensor(), plain_y, rtol=1e-9, atol=1e-9)
        elif kind == "write":
            y[:2] = number
            plain_y[:2] = number
        elif kind == "torch":
            y.copy_(torch.cos(v))
            plain_y.copy_(torch.cos(plain_v))
        elif kind == "times row":
            y.mul_(v)
            plain_y.mul_(plain_v)
            plain_y.clamp_(-1e3, 1e3)
            y.clamp_(-1e3, 1e3)
        elif kind == "view":
            view = VIEWS[b % len(VIEWS)]
            self.views.append((view(y), view(plain_y)))
        elif kind == "write view" and self.views:
            view, plain_view = self.views[b % len(self.views)]
            assert view.mul_(number).add_(1.0) is view or not isinstance(view, View)
            plain_view.mul_(number).add_(1.0)
        elif kind == "copy to view" and self.views:
            view, plain_view = self.views[b % len(self.views)]
            view.copy_(y[: view.numel()].view(view.shape))
            plain_view.copy_(plain_y[: plain_view.numel()].clone().view(plain_view.shape))
        elif kind == "copy from view" and self.views:
            view, plain_view = self.views[b % len(self.views)]
            y.add_(view.sum(), alpha=number)
            plain_y.add_(plain_view.sum(), alpha=number)
        elif kind == "add tensor":
            y.add_(plain_v, alpha=number)
            plain_y.add_(plain_v, alpha=number)

    def temporary_or_tensor(self, mean, plain):
        if isinstance(mean, Row):
            self.temporary(mean, plain)
        else:
            torch.testing.assert_close(mean, plain, rtol=1e-9, atol=1e-9)


KINDS = (
    "copy", "add", "sub", "lerp", "mul", "sum", "clone", "mean", "mixed mean", "gradient", "update", "drop", "read",
    "write", "torch", "times row", "add tensor", "view", "write view", "copy to view", "copy from view",
)  # fmt: skip

VIEWS = [
    lambda x: x[:2], lambda x: x[1:], lambda x: x[1], lambda x: x[::2], lambda x: x[1:][:1], lambda x: x.view(1, -1),
    lambda x: x.detach(), lambda x: torch.narrow(x, 0, 1, 2), lambda x: x.split(2)[0], lambda x: x[:2].view(2, 1),
]  # fmt: skip

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 30),
        st.integers(0, 30),
        st.sampled_from([-0.5, 0.25, 0.5, 1.0]),
        st.lists(st.integers(0, 30), max_size=7),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
@settings(max_examples=150)
def test_any_sequence_of_operations_is_as_if_executed_at_once(operations):
    both = Both()
    for operation in operations:
        both.do(operation)
    both.check()


LAZY = [(kind, a, b, 0.5, [a, b, a + b]) for kind in KINDS[:11] for a in range(0, 30, 3) for b in (1, 4, 11)]


@given(order=st.permutations(LAZY))
@settings(max_examples=8)
def test_long_sequences_without_a_flush(order):
    both = Both()
    for operation in order:
        both.do(operation)
        if operation[0] == "gradient":
            # Keep numbers small.
            for row, plain in zip(both.rows, both.plain, strict=True):
                row.mul_(0.3)
                plain.mul_(0.3)
    both.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@given(operations=OPERATIONS)
@settings(max_examples=50, deadline=None)
def test_any_sequence_on_a_gpu(operations):
    """On a GPU a program is one kernel."""
    both = Both(width=1000, device=torch.device("cuda"))
    for operation in operations:
        both.do(operation)
    both.check()


@given(operations=OPERATIONS)
@settings(max_examples=5)
def test_long_rows_are_processed_one_by_one(operations):
    both = Both(width=(1 << 20) // 8 + 1)
    assert both.x.wide
    for operation in operations[:15]:
        both.do(operation)
    both.check()


def test_the_number_of_pending_operations_is_bounded():
    both = Both()
    for _ in range(PENDING_LIMIT + 10):
        both.rows[0].mul_(1.0)
    assert both.tape._num_pending < PENDING_LIMIT


def test_slots_of_temporaries_are_reused():
    """A snapshot without references makes room for the next."""
    both = Both()
    for k in range(1000):
        snapshot = both.rows[k % WORKERS].clone()
        both.rows[(k + 1) % WORKERS].lerp_(snapshot, 0.5)
        del snapshot
    (pool,) = both.tape._pools.values()
    assert len(pool.free) <= 2 * WORKERS


def test_a_view_of_a_temporary_outlives_it():
    both = Both()
    snapshot = both.rows[0].clone()
    view = snapshot[1:]
    expected = both.plain[0][1:].clone()
    del snapshot
    both.rows[1].clone().mul_(0.0)
    both.tape.flush()
    assert torch.equal(view, expected)


def test_the_mean_of_one_is_not_the_row_itself():
    """A worker may change the vector that it sent after the answer has arrived."""
    both = Both()
    mean = both.tape.mean([both.rows[0]])
    both.rows[0].mul_(0.0)
    torch.testing.assert_close(mean + 0.0, both.plain[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1.0, lambda x: 1.0 - x, lambda x: -x, lambda x: x / 2.0, lambda x: x**2, lambda x: x @ x,
        lambda x: abs(x), lambda x: torch.cat([x, x]), lambda x: torch.stack((x, x)).sum(0), lambda x: x.square(),
        lambda x: x[1:] + 0.0, lambda x: torch.zeros_like(x), lambda x: torch.add(x, x, alpha=3),
        lambda x: x.new_ones(2),
        lambda x: torch.tensor(float(x.norm())), lambda x: torch.tensor([len(x), x.numel(), x.element_size()]),
        lambda x: torch.ones(WIDTH, dtype=torch.float64).add_(x), lambda x: torch.ones(WIDTH).double() * x,
    ],
)  # fmt: skip
def test_a_row_can_be_used_like_a_tensor(function):
    both = Both()
    both.rows[2].mul_(2.0)
    torch.testing.assert_close(function(both.rows[2]), function(2.0 * both.plain[2]))


@pytest.mark.parametrize("weight", [0.5, 0.3])
def test_interpolating_equal_vectors_changes_nothing(weight):
    """On rows, on tensors, and on both."""
    both = Both()
    row, expected = both.rows[0], both.plain[0].clone()
    row.lerp_(row.tensor(), weight)
    assert torch.equal(row.tensor(), expected)
    snapshot = row.clone()
    row.lerp_(snapshot, weight)
    assert torch.equal(row.tensor(), expected)
    own = row.clone()
    own.tensor()
    own.lerp_(own, weight).lerp_(row, weight)
    assert torch.equal(own.tensor(), expected)
    own.mul_(2.0).add_(1.0, alpha=3.0)
    assert torch.equal(own.tensor(), 2.0 * expected + 3.0)


def test_without_a_working_triton_the_torch_executor_is_used(monkeypatch):
    def missing(dtype, device):
        raise subprocess.CalledProcessError(1, "gcc")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(
        sys.modules, "gossamer.virtual.compute.triton_executor", SimpleNamespace(TritonExecutor=missing)
    )
    monkeypatch.setattr("gossamer.virtual.compute.executor.triton_works", triton_works.__wrapped__)
    monkeypatch.setattr("torch.ones", lambda *shape, device: None)
    with pytest.warns(UserWarning, match="Triton does not work here .*gcc"):
        assert isinstance(make_executor(torch.float32, torch.device("cuda")), TorchExecutor)
