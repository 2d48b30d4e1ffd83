"""How a unit's parameters are packed and cut. Pure: numbers in, numbers out.

[Note: flat layout]
Trained parameters of a unit share one flat; frozen ones share a flat per stored dtype, without chunks of state.
Every parameter starts on a multiple of ALIGN elements, so it is 64-byte aligned in every dtype and quantisation
blocks never straddle parameters. A flat is cut in chunks that start on multiples of CHUNK_ALIGN elements, so every
chunk offset is a multiple of 4096 bytes in every dtype and can be read and written directly. A parameter larger than
a chunk is cut into chunks of its own; smaller ones are grouped. Nothing that is computed depends on where cuts fall.

[Note: shared layout]
Among several ranks a flat is as many equal shares, each a multiple of CHUNK_ALIGN elements, and each share is cut into chunks on one grid, so a
chunk belongs to one rank and all ranks have chunks of the same sizes, and so the same plan. A parameter that a cut would part starts on a multiple of
CHUNK_ALIGN, or behind the cut if it is no larger than that: cuts within a parameter are multiples of CHUNK_ALIGN of its own elements, and no block of
a norm nor group of a quantised moment is parted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN = 256
CHUNK_ALIGN = 4096
PAGE = 4096
FLOATING = ("fp32", "bf16", "fp16", "fp64")
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1}


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the plan sees it: `dtype` is the one the user declared; `uses` counts the modules that hold it."""

    name: str
    numel: int
    dtype: str
    trained: bool
    uses: int = 1
    inner: int = 0  # last dimension's size, 0 for scalars and vectors


@dataclass(frozen=True)
class UnitSpec:
    """Parameters that move together.

    `depth` counts the units whose modules enclose this one's. `borrows` counts further units whose parameters are bound while it computes.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    depth: int = 0
    repeated: bool = False
    borrows: int = 0

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


class Slice(NamedTuple):
    """Elements [start, stop) of parameter number `parameter`, at element `offset` of the flat."""

    parameter: int
    start: int
    stop: int
    offset: int


class Chunk(NamedTuple):
    """Elements [start, stop) of a flat; the grain of updates and of NVMe traffic."""

    start: int
    stop: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Flat:
    """A packed buffer of one dtype, in as many equal shares as there are `ranks`. `offsets` gives each packed parameter's first element."""

    dtype: str
    trained: bool
    numel: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    ranks: int = 1

    @property
    def nbytes(self) -> int:
        return round_up(self.numel * DTYPE_BYTES[self.dtype], 4096)

    @property
    def share(self) -> int:
        """Elements of each rank."""
        return self.numel // self.ranks


@dataclass(frozen=True)
class UnitLayout:
    """A unit's flats: the trained one first where there is one."""

    spec: UnitSpec
    flats: tuple[Flat, ...]

    @property
    def trained(self) -> Flat | None:
        return self.flats[0] if self.flats and self.flats[0].trained else None


def pack(members: Sequence[tuple[int, int]], dtype: str, trained: bool, chunk: int) -> Flat:
    """Packs (index, numel) pairs in order into a flat cut in chunks of at most `chunk` elements (one parameter's start aside)."""
    chunks: list[Chunk] = []
    offsets: list[int] = []
    group: list[Slice] = []
    start = at = 0

    def cut() -> None:
        nonlocal start, at, group
        if group:
            at = round_up(at, CHUNK_ALIGN)
            chunks.append(Chunk(start, at, tuple(group)))
        start, group = at, []

    for index, numel in members:
        size = round_up(max(numel, 1), ALIGN)
        if at - start + size > chunk:
            cut()
        offsets.append(at)
        for begin in range(0, max(numel, 1), chunk):
            end = min(begin + chunk, numel)
            group.append(Slice(index, begin, end, at))
            at += round_up(max(end - begin, 1), ALIGN)
            if end < numel:
                cut()
    cut()
    return Flat(dtype, trained, at, tuple(i for i, _ in members), tuple(offsets), tuple(chunks))


