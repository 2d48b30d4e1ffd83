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
