"""The kernels against references that share no code with them, and against themselves at every level, thread count and split."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import drawn
from offload import _core, ops

LEVELS = _core.simd_levels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTS = {4: torch.int32, 2: torch.int16}
TINY = [1e-45, -1e-45, 1e-40, 1.17549435e-38, 6e-8, 1e-8]
SPECIAL = [0.0, -0.0, 1.0, -1.0, *TINY, 65504.0, 65520.0, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
ULP = 2.0**-23


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64 if x.dtype is torch.float64 else INTS[x.dtype.itemsize])


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, any NaN equal to any other."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if dtype is not torch.float32 else x.clone()


class State:
    """Random packed state of n elements, the same for the same seed."""

    def __init__(self, n: int, grad: torch.dtype = torch.float32, out: torch.dtype | None = None, seed: int = 0, special: bool = False) -> None:
        rng = torch.Generator().manual_seed(seed)

        def draw(spread: float) -> torch.Tensor:
            return drawn(n, rng, spread, SPECIAL if special else (), 0.3)

        self.master, self.exp_avg, self.exp_avg_sq = draw(1.0), draw(1e-2), draw(1e-2).abs()
        self.grad = narrow(draw(0.1), grad)
        self.out = torch.full((n,), 7.0, dtype=out) if out is not None else None

    def copy(self) -> State:
        return copy.deepcopy(self)

    def tensors(self) -> list[torch.Tensor]:
        return [self.master, self.grad, self.exp_avg, self.exp_avg_sq, *([] if self.out is None else [self.out])]

    def step(self, record: np.ndarray[Any, Any], level: str | None = None, threads: int = 1, cuts: tuple[int, ...] = ()) -> State:
        n = self.master.numel()
        for start, end in itertools.pairwise(sorted({0, n, *cuts})):
            m, g, a, s = (t[start:] for t in (self.master, self.grad, self.exp_avg, self.exp_avg_sq))
            out = 0 if self.out is None else self.out[start:].data_ptr()
            code = 0 if self.out is None else ops.dtype_code(self.out.dtype)
            addresses = (m.data_ptr(), g.data_ptr(), ops.dtype_code(g.dtype), a.data_ptr(), s.data_ptr())
            _core.adamw(*addresses, out, code, end - start, record, threads=threads, level=level)
        return self

    def equals(self, other: State) -> bool:
        return all(torch.equal(bits(a), bits(b)) for a, b in zip(self.tensors(), other.tensors(), strict=True))


def record(**over: Any) -> np.ndarray[Any, Any]:
    return ops.hyper_record(**{"step": 3, "lr": 1e-2, "weight_decay": 0.1, **over})


# --- Adam: against a reference in float64


def reference(s: State, h: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Adam as its paper writes it, in float64 on the fp32 state: (master, exp_avg, exp_avg_sq, size of the update, size of the gradient)."""
    p, g, m, v = (t.double().numpy() for t in s.tensors()[:4])
    g = g * float(h["grad_scale"]) * (-1 if h["maximize"] else 1)
    if h["decoupled"]:
        p = p - p * float(h["lr"]) * float(h["weight_decay"])
    else:
        g = g + float(h["weight_decay"]) * p
    b1, b2, t = float(h["beta1"]), float(h["beta2"]), int(h["step"])
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    change = float(h["lr"]) * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + float(h["eps"]))
    return p - change, m, v, np.abs(change), np.abs(g)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
