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

__all__ = [
    *("BLOCK", "GROUP", "HYPER", "MASTERS", "MOMENTS", "RULES", "adamw_", "convert_", "decode_moment_", "dtype_code", "empty", "encode_moment_"),
    *("hyper_record", "join_", "land_", "moments", "scale_", "split_", "sumsq", "update_"),
]

HYPER = np.dtype(
    {
        "names": ["lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale", "step", "active", "decoupled", "maximize", "rule", "seed"],
        "formats": [np.float64] * 6 + [np.int64] + [np.uint8] * 4 + [np.uint32],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 57, 58, 59, 60],
        "itemsize": 64,
    }
)
"""One update's hyper-parameters, as the kernels and the pipeline read them (cpp/simd/hyper.h)."""

BLOCK: int = _core.BLOCK
"""Elements that one sum of squares covers."""

GROUP: int = _core.GROUP
"""Elements of a parameter that share one scale of int8 moments; a range that is updated by itself starts on a multiple of it."""

RULES = {"adam": 0, "lion": 1, "adagrad": 2}
MASTERS = {"fp32": 0, "split": 1}
MOMENTS = {"fp32": 0, "bf16": 1, "int8": 2}
"""The kernels' numbers for optimizers and for how masters and moments are stored (cpp/simd/form.h)."""

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
    rule: str = "adam",
    seed: int = 0,
) -> np.ndarray[Any, Any]:
    """One HYPER record, shape (), checked as torch.optim.AdamW checks; `step` is this update's number, from 1. Raises ValueError.

    rule: "adam" (`decoupled`: AdamW), "lion" or "adagrad" (lr as decayed by the caller; betas have no meaning). With `decoupled` false
    weight decay is added to the gradient. seed, 32 bits, is that of the stochastic rounding of bf16 and int8 moments.
    """
    if rule not in RULES:
        raise ValueError(f"no rule {rule!r}: choose one of {', '.join(RULES)}")
    if not 0 <= int(seed) < 1 << 32:
        raise ValueError(f"seed is {seed}: it has 32 bits")
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
    record["rule"], record["seed"] = RULES[rule], int(seed)
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


_M_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_V_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_LOW_TYPES = (torch.int16, torch.uint16)


