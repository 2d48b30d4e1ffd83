"""Boundary activations, the inputs of repeated units, where they leave the device between forward and backward. Pure.

[Note: boundary activations]
`recompute` keeps a boundary of each repeated unit on the device; `host` and `nvme` keep a few that are in use or in transit, and the others on
those tiers. What they need there is reserved by shapes of parameters: a repeated unit's output is the next one's input, so its width is a number
that all its matrices have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config import Activations
from offload.errors import ConfigError
from offload.planner.demand import Batch, again, is_table
from offload.planner.layout import DTYPE_BYTES, PAGE, UnitSpec, round_up

AWAY = ("host", "nvme")  # treatments under which boundaries leave the device
STAGING_BUFFERS = 4  # on the way to nvme, one of them for the way back
STAGING_MOST = 4 << 20  # bytes of each
UNKNOWN_SHARE = {"host": 2, "nvme": 8}  # of the host budget, 1 part waits for a batch that is not known yet
MODES: dict[Activations, tuple[str, ...]] = {
    "auto": ("keep", "recompute", "host", "nvme"), "keep": ("keep",), "recompute": ("recompute",), "host": ("host",), "nvme": ("nvme",),
}  # fmt: skip


@dataclass(frozen=True)
class Boundaries:
    """The tier where boundaries rest (None: they stay on the device), bytes by unit in whole pages, and buffers on the way to nvme."""

    tier: str | None = None
    sizes: tuple[int, ...] = ()
    buffers: int = 0
    buffer_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def staging(self) -> int:
        return self.buffers * self.buffer_bytes

    @property
    def by_tier(self) -> dict[str, int]:
        """Bytes that they take of each tier beside the device."""
        return {"host": (self.nbytes if self.tier == "host" else 0) + self.staging, "nvme": self.nbytes if self.tier == "nvme" else 0}


STAY = Boundaries()


def modes(asked: str, nvme: int) -> tuple[str, ...]:
    """The treatments that `asked` allows, least costly first. ConfigError for an unknown one, and for nvme where there is none."""
    known = {str(name): ways for name, ways in MODES.items()}
    if asked not in known:
        raise ConfigError(f"activations = {asked!r}: give one of {', '.join(map(repr, known))}")
    if asked == "nvme" and not nvme:
        raise ConfigError("activations is nvme, but tiers.nvme names no directory; name one, or give activations = 'host'")
    return tuple(mode for mode in known[asked] if mode != "nvme" or nvme)


def width(unit: UnitSpec) -> int:
    """Elements a token of a repeated unit's input, as far as its parameters tell."""
    matrices = [p for p in unit.parameters if p.inner > 0]
    projections = [p for p in matrices if not is_table(p)] or matrices
    common = set.intersection(*({p.inner, p.numel // p.inner} for p in projections)) if projections else set()
    if not common:
        return max((p.inner for p in matrices), default=0)
    return projections[0].inner if projections[0].inner in common else max(common)


def boundaries(units: Sequence[UnitSpec], batch: Batch | None, compute: str, mode: str, kept: int = 0) -> Boundaries:
    """What leaves the device for a batch, of units that are computed again; without one, where to alone."""
    if mode not in AWAY:
        return STAY
    if batch is None:
        return Boundaries(mode)
    leaves = set(again(units, mode, kept))
    sizes = tuple(round_up(DTYPE_BYTES[compute] * batch.total * width(u), PAGE) if n in leaves else 0 for n, u in enumerate(units))
    if mode == "host" or not any(sizes):
        return Boundaries(mode, sizes)
    return Boundaries(mode, sizes, STAGING_BUFFERS, min(STAGING_MOST, max(sizes)))
