"""The kernels in Triton give the host's bits: on a GPU where there is one, else in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import ops
from offload.transfer.kernels import Arrays, HostKernels, Kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: its kernels are not tested here", allow_module_level=True)
if DEVICE == "cpu" and "triton" in sys.modules:
    pytest.skip("Triton was imported without its interpreter: run this file by itself", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")  # read when kernels, Triton's own among them, are defined
    from offload.transfer.triton_kernels import TritonKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 1.17549435e-38, 6e-8, 1e-8, 65504.0, 65520.0, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
HYPERS = st.fixed_dictionaries(
    {
        "step": st.one_of(st.integers(1, 5), st.integers(1, 10**6)),
        "lr": st.sampled_from([0.0, 1e-3, 0.3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.3, 0.5), (0.0, 0.0)]),
        "eps": st.sampled_from([1e-8, 0.0]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "grad_scale": st.sampled_from([1.0, 0.37, 1 / 65536, 0.0]),
        "decoupled": st.booleans(),
        "maximize": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def fma(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x * y + z of fp32, rounded once: a product is exact in float64, and the sum is rounded to odd there, which leaves one rounding to the last."""
    with np.errstate(all="ignore"):
        a, b = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        even = (total.view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(np.isfinite(total) & (error != 0) & even, odd, total).astype(np.float32)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """The interpreter is numpy, which has no fma: a product and a sum, each rounded, stand for one there. So it is given one that is right. And of an
    argument of -0.0 some releases of it make 0.0, as no GPU does, which gets fp32."""
    if DEVICE == "cuda":
        yield TritonKernels()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from triton import language
        from triton.runtime import interpreter

        convert = interpreter._implicit_cvt

        def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            return interpreter.TensorHandle(fma(*np.broadcast_arrays(x.data, y.data, z.data)), z.dtype.scalar)

        def converted(argument: Any) -> Any:
            if not isinstance(argument, float):
                return convert(argument)
            return language.tensor(interpreter.TensorHandle(np.array([argument], np.float32), language.float32), language.float32)

        patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
        patch.setattr(interpreter, "_implicit_cvt", converted)
        with np.errstate(all="ignore"):
            yield TritonKernels()


def test_fma_is_rounded_once() -> None:
    """The one that the interpreter is given, against fractions."""
    rng = np.random.default_rng(1)
    x, y, z = (rng.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32) for _ in range(3))
    z[::2] = (-x[::2].astype(np.float64) * y[::2] * (1 + rng.integers(-3, 4, 1500) * 2.0**-24)).astype(np.float32)  # cancels nearly
    got = fma(x, y, z)
    finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z) & np.isfinite(got)
    assert finite.sum() > 500
    for a, b, c, r in zip(x[finite], y[finite], z[finite], got[finite], strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        below, above = (abs(Fraction(float(np.nextafter(r, np.float32(side)))) - exact) for side in ("-inf", "inf") if np.isfinite(r))
        assert abs(Fraction(float(r)) - exact) <= min(below, above)


def draw(rng: np.random.Generator, n: int, dtype: torch.dtype, spread: float = 1.0, sign: bool = True) -> torch.Tensor:
    """Random values, among them special ones and any bits at all."""
    size = {4: np.uint32, 2: np.uint16}[dtype.itemsize]
    x = torch.from_numpy(rng.standard_normal(n).astype(np.float32) * spread)
    x = (x if sign else x.abs()).to(dtype)
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    special = special if sign else special.abs()
    where = torch.from_numpy(rng.random(n))
    x = torch.where(where < 0.1, special[torch.from_numpy(rng.integers(len(SPECIAL), size=n))], x)
    anything = torch.from_numpy(rng.integers(0, np.iinfo(size).max, n, dtype=size)).view(dtype)
    return torch.where(where > 0.95, anything if sign else anything.abs(), x).contiguous()


def state(rng: np.random.Generator, n: int, split: bool, moments: str, grad: torch.dtype, out: torch.dtype | None) -> Arrays:
    master, low = draw(rng, n, torch.float32), None
    if split:
        upper, low = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        ops.split_(upper, low, master)
        master = upper
    m, v = draw(rng, n, torch.float32, 1e-2), draw(rng, n, torch.float32, 1e-3, sign=False)
    if moments == "int8":
        rooms = [-(-n // ops.GROUP)] * 2
        tame = (torch.where(torch.isfinite(x) | torch.tensor(rng.random() < 0.3), x, torch.zeros(n)) for x in (m, v))  # one NaN spoils a group
        coded = []
        for x, dtype, room in zip(tame, (torch.int8, torch.uint8), rooms, strict=True):
            codes, scale = torch.empty(n, dtype=dtype), torch.empty(room)
            ops.encode_moment_(codes, scale, x)
            coded += [codes, scale]
        (m, m_scale), (v, v_scale) = coded[:2], coded[2:]
    else:
        dtype = torch.bfloat16 if moments == "bf16" else torch.float32
        m, v, m_scale, v_scale = m.to(dtype), v.to(dtype), None, None
    copied = None if out is None else torch.full((n,), 7.0, dtype=out)
    return Arrays(master, low, draw(rng, n, grad, 0.1), m, m_scale, v, v_scale, copied)


def there(a: Arrays) -> Arrays:
    """A copy, where the kernels work."""
    return Arrays(**{name: None if t is None else t.to(DEVICE, copy=True) for name, t in vars(a).items()})


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("split", "out"), [(False, None), (False, torch.bfloat16), (False, torch.float16), (True, None)])
@given(n=st.one_of(st.integers(1, 600), st.sampled_from([256, 1024, 1025, 4096])), rng=st.integers(0, 2**20), first=st.integers(0, 3),
       grad=st.sampled_from(DTYPES), hyper=HYPERS)  # fmt: skip
@SETTINGS
def test_updates(
    kernels: Kernels, split: bool, out: torch.dtype | None, moments: str, n: int, rng: int, first: int, grad: torch.dtype, hyper: dict[str, Any]
) -> None:
    """Every form, with denormals, infinities, NaN and any bits: all that an update writes, to the bit."""
    want = state(np.random.default_rng(rng), n, split, moments, grad, out)
    got, record = there(want), ops.hyper_record(**hyper)
    HostKernels().update(want, first * 4096, record)
    kernels.update(got, first * 4096, record)
    for name, tensor in vars(want).items():
        if tensor is not None:
            different = (raw(getattr(got, name)) != raw(tensor)).nonzero().flatten()
            assert not different.numel(), f"{name}: {different.numel()} bytes, the first in element {int(different[0]) // tensor.itemsize}"


@pytest.mark.parametrize("src", DTYPES, ids=str)
@pytest.mark.parametrize("dst", DTYPES, ids=str)
@given(n=st.one_of(st.integers(1, 600), st.sampled_from([4095, 4096, 4097, 9000, 70000])), rng=st.integers(0, 2**20), accumulate=st.booleans(),
       scale=st.sampled_from([1.0, 1.0, 0.25, 0.37]), sums=st.booleans())  # fmt: skip
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_landings(
    kernels: Kernels, dst: torch.dtype, src: torch.dtype, n: int, rng: int, accumulate: bool, scale: float, sums: bool
) -> None:  # fmt: skip
    """What lands, and the sums of squares of its blocks, to the bit: half of the time of ordinary values, whose sums are finite."""
    generator = np.random.default_rng(rng)
    make = draw if rng % 2 else lambda r, n, dtype: torch.from_numpy(r.standard_normal(n).astype(np.float32)).to(dtype)
    want, source = make(generator, n, dst), make(generator, n, src)
    blocks = torch.full((-(-n // ops.BLOCK),), -1.0, dtype=torch.float64) if sums else None
    got, got_blocks = want.to(DEVICE, copy=True), None if blocks is None else blocks.to(DEVICE, copy=True)
    HostKernels().land(want, source, accumulate, scale, blocks)
    kernels.land(got, source.to(DEVICE), accumulate, scale, got_blocks)
    assert torch.equal(raw(got), raw(want))
    assert blocks is None or got_blocks is None or torch.equal(raw(got_blocks), raw(blocks))


def test_other_rules_are_refused(kernels: Kernels) -> None:
    a = there(state(np.random.default_rng(0), 10, False, "fp32", torch.float32, None))
    with pytest.raises(ValueError, match="Adam and AdamW alone"):
        kernels.update(a, 0, ops.hyper_record(step=1, lr=0.1, rule="lion"))


COMPILED = """
import collections, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from offload.transfer import triton_kernels as K

SCALARS = "scale grad_scale l2 decay lerp1 beta2 take2 unbias2 eps minus_step_size".split()
INTS = {"n": "i32", "first_group": "i32", "key_low": "i32", "key_high": "i32", "sums": "*i64", "exp_avg_scale": "*i32", "exp_avg_sq_scale": "*i32"}

def ptx(fn, pointers, **constants):
    types = INTS | dict.fromkeys(SCALARS, "fp32") | pointers
    signature = {name: "constexpr" if name in constants else types[name] for name in fn.arg_names}
    source = ASTSource(fn=fn, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4, "enable_fp_fusion": False}).asm["ptx"]

def update(split, moments, grad, out, coupled):
    moment = ("*i32", "*i16", "*i8")[moments]
    pointers = {"master": "*i16" if split else "*i32", "low": "*i16", "grad": "*i16" if grad else "*i32", "out": "*i16"}
    return ptx(K._update, pointers | {"exp_avg": moment, "exp_avg_sq": moment}, SPLIT=split, MOMENTS=moments, GRAD=grad, OUT=out, COUPLED=coupled,
               FROM_GRAD=False, ROWS=K.ROWS, GROUP=K.GROUP)

def land(dst, src, accumulate):
    types = {"dst": "*i16" if dst else "*i32", "src": "*i16" if src else "*i32"}
    return ptx(K._land, types, DST=dst, SRC=src, ACCUMULATE=accumulate, AS_IT_IS=False, SUMS=True, BLOCKS=K.BLOCKS, BLOCK=K.BLOCK, LANES=K._LANES)

found = collections.Counter()
for text in (update(False, 0, 1, 1, False), update(False, 1, 2, 2, True), update(True, 2, 1, -1, False), land(0, 1, True), land(2, 0, False)):
    found.update(re.findall(r"^\\s*((?:fma|mad|mul|add|sub|div|r?sqrt|rcp|neg|abs|ex2|lg2|cvt)\\.[a-z0-9_.]*f(?:16|32|64)[a-z0-9.]*)\\s", text, re.M))
    found["ftz"] += text.count(".ftz")
print(json.dumps(found))
"""


def test_what_is_compiled(tmp_path: Path) -> None:
    """Nothing but operations that round once, to nearest, without flushing; and as many fused ones as are written. No GPU is needed to compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.pop("ftz") == 0
    exact = {"cvt.f32.f16", "cvt.f64.f32", "cvt.f64.f16"}
    assert {name for name in found if name not in exact} == {f"{name}.rn.f32" for name in ("fma", "mul", "add", "sub", "div", "sqrt")} | {
        "mul.rn.f64", "add.rn.f64"
    }  # fmt: skip
    elements = 4 * 256 // 128  # of a thread, in each of three updates
    assert found["fma.rn.f32"] == elements * (4 + 5 + 8)