def moments(n: int, form: str = "fp32", rule: str = "adam") -> dict[str, torch.Tensor]:
    """Zero moments for n elements, in memory of `empty`, as keywords of `update_`: exp_avg, exp_avg_sq and, for int8, their scales.

    form: a key of MOMENTS; rule: a key of RULES (Lion has no exp_avg_sq, Adagrad no exp_avg). Else ValueError.
    """
    if form not in MOMENTS or rule not in RULES:
        raise ValueError(f"no moments {form!r} of {rule!r}: forms are {', '.join(MOMENTS)}, rules {', '.join(RULES)}")
    state: dict[str, torch.Tensor] = {}
    for name, types, absent in (("exp_avg", _M_TYPES, "adagrad"), ("exp_avg_sq", _V_TYPES, "lion")):
        if rule != absent:
            state[name] = empty(n, list(types)[MOMENTS[form]]).zero_()
            if form == "int8":
                state[f"{name}_scale"] = empty(-(-n // GROUP), torch.float32).zero_()
    return state


def update_(
    master: torch.Tensor,
    grad: torch.Tensor,
    hyper: np.ndarray[Any, Any],
    *,
    low: torch.Tensor | None = None,
    exp_avg: torch.Tensor | None = None,
    exp_avg_scale: torch.Tensor | None = None,
    exp_avg_sq: torch.Tensor | None = None,
    exp_avg_sq_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    first: int = 0,
    threads: int | None = None,
) -> torch.Tensor:
    """One update, in one pass, of any optimizer over any form of its state, which the dtypes say; returns `master`.

    Args:
        master: float32; or bfloat16 with `low`, the lower halves of a split fp32 master: int16 or uint16 (see `split_`).
        grad: float32, bfloat16 or float16; only read.
        hyper: a record of `hyper_record`, which names the rule, the step and the seed.
        exp_avg: float32, bfloat16 or int8, not for Adagrad; exp_avg_sq: float32, bfloat16 or uint8, not for Lion; both of one form.
        exp_avg_scale, exp_avg_sq_scale: float32 of ceil(N / GROUP) elements, for int8 moments alone.
        out: float32, bfloat16 or float16: receives the new master, rounded to nearest even.
        first: the number of element 0 within its parameter, a multiple of GROUP; splitting at such elements changes no bits.

    All others have N elements, are contiguous CPU tensors and share no memory; else TypeError or ValueError. The arithmetic, the rounding
    of bf16 and int8 moments and the bounds of its error are written down in cpp/simd/update.h.
    """
    split, form = _form(master, low, hyper, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    given = {"master": master, "low": low, "grad": grad, "exp_avg": exp_avg, "exp_avg_scale": exp_avg_scale}
    given |= {"exp_avg_sq": exp_avg_sq, "exp_avg_sq_scale": exp_avg_sq_scale, "out": out}
    present = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in present.items():
        _check_layout(name, tensor)
    _check({name: tensor for name, tensor in present.items() if name in ("grad", "out")})
    _check_sizes({name: tensor for name, tensor in present.items() if not name.endswith("_scale")})
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        if name in present:
            _check_scale(name, present[name], master.numel())
    _check_apart(present)
    if first < 0 or first % GROUP:
        raise ValueError(f"first is {first}: a parameter is split at multiples of {GROUP} elements")
    codes = (int(split), form, dtype_code(grad.dtype), 0 if out is None else dtype_code(out.dtype))
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in given.values())
    _core.update(addresses, codes, first, master.numel(), hyper, _threads(threads))
    _written(*(tensor for name, tensor in present.items() if name != "grad"))
    return master


def split_(parameter: torch.Tensor, low: torch.Tensor, master: torch.Tensor, *, threads: int | None = None) -> None:
    """Splits `master`, float32, into `parameter`, bfloat16, and `low`, int16 or uint16, of as many elements, from which `join_` rebuilds it.

    The parameter is the master to nearest, ties away from zero; every value is rebuilt to the bit, a NaN as 0x7fc00000. Contiguous CPU
    tensors, apart in memory; else TypeError or ValueError.
    """
    _check_halves(parameter, low, master)
    _core.split(parameter.data_ptr(), low.data_ptr(), master.data_ptr(), master.numel(), _threads(threads))
    _written(parameter, low)


def join_(master: torch.Tensor, parameter: torch.Tensor, low: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
    """Rebuilds the float32 `master` of which `split_` or `update_` left `parameter` and `low`; returns it. Errors as `split_`."""
    _check_halves(parameter, low, master)
    _core.join(master.data_ptr(), parameter.data_ptr(), low.data_ptr(), master.numel(), _threads(threads))
    _written(master)
    return master


def encode_moment_(codes: torch.Tensor, scale: torch.Tensor, src: torch.Tensor, *, threads: int | None = None) -> None:
    """Stores `src`, float32 of N elements, as `codes`, int8 (exp_avg) or uint8 (exp_avg_sq, no sign), and `scale`, ceil(N / GROUP), to nearest.

    Contiguous CPU tensors, apart in memory; else TypeError or ValueError. The error is at most half of what cpp/simd/update.h says.
    """
    _check_codes(codes, scale, src, "src")
    _core.encode(codes.data_ptr(), scale.data_ptr(), src.data_ptr(), codes.dtype is torch.int8, codes.numel(), _threads(threads))
    _written(codes, scale)


def decode_moment_(dst: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
    """The values, float32 of N elements, of `codes` and `scale`; returns `dst`. Errors as `encode_moment_`."""
    _check_codes(codes, scale, dst, "dst")
    _core.decode(dst.data_ptr(), codes.data_ptr(), scale.data_ptr(), codes.dtype is torch.int8, codes.numel(), _threads(threads))
    _written(dst)
    return dst


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
    sums = torch.empty(-(-src.numel() // BLOCK), dtype=torch.float64, device="cpu")
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


def _form(
    master: torch.Tensor, low: torch.Tensor | None, hyper: np.ndarray[Any, Any], m: Any, m_scale: Any, v: Any, v_scale: Any
) -> tuple[bool, int]:
    """Whether the master is split, and the code of the moments; TypeError or ValueError for dtypes that make no form."""
    for name, tensor in {"master": master, "low": low, "exp_avg": m, "exp_avg_scale": m_scale, "exp_avg_sq": v, "exp_avg_sq_scale": v_scale}.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "master"):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if not isinstance(hyper, np.ndarray) or hyper.dtype != HYPER or hyper.size != 1:
        raise TypeError("hyper must be one record of offload.ops.HYPER: see hyper_record")
    split = low is not None
    if master.dtype is not (torch.bfloat16 if split else torch.float32):
        raise TypeError(f"master is {master.dtype}: float32 without low, bfloat16 with it")
    if low is not None and low.dtype not in _LOW_TYPES:
        raise TypeError(f"low is {low.dtype}: it must be int16 or uint16")
    rule = int(hyper["rule"].item())
    if rule not in RULES.values():
        raise ValueError(f"hyper has rule {rule}: there are {RULES}")
    forms = set()
    for name, tensor, scale, types, absent in (
        ("exp_avg", m, m_scale, _M_TYPES, RULES["adagrad"]),
        ("exp_avg_sq", v, v_scale, _V_TYPES, RULES["lion"]),
    ):
        if (tensor is None) != (rule == absent):
            raise ValueError(f"{name} is {'missing' if tensor is None else 'not kept by this rule'}")
        if tensor is None:
            form = None
        elif tensor.dtype in types:
            form = types[tensor.dtype]
            forms.add(form)
        else:
            raise TypeError(f"{name} is {tensor.dtype}: it must be one of {', '.join(map(str, types))}")
        if (scale is not None) != (form == MOMENTS["int8"]):
            raise ValueError(f"{name}_scale is {'missing' if scale is None else 'for moments in int8 alone'}")
        if scale is not None and scale.dtype is not torch.float32:
            raise TypeError(f"{name}_scale is {scale.dtype}: it must be float32")
    if len(forms) != 1:
        raise TypeError("exp_avg and exp_avg_sq are of different forms")
    return split, forms.pop()


def _check(tensors: dict[str, torch.Tensor], fp32: tuple[str, ...] = ()) -> None:
    """Refuses whatever the kernels would misread."""
    for name, tensor in tensors.items():
        _check_layout(name, tensor)
        if tensor.dtype not in _CODES or (name in fp32 and tensor.dtype is not torch.float32):
            raise TypeError(f"{name} is {tensor.dtype}: it must be {'float32' if name in fp32 else 'float32, bfloat16 or float16'}")
    _check_sizes(tensors)


def _check_layout(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on {tensor.device}: the kernels work on CPU tensors")
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg():
        raise TypeError(f"{name} is not contiguous in memory: give {name}.contiguous() and copy the result back")


def _check_sizes(tensors: dict[str, torch.Tensor]) -> None:
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError("numbers of elements differ: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))


def _check_scale(name: str, scale: torch.Tensor, n: int) -> None:
    if scale.numel() != -(-n // GROUP):
        raise ValueError(f"{name} has {scale.numel()} elements, {n} elements need {-(-n // GROUP)}")


def _check_halves(parameter: torch.Tensor, low: torch.Tensor, master: torch.Tensor) -> None:
    tensors = {"parameter": parameter, "low": low, "master": master}
    for name, tensor in tensors.items():
        _check_layout(name, tensor)
    if parameter.dtype is not torch.bfloat16 or low.dtype not in _LOW_TYPES or master.dtype is not torch.float32:
        raise TypeError(f"parameter is {parameter.dtype}, low {low.dtype}, master {master.dtype}: they must be bfloat16, int16 or uint16, float32")
    _check_sizes(tensors)
    _check_apart(tensors)


def _check_codes(codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, name: str) -> None:
    tensors = {"codes": codes, "scale": scale, name: values}
    for each, tensor in tensors.items():
        _check_layout(each, tensor)
    if codes.dtype not in (torch.int8, torch.uint8) or scale.dtype is not torch.float32 or values.dtype is not torch.float32:
        raise TypeError(f"codes are {codes.dtype}, scale {scale.dtype}, {name} {values.dtype}: they must be int8 or uint8, float32, float32")
    _check_sizes({"codes": codes, name: values})
    _check_scale("scale", scale, codes.numel())
    _check_apart(tensors)


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
