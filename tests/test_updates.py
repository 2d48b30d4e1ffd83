"""Updates of every form, against references that share no code with them and against themselves at every level, thread count and split."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import drawn
from offload import _core, ops

Array = np.ndarray[Any, Any]
LEVELS = _core.simd_levels()
GRADS = [torch.float32, torch.bfloat16, torch.float16]
FORMS = list(itertools.product(ops.RULES, ops.MASTERS, ops.MOMENTS))
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 6e-8, 65504.0, 3.4e38, float("inf"), float("-inf"), float("nan")]
ULP = 2.0**-23
NAMES = ("master", "low", "grad", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "out")


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def record(**over: Any) -> Array:
    return ops.hyper_record(**{"step": 3, "lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "seed": 5, **over})


class State:
    """n elements of a form, the same for the same seed; moments as some steps leave them."""

    def __init__(
        self,
        n: int,
        rule: str = "adam",
        master: str = "split",
        moments: str = "int8",
        grad: torch.dtype = torch.bfloat16,
        out: torch.dtype | None = None,
        seed: int = 0,
        special: bool = False,
    ) -> None:
        self.n, self.rule, self.codes = n, rule, (ops.MASTERS[master], ops.MOMENTS[moments], ops.dtype_code(grad), ops.dtype_code(out or grad))
        rng = torch.Generator().manual_seed(seed)

        def draw(spread: float) -> torch.Tensor:
            return drawn(n, rng, spread, SPECIAL if special else (), 0.02)

        self.value, m, v = draw(1.0), draw(1e-2), draw(1e-2).abs() * torch.rand(n, generator=rng) ** 4
        self.t: dict[str, torch.Tensor] = {"grad": draw(0.1).to(grad)}
        if master == "split":
            self.t |= {"master": torch.empty(n, dtype=torch.bfloat16), "low": torch.empty(n, dtype=torch.int16)}
            ops.split_(self.t["master"], self.t["low"], self.value)
        else:
            self.t["master"] = self.value.clone()
        for name, moment, code, absent in (("exp_avg", m, torch.int8, "adagrad"), ("exp_avg_sq", v, torch.uint8, "lion")):
            if rule == absent:
                continue
            if moments == "int8":
                self.t |= {name: torch.empty(n, dtype=code), f"{name}_scale": torch.empty(-(-n // ops.GROUP))}
                ops.encode_moment_(self.t[name], self.t[f"{name}_scale"], moment)
            else:
                self.t[name] = moment.to(torch.bfloat16 if moments == "bf16" else torch.float32)
        if out is not None:
            self.t["out"] = torch.full((n,), 7.0, dtype=out)

    def copy(self) -> State:
        other = State.__new__(State)
        other.n, other.rule, other.codes, other.value = self.n, self.rule, self.codes, self.value
        other.t = {name: x.clone() for name, x in self.t.items()}
        return other

    def moment(self, name: str) -> torch.Tensor:
        x = self.t[name]
        return ops.decode_moment_(torch.empty(self.n), x, self.t[f"{name}_scale"]) if x.dtype in (torch.int8, torch.uint8) else x.float()

    def master(self) -> torch.Tensor:
        return ops.join_(torch.empty(self.n), self.t["master"], self.t["low"]) if "low" in self.t else self.t["master"].clone()

    def step(self, h: Array, level: str | None = None, threads: int = 1, cuts: tuple[int, ...] = (), first: int = 0) -> State:
        for start, end in itertools.pairwise(sorted({0, self.n, *cuts})):

            def address(name: str, start: int = start) -> int:
                x = self.t.get(name)
                return 0 if x is None else x.data_ptr() + x.itemsize * (start // ops.GROUP if name.endswith("scale") else start)

            _core.update(tuple(address(name) for name in NAMES), self.codes, first + start, end - start, h, threads, level)
        return self

    def equals(self, other: State) -> bool:
        return all(torch.equal(raw(x), raw(other.t[name])) for name, x in self.t.items())


# --- storage of masters


@pytest.mark.parametrize("level", LEVELS)
def test_split_masters_are_exact(level: str) -> None:
    """Every upper half with the lower halves where rounding turns, NaN included; all 2^32 patterns are in the C++ tests."""
    lows = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    patterns = ((torch.arange(65536)[:, None] << 16) | lows).flatten()
    x = patterns.to(torch.int32).view(torch.float32)
    high, low, back = torch.empty(x.numel(), dtype=torch.bfloat16), torch.empty(x.numel(), dtype=torch.uint16), torch.empty_like(x)
    _core.split(high.data_ptr(), low.data_ptr(), x.data_ptr(), x.numel(), 2, level)
    _core.join(back.data_ptr(), high.data_ptr(), low.data_ptr(), x.numel(), 2, level)
    nan = x.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], x.view(torch.int32)[~nan])
    assert (back.view(torch.int32)[nan] == 0x7FC00000).all() and high[nan].isnan().all() and not high[~nan].isnan().any()
    tie = (patterns & 0xFFFF) == 0x8000
    assert torch.equal(high.view(torch.int16)[~nan & ~tie], x.bfloat16().view(torch.int16)[~nan & ~tie]), "to nearest"
    away = ((patterns >> 16) + 1).to(torch.int16)
    assert torch.equal(high.view(torch.int16)[~nan & tie], away[~nan & tie]), "ties away from zero"


def test_a_split_master_trains_as_the_whole_one() -> None:
    for rule, moments in itertools.product(ops.RULES, ops.MOMENTS):
        whole, split = (State(5000, rule, master, moments) for master in ops.MASTERS)
        for step in range(1, 6):
            for s in (whole, split):
                s.step(record(step=step, rule=rule))
        assert torch.equal(raw(whole.master()), raw(split.master()))
        kept = "exp_avg" if rule == "lion" else "exp_avg_sq"
        assert torch.equal(raw(whole.moment(kept)), raw(split.moment(kept)))


def test_fp32_adam_is_adamw() -> None:
    s = State(3000, "adam", "fp32", "fp32", out=torch.bfloat16)
    t = {name: x.clone() for name, x in s.t.items()}
    s.step(record())
    ops.adamw_(t["master"], t["grad"], t["exp_avg"], t["exp_avg_sq"], step=3, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), out=t["out"])
    assert all(torch.equal(raw(x), raw(t[name])) for name, x in s.t.items())


# --- rules, against a reference in float64


def reference(s: State, h: Array) -> dict[str, Array]:
    """The papers' formulas in float64 on the values of the state; `scale` is what the master's error is measured by."""
    p, g = s.master().double().numpy(), s.t["grad"].double().numpy() * float(h["grad_scale"]) * (-1 if h["maximize"] else 1)
    lr, wd, b1, b2, eps, t = (float(h[k]) for k in ("lr", "weight_decay", "beta1", "beta2", "eps", "step"))
    if h["decoupled"]:
        kept = p * (1 - lr * wd)
    else:
        kept, g = p, g + wd * p
    found: dict[str, Array] = {}
    if s.rule != "adagrad":
        m = s.moment("exp_avg").double().numpy()
        found["exp_avg"] = (b1 if s.rule == "adam" else b2) * m + (1 - (b1 if s.rule == "adam" else b2)) * g
    if s.rule != "lion":
        v = s.moment("exp_avg_sq").double().numpy()
        found["exp_avg_sq"] = v + g * g if s.rule == "adagrad" else b2 * v + (1 - b2) * g * g
    with np.errstate(all="ignore"):
        if s.rule == "lion":
            change = lr * np.sign(b1 * m + (1 - b1) * g)
            found["unsure"] = np.abs(b1 * m + (1 - b1) * g) < 4 * ULP * (np.abs(m) + np.abs(g))
        elif s.rule == "adagrad":
            change = lr * g / (np.sqrt(found["exp_avg_sq"]) + eps)
        else:
            change = lr * (found["exp_avg"] / (1 - b1**t)) / (np.sqrt(found["exp_avg_sq"] / (1 - b2**t)) + eps)
    return found | {"master": kept - change, "change": np.abs(change), "gradient": np.abs(g), "before": np.abs(p)}


@pytest.mark.parametrize(("rule", "master", "moments"), FORMS)
@given(
    n=st.integers(0, 1025),
    seed=st.integers(0, 2**20),
    step=st.integers(1, 10**5),
    lr=st.floats(0, 0.5),
    betas=st.sampled_from([(0.9, 0.99), (0.3, 0.999), (0.9, 0.4), (0.0, 0.0)]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.37]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    grad=st.sampled_from(GRADS),
    level=st.sampled_from(LEVELS),
)
@settings(max_examples=15, deadline=None)
def test_rules_are_their_papers(
    rule: str, master: str, moments: str, n: int, seed: int, step: int, lr: float, betas: tuple[float, float], decay: float, scale: float,
    decoupled: bool, maximize: bool, grad: torch.dtype, level: str,
) -> None:  # fmt: skip
    s = State(n, rule, master, moments, grad, seed=seed)
    options: dict[str, Any] = {"rule": rule, "decoupled": decoupled, "maximize": maximize, "seed": seed}
    h = ops.hyper_record(step=step, lr=lr, betas=betas, weight_decay=decay, grad_scale=scale, **options)
    before = {name: s.moment(name).double().abs().numpy() for name in ("exp_avg", "exp_avg_sq") if name in s.t}
    want = reference(s, h)
    s.step(h, level)
    g = want["gradient"] + (0 if decoupled else decay * want["before"])
    rounding = {"exp_avg": before.get("exp_avg", 0) + g, "exp_avg_sq": 2 * (before.get("exp_avg_sq", 0) + g * g)}
    for name, size in before.items():
        exact, now = want[name], s.moment(name).double().numpy()
        error = 2 * ULP * rounding[name] + 2.0**-149
        if moments == "bf16":
            error = error + np.abs(exact) * 2.0**-7 + 2.0**-133
        elif moments == "int8":
            error = error * 1.1 + bound(exact, name)
        assert (np.abs(now - exact) <= error).all(), name
        assert size.shape == now.shape
    moved, p = want["change"], want["master"]
    error = 2 * ULP * (want["before"] + np.abs(p)) + 8 * ULP * moved
    if rule == "adam":
        root = np.sqrt(np.maximum(want["exp_avg_sq"], 1e-30) / (1 - betas[1] ** step))
        error = error + 4 * ULP * lr / (1 - betas[0] ** step) * rounding["exp_avg"] / (root + 1e-8)
    if rule != "lion":
        error = error + 4 * ULP * rounding["exp_avg_sq"] / np.maximum(want["exp_avg_sq"], 1e-30) * moved
        error = error + 4 * ULP * g / np.maximum(want["gradient"], 1e-30) * moved
    unsure = want.get("unsure", np.zeros(n, bool))
    assert ((np.abs(s.master().double().numpy() - p) <= error) | unsure).all()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad_is_torch(decay: float) -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(3001))
    twin = torch.optim.Adagrad([p], lr=1e-2, lr_decay=0.1, weight_decay=decay)
    master, total = p.detach().clone(), torch.zeros(3001)
    for step in range(1, 20):
        p.grad = torch.randn(3001)
        twin.step()
        h = ops.hyper_record(rule="adagrad", step=step, lr=1e-2 / (1 + (step - 1) * 0.1), eps=1e-10, weight_decay=decay, decoupled=False)
        ops.update_(master, p.grad, h, exp_avg_sq=total)
    torch.testing.assert_close(master, p.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, twin.state[p]["sum"], rtol=1e-6, atol=1e-6)


# --- the same bits however it is computed


@pytest.mark.parametrize(("rule", "master", "moments"), FORMS)
@given(
    n=st.one_of(st.integers(0, 1025), st.integers(32000, 70000)),
    seed=st.integers(0, 2**20),
    grad=st.sampled_from(GRADS),
    out=st.sampled_from([None, *GRADS]),
    decoupled=st.booleans(),
    threads=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 260), max_size=4),
    first=st.sampled_from([0, 256, 2**32, 2**40 + 512]),
)
@settings(max_examples=12, deadline=None)
def test_levels_threads_and_splits_give_the_same_bits(
    rule: str, master: str, moments: str, n: int, seed: int, grad: torch.dtype, out: torch.dtype | None, decoupled: bool, threads: int,
    cuts: list[int], first: int,
) -> None:  # fmt: skip
    h = record(rule=rule, decoupled=decoupled, grad_scale=0.7)
    drawn = State(n, rule, master, moments, grad, out, seed, special=True)
    want = drawn.copy().step(h, LEVELS[0], first=first)
    inside = tuple(c * ops.GROUP for c in cuts if c * ops.GROUP < n)
    for level in LEVELS:
        assert drawn.copy().step(h, level, threads, first=first).equals(want), f"{level} with {threads} threads"
        assert drawn.copy().step(h, level, 1, inside, first).equals(want), f"{level} cut at {inside}"
    if out is not None:
        assert torch.equal(want.t["out"].isnan(), want.master().to(out).isnan())
        assert torch.equal(want.t["out"].nan_to_num(), want.master().to(out).nan_to_num())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_every_small_size_touches_its_own_elements_alone(level: str, moments: str) -> None:
    """Sizes 0 to 1025, each at another offset from a cache line; bytes around are left."""
    for n in range(1026):
        s = State(n, "adam", "split", moments, out=torch.float16, seed=n)
        want, buffers = s.copy().step(record(), LEVELS[0]), {}
        for k, (name, x) in enumerate(s.t.items()):
            buffer = torch.full((x.nbytes + 192,), 0x5A, dtype=torch.uint8)
            start = -buffer.data_ptr() % 64 + 64 + (7 * n + 13 * k) % 64
            buffer[start : start + x.nbytes] = raw(x)
            buffers[name] = (buffer, start, x.nbytes)
        where = tuple(buffers[name][0].data_ptr() + buffers[name][1] if name in buffers else 0 for name in NAMES)
        _core.update(where, s.codes, 0, n, record(), 1, level)
        for name, (buffer, start, nbytes) in buffers.items():
            assert torch.equal(buffer[start : start + nbytes], raw(want.t[name])), f"{n}: {name}"
            assert (buffer[:start] == 0x5A).all() and (buffer[start + nbytes :] == 0x5A).all(), f"{n}: wrote outside {name}"


def test_inactive_leaves_the_state_and_writes_the_copy() -> None:
    for rule, master, moments in FORMS:
        for out in GRADS:
            s = State(1001, rule, master, moments, out=out)
            before = s.copy()
            s.step(record(rule=rule, active=False))
            assert torch.equal(raw(s.t["out"]), raw(before.value.to(out)))
            before.t["out"] = s.t["out"]
            assert s.equals(before)


# --- rounding of moments


def mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def random_words(seed: int, step: int, n: int) -> Array:
    """The documented words, in Python's integers."""
    words = []
    for i in range(n):
        bits = mixed(mixed(mixed(seed) ^ step) ^ i // 256)
        words.append((bits % 2**32 + (bits >> 32) * (i % 256)) % 2**32)
    return np.array(words, np.uint64)


def exact_moments(s: State, h: Array) -> dict[str, torch.Tensor]:
    """The new moments before they are rounded to their storage: the fp32 form on the same values."""
    plain = State(s.n, s.rule, "fp32", "fp32")
    plain.t |= {"master": s.master(), "grad": s.t["grad"].clone(), **{name: s.moment(name) for name in ("exp_avg", "exp_avg_sq")}}
    plain.step(h)
    return {name: plain.t[name] for name in ("exp_avg", "exp_avg_sq")}


def test_bf16_moments_are_rounded_as_documented() -> None:
    s, h = State(1500, moments="bf16"), record(seed=99, step=12)
    want, words = exact_moments(s, h), random_words(99, 12, 1500)
    s.step(h)
    for name, up in (("exp_avg", words & 0xFFFF), ("exp_avg_sq", words >> 16)):
        bits = want[name].view(torch.int32).numpy().view(np.uint32)
        assert np.array_equal(s.t[name].view(torch.int16).numpy().view(np.uint16), ((bits + up) >> 16).astype(np.uint16))


def test_int8_moments_are_coded_as_documented() -> None:
    s, h = State(1500), record(seed=99, step=12)
    want, words = exact_moments(s, h), random_words(99, 12, 1500)
    s.step(h)
    for name, top, up in (("exp_avg", 494, words & 0x7FFFF), ("exp_avg_sq", 126974, words >> 13)):
        x = want[name].numpy()
        codes = np.zeros(1500, np.int64)
        for k, start in enumerate(range(0, 1500, 256)):
            part = slice(start, start + 256)
            scale = np.float32(np.float32(np.abs(x[part]).max()) / np.float32(top)) * np.float32(1 + 2.0**-21)
            assert s.t[f"{name}_scale"].numpy()[k] == scale
            f = (np.abs(x[part]).astype(np.float64) * np.float64(np.float32(1) / scale) + 2).astype(np.float32)
            codes[part] = ((f.view(np.uint32).astype(np.uint64) + up[part]) >> 19) - (0x40000000 >> 19)
        codes = np.where(np.signbit(x), codes | 0x80, codes) if name == "exp_avg" else np.maximum(codes, 1)
        assert np.array_equal(s.t[name].view(torch.uint8).numpy(), codes.astype(np.uint8))
        sign, code = np.where(codes & 0x80 * (top == 494), -1.0, 1.0), codes & (0x7F if top == 494 else 0xFF)
        values = sign * ((1 + code % 16 / 16) * 2.0 ** (1 + code // 16) - 2) * np.repeat(s.t[f"{name}_scale"].double().numpy(), 256)[:1500]
        assert np.allclose(s.moment(name).double().numpy(), values, rtol=ULP, atol=0)


def bound(x: Array, name: str) -> Array:
    """The stated bound of the error of int8 moments, per element."""
    most = np.array([np.abs(x[i : i + 256]).max() for i in range(0, len(x), 256)])
    return np.abs(x) / 16 + np.repeat(most, 256)[: len(x)] / (3950 if name == "exp_avg" else 1015000) + 2.0**-129


@pytest.mark.parametrize("level", LEVELS)
@given(
    seed=st.integers(0, 2**20),
    n=st.integers(1, 1025),
    spread=st.sampled_from([0.0, 1.0, 8.0, 30.0]),
    size=st.sampled_from([1e-38, 1e-20, 1.0, 1e30]),
)
@settings(max_examples=40, deadline=None)
def test_int8_to_nearest_keeps_its_bound(level: str, seed: int, n: int, spread: float, size: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=rng) * (torch.randn(n, generator=rng).clamp(-4, 2) * spread).exp().clamp(1e-30, 1e6) * size
    for name, dtype, value in (("exp_avg", torch.int8, x), ("exp_avg_sq", torch.uint8, x.abs())):
        codes, scale, back = torch.empty(n, dtype=dtype), torch.empty(-(-n // 256)), torch.empty(n)
        _core.encode(codes.data_ptr(), scale.data_ptr(), value.data_ptr(), dtype is torch.int8, n, 1, level)
        _core.decode(back.data_ptr(), codes.data_ptr(), scale.data_ptr(), dtype is torch.int8, n, 1, level)
        exact = value.double().numpy()
        limit = bound(exact, name) if name == "exp_avg_sq" else bound(exact, name) / 2 * (1 + 1e-6)
        assert (np.abs(back.double().numpy() - exact) <= limit).all()
        if name == "exp_avg_sq":
            assert (back[value > 0] > 0).all()
            large = exact > 2 * bound(exact, name)
            assert (np.abs(back.double().numpy() - exact)[large] <= bound(exact, name)[large] / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_rounding_has_the_exact_mean(moments: str) -> None:
    """Over many steps from one state the mean of what is stored is what should be, within 5 standard errors of each element."""
    n, rounds = 512, 400
    start = State(n, moments=moments)
    exact = exact_moments(start, record())
    stored: dict[str, list[Array]] = {name: [] for name in exact}
    for k in range(rounds):
        s = start.copy().step(record(seed=k))
        for name, values in stored.items():
            values.append(s.moment(name).double().numpy())
    for name, values in stored.items():
        error = np.stack(values) - exact[name].double().numpy()
        spread = np.ptp(error, axis=0)
        telling = error.std(axis=0) > 0.3 * np.maximum(spread, 1e-300)  # neither neighbour is rare; exp_avg_sq above its least code
        z = error.mean(axis=0)[telling] / (error.std(axis=0)[telling] / rounds**0.5)
        assert np.abs(z).max() < 5 and abs(z.mean()) < 0.25 and telling.sum() > 250


def test_small_changes_add_up() -> None:
    """exp_avg_sq under gradients a tenth as large comes down as it should; rounding to nearest would leave it where it is."""
    n = 4096
    for moments in ("bf16", "int8"):
        s = State(n, moments=moments, grad=torch.float32)
        torch.manual_seed(0)
        values = torch.full((n,), 1.0)
        if moments == "int8":
            ops.encode_moment_(s.t["exp_avg_sq"], s.t["exp_avg_sq_scale"], values)
        else:
            s.t["exp_avg_sq"] = values.bfloat16()
        before = s.moment("exp_avg_sq").mean().item()
        for step in range(1, 501):
            s.t["grad"] = torch.randn(n) * 0.1
            s.step(record(step=step, lr=0.0, betas=(0.9, 0.999)))
        want = 0.999**500 * before + (1 - 0.999**500) * 0.01
        assert abs(s.moment("exp_avg_sq").mean().item() - want) < 0.01 * want


def test_what_is_not_finite_spoils_its_group_and_says_so() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for level in LEVELS:
            s = State(1000, grad=torch.float32)
            s.t["grad"][300] = bad
            s.step(record(), level)
            for name in ("exp_avg", "exp_avg_sq"):
                assert s.moment(name)[256:512].isnan().all() and s.moment(name).isnan().sum() == 256
            assert s.t["master"].isnan().sum() <= 1


def test_zeros_stay_zeros_and_never_divide() -> None:
    s = State(512)
    for name, x in s.t.items():
        if name not in ("master", "low"):
            x.zero_()
    before = s.master()
    s.step(record(lr=0.1, weight_decay=0.0))
    assert torch.equal(s.master(), before) and not s.t["exp_avg"].any() and not s.t["exp_avg_sq"].any()
    s.t["grad"][7] = 1.0  # a neighbour of many zeros
    for step in range(1, 50):
        s.step(record(step=step, lr=0.1, weight_decay=0.0))
        s.t["grad"][7] = 0.0
    still = torch.ones(512, dtype=torch.bool)
    still[7] = False
    assert torch.equal(s.master()[still], before[still]) and (s.moment("exp_avg_sq")[:256] > 0).all()


def test_denormals_are_kept() -> None:
    small = 2.0**-133
    for moments in ops.MOMENTS:
        s = State(64, master="split", moments=moments)
        ops.split_(s.t["master"], s.t["low"], torch.full((64,), small))
        s.t["grad"].fill_(small)
        s.step(record(lr=0.0))
        assert (s.master() == small).all() and s.moment("exp_avg").isfinite().all()


@pytest.mark.parametrize(("rule", "lr"), [("adam", 2e-2), ("lion", 8e-3), ("adagrad", 3e-1)])
def test_moments_in_fewer_bits_train_alike(rule: str, lr: float) -> None:
    """Least squares from noisy gradients: every form comes to where fp32 comes."""
    torch.manual_seed(0)
    n = 2048
    target = torch.randn(n)
    losses = {}
    for moments in ops.MOMENTS:
        rng = torch.Generator().manual_seed(1)
        parameter, low = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        ops.split_(parameter, low, torch.zeros(n))
        state = ops.moments(n, moments, rule)
        for step in range(1, 301):
            grad = (parameter.float() - target + torch.randn(n, generator=rng) * 0.3).bfloat16()
            h = ops.hyper_record(rule=rule, step=step, lr=lr, betas=(0.9, 0.99), seed=3)
            ops.update_(parameter, grad, h, low=low, **state)
        losses[moments] = (ops.join_(torch.empty(n), parameter, low) - target).square().mean().item()
    assert losses["fp32"] < 0.2
    assert losses["bf16"] < 1.03 * losses["fp32"] + 1e-3 and losses["int8"] < 1.1 * losses["fp32"] + 2e-3, losses
