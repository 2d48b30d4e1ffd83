"""Arrays past 2^31 bytes or elements: run where memory is free, skipped aloud elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload import ops

GIB = 1 << 30
EDGE = 1 << 31
TILE = 1 << 22


def free_bytes() -> int:
    """What the system, and this process's cgroup, would still give."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except OSError:
        return free


# (rule, master, moments, elements, bytes it needs with some room): fp32 and bf16 arrays of 2^31 bytes and a little, and 2^31 elements
CASES = [
    ("adam", "fp32", "fp32", EDGE // 4 + 1100, 10 * GIB),
    ("lion", "fp32", "bf16", EDGE // 4 + 1100, 6 * GIB),
    ("adagrad", "fp32", "fp32", EDGE // 4 + 1100, 8 * GIB),
    ("adam", "split", "int8", EDGE + 1100, 20 * GIB),
]


@pytest.mark.parametrize(("rule", "master", "moments", "n", "need"), CASES)
def test_past_two_to_the_31(rule: str, master: str, moments: str, n: int, need: int) -> None:
    if free_bytes() < need:
        pytest.skip(f"{n} elements of {rule}, master {master}, moments {moments} need {need >> 30} GiB free, {free_bytes() >> 30} are")
    torch.manual_seed(0)
    grad = ops.empty(n, torch.bfloat16)
    tile = torch.randn(TILE).bfloat16()
    for start in range(0, n, TILE):
        grad[start : start + TILE] = tile[: n - start]
    state = ops.moments(n, moments, rule)
    if master == "split":
        weight, state["low"] = ops.empty(n, torch.bfloat16).fill_(1.0), ops.empty(n, torch.int16)
        state["low"].zero_()
    else:
        weight = ops.empty(n).fill_(1.0)
    for step in (1, 2):
        ops.update_(weight, grad, record(rule, step), **state)
    edges = [0, n // 3 // 256 * 256, EDGE // 4 - 512, EDGE // 2 - 512, EDGE - 512, n - 1100 + 76]
    for start in (e - e % 256 for e in edges if e < n):
        part = slice(start, min(start + 1024, n))
        alone = {name: torch.zeros_like(x[start // 256 : -(-part.stop // 256)] if name.endswith("scale") else x[part]) for name, x in state.items()}
        value = torch.ones_like(weight[part])
        for step in (1, 2):
            ops.update_(value, grad[part].clone(), record(rule, step), first=start, **alone)
        assert torch.equal(value, weight[part]) and not (value == 1).all()
        for name, x in alone.items():
            assert torch.equal(x, state[name][start // 256 : -(-part.stop // 256)] if name.endswith("scale") else state[name][part]), name


def record(rule: str, step: int) -> np.ndarray[Any, Any]:
    return ops.hyper_record(rule=rule, step=step, lr=1e-2, seed=1)
