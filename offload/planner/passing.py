"""Gradients that pass: units that are alike land theirs in places that they share, in turn. Pure.

[Note: passing gradients]
Where a gradient is for its update alone, and that starts as soon as its unit's backward is over, it need not rest: of repeated units that are laid
out alike SETS have places for gradients, in host memory, and the others use these in turn as a backward comes to them. One whose gradients are to
land waits for the updates of the unit that had its places before; those of the unit between run while it computes. So gradients of all these units
take what those of SETS do, and no drive sees them. A unit that holds a parameter which others use too keeps its own places, as gradients of that
one come at several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from offload.planner.layout import UnitSpec

SETS = 2
KEPT = -1  # in place of a kind: the unit's gradients rest in places of their own


def kinds(units: Sequence[UnitSpec]) -> tuple[int, ...]:
    """By unit: KEPT, or the first of the units alike whose gradients may pass through the same places, which are more than there are sets."""
    first: dict[tuple[tuple[int, str, bool], ...], int] = {}
    out = []
    for number, unit in enumerate(units):
        shape = tuple((p.numel, p.dtype, p.trained) for p in unit.parameters)
        passes = unit.repeated and any(p.trained for p in unit.parameters) and all(p.uses == 1 for p in unit.parameters)
        out.append(first.setdefault(shape, number) if passes else KEPT)
    count = Counter(out)
    return tuple(kind if count[kind] > SETS else KEPT for kind in out)


def places(of: Sequence[int]) -> tuple[int, ...]:
    """By unit, for their kinds: the unit in whose places its gradients land, which are its own unless it passes."""
    sets: dict[int, list[int]] = {}
    turn = Counter[int]()
    out = []
    for unit, kind in enumerate(of):
        there = sets.setdefault(kind, [])
        if kind == KEPT:
            out.append(unit)
            continue
        if len(there) < SETS:
            there.append(unit)
        out.append(there[turn[kind] % SETS])
        turn[kind] += 1
    return tuple(out)


def shared_bytes(of: Sequence[int], nbytes: Sequence[int]) -> int:
    """What the places of gradients that pass take, given each unit's kind and the bytes of its gradients."""
    return sum(nbytes[unit] for unit, place in enumerate(places(of)) if of[unit] != KEPT and place == unit)
