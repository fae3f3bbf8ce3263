"""AccumAdam and AccumAdamW: Adam with moments that change only once per ``period`` steps.

With small local batches a single gradient is noisy, and its square inflates Adam's second moment. Here the moments
are updated with the mean of ``s`` successive gradients, while every step still uses its newest gradient. With period
``s``, ``k = ceil(t/s)`` and ``A = 0`` at the start:

    every step:   A += g/s ;  m = M + (1−β1) g ;  v = V + (1−β2) g²
                  x −= lr/(1−β1^k) · m / (√v/√(1−β2^k) + ε)
    every s-th:   M = β1 (M + (1−β1) A) ;  V = β2 (V + (1−β2) A²) ;  A = 0

The weight decay of AccumAdam is L2 (``g += wd·x`` first), that of AccumAdamW is decoupled (``x *= 1 − lr·wd`` first).
With ``s = 1`` they are Adam and AdamW, with one difference in the state: M and V are stored already decayed for the
next step. The period should grow with the number of workers.

State per parameter: ``step`` (t), ``exp_avg`` (M), ``exp_avg_sq`` (V) and ``accumulated`` (A).

Reference: Wang, Zhang, Wu, Johansson, "From Promise to Practice: Realizing High-performance Decentralized
Training", ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.vectors.vector_math import CHUNK


class AccumAdam(Optimizer):
    """Adam whose moments are updated once per ``period`` steps, with the mean of the gradients since the last update.

    Every step still uses its newest gradient. The module's docstring has the formulas.

    Args:
        params: Parameters or parameter groups, as for every torch optimizer.
        lr: Learning rate.
        betas: Decay of the first and the second moment, once per period.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        period: Number of gradients per update of the moments; 1 is Adam.
        foreach: ``True`` updates all tensors of a group together with few kernels. ``False`` updates one tensor after
            the other, which needs temporaries for one tensor only. ``None`` depends on the device: on a GPU all
            together, on the CPU chunk by chunk, so that temporaries stay in the cache.
    """

    _decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        period: int = 4,
        foreach: bool | None = None,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if int(period) != period or period < 1:
            raise ValueError(f"Invalid period: {period} (a whole number of steps, at least 1)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "period": int(period),
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step with the gradients in ``p.grad``. Return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Check before anything changes, so that a refused step changes no parameter.
            if any(p.grad is not None and p.grad.layout is not torch.strided for p in group["params"]):
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients: use torch.optim.SparseAdam, "
                    "or make the embedding dense with sparse=False"
                )
        for group in self.param_groups:
            setting = _Setting.of(group, self._decoupled)
            params = [p for p in group["params"] if p.grad is not None]
            for batch in _by_device_and_dtype(params):
                on_cpu = batch[0].device.type == "cpu"
                if group["foreach"] is None and on_cpu:
                    _update_each(*_in_chunks(*self._gather(batch)), setting)
                elif group["foreach"] is False:
                    _update_each(*self._gather(batch), setting)
                else:
                    _update_foreach(*self._gather(batch), setting)
        return loss

    def _gather(self, params: Sequence[Tensor]) -> tuple[_Tensors, list[int]]:
        """Count one step, and return the tensors of the update as parallel lists."""
        states = []
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)  # on the CPU, as in torch's optimizers: every step reads it
                for name in ("exp_avg", "exp_avg_sq", "accumulated"):
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["step"] += 1
            states.append(state)
        tensors = _Tensors(
            params=_real(params),
            grads=_real([p.grad for p in params if p.grad is not None]),
            exp_avgs=_real([state["exp_avg"] for state in states]),
            exp_avg_sqs=_real([state["exp_avg_sq"] for state in states]),
            accumulated=_real([state["accumulated"] for state in states]),
        )
        return tensors, [int(state["step"]) for state in states]


class AccumAdamW(AccumAdam):
    """AccumAdam with decoupled weight decay, as AdamW is to Adam: every step multiplies the parameters by
    ``1 − lr·weight_decay``. The other arguments are those of AccumAdam; with period 1 it is AdamW.
    """

    _decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        period: int = 4,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, period, foreach)


class _Tensors(NamedTuple):
    """The parameters of one update with their gradients and optimizer state, as parallel lists."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    accumulated: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Setting:
    """The hyper-parameters of one parameter group, as Python numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    l2: float
    shrink: float
    period: int

    @staticmethod
    def of(group: dict[str, Any], decoupled: bool) -> _Setting:
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = group["betas"]
        return _Setting(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            l2=0.0 if decoupled else weight_decay,
            shrink=1 - lr * weight_decay if decoupled else 1.0,
            period=group["period"],
        )

    def corrections(self, step: int) -> tuple[float, float]:
        """Return ``−lr/(1−β1^k)`` and ``√(1−β2^k)`` at step ``t``, with ``k = ceil(t/s)``."""
        num_periods = -(-step // self.period)
        return -self.lr / (1 - self.beta1**num_periods), (1 - self.beta2**num_periods) ** 0.5


def _update_each(tensors: _Tensors, steps: list[int], setting: _Setting) -> None:
    for param, grad, exp_avg, exp_avg_sq, accumulated, step in zip(*tensors, steps, strict=True):
        if setting.l2:
            grad = grad.add(param, alpha=setting.l2)
        if setting.shrink != 1.0:
            param.mul_(setting.shrink)
        step_size, root_correction = setting.corrections(step)
        numerator = exp_avg.add(grad, alpha=1 - setting.beta1)
        denominator = exp_avg_sq.addcmul(grad, grad, value=1 - setting.beta2)
        denominator.sqrt_().div_(root_correction).add_(setting.eps)
        param.addcdiv_(numerator, denominator, value=step_size)

        accumulated.add_(grad, alpha=1 / setting.period)
        if step % setting.period == 0:
            exp_avg.add_(accumulated, alpha=1 - setting.beta1).mul_(setting.beta1)
            exp_avg_sq.addcmul_(accumulated, accumulated, value=1 - setting.beta2).mul_(setting.beta2)
            accumulated.zero_()


def _update_foreach(tensors: _Tensors, steps: list[int], setting: _Setting) -> None:
    """Do the same operations in the same order, each on all tensors at once."""
    params, grads = tensors.params, tensors.grads
    if setting.l2:
        grads = list(torch._foreach_add(grads, params, alpha=setting.l2))
    if setting.shrink != 1.0:
        torch._foreach_mul_(params, setting.shrink)
    step_sizes, root_corrections = zip(*map(setting.corrections, steps), strict=True)
    numerators = torch._foreach_add(tensors.exp_avgs, grads, alpha=1 - setting.beta1)
    denominators = torch._foreach_addcmul(tensors.exp_avg_sqs, grads, grads, value=1 - setting.beta2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_div_(denominators, root_corrections)
    torch._foreach_add_(denominators, setting.eps)
    torch._foreach_addcdiv_(params, numerators, denominators, step_sizes)
    del numerators, denominators

    torch._foreach_add_(tensors.accumulated, grads, alpha=1 / setting.period)
    # Every parameter counts its own steps (it may lack a gradient in some), so periods need not end together.
    ending = [index for index, step in enumerate(steps) if step % setting.period == 0]
    if ending:
        exp_avgs = [tensors.exp_avgs[index] for index in ending]
        exp_avg_sqs = [tensors.exp_avg_sqs[index] for index in ending]
        accumulated = [tensors.accumulated[index] for index in ending]
        torch._foreach_add_(exp_avgs, accumulated, alpha=1 - setting.beta1)
        torch._foreach_mul_(exp_avgs, setting.beta1)
        torch._foreach_addcmul_(exp_avg_sqs, accumulated, accumulated, value=1 - setting.beta2)
        torch._foreach_mul_(exp_avg_sqs, setting.beta2)
        torch._foreach_zero_(accumulated)


def _in_chunks(tensors: _Tensors, steps: list[int]) -> tuple[_Tensors, list[int]]:
    """Return the same with long tensors split into chunks, whose temporaries fit into a core's cache."""
    chunked = _Tensors([], [], [], [], [])
    chunk_steps = []
    for *row, step in zip(*tensors, steps, strict=True):
        unsplit = row[0].numel() <= CHUNK or not all(tensor.is_contiguous() for tensor in row)
        chunks = [(tensor,) if unsplit else tensor.view(-1).split(CHUNK) for tensor in row]
        for target, tensor_chunks in zip(chunked, chunks, strict=True):
            target.extend(tensor_chunks)
        chunk_steps += [step] * len(chunks[0])
    return chunked, chunk_steps


def _by_device_and_dtype(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return groups of parameters that one foreach call can update together."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for param in params:
        assert param.grad is not None
        groups.setdefault((param.device, param.dtype, param.grad.dtype), []).append(param)
    return list(groups.values())


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return complex tensors as pairs of real numbers, each with its own moments, as torch's Adam does."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