@given(
    n=st.integers(0, 1025),
    seed=st.integers(0, 2**20),
    step=st.integers(1, 10**6),
    lr=st.floats(0, 1),
    betas=st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95]), st.sampled_from([0.0, 0.5, 0.99, 0.999])),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    scale=st.sampled_from([1.0, 0.37, 1 / 65536]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_adam_is_the_paper_to_a_few_ulp(
    level: str,
    grad: torch.dtype,
    n: int,
    seed: int,
    step: int,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    scale: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    h = ops.hyper_record(step=step, lr=lr, betas=betas, weight_decay=weight_decay, grad_scale=scale, decoupled=decoupled, maximize=maximize)
    s = State(n, grad, torch.bfloat16, seed)
    m_before = s.exp_avg.double().abs().numpy()
    p, m, v, change, g = reference(s, h)
    p_before = s.master.double().abs().numpy()
    s.step(h, level)
    tiny = 2.0**-149
    g = g + weight_decay * p_before  # a coupled gradient is rounded at its larger term
    assert (np.abs(s.exp_avg.double().numpy() - m) <= 2 * ULP * (m_before + g) + tiny).all()
    assert (np.abs(s.exp_avg_sq.double().numpy() - v) <= 4 * ULP * (v + g * g) + tiny).all()
    bound = 2 * ULP * (p_before + np.abs(p)) + 8 * ULP * change
    cancelled = 4 * ULP * float(lr) / (1 - betas[0] ** step) * (m_before + g) / (np.sqrt(np.maximum(v, 1e-30) / (1 - betas[1] ** step)) + 1e-8)
    coupled = 4 * g * g * ULP / np.maximum(v, 1e-30) * change
    assert (np.abs(s.master.double().numpy() - p) <= bound + cancelled + coupled).all()
    assert s.out is not None and torch.equal(bits(s.out), bits(s.master.bfloat16()))


@pytest.mark.parametrize("n", [*range(68), 255, 256, 257, 1023, 1024, 1025])
def test_every_small_size_touches_its_own_elements_alone(n: int) -> None:
    for level in LEVELS:
        whole = State(n + 64, torch.bfloat16, torch.bfloat16)
        before = [t.clone() for t in whole.tensors()]
        part = State(n + 64, torch.bfloat16, torch.bfloat16)
        for name in ("master", "grad", "exp_avg", "exp_avg_sq", "out"):
            setattr(part, name, getattr(whole, name)[32 : 32 + n])
        part.step(record(), level)
        for was, now in zip(before, whole.tensors(), strict=True):
            assert torch.equal(was[:32], now[:32]) and torch.equal(was[32 + n :], now[32 + n :])


# --- Adam: against torch


def torch_twin(decoupled: bool, p: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)([p], **options)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5), (0.0, 0.95)])
def test_adam_is_torch(decoupled: bool, maximize: bool, fused: bool, betas: tuple[float, float]) -> None:
    torch.manual_seed(0)
    n, lr, decay = 5003, 1e-2, 0.1
    p = torch.nn.Parameter(torch.randn(n))
    twin = torch_twin(decoupled, p, lr=lr, betas=betas, weight_decay=decay, maximize=maximize, fused=fused)
    for step in range(1, 8):
        g = torch.randn(n) * 10.0 ** -(step % 4)
        state = [p.detach().clone(), *(twin.state[p][k].clone() if step > 1 else torch.zeros(n) for k in ("exp_avg", "exp_avg_sq"))]
        sizes = [t.abs().clone() for t in state]
        p.grad = g.clone()
        twin.step()
        ops.adamw_(state[0], g, *state[1:], step=step, lr=lr, betas=betas, weight_decay=decay, decoupled=decoupled, maximize=maximize)
        now = [p.detach(), twin.state[p]["exp_avg"], twin.state[p]["exp_avg_sq"]]
        for name, size, ours, theirs in zip(("master", "exp_avg", "exp_avg_sq"), sizes, state, now, strict=True):
            larger = torch.maximum(size, theirs.abs())
            if name == "exp_avg":
                larger = torch.maximum(larger, g.abs() + decay * sizes[0])
            ulps = 4 + (8 if name == "master" else 0)
            worst = ((ours - theirs).abs() / (ULP * larger + (ULP * lr * 20 if name == "master" else 1e-45))).max().item()
            assert worst <= ulps, f"step {step}: {name} is off by {worst} ulp"


def test_many_steps_stay_with_torch() -> None:
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(1000))
    twin = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.01)
    master, m, v = p.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 201):
        p.grad = torch.randn(1000)
        twin.step()
        ops.adamw_(master, p.grad, m, v, step=step, lr=1e-3, weight_decay=0.01)
    torch.testing.assert_close(master, p.detach(), rtol=2e-6, atol=2e-6)


# --- Adam: the same bits however it is computed


