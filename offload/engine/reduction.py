"""Gradients of several ranks: collected unit by unit, averaged, and landed where they rest.

[Note: reduction]
At the start of a backward ranks tell each other which gradients their graphs hold. A unit is reduced once all of this rank's own have come, as zeros
where it has none, and units in one order that all ranks know: that in which those of rank 0 were complete in the last backward. So a unit that some
ranks do not use waits for nobody and keeps nobody waiting. What the graphs did not tell of (a backward inside of this one) is reduced at the end.
Stages 0 and 1 sum whole gradients on every rank, 2 and 3 each rank's share. Sums are in the order of ranks and divided as they land, so where they
are of the same dtype their bits do not depend on the stage. Where groups of ranks hold the same ([Note: groups]), each group's sum is made first, in
the order of its ranks, and rounded to the dtype that gradients move in; then, likewise and at every stage, the sum of these in the order of groups.
A gradient cannot be read between its arrival and its reduction.
Where each rank first sums several micro-batches by itself nothing is packed: see [Note: local sums].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.dist.collectives import add_up, assemble, sum_across
from offload.dist.world import World
from offload.engine.record import NORM_BLOCK, Record, Unit
from offload.memory.stalls import RANKS
from offload.planner.share import Share
from offload.transfer.device import Device
from offload.transfer.queue import SwapQueue, Transfer


class Arrival(NamedTuple):
    """A gradient that lands: added to what rests there, which is first multiplied by `scale`, or in its place."""

    record: Record
    accumulate: bool
    scale: float


@dataclass(eq=False)
class _Bucket:
    """A unit's gradients of one backward, packed as its trained flat is. `came`: by record number, how each lands."""

    memory: torch.Tensor
    came: dict[int, Arrival] = field(default_factory=dict)


# lands the elements of a unit's reduced flat from `first` on, in memory the host can read, times `factor`
Land = Callable[[Unit, torch.Tensor, int, Sequence[Arrival], float], None]


