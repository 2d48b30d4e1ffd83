"""What the public operations accept, refuse and say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from offload import _core, ops


@pytest.fixture
def four() -> Iterator[list[torch.Tensor]]:
    yield [torch.zeros(64) for _ in range(4)]


def adamw(four: list[torch.Tensor], **over: Any) -> None:
    ops.adamw_(*four, **{"step": 1, "lr": 1e-3, **over})


@pytest.mark.parametrize("at", range(4))
def test_wrong_tensors_are_refused(four: list[torch.Tensor], at: int) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.zeros(64, dtype=torch.float64), TypeError, "float64"),
        (torch.zeros(64, dtype=torch.int32), TypeError, "int32"),
        (torch.zeros(128)[::2], TypeError, "contiguous"),
        (torch.zeros(1).expand(64), TypeError, "contiguous"),
        (torch.zeros(64).to_sparse(), TypeError, "contiguous"),
        (torch._neg_view(torch.zeros(64)), TypeError, "contiguous"),
        (torch.zeros(64, device="meta"), TypeError, "meta"),
        ([0.0] * 64, TypeError, "list"),
        (torch.zeros(63), ValueError, "63"),
    ]
    if at != 1:
        wrong.append((torch.zeros(64, dtype=torch.bfloat16), TypeError, "bfloat16"))
    name = ["master", "grad", "exp_avg", "exp_avg_sq"][at]
    for tensor, error, word in wrong:
        given_ = [*four]
        given_[at] = tensor
        with pytest.raises(error, match=f"(?s)(?=.*{name})(?=.*{word})"):
            adamw(given_)


def test_overlap_is_refused(four: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="share memory"):
        adamw([four[0], four[0], *four[2:]])
    both = torch.zeros(127)
    with pytest.raises(ValueError, match=r"exp_avg and out|out and exp_avg"):
        adamw([*four[:2], both[:64], four[3]], out=both[63:])
    with pytest.raises(TypeError, match=r"out is torch\.int8"):
        adamw(four, out=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(ValueError, match="share memory"):
        ops.convert_(both[:100].view(torch.bfloat16)[:100], both[:100])


@pytest.mark.parametrize(
    "over",
    [
        {"step": 0},
        {"step": -1},
        {"step": 1.5},
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"grad_scale": float("nan")},
        {"threads": 0},
    ],
    ids=str,
)
def test_wrong_numbers_are_refused(four: list[torch.Tensor], over: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(over)).removesuffix("s")):
        adamw(four, **over)


def test_raw_addresses_that_would_crash_are_refused() -> None:
    with pytest.raises(ValueError, match="null"):
        _core.sumsq(0, 0, 5, 0)
    with pytest.raises(ValueError, match="dtype"):
        _core.convert(0, 3, 0, 0, 0)
    with pytest.raises(ValueError, match="64 bytes"):
        _core.adamw(0, 0, 0, 0, 0, 0, 0, 0, np.zeros(63, np.uint8))
    with pytest.raises(ValueError, match="step"):
        _core.adamw(0, 0, 0, 0, 0, 0, 0, 0, started_at_zero())


def started_at_zero() -> np.ndarray[Any, Any]:
    h = ops.hyper_record(step=1, lr=0.0)
    h["step"] = 0
    return h


def test_leaves_and_shapes_are_taken_and_autograd_is_told() -> None:
    p = torch.nn.Parameter(torch.ones(3, 5))
    moments = [torch.zeros(15), torch.zeros(5, 3)]
    loss = (p * p).sum()
    assert ops.adamw_(p, torch.ones(3, 5), *moments, step=1, lr=1e-3) is p
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        adamw([torch.zeros(4) for _ in range(4)])


# --- other forms


FORM = {
    "master": (torch.bfloat16, 300),
    "low": (torch.int16, 300),
    "grad": (torch.bfloat16, 300),
    "exp_avg": (torch.int8, 300),
    "exp_avg_scale": (torch.float32, 2),
    "exp_avg_sq": (torch.uint8, 300),
    "exp_avg_sq_scale": (torch.float32, 2),
    "out": (torch.float16, 300),
}


def update(over: dict[str, Any] | None = None, **record: Any) -> dict[str, torch.Tensor]:
    given = {name: torch.zeros(n, dtype=dtype) for name, (dtype, n) in FORM.items()} | (over or {})
    given = {name: x for name, x in given.items() if x is not None}
    hyper = given.pop("hyper", ops.hyper_record(**{"step": 1, "lr": 1e-3, **record}))
    ops.update_(given["master"], given["grad"], hyper, **{name: x for name, x in given.items() if name not in ("master", "grad")})
    return given


@pytest.mark.parametrize("name", list(FORM))
def test_update_refuses_wrong_tensors(name: str) -> None:
    dtype, n = FORM[name]
    update()
    for tensor, error, word in [
        (torch.zeros(n, dtype=torch.float64), TypeError, "float64"),
        (torch.zeros(n, dtype=torch.int32), TypeError, "int32"),
        (torch.zeros(2 * n, dtype=dtype)[::2], TypeError, "contiguous"),
        (torch.zeros(n, dtype=dtype, device="meta"), TypeError, "meta"),
        ([0.0] * n, TypeError, "list"),
        (torch.zeros(n + 1, dtype=dtype), ValueError, str(n + 1)),
    ]:
        with pytest.raises(error, match=f"(?s)(?=.*{name})(?=.*{word})"):
            update({name: tensor})


def test_update_refuses_what_makes_no_form() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"low": None}, {}, TypeError, "master is torch.bfloat16: float32 without low"),
        ({"master": torch.zeros(300)}, {}, TypeError, "master is torch.float32: float32 without low, bfloat16 with it"),
        ({"exp_avg": torch.zeros(300, dtype=torch.uint8)}, {}, TypeError, "exp_avg is torch.uint8"),
        ({"exp_avg_sq": torch.zeros(300, dtype=torch.int8)}, {}, TypeError, "exp_avg_sq is torch.int8"),
        ({"exp_avg": torch.zeros(300)}, {}, ValueError, "exp_avg_scale is for moments in int8 alone"),
        ({"exp_avg": torch.zeros(300), "exp_avg_scale": None}, {}, TypeError, "different forms"),
        ({"exp_avg_scale": None}, {}, ValueError, "exp_avg_scale is missing"),
        ({"exp_avg_sq": None}, {}, ValueError, "exp_avg_sq is missing"),
        ({}, {"rule": "lion"}, ValueError, "exp_avg_sq is not kept by this rule"),
        ({}, {"rule": "adagrad"}, ValueError, "exp_avg is not kept by this rule"),
        ({"first": 255}, {}, ValueError, "multiples of 256"),
        ({"first": -256}, {}, ValueError, "multiples of 256"),
        ({"threads": 0}, {}, ValueError, "threads"),
        ({"hyper": np.zeros(8)}, {}, TypeError, "hyper_record"),
        ({"hyper": started_at_zero()}, {}, ValueError, "step counts from 1"),
    ]
    for over, record, error, word in cases:
        with pytest.raises(error, match=word):
            update(over, **record)
    both = torch.zeros(600, dtype=torch.int16)
    with pytest.raises(ValueError, match="share memory"):
        update({"master": both[:300].view(torch.bfloat16), "low": both[299:599]})
    for wrong in ({"rule": "sgd"}, {"seed": -1}, {"seed": 1 << 32}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ops.hyper_record(step=1, lr=0.1, **wrong)
    with pytest.raises(ValueError, match="int4"):
        ops.moments(10, "int4")


def test_storage_refuses_wrong_tensors() -> None:
    x, half, low = torch.zeros(300), torch.zeros(300, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.int16)
    for call in (lambda *t: ops.split_(*t), lambda p, low_, m: ops.join_(m, p, low_)):
        call(half, low, x)
        call(half, low.view(torch.uint16), x)
        for error, tensors in (
            (TypeError, (half.half(), low, x)),
            (TypeError, (half, low.int(), x)),
            (TypeError, (half, low, x.double())),
            (TypeError, (half, low, torch.zeros(600)[::2])),
            (ValueError, (half, low[:299], x)),
            (ValueError, (half, half.view(torch.int16), x)),
        ):
            with pytest.raises(error):
                call(*tensors)
    codes, scale = torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    for call in (lambda *t: ops.encode_moment_(*t), lambda c, s, v: ops.decode_moment_(v, c, s)):
        call(codes, scale, x)
        for error, tensors in (
            (TypeError, (codes.int(), scale, x)),
            (TypeError, (codes, scale.double(), x)),
            (TypeError, (codes, scale, x.half())),
            (ValueError, (codes, torch.zeros(1), x)),
            (ValueError, (codes[:299], scale, x)),
        ):
            with pytest.raises(error):
                call(*tensors)


def test_hyper_records_have_one_layout() -> None:
    assert ops.HYPER.itemsize == 64 and ops.HYPER.fields is not None and ops.HYPER.fields["seed"][1] == 60
    raw = ops.hyper_record(step=2, lr=0.5, rule="adagrad", seed=0x01020304).tobytes()
    assert raw[56:60] == bytes([1, 1, 0, 2]) and raw[60:] == bytes([4, 3, 2, 1])
    with pytest.raises(ValueError, match="no rule code 9"):
        h = ops.hyper_record(step=1, lr=0.1)
        h["rule"] = 9
        x = torch.zeros(1)
        _core.adamw(x.data_ptr(), x.data_ptr(), 0, x.data_ptr(), x.data_ptr(), 0, 0, 1, h)


# --- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000, (1 << 20) + 1])
def test_empty(n: int, dtype: torch.dtype) -> None:
    x = ops.empty(n, dtype)
    assert x.shape == (n,) and x.dtype is dtype and x.is_contiguous()
    assert x.data_ptr() % ((2 << 20) if x.nbytes >= 2 << 20 else 4096) == 0
    x.fill_(3)
    assert (x == 3).all()


def test_empty_refuses_a_negative_size() -> None:
    with pytest.raises(ValueError, match="-1"):
        ops.empty(-1, torch.float32)
