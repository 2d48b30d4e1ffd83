"""Which units' gradients are summed on a device of its own, of which their updates know nothing. Pure.

[Note: sums on the device]
With several micro-batches a step, the gradients of a unit that does not rest on the device move to the host once for each; and where they rest on
nvme the sum is read and written for each. Where the device has room left over, a unit's sum stays there instead, in fp32, and is moved once, by the
last micro-batch, to where it rests for its update. Both ways add in the same order by the same operations. An element takes 4 bytes on the device and
4 on its way, instead of those of the compute dtype for each micro-batch: a unit of which no link would see less is not taken. Those of which nvme
sees less come first, then those whose gradients come first in a backward: what the last one of a step moves has the rest of it to move under.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.planner.layout import DTYPE_BYTES, UnitLayout

SUM = "fp32"


class Gain(NamedTuple):
    """Bytes a step that are not moved if a unit's sum stays on the device: by nvme, and over the link from the device."""

    nvme: int
    link: int


def sum_bytes(layout: UnitLayout) -> int:
    """What a unit's sum takes."""
    return layout.trained.numel * DTYPE_BYTES[SUM] if layout.trained else 0


def link_bytes(numel: int, moves: str, accumulate: int, summed: bool) -> int:
    """Bytes a step that so many elements of a gradient take over the link, each micro-batch's in the dtype `moves`, or the sum alone."""
    return numel * (DTYPE_BYTES[SUM] if summed else accumulate * DTYPE_BYTES[moves])


def gain(tiers: Sequence[str], numel: Sequence[int], moves: str, accumulate: int) -> Gain:
    """Of a unit whose gradient's chunks rest on these tiers and have so many elements."""
    fewer = accumulate - 1  # sums that are read and written
    nvme = sum(2 * fewer * n * DTYPE_BYTES[SUM] for tier, n in zip(tiers, numel, strict=True) if tier == "nvme")
    moved = sum(n for tier, n in zip(tiers, numel, strict=True) if tier in ("host", "nvme"))
    return Gain(nvme, link_bytes(moved, moves, accumulate, False) - link_bytes(moved, moves, accumulate, True))
