"""What one of several ranks keeps of each role. Pure.

[Note: shares]
ZeRO's stages (Rajbhandari and others, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020): every rank has everything (0), its
share of the optimizer state (1), of gradients too (2), of parameters too (3). A rank's share of a flat is elements [rank * S, (rank + 1) * S); see
[Note: shared layout].
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.planner.layout import DTYPE_BYTES, PAGE, Flat, round_up

ABSENT = ""  # in place of the tier of a chunk that rests on another rank
_FROM_STAGE = {"optimizer": 1, "gradient": 2, "parameter": 3}


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `ranks` under a stage, in each of `replicas` groups that have the same."""

    ranks: int = 1
    rank: int = 0
    stage: int = 3
    replicas: int = 1

    @classmethod
    def of(cls, size: int, rank: int, stage: int, replicas: int = 1) -> Share:
        """That of rank `rank` of `size` in all, in rows of equal length. A group of one rank divides nothing, which is stage 0."""
        if size == 1:
            return ALONE
        if replicas == size:
            return cls(size, rank, 0)
        return cls(size // replicas, rank % (size // replicas), stage, replicas)

    @property
    def text(self) -> str:
        """As messages tell of it."""
        if self.ranks == 1:
            return "one rank"
        groups = f" in each of {self.replicas} groups" if self.replicas > 1 else ""
        return f"rank {self.rank} of {self.ranks}{groups} at stage {self.stage}"

    def divides(self, role: str) -> bool:
        """Whether each rank keeps its share alone of a role ("parameter", "gradient", "optimizer")."""
        return self.ranks > 1 and self.stage >= _FROM_STAGE[role]

    def chunks(self, flat: Flat | None, role: str) -> range:
        """The numbers of the chunks of a trained flat whose gradients or states rest on this rank."""
        count = len(flat.chunks) if flat is not None else 0
        if not self.divides(role):
            return range(count)
        return range(count // self.ranks * self.rank, count // self.ranks * (self.rank + 1))

    def span(self, flat: Flat, role: str) -> tuple[int, int]:
        """The first element of a flat that rests on this rank, and the one behind the last."""
        return (self.rank * flat.share, (self.rank + 1) * flat.share) if self.divides(role) else (0, flat.numel)

    def parameter_bytes(self, flat: Flat) -> int:
        """Bytes at rest of a flat's parameters."""
        first, stop = self.span(flat, "parameter")
        return round_up((stop - first) * DTYPE_BYTES[flat.dtype], PAGE)

    def numel(self, flat: Flat, index: int, numel: int, role: str) -> int:
        """Of the parameter packed as number `index`, of `numel` elements: how many rest on this rank."""
        first, stop = self.span(flat, role)
        at = flat.offsets[flat.parameters.index(index)]
        return max(0, min(at + numel, stop) - max(at, first))


ALONE = Share()
