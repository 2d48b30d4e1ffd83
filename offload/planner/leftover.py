"""What a device of its own does with what everything else leaves of its budget: it keeps what would move again. Pure.

[Note: passes]
Of k micro-batches a step has 2k passes, forward and backward in turn, and each takes units in the opposite order of the one before. So at each of the
2k - 1 turns what was used last is needed first. Slots are taken from units in the order of their last use, so they then still have as many of the
last units of a forward, and of the first of a backward, as there are slots of their size, and these are not fetched again. The first forward fetches
all, as their updates came between.

[Note: left over]
Three things take what is left, in this order. Sums that would rest on nvme stay on the device (planner/sums.py), as a drive is the slowest of links.
Further slots: each spares the link to the device a fetch at every turn, in forwards, which have nothing else to move, and in backwards. Then the
sums of other units, which spare the link from the device: a backward moves parameters and gradients at once, so they are worth nothing while it
fetches more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from offload.planner.layout import FLOATING, UnitLayout, slot_bytes
from offload.planner.sums import Gain, gain, sum_bytes

if TYPE_CHECKING:
    from offload.planner.placement import Plan


@dataclass(frozen=True)
class Leftover:
    """Sizes of further slots, and the units whose gradients are summed on the device."""

    slots: tuple[int, ...] = ()
    summed: frozenset[int] = frozenset()


@lru_cache(maxsize=64)
def fetches(sizes: tuple[int, ...], slots: tuple[int, ...], accumulate: int) -> tuple[tuple[int, int], ...]:
    """How often a step fetches each unit in its forwards and in its backwards, given their bytes in a slot (0: they need none) in the order of their
    use; see [Note: passes]. Of two micro-batches all that follow are as the second."""
    holds: list[int | None] = [None] * len(slots)
    used, clock = [0] * len(slots), 0
    times = [[0, 0] for _ in sizes]
    for number in range(4 if accumulate > 1 else 2):
        for unit in range(len(sizes))[:: -1 if number % 2 else 1]:
            if not sizes[unit]:
                continue
            if unit not in holds:
                times[unit][number % 2] += 1 if number < 2 else accumulate - 1
            fits = (slot for slot, size in enumerate(slots) if size >= sizes[unit])
            at = holds.index(unit) if unit in holds else min(fits, key=lambda s: (slots[s], holds[s] is not None, used[s]), default=None)
            if at is not None:
                clock += 1
                holds[at], used[at] = unit, clock
    return tuple((forward, backward) for forward, backward in times)


def further_slots(sizes: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Sizes of slots, small ones first, with which every unit of a size that has any would have one."""
    out = []
    classes: dict[int, list[int]] = {}  # units by the power of two of their bytes, as slots are made for them (demand.slot_sizes)
    for unit, size in enumerate(sizes):
        if size:
            classes.setdefault(size.bit_length(), []).append(unit)
    for kind, members in classes.items():
        there = sum(slot.bit_length() == kind for slot in slots)
        if there:
            out += [max(sizes[u] for u in members)] * (len(members) - there)
    return sorted(out)


def spend(room: int, slots: Sequence[int], gains: Sequence[Gain], sums: Sequence[int]) -> Leftover:
    """What to do with `room` bytes, given the further `slots` that there might be, small ones first, and by unit the bytes of its sum and what that
    saves; see [Note: left over] and [Note: sums on the device]."""
    summed: set[int] = set()
    taken = 0

    def keep_sums(units: Iterable[int]) -> None:
        nonlocal room
        for unit in units:
            if sums[unit] <= room:
                summed.add(unit)
                room -= sums[unit]

    wanted = [u for u in reversed(range(len(gains))) if sum(gains[u]) > 0 and min(gains[u]) >= 0]
    keep_sums(u for u in wanted if gains[u].nvme)
    while taken < len(slots) and slots[taken] <= room:
        room -= slots[taken]
        taken += 1
    keep_sums(u for u in wanted if not gains[u].nvme)
    return Leftover(tuple(slots[:taken]), frozenset(summed))


def slots_of(plan: Plan, direct: bool) -> tuple[int, ...]:
    """By unit, what it takes of a slot; 0 where the device computes from where its parameters rest."""
    reach = ("device", "host") if direct else ("device",)

    def moves(unit: UnitLayout, tier: str) -> bool:
        cast = any(f.dtype != plan.compute and f.dtype in FLOATING for f in unit.flats)
        return tier not in reach or cast or plan.share.divides("parameter")

    return tuple(slot_bytes(unit, plan.compute) if moves(unit, tier) else 0 for unit, tier in zip(plan.layouts, plan.parameter, strict=True))


def leftover(plan: Plan, slots: bool) -> Leftover:
    """What the plan is to do with what its device has left; further slots only if they may still be made."""
    request = plan.request
    if request is None or plan.batch is None or not (request.may_stay or request.may_sum):
        return Leftover()
    chunks = [unit.trained.chunks if unit.trained else () for unit in plan.layouts]
    gains = [gain(tiers, [c.numel for c in own], plan.sent, plan.accumulate) for tiers, own in zip(plan.gradient, chunks, strict=True)]
    further = further_slots(slots_of(plan, False), plan.slots) if slots and request.may_stay else []
    sums = [sum_bytes(unit) for unit in plan.layouts]
    room = plan.budgets["device"] - plan.peak_bytes["device"]
    return spend(room, further, gains if request.may_sum else [Gain(0, 0)] * len(gains), sums)
