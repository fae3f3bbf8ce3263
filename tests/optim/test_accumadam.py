"""AccumAdam and AccumAdamW: the formula, Adam as its special case, and the manners of a torch optimizer."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.optim import AccumAdam, AccumAdamW

SHAPES = [(), (1,), (7,), (3, 4), (2, 3, 5)]
BOTH = pytest.mark.parametrize("kind", [AccumAdam, AccumAdamW])
DEVICES = pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])


def make_params(seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in SHAPES
    ]


def set_grads(params: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param)
        param.grad = noise + 0.1 * param.detach()


def train(optimizer: torch.optim.Optimizer, params: list[Tensor], num_steps: int, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        set_grads(params, step)
        optimizer.step()


def assert_all_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> None:
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)


@DEVICES
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "torchs"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)])
def test_period_one_is_adam(kind, torchs, weight_decay, foreach, device):
    ours, theirs = make_params(device=device), make_params(device=device)
    setting = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    train(kind(ours, period=1, foreach=foreach, **setting), ours, 100)
    train(torchs(theirs, **setting), theirs, 100)
    assert_all_close(ours, theirs)


@pytest.mark.parametrize(("kind", "torchs"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)])
def test_period_one_is_adam_with_groups_and_defaults(kind, torchs):
    def groups(params: list[Tensor]) -> list[dict]:
        return [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": params[2:], "betas": (0.5, 0.9), "eps": 1e-4},
        ]

    ours, theirs = make_params(), make_params()
    train(kind(groups(ours), period=1), ours, 50)
    train(torchs(groups(theirs)), theirs, 50)
    assert_all_close(ours, theirs)


def transcription(
    x: np.ndarray, grads: list[np.ndarray], *, s: int, lr: float, wd: float, decoupled: bool
) -> np.ndarray:
    """methods.md, line by line."""
    beta1, beta2, eps = 0.9, 0.99, 1e-6
    M, V, A = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(grads, start=1):
        k = int(np.ceil(t / s))
        if decoupled:
            x = x * (1 - lr * wd)
        else:
            g = g + wd * x
        A = A + g / s
        m = M + (1 - beta1) * g
        v = V + (1 - beta2) * g**2
        x = x - lr / (1 - beta1**k) * m / (np.sqrt(v) / np.sqrt(1 - beta2**k) + eps)
        if t % s == 0:
            M = beta1 * (M + (1 - beta1) * A)
            V = beta2 * (V + (1 - beta2) * A**2)
            A = np.zeros_like(x)
    return x


@DEVICES
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("period", [1, 3, 4])
@BOTH
def test_formula(kind, period, weight_decay, foreach, device):
    rng = np.random.default_rng(period)
    start = rng.standard_normal((3, 5))
    grads = [rng.standard_normal((3, 5)) for _ in range(30)]
    param = torch.tensor(start, requires_grad=True, device=device)
    optimizer = kind(
        [param], 0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=weight_decay, period=period, foreach=foreach
    )
    for grad in grads:
        param.grad = torch.tensor(grad, device=device)
        optimizer.step()
    decoupled = kind is AccumAdamW
    expected = transcription(start, grads, s=period, lr=0.02, wd=weight_decay, decoupled=decoupled)
    np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=1e-12, atol=1e-12)


@BOTH
def test_foreach_and_plain_agree_bit_for_bit_on_the_cpu(kind):
    one, two = make_params(dtype=torch.float32), make_params(dtype=torch.float32)
    train(kind(one, weight_decay=0.1, foreach=True), one, 20)
    train(kind(two, weight_decay=0.1, foreach=False), two, 20)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("through", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@BOTH
def test_state_dict_round_trip_in_mid_period(kind, through):
    straight, broken = make_params(), make_params()
    train(kind(straight, period=4), straight, 15)

    first = kind(broken, period=4)
    train(first, broken, 6)
    second = kind(broken, lr=99.0, period=7)
    second.load_state_dict(through(first.state_dict()))
    train(second, broken, 9, first=6)
    assert all(torch.equal(a, b) for a, b in zip(straight, broken, strict=True))
    assert set(second.state[broken[0]]) == {"step", "exp_avg", "exp_avg_sq", "accumulated"}


def test_parameters_without_gradient_are_skipped_and_count_their_own_steps():
    """The second parameter misses every other step: it must go as if it had been alone."""
    for foreach in (True, False):
        steady, halting = (torch.ones(3, requires_grad=True) for _ in range(2))
        alone = torch.ones(3, requires_grad=True)
        together, solo = AccumAdam([steady, halting], period=3, foreach=foreach), AccumAdam([alone], period=3)
        for step in range(14):
            steady.grad = torch.full((3,), 0.5)
            halting.grad = torch.full((3,), 1.0 + step) if step % 2 else None
            together.step()
            if step % 2:
                alone.grad = torch.full((3,), 1.0 + step)
                solo.step()
        assert torch.equal(halting, alone)
        assert together.state[steady]["step"] == 14
        assert together.state[halting]["step"] == 7


def test_nothing_happens_without_gradients():
    param = torch.ones(2, requires_grad=True)
    AccumAdamW([param]).step()
    assert torch.equal(param, torch.ones(2))


def test_closure_is_evaluated_with_gradients_and_its_loss_returned():
    param = torch.ones(2, requires_grad=True)
    optimizer = AccumAdam([param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(200)]
    assert losses[0] == 2.0
    assert losses[-1] < 1e-2


def test_lr_scheduler():
    param = torch.zeros(1, requires_grad=True)
    optimizer = AccumAdam([param], lr=0.1, period=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    for _ in range(3):
        param.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-0.1]))


def test_mixed_dtypes_and_complex_parameters():
    def mixed() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        dtypes = (torch.float32, torch.float64, torch.complex64, torch.float32)
        return [torch.randn(4, generator=generator, dtype=dtype).requires_grad_() for dtype in dtypes]

    outcomes = []
    for kind, options in (
        (AccumAdam, {"period": 1}),
        (AccumAdam, {"period": 1, "foreach": False}),
        (torch.optim.Adam, {}),
    ):
        params = mixed()
        optimizer = kind(params, **options)
        for step in range(10):
            for param in params:
                param.grad = param.detach() * (step - 3) + 1
            optimizer.step()
        outcomes.append(params)
    for ours in outcomes[:2]:
        assert_all_close(ours, outcomes[2], tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains(dtype):
    param = torch.ones(8, dtype=dtype, requires_grad=True)
    optimizer = AccumAdamW([param], lr=0.05, eps=1e-4)
    for _ in range(60):
        param.grad = 2 * param.detach()
        optimizer.step()
    assert param.dtype is dtype
    assert param.abs().max() < 0.3


def test_sparse_gradients_are_refused_before_anything_moves():
    dense, sparse = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    dense.grad, sparse.grad = torch.ones(3), torch.ones(3).to_sparse()
    optimizer = AccumAdam([{"params": [dense]}, {"params": [sparse]}])
    with pytest.raises(RuntimeError, match="AccumAdam does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"period": 0},
        {"period": 2.5},
    ],
)
@BOTH
def test_wrong_settings(kind, wrong):
    with pytest.raises(ValueError, match="Invalid"):
        kind([torch.ones(1, requires_grad=True)], **wrong)


def test_longer_periods_keep_the_second_moment_of_noise_smaller():
    """What it is for: the mean of s noisy gradients has 1/s of their variance."""
    sizes = {}
    for period in (1, 4):
        param = torch.zeros(2000, requires_grad=True)
        optimizer = AccumAdam([param], lr=0.0, betas=(0.9, 0.9), period=period)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            param.grad = torch.randn(2000, generator=generator)
            optimizer.step()
        sizes[period] = float(optimizer.state[param]["exp_avg_sq"].mean())
    assert sizes[4] == pytest.approx(sizes[1] / 4, rel=0.1)
