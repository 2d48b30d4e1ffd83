"""The kernels on CPU tensors: one-pass Adam, the landing of gradients, conversion, and host memory as the arenas have it.

Everything works in place, on `threads` threads of our own (`None`: OFFLOAD_THREADS, else the physical cores this process
may use), with the GIL released. Results do not depend, to the bit, on the instruction set, threads or alignment.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from offload import _core

__all__ = ["BLOCK", "HYPER", "adamw_", "convert_", "dtype_code", "empty", "hyper_record", "land_", "scale_", "sumsq"]

HYPER = np.dtype(
    {
        "names": ["lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale", "step", "active", "decoupled", "maximize"],
        "formats": [np.float64] * 6 + [np.int64] + [np.uint8] * 3,
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 57, 58],
        "itemsize": 64,
    }
)
"""One update's hyper-parameters, as the kernels and the pipeline read them (cpp/simd/hyper.h)."""

BLOCK: int = _core.BLOCK
"""Elements that one sum of squares covers."""

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def dtype_code(dtype: torch.dtype) -> int:
    """The kernels' number for a dtype: fp32 0, bf16 1, fp16 2; others raise TypeError."""
    if dtype not in _CODES:
        raise TypeError(f"the kernels work on float32, bfloat16 and float16, not {dtype}")
    return _CODES[dtype]


