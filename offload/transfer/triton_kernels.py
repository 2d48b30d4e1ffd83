"""The host's kernels for CUDA, in Triton: the same operations in the same order, so the same bits.

[Note: the same bits]
Every operation is one that IEEE 754 rounds in one way: +, -, *, `tl.fma`, `tl.div_rn`, `tl.sqrt_rn`; nothing else is used on floats, and
`enable_fp_fusion=False` keeps the compiler from making an fma of a product and a sum. Triton flushes no denormals in these. Storage in bf16 and
fp16 is rounded by integers, as on the host, and all memory is loaded and stored as integers. Squares are summed in float64, where squares of fp32
values are exact, in the host's order: within a block of BLOCK elements 16 lanes by index modulo 16, then pairwise.
The forms and their arithmetic are written down in cpp/simd/update.h. Importing this needs Triton.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from offload.ops import BLOCK, GROUP, dtype_code
from offload.transfer.kernels import Arrays, Coefficients

ROWS = 4  # groups that one program updates
BLOCKS = 16  # blocks that one program lands
_LANES = 16
_NONE = -1
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes: what a kernel loads and stores


@triton.jit
def _bits(x):
    """The bits of fp32 values, a NaN's as 0x7fc00000."""
    return tl.where(x != x, 0x7FC00000, x.to(tl.uint32, bitcast=True)).to(tl.uint32)


@triton.jit
def _floats(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _widen(raw, CODE: tl.constexpr):
    """fp32 values of stored ones: CODE 0 fp32, 1 bf16, 2 fp16."""
    if CODE == 0:
        return raw.to(tl.float32, bitcast=True)
    elif CODE == 1:
        return _floats(raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _half_bits(bits):
    """fp16, to nearest even, of the bits of fp32 values; denormals kept."""
    size = bits & 0x7FFFFFFF
    small = (_floats(size) + 0.5).to(tl.uint32, bitcast=True) - 0x3F000000  # 0.5 has halves of its last place at 2^-24
    normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
    half = tl.where(size >= 0x47800000, 0x7C00, tl.where(size < 0x38800000, small, normal))
    return tl.where(size > 0x7F800000, 0x7E00, half) | ((bits >> 16) & 0x8000)


@triton.jit
def _narrow(x, CODE: tl.constexpr):
    """What is stored for fp32 values: to nearest even."""
    bits = _bits(x)
    if CODE == 0:
        return bits.to(tl.int32, bitcast=True)
    elif CODE == 1:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        return _half_bits(bits).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _load_master(master, low, at, inside, SPLIT: tl.constexpr):
    if SPLIT:
        upper = tl.load(master + at, inside, 0).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return _floats(upper + tl.load(low + at, inside, 0).to(tl.int32).to(tl.uint32, bitcast=True))
    else:
        return _widen(tl.load(master + at, inside, 0), 0)


@triton.jit
def _store_master(master, low, at, inside, p, SPLIT: tl.constexpr):
    bits = _bits(p)
    if SPLIT:
        tl.store(master + at, ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.int16, bitcast=True), inside)
        tl.store(low + at, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), inside)
    else:
        tl.store(master + at, bits.to(tl.int32, bitcast=True), inside)


@triton.jit
def _signed_as(size, x):
    """`size`, with its sign changed where `x` has one."""
    return _floats(size.to(tl.uint32, bitcast=True) ^ (x.to(tl.uint32, bitcast=True) & 0x80000000))


@triton.jit
def _load_moment(moment, scale, at, row, inside, there, MOMENTS: tl.constexpr, SIGNED: tl.constexpr):
    raw = tl.load(moment + at, inside, 0)
    if MOMENTS != 2:
        return _widen(raw, MOMENTS)
    else:
        s = tl.load(scale + row, there, 0).to(tl.float32, bitcast=True)[:, None]
        if SIGNED:
            f = _floats((((raw.to(tl.int32) << 3) & 0x83F8) | 0x4000).to(tl.uint32, bitcast=True) << 16)
            return tl.fma(f, s, _signed_as(-2.0 * s, f))
        else:
            f = _floats(((raw.to(tl.uint8, bitcast=True).to(tl.uint32) << 3) + 0x4000) << 16)
            return tl.fma(f, s, -2.0 * s)