class Reduction:
    """Collects, reduces and lands. `dtype`: that in which gradients move between ranks."""

    def __init__(self, units: Sequence[Unit], share: Share, dtype: torch.dtype, device: Device, world: World, land: Land) -> None:
        self._units, self.share, self._dtype, self._device, self._world, self._land = units, share, dtype, device, world, land
        self._records = {r.number: r for u in units for r in u.records if r.trained}
        self.start: Callable[[Record], Arrival] = lambda record: Arrival(record, False, 1.0)  # a gradient that came on other ranks alone
        self.landing: Callable[[Record, Transfer], None] = lambda record, transfer: None
        self.average: Callable[[Unit, set[int]], None] = lambda unit, present: None  # where they rest, what ranks have summed by themselves
        sizes = [u.layout.trained.numel * dtype.itemsize for u in units if u.layout.trained is not None]
        self._pending_most = max(sizes, default=0)
        self.queue = SwapQueue("reduce", bound=len(units) + 1, stalls=device.stalls, cause=RANKS)
        weakref.finalize(self, self.queue.close)  # its thread ends with a model that is dropped without close()
        self._agreed = [u.number for u in reversed(units) if u.layout.trained is not None]
        self._sums_known = False
        self.active = False  # a backward runs that accumulates
        self._apart = self._kept_some = False  # gradients stay on their ranks; some may have, and were not averaged yet
        self._kept: set[int] = set()  # parameters whose gradients at rest are this rank's own
        self._reset()

    def _reset(self) -> None:
        self.active = False
        self._at_rest = False  # this backward's gradients are averaged where they rest
        self._open: dict[int, _Bucket] = {}
        self._order: list[int] = []  # units to be reduced in this backward
        self._at = 0  # of these, how many were
        self._union: dict[int, set[int]] = {}  # by unit, the parameters that have a gradient on any rank
        self._awaited: dict[int, set[int]] = {}  # by unit, those whose gradients this rank's graph still holds
        self._completed: list[int] = []

    # What ranks keep apart

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Gradients of backwards inside stay on their ranks, where whole ones rest there."""
        before, self._apart = self._apart, not self.share.divides("gradient")
        self._kept_some |= self._apart
        try:
            yield
        finally:
            self._apart = before

    @property
    def packs(self) -> bool:
        """Whether a gradient that comes is collected here; else it lands as one rank's does, and is told of by `keep`."""
        return not (self._apart or self._at_rest)

    def keep(self, record: Record) -> None:
        """The gradient that rests is this rank's own."""
        self._kept.add(record.number)

    def _still_kept(self) -> list[int]:
        self._kept = {number for number in self._kept if self._records[number].parameter.grad is not None}
        return sorted(self._kept)

    def complete(self) -> None:
        """Starts to average what ranks have kept apart. A collective, where they may have."""
        if not self._kept_some or self.active:
            return
        self._kept_some = False
        for unit, present in sorted(self._by_unit(self._share(self._still_kept(), "averaging of what ranks have summed")).items()):
            self._start_average(unit, present)

    def _share(self, value: Any, what: str) -> list[Any]:
        with self._device.stalls.waiting(RANKS):
            return self._world.share(value, what)

    def _start_average(self, unit: int, present: set[int]) -> None:
        self._kept -= present
        self.average(self._units[unit], present)
        self.changed()

    def _by_unit(self, numbers: Iterable[Iterable[int]]) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for number in set().union(*numbers):
            found.setdefault(self._records[number].unit, set()).add(number)
        return found

    # During a backward

    def nested(self) -> None:
        """The backward that runs is part of another one."""
        self.active = not self._apart

    def begin(self, expected: Iterable[int]) -> None:
        """A backward begins whose graph holds the gradients of these parameters. A collective, unless they are kept apart."""
        self.abandon()
        if self._apart:
            return
        self.active = True
        own = set(expected)
        told = self._share([sorted(own), self._still_kept()], "start of a backward")
        self._at_rest = any(kept for _, kept in told)
        self._union = self._by_unit([*(reached for reached, _ in told), *(kept for _, kept in told)])
        for number in own:
            self._awaited.setdefault(self._records[number].unit, set()).add(number)
        self._order = [unit for unit in self._agreed if unit in self._union]
        self._advance()

    def add(self, arrival: Arrival, value: torch.Tensor) -> None:
        """A gradient, of the parameter's shape on the device."""
        record = arrival.record
        unit = self._units[record.unit]
        bucket = self._open.get(record.unit)
        if bucket is None:
            bucket = self._open[record.unit] = self._bucket(unit)
        view = bucket.memory[record.offset : record.offset + record.numel]
        with torch.no_grad():
            if record.number in bucket.came:
                view.add_(value.reshape(-1))
            else:
                view.copy_(value.reshape(-1))
                bucket.came[record.number] = arrival

    def came(self, record: Record) -> None:
        """Autograd has accumulated into `.grad`."""
        awaited = self._awaited.get(record.unit)
        if awaited is None or record.number not in awaited:
            return
        awaited.discard(record.number)
        if not awaited:
            del self._awaited[record.unit]
            self._completed.append(record.unit)
            self._advance()

    def _advance(self) -> None:
        while self._at < len(self._order) and self._order[self._at] not in self._awaited:
            self._reduce_next()

    def _reduce_next(self) -> None:
        unit = self._order[self._at]
        self._at += 1
        self._reduce(unit, self._union[unit])

    def finish(self) -> None:
        """The backward is over. A collective, where it accumulated."""
        if not self.active:
            return
        while self._at < len(self._order):
            self._reduce_next()
        late = self._still_kept() if self._at_rest else sorted(number for bucket in self._open.values() for number in bucket.came)
        told = self._share([late, self._completed], "end of a backward")
        for unit, present in sorted(self._by_unit(numbers for numbers, _ in told).items()):
            self._reduce(unit, present)
        self._kept_some = False
        first = list(told[0][1])
        self._agreed = [*first, *(unit for unit in self._agreed if unit not in first)]
        self._reset()

    def abandon(self) -> None:
        """What a backward that raised has left is dropped."""
        self._reset()

    def _bucket(self, unit: Unit) -> _Bucket:
        assert unit.layout.trained is not None
        return _Bucket(torch.empty(unit.layout.trained.numel, dtype=self._dtype, device=self._device.compute))

    def _reduce(self, number: int, present: set[int]) -> None:
        """Starts to reduce a unit's gradients, which are zeros where other ranks alone have them."""
        if self._at_rest:
            self._start_average(number, present)
            return
        unit = self._units[number]
        bucket = self._open.pop(number, None) or self._bucket(unit)
        for record in unit.records:
            if record.number in present and record.number not in bucket.came:
                bucket.memory[record.offset : record.offset + record.numel].zero_()
                bucket.came[record.number] = self.start(record)
        arrivals = [bucket.came[n] for n in sorted(present)]
        mark, memory = self._device.mark(), bucket.memory
        del bucket

        def run(memory: torch.Tensor = memory) -> None:
            with self._device.beside(mark):
                host, first = self._sum(unit, memory)
                self._device.send(host, lambda own: self._land(unit, own, first, arrivals, 1.0 / self._world.size)).wait()

        job = self.queue.submit(run, memory.nbytes, self._pending_most, f"gradients of {unit.name}")
        for arrival in arrivals:
            self.landing(arrival.record, job)
        self.changed()

    def _sum(self, unit: Unit, memory: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The part of the sum that rests here, and its first element."""
        assert unit.layout.trained is not None
        name = f"the gradients of {unit.name}"
        divided = self.share.divides("gradient")
        first, stop = self.share.span(unit.layout.trained, "gradient")
        with self._device.stalls.waiting(RANKS):
            if self._world.across is not None:
                sum_across(self._world, memory, name, divided)
            elif divided:
                self._world.reduce_scatter(memory[first:stop], memory, name).wait()
            else:
                self._world.all_reduce(memory, name).wait()
        return memory[first:stop], first

    # At rest

    def changed(self) -> None:
        """A gradient, and so the sums of its squares."""
        self._sums_known = False

    def agree(self) -> None:
        """Every record's `sums` are of the whole gradient from here on. All have landed. A collective, where something changed."""
        if self._sums_known or not self.share.divides("gradient"):
            return
        with self._device.stalls.waiting(RANKS):
            self._world.within.barrier("norm of the gradients")
        records = list(self._records.values())
        whole = torch.zeros(sum(r.sums.numel() for r in records), dtype=torch.float64, device="cpu")
        parts = whole.split([r.sums.numel() for r in records])
        for record, part in zip(records, parts, strict=True):
            first, stop = self._own(record)
            if first < stop:
                blocks = slice(first // NORM_BLOCK, -(-stop // NORM_BLOCK))
                part[blocks] = record.sums[blocks]
        with self._device.stalls.waiting(RANKS):
            add_up(self._world.within, whole, "sums of squares of gradients")
        for record, part in zip(records, parts, strict=True):
            record.sums.copy_(part)
        self._sums_known = True

    def _own(self, record: Record) -> tuple[int, int]:
        """The elements of a gradient that rest here."""
        trained = self._units[record.unit].layout.trained
        assert trained is not None
        first, stop = self.share.span(trained, "gradient")
        return max(0, first - record.offset), min(record.numel, stop - record.offset)

    def whole(self, record: Record, out: torch.Tensor) -> None:
        """Fills the gradient `out`, of which the part that rests here is there and zeros elsewhere. A collective."""
        if self.share.divides("gradient"):
            self._world.within.barrier(f"gradient of {record.name}")
            assemble(self._world.within, out, f"the gradient of {record.name}")

    def close(self) -> None:
        self._reset()
        self.queue.close()
