"""How a unit's parameters are packed and cut. Pure: numbers in, numbers out.

[Note: flat layout]
Trained parameters of a unit share one flat; frozen ones share a flat per stored dtype, without chunks of state.
Every parameter starts on a multiple of ALIGN elements, so it is 64-byte aligned in every dtype and quantisation
blocks never straddle parameters. A flat is cut in chunks that start on multiples of CHUNK_ALIGN elements, so every
chunk offset is a multiple of 4096 bytes in every dtype and can be read and written directly. A parameter larger than
a chunk is cut into chunks of its own; smaller ones are grouped. Nothing that is computed depends on where cuts fall.
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
    """A packed buffer of one dtype. `offsets` gives each packed parameter's first element."""

    dtype: str
    trained: bool
    numel: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return round_up(self.numel * DTYPE_BYTES[self.dtype], 4096)


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


def lay_out(spec: UnitSpec, compute: str, chunk: int) -> UnitLayout:
    """Flats of a unit for a compute dtype and at most `chunk` elements a chunk (a multiple of CHUNK_ALIGN)."""
    trained = [(i, p.numel) for i, p in enumerate(spec.parameters) if p.trained]
    flats = [pack(trained, compute, True, chunk)] if trained else []
    for dtype in sorted({p.dtype for p in spec.parameters if not p.trained}):
        flats.append(pack([(i, p.numel) for i, p in enumerate(spec.parameters) if not p.trained and p.dtype == dtype], dtype, False, chunk))
    return UnitLayout(spec, tuple(flats))


def lay_out_all(specs: Sequence[UnitSpec], compute: str, chunk: int) -> tuple[UnitLayout, ...]:
    """Layouts of all units; those of equal shape share their flats."""
    seen: dict[tuple[tuple[int, str, bool], ...], tuple[Flat, ...]] = {}
    out = []
    for spec in specs:
        shape = tuple((p.numel, p.dtype, p.trained) for p in spec.parameters)
        if shape not in seen:
            seen[shape] = lay_out(spec, compute, chunk).flats
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
