"""Learning rates by step."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, schedule: str) -> float:
    """The rate of `step` (from 0) of `steps`: rises linearly to `peak` over `warmup` steps, then constant, linear or cosine to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak
