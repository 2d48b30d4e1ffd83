"""Small training runs in which everything that may overlap does, as late as a seed has it, and the same runs one thing after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import models as M
import offload
from late import late
from offload.engine import activations
from offload.engine.registry import engine_of
from offload.transfer.device import SimDevice

UPDATES = ["forward", "backward"]  # during which pass updates may run
ACTIVATIONS = ["keep", "recompute", "host", "nvme"]
STEPS = 3
IDS = torch.arange(16).view(2, 8) * 101 % 211
STATE_ON_NVME = {"parameter": "host", "gradient": "host", "optimizer": "nvme"}
PLACES = [
    None, M.placed("nvme"), M.placed("host"), STATE_ON_NVME, {"parameter": "nvme", "gradient": "nvme", "optimizer": "host"},
    M.placed("device"), {"optimizer": "device"},
]  # fmt: skip
PRECISIONS = [M.FP32, M.BF16, offload.Precision(master="split", moments="int8")]
MODELS: list[tuple[M.Make, M.Loss]] = [
    (lambda: M.Language(211, depth=3), lambda m: M.mean_square(m, IDS)),  # a tied table: two uses of one gradient
    (lambda: M.Stack(depth=3, width=16, dropout=0.1), M.mean_square),
]


class Combination(NamedTuple):
    updates: str
    accumulate: int
    clip: float | None
    activations: str

    def __str__(self) -> str:
        return f"{self.updates}-{self.accumulate}-{'clipped' if self.clip else 'unclipped'}-{self.activations}"


COMBINATIONS = [
    Combination(updates, accumulate, clip, mode)
    for updates in UPDATES
    for accumulate in (1, 4)
    for clip in ((None, 0.01) if updates == "forward" else (None,))  # a norm is known after the whole backward
    for mode in ACTIVATIONS
]


class Spoiled(NamedTuple):
    """What is done to a step's gradients: by a factor of the loss ("loss"), by a hook on one of them, or by writing to one of them at rest."""

    how: str
    value: float


def train(
    model: nn.Module, loss: M.Loss, *, wait: bool, accumulate: int = 1, clip: float | None = None, steps: int = STEPS,
    scales: Mapping[int, float] = {}, spoiled: Mapping[int, Spoiled] = {},
) -> list[str]:  # fmt: skip
    """Losses and norms, exactly as they are. `wait`: nothing is under way after a backward or a step. `scales`: factors of steps' gradients."""
    torch.manual_seed(5)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    parameters = list(model.parameters())
    seen = []
    settle = offload.runtime(model).synchronize if wait else lambda: None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        how, bad = spoiled.get(step, Spoiled("", 1.0))
        handle = parameters[2].register_hook(lambda grad, bad=bad: grad.index_fill(0, torch.tensor([1]), bad)) if how == "hook" else None
        for micro in range(accumulate):
            value = loss(model) / accumulate
            factor = scales.get(step, 1.0) * (bad if how == "loss" and micro == accumulate - 1 else 1.0)
            torch.autograd.backward(value * factor)
            seen.append(float(value.detach()).hex())
            settle()
        if handle is not None:
            handle.remove()
        if how == "write":
            with torch.no_grad():
                parameters[-1].grad.view(-1)[0] = bad
        if clip is not None:
            seen.append(float(offload.clip_grad_norm_(model, clip)).hex())
        optimizer.step()
        settle()
        optimizer.zero_grad()
    return [*seen, f"{optimizer.skipped} skipped"]


@contextmanager
def small_activations_leave() -> Iterator[None]:
    kept, activations.SMALLEST = activations.SMALLEST, 1
    try:
        yield
    finally:
        activations.SMALLEST = kept


def synchronous(path: Path, kind: int, precision: offload.Precision, accumulate: int, **options: Any) -> tuple[list[str], str]:
    """All in memory, nothing recomputed, one thing after another; what was seen, and the digest."""
    make, loss = MODELS[kind]
    setting: dict[str, Any] = {"precision": precision, "place": M.placed("device"), "activations": "keep", "accumulate": accumulate}
    with M.prepared(M.seeded(make), M.tiers(path), device="cpu", **setting) as model:
        return train(model, loss, wait=True, accumulate=accumulate, **options), offload.runtime(model).digest()


def overlapped(
    path: Path, kind: int, precision: offload.Precision, accumulate: int, device: str, seed: int, updates: str, mode: str, **options: Any
) -> tuple[list[str], str]:
    """The seed chooses places, slots, which updates are late, and, on `sim`, which transfers are."""
    make, loss = MODELS[kind]
    made: Any = SimDevice(seed=seed) if device == "sim" else device
    setting: dict[str, Any] = {"precision": precision, "place": PLACES[seed % len(PLACES)], "slots": 3 if seed % 2 else None}
    with small_activations_leave(), M.prepared(
        M.seeded(make), M.tiers(path), device=made, updates=updates, activations=mode, accumulate=accumulate, **setting
    ) as model:
        engine_of(model).early.keep_gradients = seed % 4 < 2
        with late(model, seed) if seed % 3 else nullcontext():
            seen = train(model, loss, wait=False, accumulate=accumulate, **options)
        return seen, offload.runtime(model).digest()


def wrong(path: Path, which: Combination, device: str, seed: int, references: dict[Any, Any]) -> str:
    """How a combination's run differs from the synchronous one; nothing if it does not. `references`: those that were run, by what makes them."""
    kind, precision = seed % len(MODELS), PRECISIONS[seed // 2 % len(PRECISIONS)]
    key = (kind, precision, which.accumulate, which.clip)
    if key not in references:
        references[key] = synchronous(path, *key[:3], clip=which.clip)
    want = references[key]
    got = overlapped(path, kind, precision, which.accumulate, device, seed, which.updates, which.activations, clip=which.clip)
    if got == want:
        return ""
    first = next((i for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)) if a != b), None)
    return f"{which} on {device}, seed {seed}: " + ("digests differ" if first is None else f"value {first}: {got[0][first]} for {want[0][first]}")
