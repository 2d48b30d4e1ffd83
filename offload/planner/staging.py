"""How staging buffers are shared out. Pure.

[Note: staging]
Whole buffers belong to the update pipeline, which holds each from the read of a chunk to its write-back. One more is cut in parts, each of which
holds a chunk's fp32 gradient: one for fetches, which are one at a time, the others for gradients that rest on NVMe. Nobody takes a buffer of
another, so nobody waits for a buffer whose holder waits for him.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planner.layout import CHUNK_ALIGN, PAGE, UnitLayout, round_up

PARTS_MOST = 8


@dataclass(frozen=True)
class Staging:
    """`updates` buffers of `frame_bytes` for the update pipeline, and `parts` of `part_bytes` each in one more for fetches and gradients."""

    updates: int
    frame_bytes: int
    parts: int
    part_bytes: int

    @property
    def nbytes(self) -> int:
        return (self.updates + (1 if self.parts else 0)) * self.frame_bytes


NONE = Staging(0, 0, 0, 0)


def share_out(frames: int, frame_bytes: int, layouts: Sequence[UnitLayout]) -> Staging:
    """The shares of `frames` buffers (at least two, or none)."""
    if not frames:
        return NONE
    largest = max((c.numel for u in layouts if u.trained for c in u.trained.chunks), default=CHUNK_ALIGN)
    part = round_up(4 * largest, PAGE)
    return Staging(frames - 1, frame_bytes, min(PARTS_MOST, frame_bytes // part), part)