@triton.jit
def _mixed(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _random(key_low, key_high, group, column):
    """The random words of groups of elements; see [Note: stochastic rounding] in cpp/simd/update.h."""
    key = ((key_high.to(tl.int64) << 32) | (key_low.to(tl.int64) & 0xFFFFFFFF)).to(tl.uint64, bitcast=True)
    bits = _mixed(key ^ group.to(tl.uint64))
    start, step = (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)
    return start[:, None] + step[:, None] * column[None, :].to(tl.uint32)


@triton.jit
def _store_bytes(moment, scale, at, row, inside, there, x, random, SIGNED: tl.constexpr, TOP: tl.constexpr):
    """A group's moments in bytes with its scale; `random` is what is added before the lower bits are dropped."""
    bits = _bits(x)
    most = tl.max((bits & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=1)
    size = tl.div_rn(most.to(tl.float32, bitcast=True), TOP + tl.zeros_like(most).to(tl.float32)) * 1.000000476837158203125
    usable = tl.where(size > 1.1754943508222875e-38, size, 1.1754943508222875e-38)
    inverse = tl.div_rn(tl.zeros_like(usable) + 1.0, usable)
    codes = tl.where((most >= 0x7F800000) | (most == 0), 0, 1)[:, None]  # none where everything is zero or something is not finite
    stored = tl.where(most >= 0x7F800000, 0x7FC00000, tl.where(most == 0, 0, usable.to(tl.int32, bitcast=True)))
    tl.store(scale + row, stored.to(tl.int32), there)
    two = tl.zeros_like(x) + 2.0
    if SIGNED:
        w = (tl.fma(x, inverse[:, None], _signed_as(two, x)).to(tl.uint32, bitcast=True) + random) >> 16
        code = ((w >> 3) & 0x7F) | ((w >> 8) & 0x80)
    else:
        w = (tl.fma(x, inverse[:, None], two).to(tl.uint32, bitcast=True) + random) >> 16
        code = tl.maximum((w >> 3).to(tl.int32), 0x801).to(tl.uint32) & 0xFF
    tl.store(moment + at, (code * codes.to(tl.uint32)).to(tl.uint8).to(tl.int8, bitcast=True), inside)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _update(
    master, low, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, out, n, first_group, key_low, key_high,
    grad_scale, l2, decay, lerp1, beta2, take2, unbias2, eps, minus_step_size,
    SPLIT: tl.constexpr, MOMENTS: tl.constexpr, GRAD: tl.constexpr, OUT: tl.constexpr, COUPLED: tl.constexpr, FROM_GRAD: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUP)
    at = row[:, None] * GROUP + column[None, :]
    inside, there = at < n, row * GROUP < n
    p = _load_master(master, low, at, inside, SPLIT)
    m = _load_moment(exp_avg, exp_avg_scale, at, row, inside, there, MOMENTS, True)
    v = _load_moment(exp_avg_sq, exp_avg_sq_scale, at, row, inside, there, MOMENTS, False)
    g = _widen(tl.load(grad + at, inside, 0), GRAD) * grad_scale
    if COUPLED:
        g = tl.fma(p, l2, g)
    m = tl.fma(g - m, lerp1, g if FROM_GRAD else m)
    v = tl.fma(g * take2, g, v * beta2)
    size = tl.fma(tl.sqrt_rn(v), unbias2, eps)
    p = tl.fma(tl.div_rn(m, size), minus_step_size, p * decay)
    if MOMENTS == 0:
        tl.store(exp_avg + at, _narrow(m, 0), inside)
        tl.store(exp_avg_sq + at, _narrow(v, 0), inside)
    else:
        random = _random(key_low, key_high, row + first_group, column)
        if MOMENTS == 1:
            tl.store(exp_avg + at, ((_bits(m) + (random & 0xFFFF)) >> 16).to(tl.uint16).to(tl.int16, bitcast=True), inside)
            tl.store(exp_avg_sq + at, ((_bits(v) + (random >> 16)) >> 16).to(tl.uint16).to(tl.int16, bitcast=True), inside)
        else:
            _store_bytes(exp_avg, exp_avg_scale, at, row, inside, there, m, random & 0x7FFFF, True, 494.0)
            _store_bytes(exp_avg_sq, exp_avg_sq_scale, at, row, inside, there, v, random >> 13, False, 126974.0)
    _store_master(master, low, at, inside, p, SPLIT)
    if OUT >= 0:
        tl.store(out + at, _narrow(p, OUT), inside)


@triton.jit
def _land(
    dst, src, sums, n, scale, DST: tl.constexpr, SRC: tl.constexpr, ACCUMULATE: tl.constexpr, AS_IT_IS: tl.constexpr, SUMS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lane = block[:, None] * BLOCK + tl.arange(0, LANES)[None, :]
    total = tl.zeros([BLOCKS, LANES], tl.float64)
    for start in range(0, BLOCK, LANES):
        at = lane + start
        inside = at < n
        stored = tl.load(src + at, inside, 0)
        if not AS_IT_IS:
            x = _widen(stored, SRC) * scale
            if ACCUMULATE:
                x = _widen(tl.load(dst + at, inside, 0), DST) + x
            stored = _narrow(x, DST)
        tl.store(dst + at, stored, inside)
        if SUMS:
            wide = _widen(stored, DST).to(tl.float64)
            total += wide * wide
    if SUMS:  # lane i and i + 8, then i + 4, ...: a sum of two has one order
        total = tl.sum(tl.reshape(total, [BLOCKS, 2, LANES // 2]), axis=1)
        total = tl.sum(tl.reshape(total, [BLOCKS, 2, LANES // 4]), axis=1)
        total = tl.sum(tl.reshape(total, [BLOCKS, 2, LANES // 8]), axis=1)
        total = tl.sum(total, axis=1)
        bits = tl.where(total != total, 0x7FF8000000000000, total.to(tl.int64, bitcast=True))
        tl.store(sums + block, bits, block * BLOCK < n)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as integers of its elements' size."""
    return tensor.view(_RAW[tensor.element_size()])


def _signed(word: int) -> int:
    """32 bits as a signed number, whose type never depends on its value."""
    return word - (1 << 32) if word >> 31 else word


class TritonKernels:
    """`transfer.kernels.Kernels` by Triton, on the current stream of the current device."""

    def land(self, dst: torch.Tensor, src: torch.Tensor, accumulate: bool, scale: float, sums: torch.Tensor | None) -> None:
        n = dst.numel()
        if not n:
            return
        as_it_is = dst.dtype == src.dtype and not accumulate and scale == 1.0
        to = _raw(dst)
        _land[(triton.cdiv(n, BLOCKS * BLOCK),)](
            to, _raw(src), to if sums is None else sums.view(torch.int64), n, float(scale), dtype_code(dst.dtype), dtype_code(src.dtype),
            accumulate, as_it_is, sums is not None, BLOCKS, BLOCK, _LANES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def update(self, arrays: Arrays, first: int, hyper: np.ndarray[Any, Any]) -> None:
        n = arrays.master.numel()
        if not n:
            return
        c = Coefficients.of(hyper)
        a = arrays
        master = _raw(a.master)
        given = (a.low, a.grad, a.exp_avg, a.exp_avg_scale, a.exp_avg_sq, a.exp_avg_sq_scale, a.out)
        _update[(triton.cdiv(n, ROWS * GROUP),)](
            master, *(master if t is None else _raw(t) for t in given), n, first // GROUP, _signed(c.key & 0xFFFFFFFF), _signed(c.key >> 32),
            c.grad_scale, c.l2, c.decay, c.lerp1, c.beta2, c.take2, c.unbias2, c.eps, c.minus_step_size,
            a.low is not None, _MOMENTS[a.exp_avg.dtype], dtype_code(a.grad.dtype), _NONE if a.out is None else dtype_code(a.out.dtype),
            c.coupled, c.from_grad, ROWS, GROUP, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
