"""Slots: the reusable device buffers that hold a unit while it computes.

[Note: leases]
A unit is resident while a lease on it is held. A forward's lease is firm: its slot is never taken. A backward's is soft: it is given up to a
unit that finds no other slot, because what backward still needs is found again through its saved handles. Everything else in a slot is a
cache in least-recently-used order.

[Note: gathers]
Where parameters are divided among ranks, a slot is filled with this rank's share and then, in the thread of fetches, with the others'. Which slot is
filled with what, and when, follows from the order in which units are used and from nothing else: were it to follow from what has finished, ranks
would wait for each other's gathers for ever.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from offload.dist.world import World
from offload.engine.background import Background
from offload.engine.record import DTYPE_NAMES, DTYPES, Record, Unit
from offload.errors import BudgetError, OffloadError
from offload.memory.shard import check_process
from offload.memory.stalls import RANKS
from offload.planner.layout import slot_starts
from offload.planner.share import ALONE, Share
from offload.transfer.device import Copy, Device
from offload.transfer.frames import FramePool
from offload.transfer.queue import Transfer

log = logging.getLogger("offload")

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(eq=False)
class Slot:
    """A device buffer. `unit` is what it holds or is being filled with; `arriving` is the transfer that fills it."""

    number: int
    memory: torch.Tensor
    unit: int | None = None
    arriving: Transfer | None = None
    used: int = 0
    flats: list[torch.Tensor] = field(default_factory=list)  # the unit's, as views of the memory
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # all that were made


@dataclass
class Use:
    """Leases held on one unit."""

    firm: int = 0
    soft: bool = False


@dataclass
class Counters:
    fetches: int = 0
    misses: int = 0  # of those, not asked for before they were needed
    late: int = 0  # of the last in the step under way, but for its first fetch, which nothing can foresee
    steps: int = 0


class Slots:
    """Who is resident where. `views` gives a resident unit's flats as device tensors in the dtype they are computed with.

    What a unit is filled from, or computed from, is what its last update made of it: see [Note: updates under the forward].
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sizes: Sequence[int],
        device: Device,
        compute: torch.dtype,
        frames: FramePool | None,
        take: Callable[[int], torch.Tensor],
        background: Background,
        world: World | None = None,
        share: Share = ALONE,
    ) -> None:
        """`world`: with several ranks, from whom units come that are divided among them."""
        self._world, self._share = world, share
        self._gathers = world is not None and share.divides("parameter")
        self.units, self.device, self.compute, self.frames, self._background = units, device, compute, frames, background
        self.slots = [Slot(i, take(size)) for i, size in enumerate(sizes)]
        self._by_storage = {s.memory.untyped_storage().data_ptr(): s for s in self.slots}
        self.uses = [Use() for _ in units]
        self.where: dict[int, Slot] = {}
        self.counters = Counters()
        self.on_steal: Callable[[int], None] = lambda unit: None
        self._clock = 0
        self._owner = os.getpid()
        self.closed = self._said_late = False
        self._fixed = {u.number: self._in_place(u) for u in units if self._rests_in_reach(u)}
        self._fixed_at = {flat.untyped_storage().data_ptr(): (u, f) for u, flats in self._fixed.items() for f, flat in enumerate(flats)}
        self._bytes = [slot_starts(u.layout, DTYPE_NAMES[compute]) for u in units]
        self._starts = [self._starts_of(u) for u in units]

    def _rests_in_reach(self, unit: Unit) -> bool:
        if self._gathers and unit.layout.flats:
            return False
        for flat, shard in zip(unit.layout.flats, unit.parameters, strict=True):
            stored = DTYPES[flat.dtype]
            if stored in _FLOATING and stored != self.compute:
                return False
            if not (shard.tier == "device" or (shard.tier == "host" and self.device.direct)):
                return False
        return True

    def _in_place(self, unit: Unit) -> list[torch.Tensor]:
        return [
            s.memory[: f.numel * DTYPES[f.dtype].itemsize].view(DTYPES[f.dtype])
            for f, s in zip(unit.layout.flats, unit.parameters, strict=True)
            if s.memory is not None
        ]

    def slot_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self.compute if stored in _FLOATING else stored

    def slot_views(self, unit: Unit, memory: torch.Tensor) -> list[torch.Tensor]:
        views = []
        for flat, at in zip(unit.layout.flats, self._flat_starts(unit.number), strict=False):
            dtype = self.slot_dtype(DTYPES[flat.dtype])
            views.append(memory[at : at + flat.numel * dtype.itemsize].view(dtype))
        return views

    def _views(self, slot: Slot, unit: Unit) -> list[torch.Tensor]:
        """Made once for units that are laid out alike, which share their flats."""
        key = id(unit.layout.flats)
        if key not in slot.views:
            with torch.inference_mode(False):  # the next user of the slot may be training
                slot.views[key] = self.slot_views(unit, slot.memory)
        return slot.views[key]

    def slot_bytes(self, unit: Unit) -> int:
        return self._flat_starts(unit.number)[-1]

    # Residency

    def begin_forward(self) -> None:
        """The model's forward begins: with all ranks, where what it needs is divided among them."""
        if self._gathers and self._world is not None:
            with self.device.stalls.waiting(RANKS):
                self._world.barrier(f"start of a forward {'with' if torch.is_grad_enabled() else 'without'} gradients")

    def resident(self, number: int) -> list[torch.Tensor]:
        """The unit's flats on the device, fetched and waited for if need be."""
        self._check()
        slot = self.where.get(number)
        if slot is None:
            self._background.wait_unit(number)
        if number in self._fixed:
            return self._fixed[number]
        if slot is None:
            self.counters.misses += 1
            self.counters.late += bool(self.where)
            chosen = self._choose(self.units[number], firm=True)
            assert chosen is not None
            slot = self._fill(chosen, number)
        self._clock += 1
        slot.used = self._clock
        if slot.arriving is not None:
            self._background.wait_unit(number)
            self._arrive(slot)
        return slot.flats

    def _arrive(self, slot: Slot) -> None:
        """What was being fetched is there; if that failed, the slot is empty."""
        arriving, slot.arriving = slot.arriving, None
        try:
            if arriving is not None:
                arriving.wait()
        except BaseException:
            self._empty(slot)
            raise

    # Tensors that view a unit

    def unit_at(self, storage: int) -> int | None:
        """The unit that lies in the storage at this address."""
        slot = self._by_storage.get(storage)
        if slot is not None:
            return slot.unit
        fixed = self._fixed_at.get(storage)
        return fixed[0] if fixed is not None else None

    def record_at(self, unit: int, tensor: torch.Tensor) -> Record:
        """The parameter that a tensor on the device views."""
        starts = self._starts[unit]
        fixed = self._fixed_at.get(tensor.untyped_storage().data_ptr())
        at = tensor.storage_offset() * tensor.element_size() + (self._flat_starts(unit)[fixed[1]] if fixed is not None else 0)
        return starts[bisect.bisect_right(starts, at, key=lambda s: s[0]) - 1][1]

    def view(self, record: Record, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor on the device again, wherever the unit now is. `offset` counts from the start of the storage it was saved from."""
        self.resident(record.unit)
        fixed = self._fixed.get(record.unit)
        memory = fixed[record.flat] if fixed is not None else self.where[record.unit].memory.view(dtype)
        return torch.as_strided(memory.view(dtype), size, stride, offset)

    def moves(self, unit: int) -> bool:
        """Whether the unit comes to slots, and leaves them."""
        return unit not in self._fixed

    def _flat_starts(self, unit: int) -> tuple[int, ...]:
        """The byte in a slot at which each flat of a unit starts, and last where they end."""
        return self._bytes[unit]

    def _starts_of(self, unit: Unit) -> list[tuple[int, Record]]:
        """(first byte in a slot, parameter) of each of a unit's parameters, in order."""
        flats = self._flat_starts(unit.number)
        sizes = [self.slot_dtype(DTYPES[f.dtype]).itemsize for f in unit.layout.flats]
        return sorted(((flats[r.flat] + r.offset * sizes[r.flat], r) for r in unit.records), key=lambda s: s[0])

    def prefetch(self, number: int, nearer: Collection[int] = ()) -> bool:
        """Starts fetching a unit if a slot can be had that is not in use nor holds one of the `nearer` units; whether it is on its way or there."""
        if number in self._fixed or number in self.where:
            return True
        if self.device.direct and not self._gathers and not self._background.ready(number):
            return False  # its fetch would have to wait, and here nobody waits for it but the caller
        slot = self._choose(self.units[number], firm=False, nearer=nearer)
        if slot is None:
            return False
        self._fill(slot, number)
        return True

    def _check(self) -> None:
        check_process(self._owner)
        if self.closed:
            raise OffloadError("the runtime of this model was closed; prepare the model again")

    def at_hand(self, number: int) -> bool:
        """Whether the unit is on the device or on its way."""
        return number in self._fixed or number in self.where

    def forget(self) -> None:
        """After a step: what slots hold is no longer current, except under a firm lease."""
        self._say_late()
        for slot in self.slots:
            if slot.unit is not None and not self.uses[slot.unit].firm:
                self._empty(slot)

    def give_up(self, number: int) -> bool:
        """What a slot holds of a unit is no longer current; False, and it is kept, where a lease needs it."""
        slot = self.where.get(number)
        if slot is not None and (self.uses[number].firm or self.uses[number].soft):
            return False
        if slot is not None:
            self._empty(slot)
        return True

    def _say_late(self) -> None:
        """Once, when the order of units is known by its second step."""
        late, self.counters.late = self.counters.late, 0
        self.counters.steps += 1
        if late and self.counters.steps > 2 and not self._said_late:
            self._said_late = True
            log.warning(
                "fetches of units in a step that began only when they were needed, so that compute waits for them whole: %d (prefetch_misses in "
                "stats()); a larger device budget has room for more slots", late,
            )  # fmt: skip

    def settle(self) -> None:
        for slot in self.slots:
            self._arrive(slot)

    def close(self) -> None:
        self.closed, self.frames = True, None
        self.slots, self.where, self._fixed, self._by_storage, self._fixed_at = [], {}, {}, {}, {}

    def _choose(self, unit: Unit, firm: bool, nearer: Collection[int] = ()) -> Slot | None:
        """The slot for a unit: of those that fit the smallest, as units inside it may need the larger; empty or longest unused among equals."""
        size = self.slot_bytes(unit)
        fits = [s for s in self.slots if s.memory.numel() >= size]
        free = [s for s in fits if s.unit is None or not (self.uses[s.unit].firm or self.uses[s.unit].soft)]
        if not firm:  # ahead of need: nothing that is still arriving or was used last gives way, nor a much larger slot
            newest = max((s.used for s in self.slots), default=0)
            free = [s for s in free if s.unit is None or (s.used < newest and s.arriving is None and s.unit not in nearer)]
            free = [s for s in free if s.memory.numel() <= 2 * size]
        if free or not firm:
            return min(free, key=lambda s: (s.memory.numel(), s.unit is not None, s.used), default=None)
        soft = [s for s in fits if s.unit is not None and not self.uses[s.unit].firm]
        if soft:
            slot = min(soft, key=lambda s: s.used)
            assert slot.unit is not None
            self.on_steal(slot.unit)
            return slot
        if not fits:
            raise BudgetError(f"unit {unit.name} needs a slot of {size} bytes and the plan has none so large")
        raise BudgetError(
            f"unit {unit.name} finds no slot: all {len(fits)} that fit are in use by units whose forward is running "
            f"({', '.join(self.units[s.unit].name for s in fits if s.unit is not None)}); "
            "raise the device budget, or name smaller units with units=[...]"
        )

    def _empty(self, slot: Slot) -> None:
        if slot.arriving is not None:
            self._arrive(slot)
        if slot.unit is not None:
            self.where.pop(slot.unit, None)
            slot.unit, slot.flats = None, []

    def _fill(self, slot: Slot, number: int) -> Slot:
        self._empty(slot)
        unit = self.units[number]
        self._clock += 1
        slot.unit, slot.used = number, self._clock
        self.where[number] = slot
        self.counters.fetches += 1
        slot.flats = views = self._views(slot, unit)
        spans = [self._share.span(flat, "parameter") for flat in unit.layout.flats]
        copies = [
            Copy(view[first:stop], shard, 0, DTYPES[flat.dtype])
            for view, (first, stop), shard, flat in zip(views, spans, unit.parameters, unit.layout.flats, strict=True)
            if flat.numel
        ]
        then = (lambda: self._gather(unit, views)) if self._gathers else None
        try:
            slot.arriving = self.device.fetch(copies, self.frames, lambda: self._background.wait_unit(number, tell=False), unit.name, then)
        except BaseException:  # the slot has something else, or a part of the unit
            self._empty(slot)
            raise
        return slot

    def _gather(self, unit: Unit, views: Sequence[torch.Tensor]) -> None:
        """Fills a slot, which has this rank's shares, with those of the others. A collective: all ranks fill slots in one order."""
        assert self._world is not None
        with self.device.stalls.waiting(RANKS):
            for i, (view, flat) in enumerate(zip(views, unit.layout.flats, strict=True)):
                first, stop = self._share.span(flat, "parameter")
                if flat.numel:
                    self._world.gather_into(view, view[first:stop], f"{unit.name}, part {i}", ordered=True).wait()
