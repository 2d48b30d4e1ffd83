"""Memory that compute frees on a device that is RAM: whether the C library keeps it for what comes next. Pure. See [Note: freed memory]."""

from __future__ import annotations

from typing import NamedTuple

from offload.planner import demand
from offload.planner.layout import DTYPE_BYTES
from offload.planner.placement import Plan

NEVER_KEPT = 32 << 20  # bytes of a block from which on memory comes from the kernel, whatever is free (cpp/simd/heap.cpp)


class Freed(NamedTuple):
    """`kept`: there is room for it, beside what one unit may add, `margin_bytes`; `reused`: what is kept is room for part of that."""

    kept: bool
    margin_bytes: int
    reused: bool


def freed(plan: Plan) -> Freed:
    """What a plan has room for. Without a batch it is not known what a unit may add: half of what is free is left for it, and nothing kept."""
    margin = surge_bytes(plan)
    if margin is None:
        return Freed(False, plan.free_bytes // 2, _reused(plan))
    return Freed(margin < plan.free_bytes // 2, margin, _reused(plan))


def surge_bytes(plan: Plan) -> int | None:
    """What may come to live on the device while one unit is computed."""
    if plan.batch is None:
        return None
    largest = demand.largest_kept([u.spec for u in plan.layouts], plan.batch, plan.compute)
    return largest + plan.working.logits + plan.working.gradients + plan.working.slack


def _reused(plan: Plan) -> bool:
    """Not for gradients of repeated units that are too large to be kept."""
    repeated = (p for u in plan.layouts if u.spec.repeated for p in u.spec.parameters)
    return max((p.numel for p in repeated if p.trained), default=0) * DTYPE_BYTES[plan.compute] < NEVER_KEPT
