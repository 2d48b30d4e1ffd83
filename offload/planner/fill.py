"""Fills the tiers in one order with what rests on them. Pure; see [Note: placement] and [Note: whole units]."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TypeVar

from offload.planner.form import StateForm
from offload.planner.layout import DTYPE_BYTES, FLOATING, Chunk, UnitLayout, slot_bytes
from offload.planner.passing import KEPT, shared_bytes
from offload.planner.share import ALONE, Share

TIERS = ("device", "host", "nvme")
ROLES = ("parameter", "gradient", "optimizer")
Runs = tuple[tuple[str, int], ...]  # (tier, chunks) in the order of the chunks


@dataclass(frozen=True)
class Sizes:
    """Units as they are cut. By unit: bytes of the parameters at rest and in a slot, whether the device can compute from where they rest, and
    by role ("gradient", "optimizer") and unit the bytes at which its chunks end, one behind another; and its kind (planner/passing.py)."""

    parameter: tuple[int, ...]
    slot: tuple[int, ...]
    plain: tuple[bool, ...]
    ends: dict[str, tuple[tuple[int, ...], ...]]
    kinds: tuple[int, ...]

    @property
    def shared(self) -> int:
        """Bytes on the host of the places that gradients pass through."""
        return shared_bytes(self.kinds, [ends[-1] if ends else 0 for ends in self.ends["gradient"]])

    def of(self, units: Sequence[int]) -> Sizes:
        """Those of some units alone."""
        return Sizes(
            _picked(self.parameter, units), _picked(self.slot, units), _picked(self.plain, units),
            {role: _picked(ends, units) for role, ends in self.ends.items()}, _picked(self.kinds, units),
        )  # fmt: skip


_T = TypeVar("_T")


def _picked(each: Sequence[_T], units: Sequence[int]) -> tuple[_T, ...]:
    return tuple(each[u] for u in units)


def sizes_of(layouts: Sequence[UnitLayout], grad: str, form: StateForm, share: Share = ALONE, kinds: Sequence[int] = ()) -> Sizes:
    """What of them rests on one rank. Parameters that are divided among ranks are gathered in slots, wherever they rest. Without `kinds` no gradient
    passes."""
    compute = form.compute

    def own(unit: UnitLayout, role: str) -> list[Chunk]:
        return [unit.trained.chunks[c] for c in share.chunks(unit.trained, role)] if unit.trained else []

    def ends(unit: UnitLayout) -> tuple[int, ...]:
        chunks = own(unit, "gradient")
        return tuple((c.stop - chunks[0].start) * DTYPE_BYTES[grad] for c in chunks)

    return Sizes(
        tuple(sum(share.parameter_bytes(f) for f in u.flats) for u in layouts),
        tuple(slot_bytes(u, compute) for u in layouts),
        tuple(
            not (u.flats and share.divides("parameter")) and all(f.dtype == compute or f.dtype not in FLOATING for f in u.flats) for u in layouts
        ),
        {
            "gradient": tuple(ends(u) for u in layouts),
            "optimizer": tuple(tuple(accumulate(form.record_bytes(c.numel) for c in own(u, "optimizer"))) for u in layouts),
        },
        tuple(kinds) or (KEPT,) * len(layouts),
    )


@dataclass(frozen=True)
class Load:
    """What is to rest where: the tiers of the roles that are fixed. `rests`, `direct`: as in `Capacities`. `most`: units that may rest whole."""

    place: dict[str, str]
    rests: bool
    direct: bool
    most: float = math.inf

    @property
    def whole(self) -> bool:
        """Whether a unit rests on the device with all its roles or with none; see [Note: whole units]."""
        return self.rests and not self.direct


@dataclass(frozen=True)
class Room:
    """Bytes on the device for slots and state at rest, and on the host for state at rest; of what slots leave, 1/`share` is for state at rest, and
    no more than `resting`."""

    device: int
    share: int
    host: int
    resting: float = math.inf


@dataclass(frozen=True)
class Filled:
    """Tiers by unit (parameters) and by unit and run of chunks (gradients, states), the slots that this needs, and bytes at rest by tier."""

    parameter: tuple[str, ...]
    gradient: tuple[Runs, ...]
    state: tuple[Runs, ...]
    slots: tuple[int, ...]
    taken: dict[str, int]


class Short(Exception):
    """A tier has too little room, whatever goes elsewhere: `nbytes` of it would do."""

    def __init__(self, tier: str, nbytes: int, slots: Sequence[int] = ()) -> None:
        super().__init__(tier)
        self.tier, self.nbytes, self.slots = tier, nbytes, tuple(slots)


def fixed_bytes(sizes: Sizes, load: Load) -> dict[str, int]:
    """Bytes of the roles that are fixed to a tier, by tier."""
    out = dict.fromkeys(TIERS, 0)
    for role, tier in load.place.items():
        out[tier] += sum(sizes.parameter) if role == "parameter" else sum(ends[-1] for ends in sizes.ends[role] if ends)
    return out


def moved(sizes: Sizes, load: Load, tiers: Sequence[str]) -> list[int]:
    """Slot bytes of the units that the device does not compute from where they rest."""
    reach = {"device"} | ({"host"} if load.direct else set())
    return [s for s, plain, tier in zip(sizes.slot, sizes.plain, tiers, strict=True) if not (plain and tier in reach)]


def fill(sizes: Sizes, load: Load, room: Room, slots_for: Callable[[Sequence[int]], tuple[int, ...]], in_reach: bool) -> Filled | None:
    """Everything's place. `slots_for` gives the slots for units of such sizes; fewer units never need more.

    With `in_reach`, parameters that may rest anywhere must rest where the device computes from them, None where they cannot. Raises Short.
    """
    if load.whole and "device" not in load.place.values():
        return _fill_whole(sizes, load, room, slots_for, in_reach)
    fixed = fixed_bytes(sizes, load)
    fixed["host"] += sizes.shared
    if fixed["host"] > room.host:
        raise Short("host", fixed["host"])
    left = Room(room.device - room.share * fixed["device"], room.share, room.host - fixed["host"], room.resting - fixed["device"])
    if "parameter" in load.place:
        tiers = (load.place["parameter"],) * len(sizes.parameter)
        slots, full = slots_for(moved(sizes, load, tiers)), 0
        if sum(slots) > left.device:
            raise Short("device", room.share * fixed["device"] + sum(slots), slots)
    else:
        chosen = _parameters(sizes, load, left, slots_for, in_reach)
        if isinstance(chosen, Short):
            if in_reach:
                return None
            raise Short("device", room.share * fixed["device"] + chosen.nbytes, chosen.slots)
        tiers, slots, full = chosen
    taken = fixed
    if "parameter" not in load.place:
        for tier, nbytes in zip(tiers, sizes.parameter, strict=True):
            taken[tier] += nbytes
    rest = min((room.device - sum(slots)) // room.share, room.resting) if load.rests else 0
    chunks = _Chunks({"device": rest - taken["device"], "host": room.host - taken["host"]}, full if load.rests else max(full, 1), taken)
    passing = ["host" if kind != KEPT else None for kind in sizes.kinds]
    gradient = tuple(chunks.spread(e, p or load.place.get("gradient")) for e, p in zip(sizes.ends["gradient"], passing, strict=True))
    state = tuple(chunks.spread(ends, load.place.get("optimizer")) for ends in sizes.ends["optimizer"])
    return Filled(tiers, gradient, state, slots, taken)


def _fill_whole(
    sizes: Sizes, load: Load, room: Room, slots_for: Callable[[Sequence[int]], tuple[int, ...]], in_reach: bool
) -> Filled | None:
    """As `fill`: as many units as can be rest whole on the device, beside the slots of the others."""
    count = len(sizes.parameter)
    whole = [sizes.parameter[u] + sum(ends[u][-1] for ends in sizes.ends.values() if ends[u]) for u in range(count)]
    order = [u for u in sorted(range(count), key=lambda u: sizes.parameter[u]) if _may_rest(sizes, load, u)]
    upto = [0, *accumulate(whole[u] for u in order)]
    first = int(min(load.most, bisect_right(upto, room.device // room.share) - 1))
    while first > 0 and room.share * upto[first] + sum(slots_for(_moved_beside(sizes, set(order[:first])))) > room.device:
        first -= 1
    there = set(order[: max(0, first)])
    if in_reach and len(there) < count:
        return None
    others = [u for u in range(count) if u not in there]
    left = Room(room.device - room.share * upto[len(there)], room.share, room.host)
    nearest = [sizes.slot[u] for u in there if not sizes.plain[u]]  # computed from slots all the same
    filled = fill(sizes.of(others), replace(load, rests=False), left, lambda moving: slots_for([*moving, *nearest]), False)
    if filled is None:
        return None
    tiers, gradient, state = ["device"] * count, _all_on_device(sizes.ends["gradient"]), _all_on_device(sizes.ends["optimizer"])
    for u, tier, g, s in zip(others, filled.parameter, filled.gradient, filled.state, strict=True):
        tiers[u], gradient[u], state[u] = tier, g, s
    return Filled(tuple(tiers), tuple(gradient), tuple(state), filled.slots, filled.taken | {"device": upto[len(there)]})


def leaving_room(
    filled: Filled, sizes: Sizes, load: Load, room: Room, slots_for: Callable[[Sequence[int]], tuple[int, ...]], in_reach: bool
) -> Filled:
    """`filled`, or where device and host are one memory as much of it on the host as leaves no more on nvme; see [Note: one memory]."""
    if not (load.rests and load.direct):
        return filled
    least = max(fixed_bytes(sizes, load)["device"], filled.taken["device"] + filled.taken["host"] - room.host)
    whole = max(sizes.parameter, default=0) + max((ends[0] for role in sizes.ends.values() for ends in role if ends), default=0)
    for resting in (least, least + whole):  # what is not divided may not fill the host to its brim
        if resting < filled.taken["device"]:
            try:
                other = fill(sizes, load, replace(room, resting=resting), slots_for, in_reach)
            except Short:
                continue
            if other is not None and other.taken["nvme"] <= filled.taken["nvme"] and other.taken["device"] < filled.taken["device"]:
                return other
    return filled


def _all_on_device(ends: Sequence[Sequence[int]]) -> list[Runs]:
    return [(("device", len(own)),) if own else () for own in ends]


def _may_rest(sizes: Sizes, load: Load, unit: int) -> bool:
    """Whether no role that the unit has is fixed elsewhere."""
    return "parameter" not in load.place and not any(role in load.place and ends[unit] for role, ends in sizes.ends.items())


def _moved_beside(sizes: Sizes, there: set[int]) -> list[int]:
    """Slot bytes of the units that are computed from slots when those of `there` rest on the device and no others do."""
    return [slot for u, slot in enumerate(sizes.slot) if u not in there or not sizes.plain[u]]


def _parameters(
    sizes: Sizes, load: Load, left: Room, slots_for: Callable[[Sequence[int]], tuple[int, ...]], in_reach: bool
) -> tuple[tuple[str, ...], tuple[int, ...], int] | Short:
    """(tiers by unit, slots, tiers that nothing later may use): as many units as can be on the device beside the others' slots, then on the host."""
    count = len(sizes.parameter)
    order = sorted(range(count), key=lambda u: sizes.parameter[u])
    upto = [0, *accumulate(sizes.parameter[u] for u in order)]

    def on_host(first: int) -> int:
        return bisect_right(upto, upto[first] + max(0, left.host)) - 1

    @cache
    def slots_beyond(reach: int) -> tuple[int, ...]:
        return slots_for([sizes.slot[u] for i, u in enumerate(order) if i >= reach or not sizes.plain[u]])

    most = bisect_right(upto, min(left.device // left.share, left.resting)) - 1 if load.rests else 0
    for first in range(max(0, most), -1, -1):
        end = on_host(first)
        reach = end if load.direct else first
        if in_reach and reach < count:
            break
        slots = slots_beyond(reach)
        if left.share * upto[first] + sum(slots) <= left.device:
            tiers = [""] * count
            for i, u in enumerate(order):
                tiers[u] = TIERS[0 if i < first else 1 if i < end else 2]
            return tuple(tiers), slots, 0 if first == count else 1 if end == count else 2
    slots = slots_beyond(on_host(0) if load.direct else 0)
    return Short("device", sum(slots), slots)


class _Chunks:
    """Places chunks in order, never nearer than one before; `left` is what tiers have left, `taken` counts what rests."""

    def __init__(self, left: dict[str, float], at: int, taken: dict[str, int]) -> None:
        self._left: list[float] = [left["device"], left["host"], math.inf]
        self._at, self._taken = at, taken

    def spread(self, ends: Sequence[int], fixed: str | None) -> Runs:
        """Tiers of one unit's chunks, which end at these bytes; what is `fixed` is counted already."""
        if fixed is not None:
            return ((fixed, len(ends)),)
        runs, done = [], 0
        while done < len(ends):
            start = ends[done - 1] if done else 0
            room = self._left[self._at]
            end = len(ends) if room == math.inf else bisect_right(ends, start + room, lo=done)
            if end > done:
                nbytes = ends[end - 1] - start
                self._left[self._at] -= nbytes
                self._taken[TIERS[self._at]] += nbytes
                runs.append((TIERS[self._at], end - done))
                done = end
            if done < len(ends):
                self._at += 1
        return tuple(runs)
