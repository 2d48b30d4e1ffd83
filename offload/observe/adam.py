"""Measures the update, every form of it, against what the same memory can do and against torch's own.

Each form takes turns with one array multiplied in place and with the update of fp32 state; figures are medians, ratios are by turn.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from offload import ops
from offload.config import Precision, format_size
from offload.errors import ConfigError
from offload.memory.limits import host_limits
from offload.observe.measure import MIB, rate, turns

BYTES_A_PARAMETER = 64  # of memory, while one form, the fp32 state and the array are there


@dataclass(frozen=True)
class Form:
    """One form of the update: its name, bytes that it must move per parameter, and a maker of a step on `n` parameters.

    Forms of the same `kind` (rule, master, moments, dtypes of gradient and copy) are the same; None: something else than an update of ours.
    """

    name: str
    bytes_per_parameter: float
    make: Callable[[int], Callable[[], object]]
    kind: tuple[object, ...] | None = None


def _update(rule: str, master: str, moments: str, grad: torch.dtype, out: torch.dtype | None) -> Callable[[int], Callable[[], object]]:
    def make(n: int) -> Callable[[], object]:
        values = torch.randn(n)
        gradient = ops.empty(n, grad).copy_(values.flip(0))
        state: dict[str, Any] = dict(ops.moments(n, moments, rule))
        weight = ops.empty(n, torch.bfloat16 if master == "split" else torch.float32)
        if master == "split":
            state["low"] = ops.empty(n, torch.int16)
            ops.split_(weight, state["low"], values)
        else:
            weight.copy_(values)
        if out is not None:
            state["out"] = ops.empty(n, out).zero_()
        del values
        hyper = ops.hyper_record(rule=rule, step=1, lr=1e-3, weight_decay=0.01, seed=1)

        def step() -> object:
            hyper["step"] += 1
            return ops.update_(weight, gradient, hyper, **state)

        for _ in range(3):
            step()  # moments as training leaves them
        return step

    return make


def _form(name: str, rule: str, master: str, moments: str, grad: torch.dtype = torch.bfloat16, out: torch.dtype | None = torch.bfloat16) -> Form:
    """A split master is its own copy in bf16."""
    copy = out if master == "fp32" else None
    moment = {"fp32": 8, "bf16": 4, "int8": 2 + 8 / ops.GROUP}[moments] * (2 if rule == "adam" else 1)
    kind = (rule, master, moments, grad, copy)
    return Form(name, 8 + grad.itemsize + (copy.itemsize if copy else 0) + moment, _update(*kind), kind)


FP32_STATE = _form("AdamW, bf16 gradients, bf16 copy", "adam", "fp32", "fp32")
FORMS = (
    _form("AdamW, fp32 gradients", "adam", "fp32", "fp32", torch.float32, None),
    FP32_STATE,
    _form("AdamW, fp16 gradients, fp16 copy", "adam", "fp32", "fp32", torch.float16, torch.float16),
    _form("AdamW, fp32 gradients, bf16 copy", "adam", "fp32", "fp32", torch.float32),
    _form("AdamW, bf16 moments", "adam", "fp32", "bf16"),
    _form("AdamW, int8 moments", "adam", "fp32", "int8"),
    _form("AdamW, split master", "adam", "split", "fp32"),
    _form("AdamW, split master, bf16 moments", "adam", "split", "bf16"),
    _form("AdamW, split master, int8 moments", "adam", "split", "int8"),
    _form("Lion", "lion", "fp32", "fp32"),
    _form("Lion, split master, int8 moment", "lion", "split", "int8"),
    _form("Adagrad", "adagrad", "fp32", "fp32"),
    _form("Adagrad, split master, int8 sum", "adagrad", "split", "int8"),
)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def form_of(precision: Precision) -> Form:
    """The update that a run of this precision makes: one of `FORMS` where it is there."""
    own = precision.compute == "fp32"
    out = None if own else _DTYPES[precision.compute]
    made = _form("AdamW of the run", "adam", "fp32" if own else precision.master, precision.moments, _DTYPES[precision.grad], out)
    return next((form for form in FORMS if form.kind == made.kind), made)


def _torch_fused(n: int) -> Callable[[], object]:
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = torch.randn(n)
    return torch.optim.AdamW([parameter], lr=1e-3, fused=True).step


def _in_place(n: int) -> Callable[[], object]:
    array = ops.empty(n).normal_()
    return lambda: array.mul_(0.999)


TORCH_FUSED = Form("torch fused AdamW, fp32", 28, _torch_fused)
CEILING = Form("one array multiplied in place", 8, _in_place)


def adam_parameters() -> int:
    """Parameters to measure with: 32 Mi, fewer where memory is scarce."""
    return min(32 * MIB, host_limits().room // 4 // BYTES_A_PARAMETER // 4096 * 4096)


def adam_rates(n: int, forms: Iterable[Form] = FORMS, rounds: int = 5) -> list[dict[str, Any]]:
    """Rows of form, bytes_per_parameter, gb_per_second of those, share_of_in_place bandwidth of the same kind of memory, times_fp32_state (how
    many times as fast as fp32 state with bf16 gradients) and seconds_per_billion parameters. ConfigError: too little memory is free."""
    if n <= 0:
        free = format_size(host_limits().room)
        raise ConfigError(f"{free} of memory is free, too little to measure the update; free some, or raise the container's limit")
    rows = []
    ceiling, base = CEILING.make(n), FP32_STATE.make(n)
    for form in (*forms, TORCH_FUSED):
        step = base if form is FP32_STATE else form.make(n)  # one form's memory at a time
        taken = turns({"form": _rested(step), "ceiling": _rested(ceiling), "base": _rested(base)}, rounds, warm=2)
        share = statistics.median(
            form.bytes_per_parameter * c / (CEILING.bytes_per_parameter * s) for s, c in zip(taken["form"], taken["ceiling"], strict=True)
        )
        rows.append({
            "form": form.name, "bytes_per_parameter": form.bytes_per_parameter, "gb_per_second": rate(form.bytes_per_parameter * n, taken["form"]),
            "share_of_in_place": share, "times_fp32_state": statistics.median(b / s for s, b in zip(taken["form"], taken["base"], strict=True)),
            "seconds_per_billion": statistics.median(taken["form"]) / n * 1e9,
        })  # fmt: skip
        del step
    rows.append({"form": CEILING.name, "bytes_per_parameter": 8, "gb_per_second": rate(8 * n, taken["ceiling"]), "share_of_in_place": 1.0})
    return rows


def step_seconds(form: Form, n: int, rounds: int = 5) -> list[float]:
    """Seconds of updates of `n` parameters."""
    return turns({"form": _rested(form.make(n))}, rounds, warm=2)["form"]


_rest = threading.Event()


def _rested(call: Callable[[], object]) -> Callable[[], float]:
    """OpenMP's threads spin for some milliseconds after their work: whoever comes next would share the cores with them."""

    def run() -> float:
        _rest.wait(0.02)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run