def _starts(members: Sequence[tuple[int, int]], share: int, chunk: int) -> tuple[list[int], int]:
    """Each member's first element where shares of so many elements are cut in chunks, and where the last one ends; see [Note: shared layout]."""
    offsets, at = [], 0
    for _, numel in members:
        size = max(numel, 1)
        first = at // share * share  # of the share that this is in
        cut = min(first + round_up(at - first + 1, chunk), first + share)
        if at + size > cut:
            at = cut if size <= CHUNK_ALIGN else round_up(at, CHUNK_ALIGN)
        offsets.append(at)
        at += round_up(size, ALIGN)
    return offsets, at


def pack_shares(members: Sequence[tuple[int, int]], dtype: str, trained: bool, chunk: int, ranks: int) -> Flat:
    """As `pack`, in `ranks` equal shares, the smallest that hold everything."""
    share = max(CHUNK_ALIGN, round_up(-(-sum(round_up(max(n, 1), ALIGN) for _, n in members) // ranks), CHUNK_ALIGN))
    offsets, end = _starts(members, share, chunk)
    while end > share * ranks:
        share += CHUNK_ALIGN
        offsets, end = _starts(members, share, chunk)
    chunks = []
    at = 0  # the first member that may lie in the next chunk
    for start in (r * share + k for r in range(ranks) for k in range(0, share, chunk)):
        stop = min(start + chunk, (start // share + 1) * share)
        slices = []
        while at < len(members) and offsets[at] < stop:
            (index, numel), offset = members[at], offsets[at]
            slices.append(Slice(index, max(0, start - offset), min(numel, stop - offset), max(start, offset)))
            if offset + numel > stop:
                break
            at += 1
        chunks.append(Chunk(start, stop, tuple(slices)))
    return Flat(dtype, trained, share * ranks, tuple(i for i, _ in members), tuple(offsets), tuple(chunks), ranks)


def lay_out(spec: UnitSpec, compute: str, chunk: int, ranks: int = 1) -> UnitLayout:
    """Flats of a unit for a compute dtype and at most `chunk` elements a chunk (a multiple of CHUNK_ALIGN), in shares for `ranks`."""

    def flat(members: list[tuple[int, int]], dtype: str, trained: bool) -> Flat:
        return pack(members, dtype, trained, chunk) if ranks == 1 else pack_shares(members, dtype, trained, chunk, ranks)

    trained = [(i, p.numel) for i, p in enumerate(spec.parameters) if p.trained]
    flats = [flat(trained, compute, True)] if trained else []
    for dtype in sorted({p.dtype for p in spec.parameters if not p.trained}):
        flats.append(flat([(i, p.numel) for i, p in enumerate(spec.parameters) if not p.trained and p.dtype == dtype], dtype, False))
    return UnitLayout(spec, tuple(flats))


def lay_out_all(specs: Sequence[UnitSpec], compute: str, chunk: int, ranks: int = 1) -> tuple[UnitLayout, ...]:
    """Layouts of all units; those of equal shape share their flats."""
    seen: dict[tuple[tuple[int, str, bool], ...], tuple[Flat, ...]] = {}
    out = []
    for spec in specs:
        shape = tuple((p.numel, p.dtype, p.trained) for p in spec.parameters)
        if shape not in seen:
            seen[shape] = lay_out(spec, compute, chunk, ranks).flats
        out.append(UnitLayout(spec, seen[shape]))
    return tuple(out)


def slot_starts(layout: UnitLayout, compute: str) -> tuple[int, ...]:
    """The byte in a slot at which each of a unit's flats starts, and last where they end: floating ones in the compute dtype, each on a page."""
    starts = [0]
    for flat in layout.flats:
        starts.append(starts[-1] + round_up(flat.numel * DTYPE_BYTES[compute if flat.dtype in FLOATING else flat.dtype], PAGE))
    return tuple(starts)


def slot_bytes(layout: UnitLayout, compute: str) -> int:
    """A unit's size in a slot, as it is cut."""
    return slot_starts(layout, compute)[-1]
