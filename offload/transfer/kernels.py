"""What works on the memory of a device that the host's kernels may not touch: one interface, here over the host's kernels for `sim`.

[Note: work on the device]
Gradients that rest on such a device land there, and the state that rests there is updated there, by work that runs in the order in which it was
submitted (`Device.work`). What it computes is to the bit what the host's kernels compute (cpp/simd/update.h, cpp/simd/land.h), so that where
something rests changes no number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from offload import _core
from offload.ops import RULES, dtype_code

_MASK = (1 << 64) - 1
_CODED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass(frozen=True)
class Arrays:
    """N elements of one parameter's state, in device memory: a master, fp32, or its upper halves, bf16, with `low`, int16; the gradient; Adam's
    moments, fp32, bf16, or int8 and uint8 with fp32 scales of ceil(N / GROUP); and the copy that is computed with. None: the form has none."""

    master: torch.Tensor
    low: torch.Tensor | None
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_scale: torch.Tensor | None
    exp_avg_sq: torch.Tensor
    exp_avg_sq_scale: torch.Tensor | None
    out: torch.Tensor | None


class Kernels(Protocol):
    """The host's kernels, on device memory; see [Note: work on the device]. fp32, bf16 or fp16 wherever nothing else is said."""

    def land(self, dst: torch.Tensor, src: torch.Tensor, accumulate: bool, scale: float, sums: torch.Tensor | None) -> None:
        """dst = src * scale, or dst += src * scale; `sums`, float64, a sum of squares of what dst then holds for each BLOCK elements."""

    def update(self, arrays: Arrays, first: int, hyper: np.ndarray[Any, Any]) -> None:
        """One update of Adam or AdamW by one record of ops.HYPER; `first` is the number of element 0 within its parameter."""


class HostKernels:
    """Where device memory is RAM."""

    def land(self, dst: torch.Tensor, src: torch.Tensor, accumulate: bool, scale: float, sums: torch.Tensor | None) -> None:
        where = 0 if sums is None else sums.data_ptr()
        _core.land(dst.data_ptr(), dtype_code(dst.dtype), src.data_ptr(), dtype_code(src.dtype), dst.numel(), accumulate, scale, where)

    def update(self, arrays: Arrays, first: int, hyper: np.ndarray[Any, Any]) -> None:
        a = arrays
        given = (a.master, a.low, a.grad, a.exp_avg, a.exp_avg_scale, a.exp_avg_sq, a.exp_avg_sq_scale, a.out)
        form = int(a.low is not None), _CODED[a.exp_avg.dtype], dtype_code(a.grad.dtype), 0 if a.out is None else dtype_code(a.out.dtype)
        _core.update(tuple(0 if t is None else t.data_ptr() for t in given), form, first, a.master.numel(), hyper)


@dataclass(frozen=True)
class Coefficients:
    """The scalars of one update of Adam or AdamW, each rounded once to fp32, and the key of its random rounding: cpp/simd/hyper.h."""

    grad_scale: float
    l2: float
    decay: float
    lerp1: float
    beta2: float
    take2: float
    unbias2: float
    eps: float
    minus_step_size: float
    coupled: bool
    from_grad: bool
    key: int

    @classmethod
    def of(cls, hyper: np.ndarray[Any, Any]) -> Coefficients:
        """From an active record of ops.HYPER. ValueError for a rule other than Adam's."""
        if int(hyper["rule"]) != RULES["adam"]:
            raise ValueError(f"hyper has rule {int(hyper['rule'])}: what rests on this device is updated by Adam and AdamW alone")
        lr, beta1, beta2, decay = (float(hyper[k]) for k in ("lr", "beta1", "beta2", "weight_decay"))
        decoupled, step, scale = bool(hyper["decoupled"]), int(hyper["step"]), float(hyper["grad_scale"])
        from_grad = beta1 < 0.5
        return cls(
            grad_scale=_fp32(-scale if hyper["maximize"] else scale), l2=_fp32(0.0 if decoupled else decay),
            decay=_fp32(1.0 - lr * decay if decoupled else 1.0), lerp1=_fp32(-beta1 if from_grad else 1.0 - beta1), beta2=_fp32(beta2),
            take2=_fp32(1.0 - beta2), unbias2=_fp32(1.0 / math.sqrt(1.0 - _power(beta2, step))), eps=_fp32(float(hyper["eps"])),
            minus_step_size=_fp32(-lr / (1.0 - _power(beta1, step))), coupled=not decoupled and decay != 0.0, from_grad=from_grad,
            key=mixed(mixed(int(hyper["seed"])) ^ step),
        )  # fmt: skip


def mixed(x: int) -> int:
    """splitmix64's function."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def _power(base: float, exponent: int) -> float:
    """By squaring, as the host's kernels do: a library's pow() may differ in the last place."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        exponent >>= 1
        base *= base
    return result


def _fp32(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))