@given(
    n=st.one_of(st.integers(0, 1025), st.integers(32700, 100000)),
    seed=st.integers(0, 2**20),
    grad=st.sampled_from(DTYPES),
    out=st.sampled_from([None, *DTYPES]),
    decoupled=st.booleans(),
    beta1=st.sampled_from([0.0, 0.9]),
    threads=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 100000), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_levels_threads_and_splits_give_the_same_bits(
    n: int, seed: int, grad: torch.dtype, out: torch.dtype | None, decoupled: bool, beta1: float, threads: int, cuts: list[int]
) -> None:
    h = record(decoupled=decoupled, betas=(beta1, 0.99), grad_scale=0.7)
    drawn = State(n, grad, out, seed, special=True)
    first = drawn.copy().step(h, LEVELS[0])
    inside = tuple(c for c in cuts if c < n)
    for level in LEVELS:
        assert drawn.copy().step(h, level, threads).equals(first), f"{level} with {threads} threads"
        assert drawn.copy().step(h, level, 1, inside).equals(first), f"{level} cut at {inside}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_alignment_gives_the_same_bits(level: str, dtype: torch.dtype) -> None:
    n = 83
    want = State(n, dtype, torch.float16).step(record())
    for offset in range(64):
        got, buffers = State(n, dtype, torch.float16), []
        for t in got.tensors():
            buffer = torch.zeros(n * 4 + 128, dtype=torch.uint8)
            start = -buffer.data_ptr() % 64 + offset
            buffer[start : start + n * t.itemsize] = t.view(torch.uint8)
            buffers.append((buffer, start))
        p, g, m, v, o = (b.data_ptr() + start for b, start in buffers)
        _core.adamw(p, g, ops.dtype_code(dtype), m, v, o, 2, n, record(), threads=1, level=level)
        for (buffer, start), t in zip(buffers, want.tensors(), strict=True):
            assert torch.equal(buffer[start : start + n * t.itemsize], t.view(torch.uint8)), f"offset {offset}"
            assert int(buffer.sum(dtype=torch.int64)) == int(t.view(torch.uint8).sum(dtype=torch.int64)), f"wrote outside at offset {offset}"


def test_denormals_are_kept() -> None:
    small = 2.0**-133  # the least that bf16 has
    s = State(64, torch.bfloat16, torch.bfloat16)
    s.master.fill_(small)
    s.exp_avg.fill_(small)
    s.exp_avg_sq.fill_(small)
    s.grad.fill_(small)
    s.step(record(lr=0.0))
    assert s.out is not None
    assert (s.master == small).all() and (s.exp_avg == small).all() and (s.out == small).all()
    assert ((s.exp_avg_sq - small * 0.999).abs() <= 2.0**-149).all()


def test_inactive_leaves_the_state_and_writes_the_copy() -> None:
    s = State(1000, torch.bfloat16, torch.bfloat16)
    before = [t.clone() for t in s.tensors()[:4]]
    s.step(record(active=False))
    assert all(torch.equal(a, b) for a, b in zip(before, s.tensors()[:4], strict=True))
    assert s.out is not None and torch.equal(s.out, s.master.bfloat16())


