"""Memory that compute frees on a device that is RAM: whether the C library keeps it for what comes next. Pure. See [Note: freed memory]."""

from __future__ import annotations

from typing import NamedTuple

from offload.planner import demand
from offload.planner.layout import DTYPE_BYTES
from offload.planner.placement import Plan

NEVER_KEPT = 32 << 20  # bytes of a block from which on memory comes from the kernel, whatever is free (cpp/simd/heap.cpp)


class Freed(NamedTuple):
    """`kept`: there is room for it; `margin_bytes`: what is to be left for what a unit adds; `reused`: what is kept is room for part of that."""

    kept: bool
    margin_bytes: int
    reused: bool


def freed(plan: Plan) -> Freed:
    """What a plan has room for. Where it keeps nothing, what lies free in pieces too small to go back by themselves leaves room for the greatest of
    what a unit adds (beside activations, which fit in those pieces, where gradients do too), or half of what is free, whichever is more; without a
    batch it is not known what a unit adds."""
    spare, work, reused = plan.free_bytes // 2, plan.working, _reused(plan)
    if plan.batch is None:
        return Freed(False, spare, reused)
    largest = demand.largest_kept([u.spec for u in plan.layouts], plan.batch, plan.compute)
    added = work.logits + work.gradients
    if largest + added + work.slack < spare:
        return Freed(True, largest + added + work.slack, reused)
    return Freed(False, max(spare, added if reused else largest + added), reused)


def _reused(plan: Plan) -> bool:
    """Not for gradients of repeated units that are too large to be kept."""
    repeated = (p for u in plan.layouts if u.spec.repeated for p in u.spec.parameters)
    return max((p.numel for p in repeated if p.trained), default=0) * DTYPE_BYTES[plan.compute] < NEVER_KEPT