def empty(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`n` elements of uninitialised host memory, shape (n,): exact to the page, aligned for direct I/O, on huge pages from 2 MiB up.

    A mapping of its own, left out of forked children and given back with the tensor. Raises ValueError for a negative n, MemoryError
    or OSError where the system has no more.
    """
    from offload.memory.arena import reserve

    if n < 0:
        raise ValueError(f"a tensor cannot have {n} elements")
    return reserve(n * dtype.itemsize).view(dtype)


def hyper_record(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
    active: bool = True,
) -> np.ndarray[Any, Any]:
    """One HYPER record, shape (), checked as torch.optim.AdamW checks; `step` is this update's number, from 1. Raises ValueError."""
    values = {
        "lr": float(lr),
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "eps": float(eps),
        "weight_decay": float(weight_decay),
        "grad_scale": float(grad_scale),
    }
    for name, value in values.items():
        if not math.isfinite(value) or (value < 0 and name != "grad_scale"):
            raise ValueError(f"{name} is {value}: it must be finite{'' if name == 'grad_scale' else ' and not negative'}")
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise ValueError(f"{name} is {values[name]}: it must be below 1")
    if int(step) != step or step < 1:
        raise ValueError(f"step is {step}: it counts the updates, from 1")
    record = np.zeros((), HYPER)
    for name, value in values.items():
        record[name] = value
    record["step"], record["active"], record["decoupled"], record["maximize"] = int(step), active, decoupled, maximize
    return record


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    out: torch.Tensor | None = None,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
    threads: int | None = None,
) -> torch.Tensor:
    """Updates `master` by AdamW (`decoupled=False`: Adam with L2 decay) in one pass over the memory; returns `master`.

    Args:
        master, exp_avg, exp_avg_sq: float32, N elements each, updated in place.
        grad: float32, bfloat16 or float16, N elements; only read.
        step: this update's number, from 1, for the bias corrections.
        out: float32, bfloat16 or float16, N elements: receives the new master, rounded to nearest even.
        grad_scale: the gradient is multiplied by it first (1 / loss scale * clip factor).

    All are contiguous CPU tensors of the same number of elements that share no memory; else TypeError (dtype, device, layout) or
    ValueError (sizes, overlap, hyper-parameters). Equal to torch.optim.AdamW (arXiv:1711.05101) and Adam (arXiv:1412.6980) to a few
    units in the last place; the arithmetic is written down in cpp/simd/adam.h.
    """
    tensors = {"master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if out is not None:
        tensors["out"] = out
    _check(tensors, fp32=("master", "exp_avg", "exp_avg_sq"))
    _check_apart(tensors)
    record = hyper_record(
        step=step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale, decoupled=decoupled, maximize=maximize
    )
    _core.adamw(
        master.data_ptr(),
        grad.data_ptr(),
        dtype_code(grad.dtype),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        0 if out is None else out.data_ptr(),
        0 if out is None else dtype_code(out.dtype),
        master.numel(),
        record,
        _threads(threads),
    )
    _written(master, exp_avg, exp_avg_sq, *([] if out is None else [out]))
    return master


def land_(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    accumulate: bool = False,
    scale: float = 1.0,
    block_sums: torch.Tensor | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """dst = src * scale, or with `accumulate` dst += src * scale, computed in fp32 and rounded to dst's dtype; returns `dst`.

    `block_sums`, float64 of ceil(N / BLOCK) elements, receives the sums of squares of what dst then holds, per BLOCK elements.
    Contiguous CPU tensors of N elements in float32, bfloat16 or float16, apart in memory; else TypeError or ValueError.
    """
    tensors = {"dst": dst, "src": src}
    _check(tensors)
    _check_apart(tensors)
    if block_sums is not None:
        _check_sums(block_sums, dst.numel())
    address = 0 if block_sums is None else block_sums.data_ptr()
    _core.land(
        dst.data_ptr(), dtype_code(dst.dtype), src.data_ptr(), dtype_code(src.dtype), dst.numel(), accumulate, scale, address, _threads(threads)
    )
    _written(dst, *([] if block_sums is None else [block_sums]))
    return dst


def sumsq(src: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
    """The sums of squares of each BLOCK elements of `src`: float64, shape (ceil(N / BLOCK),); non-finite where an element is."""
    _check({"src": src})
    sums = torch.empty(-(-src.numel() // BLOCK), dtype=torch.float64)
    _core.sumsq(src.data_ptr(), dtype_code(src.dtype), src.numel(), sums.data_ptr(), _threads(threads))
    return sums


def convert_(dst: torch.Tensor, src: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
    """dst = src in dst's dtype, to nearest even, denormals kept; contiguous CPU tensors of N elements, apart in memory. Returns `dst`."""
    tensors = {"dst": dst, "src": src}
    _check(tensors)
    _check_apart(tensors)
    _core.convert(dst.data_ptr(), dtype_code(dst.dtype), src.data_ptr(), dtype_code(src.dtype), dst.numel(), _threads(threads))
    _written(dst)
    return dst


def scale_(dst: torch.Tensor, factor: float, *, threads: int | None = None) -> torch.Tensor:
    """dst *= factor, computed in fp32 and rounded to dst's dtype; a contiguous CPU tensor. Returns `dst`."""
    _check({"dst": dst})
    _core.scale(dst.data_ptr(), dtype_code(dst.dtype), dst.numel(), factor, _threads(threads))
    _written(dst)
    return dst


def _threads(threads: int | None) -> int:
    if threads is None:
        return _core.default_threads()
    if threads < 1:
        raise ValueError(f"threads is {threads}: give at least 1, or None for the default")
    return threads


def _check(tensors: dict[str, torch.Tensor], fp32: tuple[str, ...] = ()) -> None:
    """Refuses whatever the kernels would misread."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if tensor.device.type != "cpu":
            raise TypeError(f"{name} is on {tensor.device}: the kernels work on CPU tensors")
        if tensor.dtype not in _CODES or (name in fp32 and tensor.dtype is not torch.float32):
            raise TypeError(f"{name} is {tensor.dtype}: it must be {'float32' if name in fp32 else 'float32, bfloat16 or float16'}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg():
            raise TypeError(f"{name} is not contiguous in memory: give {name}.contiguous() and copy the result back")
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError("numbers of elements differ: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))


def _check_apart(tensors: dict[str, torch.Tensor]) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize, name) for name, t in tensors.items() if t.numel())
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{one} and {other} share memory")


def _check_sums(block_sums: torch.Tensor, n: int) -> None:
    if block_sums.dtype is not torch.float64 or block_sums.device.type != "cpu" or not block_sums.is_contiguous():
        raise TypeError("block_sums must be a contiguous float64 CPU tensor")
    if block_sums.numel() != -(-n // BLOCK):
        raise ValueError(f"block_sums has {block_sums.numel()} elements, {n} elements need {-(-n // BLOCK)}")


def _written(*tensors: torch.Tensor) -> None:
    """Tells autograd, so that a backward which saved the old value raises instead of using the new one."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
