"""Runs cases of large units, each in a process of its own; prints the peak of the device as the runtime counts it, beside its budget.

    python tests/peaks.py DIRECTORY DEVICE,PASSING,ACTIVATIONS,SHARE ...

PASSING is 1 where gradients pass to updates in the backward; SHARE is that of the least budget that can be planned for.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.observe import base

MIB = 1 << 20
TOKENS, DEPTH = 96, 4
LARGE, SMALL = 4224, 64  # widths: of gradients of 34 MiB, which the C library never keeps; and of what a process is warmed up with
PRECISION = offload.Precision(master="split", moments="int8")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Deep(nn.Module):
    """Repeated blocks of one large matrix each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tiers(where: Path, device: int, width: int) -> offload.Tiers:
    """Host memory for less than the state."""
    numel = DEPTH * width * width
    return offload.Tiers(device, 8 * MIB + numel * 7 // 2, [(str(where), 8 * MIB + 8 * numel)])


def least(where: Path, width: int, device: str, passing: bool, activations: str) -> int:
    """The least device budget that can be planned for, to a MiB."""
    with torch.device("meta"):
        model = Deep(width)
    low, high = 0, 1024
    while high - low > 1:
        middle = (low + high) // 2
        try:
            planned(model, tiers(where, middle * MIB, width), device, passing, activations)
            high = middle
        except offload.PlanError:
            low = middle
    return high * MIB


def planned(model: nn.Module, where: offload.Tiers, device: str, passing: bool, activations: str) -> Any:
    how: dict[str, Any] = {"device": device, "precision": PRECISION, "batch": (1, TOKENS), "activations": activations}
    return offload.plan(model, where, keep_gradients=not passing, **how)


def run(where: Path, width: int, device: str, passing: bool, activations: str, share: float) -> dict[str, Any]:
    budget = int(share * least(where, width, device, passing, activations))
    with torch.device("meta"):
        model = Deep(width)
    plan = planned(model, tiers(where, budget, width), device, passing, activations)
    updates: Any = "backward" if passing else "forward"
    offload.prepare(model, tiers(where, budget, width), device=device, precision=PRECISION, updates=updates, plan=plan)
    with offload.runtime(model) as runtime:
        runtime.start_early(DEPTH, keep_gradients=not passing)
        runtime.fill()  # which takes a unit more than the budgets
        forget()
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            model(torch.ones(1, TOKENS, width)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.synchronize()
        stats = runtime.stats()
    return {"peak": stats["peak_bytes"], "budget": stats["budget_bytes"], "passing": stats["passing_units"], "gradient": 2 * width * width}


def forget() -> None:
    """The most that is resident counts from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def compute(width: int) -> None:
    """A block in plain torch, for which libraries make kernels that they keep."""
    block = Block(width).bfloat16()
    block(torch.ones(1, TOKENS, width, dtype=torch.bfloat16)).float().square().mean().backward()


def case(where: Path, device: str, passing: str, activations: str, share: str) -> dict[str, Any]:
    how = device, passing == "1", activations, float(share)
    run(where, SMALL, *how)  # what is imported and made once is of the base
    compute(LARGE)
    base.measure()
    return run(where, LARGE, *how)


def main(directory: str, *cases: str) -> None:
    for text in cases:
        with tempfile.TemporaryDirectory(dir=directory) as where:
            child = os.fork()  # before anything has threads
            if not child:
                try:
                    print(json.dumps(case(Path(where), *text.split(","))), flush=True)
                    os._exit(0)
                finally:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                    os._exit(1)
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"{text} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
