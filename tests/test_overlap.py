"""Overlap is exact: whatever runs under whatever, and however late, the bits are those of one thing after another."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

import overlap
from overlap import COMBINATIONS, Combination, Spoiled

SEEDS = 50  # spread over the combinations here; bench/combos.py runs all of them for each

_references: dict[Any, Any] = {}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("which", COMBINATIONS, ids=str)
def test_every_combination(tmp_path: Path, which: Combination, device: str) -> None:
    place, count = COMBINATIONS.index(which), len(COMBINATIONS)
    for seed in range(place, SEEDS, count) if device == "sim" else (place,):
        assert not overlap.wrong(tmp_path, which, device, seed, _references)


CLIP = 0.01
LARGE, SMALL = 1.0, 1e-4  # factors that put every norm of these models above CLIP, and below
STEPS = 6


def _norms(seen: list[str]) -> list[float]:
    return [float.fromhex(value) for value in seen[1:-1:2]]  # after each loss


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", overlap.ACTIVATIONS)
def test_clipping(tmp_path: Path, mode: str, share: float, device: str) -> None:
    """Active in none, half and all of the steps."""
    active = [share == 1.0 or (share == 0.5 and i % 2 == 0) for i in range(STEPS)]
    options: dict[str, Any] = {"clip": CLIP, "steps": STEPS, "scales": {i: LARGE if a else SMALL for i, a in enumerate(active)}}
    for seed in (1, 2):
        kind, precision = seed % 2, overlap.PRECISIONS[seed % 3]
        key = (kind, precision, share)
        if key not in _references:
            _references[key] = overlap.synchronous(tmp_path, kind, precision, 1, **options)
        want = _references[key]
        assert [norm > CLIP for norm in _norms(want[0])] == active
        assert overlap.overlapped(tmp_path, kind, precision, 1, device, seed, "forward", mode, **options) == want


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("seed", range(8))
def test_infinite_gradients(tmp_path: Path, seed: int, clip: float | None, device: str) -> None:
    """At random steps: those steps are skipped whole, and the others are as they would be without overlap."""
    chance = random.Random(seed)
    spoiled = {
        step: Spoiled(chance.choice(["loss", "hook", "write"]), chance.choice([math.inf, -math.inf, math.nan]))
        for step in chance.sample(range(STEPS), chance.randint(1, 4))
    }
    kind, precision, accumulate = seed % 2, overlap.PRECISIONS[seed % 3], (1, 4)[seed // 2 % 2]
    options: dict[str, Any] = {"clip": clip, "steps": STEPS, "spoiled": spoiled}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step skipped", RuntimeWarning)
        want = overlap.synchronous(tmp_path, kind, precision, accumulate, **options)
        mode = overlap.ACTIVATIONS[seed % 4]
        got = overlap.overlapped(tmp_path, kind, precision, accumulate, device, seed, "forward", mode, **options)
    assert want[0][-1] == f"{len(spoiled)} skipped"
    assert got == want