# --- conversion


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def rounding_cases(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit value in fp32, the points halfway to the next, and their fp32 neighbours."""
    values = all_halves(dtype).float()
    step = 0x8000 if dtype is torch.bfloat16 else 0x1000
    around = torch.stack([bits(values) + d for d in (-step - 1, -step, -step + 1, -1, 0, 1, step - 1, step, step + 1)]).flatten().view(torch.float32)
    finite = values[values.isfinite()]
    below = torch.linspace(-(2.0**-13), 2.0**-13, 100001)
    middles = (finite.double() + 2.0**-25).float()  # halfway between fp16's denormals
    return torch.cat([around, middles, below, torch.tensor(SPECIAL)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_conversions_are_torchs(level: str, source: torch.dtype, target: torch.dtype) -> None:
    src = torch.cat([rounding_cases(torch.bfloat16), rounding_cases(torch.float16)]) if source is torch.float32 else all_halves(source)
    dst = torch.empty(src.numel(), dtype=target)
    _core.convert(dst.data_ptr(), ops.dtype_code(target), src.data_ptr(), ops.dtype_code(source), src.numel(), threads=2, level=level)
    assert same_values(dst, src.to(target))
    first = torch.empty_like(dst)
    _core.convert(first.data_ptr(), ops.dtype_code(target), src.data_ptr(), ops.dtype_code(source), src.numel(), threads=1, level=LEVELS[0])
    assert torch.equal(bits(first), bits(dst)), "NaN included"
    if source is target:
        assert torch.equal(bits(dst), bits(src))


# --- landing and sums of squares


def block_sums(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The documented order, in numpy: 16 lanes by index modulo 16, then pairwise."""
    sums = []
    for start in range(0, x.numel(), ops.BLOCK):
        block = x[start : start + ops.BLOCK].double().numpy()
        lanes = np.zeros(16)
        for row in np.pad(block, (0, -len(block) % 16)).reshape(-1, 16):
            lanes = lanes + row * row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        sums.append(lanes[0])
    return np.array(sums)


def land(dst: torch.Tensor, src: torch.Tensor, accumulate: bool, scale: float, threads: int, level: str) -> torch.Tensor:
    sums = torch.full((-(-src.numel() // ops.BLOCK),), -1.0, dtype=torch.float64)
    codes = ops.dtype_code(dst.dtype), ops.dtype_code(src.dtype)
    _core.land(dst.data_ptr(), codes[0], src.data_ptr(), codes[1], src.numel(), accumulate, scale, sums.data_ptr(), threads, level)
    return sums


@given(
    n=st.one_of(st.integers(0, 1025), st.integers(4090, 9000), st.integers(65530, 140000)),
    seed=st.integers(0, 2**20),
    dst=st.sampled_from(DTYPES),
    src=st.sampled_from(DTYPES),
    accumulate=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 0.3]),
    special=st.booleans(),
    threads=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
@np.errstate(all="ignore")
def test_landing(n: int, seed: int, dst: torch.dtype, src: torch.dtype, accumulate: bool, scale: float, special: bool, threads: int) -> None:
    drawn = State(n, src, None, seed, special)
    came, held = drawn.grad, narrow(drawn.master, dst)
    want = came.float() * torch.tensor(scale)
    want = (want + held.float() if accumulate else want).to(dst)
    results = []
    for level in LEVELS:
        now = held.clone()
        sums = land(now, came, accumulate, scale, threads, level)
        assert same_values(now, want)
        results.append((now, sums))
        expected = block_sums(now)
        assert np.array_equal(sums.numpy(), expected, equal_nan=True)
        finite = np.array([bool(part.isfinite().all()) for part in now.split(ops.BLOCK)]) if n else np.array([], bool)
        assert np.array_equal(np.isfinite(sums.numpy()), finite)
        again = torch.empty_like(sums)
        _core.sumsq(now.data_ptr(), ops.dtype_code(dst), n, again.data_ptr(), threads, level)
        assert torch.equal(bits(again), bits(sums))
    for now, sums in results[1:]:
        assert torch.equal(bits(now), bits(results[0][0])) and torch.equal(bits(sums), bits(results[0][1]))


def test_landing_without_change_is_exact() -> None:
    for dtype in DTYPES:
        src = all_halves(torch.bfloat16).float() if dtype is torch.float32 else all_halves(dtype)
        assert same_values(ops.land_(torch.empty_like(src), src), src)


def test_one_bad_element_spoils_its_block_alone() -> None:
    for bad, at in itertools.product([float("nan"), float("inf"), float("-inf")], [0, 4095, 4096, 9999]):
        x = torch.ones(10000)
        x[at] = bad
        finite = ops.sumsq(x).isfinite()
        assert not finite[at // ops.BLOCK] and int(finite.sum()) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(dtype: torch.dtype) -> None:
    x = torch.randn(70001).to(dtype)
    assert torch.equal(ops.scale_(x.clone(), 0.3), (x.float() * torch.tensor(0.3)).to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, 1 << 20, (8 << 20) - 1, (8 << 20) + 77])
@pytest.mark.parametrize("offset", [0, 1, 63])
def test_copy(level: str, nbytes: int, offset: int) -> None:
    src = torch.randint(256, (nbytes + 64,), dtype=torch.uint8)
    dst = torch.zeros(nbytes + 128, dtype=torch.uint8)
    _core.copy(dst.data_ptr() + offset, src.data_ptr() + 1, nbytes, threads=2, level=level)
    assert torch.equal(dst[offset : offset + nbytes], src[1 : 1 + nbytes])
    assert not dst[:offset].any() and not dst[offset + nbytes :].any()


# --- threads


def test_calls_from_many_threads_at_once() -> None:
    drawn = State(200_000, torch.bfloat16, torch.bfloat16)
    want = drawn.copy().step(record(), threads=1)
    got = [drawn.copy() for _ in range(6)]
    workers = [threading.Thread(target=s.step, args=(record(),), kwargs={"threads": 3}) for s in got]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(s.equals(want) for s in got)
