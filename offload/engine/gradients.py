"""Gradients at rest.

[Note: gradients at rest]
Bind's backward wraps a gradient in a `Contribution`; autograd sums contributions and hands them to the parameter; the hook that runs after
that lands the result here. Landing casts, stores and takes the sums of squares of fixed blocks in one pass, in one thread at a time. A gradient has a
`scale` that clipping and a GradScaler set and the update applies, so they move no bytes. `p.grad is None` alone starts a new generation.
Where a unit rests whole on a device of its own, its gradients land there, by work of the device's: see [Note: resident units].

[Note: copies of sums]
Where the gradients of a unit are summed on the device (planner/sums.py) they rest there: who reads, writes or scales them, or asks for their norm,
does so there. What the tiers of the plan have is a copy, for the update alone. It is made once as many backwards as were declared have added to the
gradient, while others are computed; step() makes those that are missing, as of a parameter that not every micro-batch used, and those that are stale.
No work that changes a sum starts before its copy has ended.

[Note: fp16 at rest]
fp16 holds few exponents. What comes from a backward is cast as it is, so that what overflows is infinite and is found: a loss scale is there to
prevent it. What a user writes is no longer scaled by any loss scale and would vanish: it is stored times a power of two that brings its largest
element to the top of the range, and the gradient's `scale` takes that back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from offload.dist.world import World
from offload.engine.atrest import AtRest
from offload.engine.entries import Entries
from offload.engine.graph import accumulates
from offload.engine.places import Places, Start
from offload.engine.record import NORM_BLOCK, Record, Unit
from offload.engine.reduction import Arrival, Reduction
from offload.engine.resident import Resident
from offload.engine.sources import Contribution, GradientSource
from offload.errors import OffloadError
from offload.memory.shard import check_process
from offload.planner.share import Share
from offload.transfer.device import Device, Landing
from offload.transfer.queue import Transfer

_FLT_MAX = torch.finfo(torch.float32).max
_FP16_OVER = 65520.0  # from here on fp32 rounds to an infinite fp16


class Gradients:
    """The gradients of all trained parameters: `entries` knows what has come, and it rests in `places`."""

    def __init__(self, units: list[Unit], records: list[Record], places: Places, device: Device, resident: Resident, declared: int = 1) -> None:
        """`declared`: how many backwards a step is to have."""
        self.units, self.records, self.places, self.device, self._resident = units, records, places, device, resident
        self._declared = declared
        self.entries = Entries(records)
        self.closed = False
        self._owner = os.getpid()
        self.before_sums: Callable[[], None] = lambda: None
        self.before_backward: Callable[[], None] = lambda: None  # called at each gradient that arrives
        self.came: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Record, str, bool], None] = lambda record, doing, whole: None  # raises where an update must not see a change
        self.claim: Callable[[Record], None] = lambda record: None  # makes places that units share the record's unit's, or raises
        self.reduction: Reduction | None = None  # with several ranks
        for r in records:
            if r.trained:
                r.sums = torch.zeros(max(1, -(-r.numel // NORM_BLOCK)), dtype=torch.float64, device="cpu")

    def share(self, share: Share, dtype: torch.dtype, world: World) -> Reduction:
        """They are those of several ranks from here on, and move between them in `dtype`; see [Note: reduction]."""
        self.reduction = Reduction(self.units, share, dtype, self.device, world, self._land_reduced)
        self.reduction.start = lambda record: self._arrival(record, record.grad is not None)
        self.reduction.landing = self._reducing
        return self.reduction

    def close(self) -> None:
        """Nothing is kept: gradients at rest are gone with the arenas."""
        self.closed = True
        self.places.close()
        if self.reduction is not None:
            self.reduction.close()

    def _check(self) -> None:
        check_process(self._owner)
        if self.closed:
            raise OffloadError("the runtime that held this gradient was closed")

    def _check_reduced(self, record: Record) -> None:
        self._check()
        if self.entries[record.number].collecting:
            raise OffloadError(
                f"the gradient of {record.name} is not averaged over ranks yet, or never was, as its backward raised: use it after the backward. "
                "A prepared model wants no DistributedDataParallel around it"
            )

    # Arrival

    def contribution(self, record: Record, value: torch.Tensor) -> Contribution:
        """One use's gradient. A first use of several lands early where that keeps its bits and nothing looks at it on the way."""
        self._check()
        self.before_backward()
        if value.layout != torch.strided:
            raise OffloadError(f"parameter {record.name} has a sparse gradient, which is not supported; build its module with sparse=False")
        out = Contribution(record, self, value)
        p, entry, task = record.parameter, self.entries[record.number], torch._C._current_graph_task_id()
        first = len(record.uses) > 1 and p.grad is None and entry.early_task != task and self.reduction is None
        if first and value.dtype == self.places.dtype and not p._backward_hooks and accumulates(p):
            entry.early_task = task
            out.landed, out.value = self.land(record, value), None
        return out

    def arrived(self, record: Record) -> None:
        """After autograd accumulated into `.grad`: what is there rests here from now on."""
        grad = record.grad
        if grad is None:
            return
        if isinstance(grad, AtRest) and not grad.chain:
            source = grad.source
            if isinstance(source, GradientSource) and source.record is record:
                return
            if isinstance(source, Contribution) and source.record is record:
                grad.source = source.landed or self._take(record, source.held())
                return
        value = grad.plain() if isinstance(grad, AtRest) else grad.detach()
        if self.reduction is not None and torch._C._current_graph_task_id() >= 0:
            record.grad = AtRest(self._take(record, value))
            return
        record.grad = AtRest(self.land(record, *self._fitted(value)))

    def adopt(self, records: Iterable[Record]) -> list[Record]:
        """Before an update: the trained parameters that have a gradient; those that the user put in `.grad` come to rest here. A collective."""
        if self.reduction is not None:
            self.reduction.complete()
        present = [r for r in records if r.trained and r.grad is not None]
        foreign = [r for r in present if not self._is_own(r)]
        values = {r.number: r.grad.plain() for r in foreign if isinstance(r.grad, AtRest)}
        for record in foreign:  # each is read before any lands where another may still be read
            if record.number in values:
                record.grad = values[record.number]
            self.arrived(record)
        return present

    def _is_own(self, record: Record) -> bool:
        grad = record.grad
        if not isinstance(grad, AtRest) or grad.chain or not isinstance(grad.source, GradientSource) or grad.source.record is not record:
            return False
        if not grad.source.current:
            raise OffloadError(f"the gradient in {record.name}.grad was replaced by that of a later backward")
        return True

    def nested_backward(self) -> None:
        """The backward that runs now is part of another one."""
        self.entries.nested_backward()
        if self.reduction is not None:
            self.reduction.nested()

    def _take(self, record: Record, value: torch.Tensor) -> GradientSource:
        """A backward's gradient, on the device: a fresh start."""
        packing = self._packing(record)
        if packing is None:
            return self.land(record, value)
        packing.add(self._arrival(record, False), value)
        return GradientSource(record, self, self.entries[record.number].generation)

    def _packing(self, record: Record) -> Reduction | None:
        """What collects the parameter's gradient; None: it lands as one rank's does."""
        if self.reduction is None or self.reduction.packs:
            return self.reduction
        self.reduction.keep(record)
        return None

    def _arrival(self, record: Record, accumulate: bool) -> Arrival:
        """Of a gradient that is to be reduced: how it lands."""
        self._check()
        entry = self.entries[record.number]
        entry.collecting = True
        if accumulate:
            if self.places.dtype != torch.float32:
                self.before_sums()
            return Arrival(record, True, entry.take_scale())
        self.entries.start(record)
        return Arrival(record, False, 1.0)

    def _reducing(self, record: Record, transfer: Transfer) -> None:
        """A gradient is reduced and lands: `.grad` stands for it, also where other ranks alone have one."""
        entry = self.entries[record.number]
        entry.landing.append(transfer)
        entry.collecting = False
        if record.grad is None:
            record.grad = AtRest(GradientSource(record, self, entry.generation))

    def _land_reduced(self, unit: Unit, host: torch.Tensor, first: int, arrivals: Sequence[Arrival], factor: float) -> None:
        """Lands `host`, elements of the unit's trained flat from `first` on, times `factor`."""
        for record, accumulate, scale in arrivals:
            if scale != 1.0:
                self.places.scale(record, scale)
            self.places.store(record, host, accumulate, record.offset - first, factor)

    def land(self, record: Record, value: torch.Tensor, scale: float = 1.0) -> GradientSource:
        """A fresh start: `value` times `scale` replaces whatever was here."""
        if not record.trained:
            raise OffloadError(
                f"parameter {record.name} was frozen when prepare() ran, so it has no master and no moments; set requires_grad before prepare()"
            )
        self._check()
        self.guard(record, "a gradient", False)
        self.claim(record)
        self.entries[record.number].settle(fresh=True)
        entry = self.entries.start(record, scale)
        self._changed()
        self._send(record, value.contiguous(), lambda there: self.places.store(record, there, accumulate=False))
        return GradientSource(record, self, entry.generation)

    def sum_up(self, record: Record, contribution: Contribution) -> None:
        """Adds a later micro-batch's gradient: in fp32, whatever was declared."""
        self.entries.check_kept(record)
        if self.places.dtype != torch.float32:
            self.before_sums()
        self.accumulate(record, contribution)
        entry = self.entries[record.number]
        entry.backwards += 1
        if entry.backwards >= self._declared:
            self._copy_sum(record)

    def accumulate(self, record: Record, contribution: Contribution) -> None:
        """Adds to what rests here: a later use of the same backward, or a later micro-batch."""
        packing = self._packing(record)
        if packing is not None:
            packing.add(self._arrival(record, True), contribution.held())
            return
        self.guard(record, "a further gradient", False)
        self.claim(record)
        entry = self.entries[record.number]
        if self.reduction is not None:
            entry.settle()  # it may be averaged where it rests
            self._changed()
        elif self.units[record.unit].sums is not None and entry.copied:
            entry.settle()  # the copy reads what this adds to
        scale, value = entry.take_scale(), contribution.held().contiguous()

        def landing(there: torch.Tensor) -> None:
            if scale != 1.0:
                self.places.scale(record, scale)
            self.places.store(record, there, accumulate=True)

        self._send(record, value, landing)

    def _send(self, record: Record, source: torch.Tensor, landing: Landing) -> None:
        """Moves a gradient to where landings of the parameter's run, and starts one."""
        entry = self.entries[record.number]
        if self._resident.lands(record.unit):
            entry.copied = False
            taken = self._resident.taken(source)
            entry.landing.append(self._resident.start(record, lambda: landing(taken), source.nbytes))
        else:
            entry.landing.append(self.device.send(source, landing))
            self.device.make_way()

    def _put(self, record: Record, value: torch.Tensor) -> None:
        """Stores a value of the host's, at once or in the order of the device's work."""
        if self._resident.lands(record.unit):
            self._send(record, value, lambda there: self.places.store(record, there, accumulate=False))
            self.entries[record.number].settle()  # the value may be the user's memory
        else:
            self.places.store(record, value, accumulate=False)

    def _copy_sum(self, record: Record) -> None:
        """Starts to copy a sum on the device to where its update reads it, unless that was done."""
        entry, sums = self.entries[record.number], self.places.sum_of(record)
        if sums is None or entry.copied or record.number in self.places.zeroed:
            return
        entry.copied = True
        store = partial(self.places.copy_sum, record, sums)
        entry.landing.append(self.device.stow(sums, store, entry.landing[-1:], f"sum {record.name}"))

    # Access

    def read(self, record: Record) -> torch.Tensor:
        """The gradient, flat, in the dtype at rest (fp32 where it is scaled). With stages 2 and 3 of several ranks a collective."""
        self._check_reduced(record)
        self.entries.check_kept(record)
        entry = self.entries[record.number]
        entry.settle()
        if record.number in self.places.zeroed:
            return torch.zeros(record.numel, dtype=self.places.dtype, device="cpu")
        out = (torch.empty if self.reduction is None else torch.zeros)(record.numel, dtype=self.places.dtype, device="cpu")
        self.places.read(record, out)
        if self.reduction is not None:
            self.reduction.whole(record, out)
        return out if entry.scale == 1.0 else out.float().mul_(entry.scale)

    def write(self, record: Record, value: torch.Tensor) -> None:
        self._check_reduced(record)
        self.guard(record, "writing to the gradient", True)
        entry = self.entries[record.number]
        entry.settle(fresh=True)
        stored, entry.scale = self._fitted(value.detach().to("cpu").contiguous())
        entry.spent = False
        self._changed()
        self._put(record, stored)

    def _fitted(self, value: torch.Tensor) -> tuple[torch.Tensor, float]:
        """What is to be stored for `value`, and the scale that gives it back; see [Note: fp16 at rest]."""
        most = float(value.abs().max()) if self.places.dtype == torch.float16 and value.numel() else 0.0
        if not 0.0 < most < math.inf:
            return value, 1.0
        exponent = min(16 - math.frexp(most)[1], 126)
        exponent -= math.ldexp(most, exponent) >= _FP16_OVER
        return value.float().mul(math.ldexp(1.0, exponent)), math.ldexp(1.0, -exponent)

    def zero(self, record: Record) -> None:
        """As `write` of zeros, at once."""
        self._check_reduced(record)
        self.guard(record, "zeroing the gradient", True)
        entry = self.entries[record.number]
        entry.settle(fresh=True)
        entry.scale, entry.spent, entry.backwards, entry.stepped = 1.0, False, 0, (0, 0)
        self.places.zeroed.add(record.number)
        self._resident.forget_sums(record)
        record.sums.zero_()

    def settle(self, again: bool = True) -> None:
        """Every landing is done; its error, if any, is raised, `again` where that was done before and the gradient is still there."""
        for record in self.records:
            self.entries[record.number].settle(fresh=not again or record.parameter.grad is None)
        self._resident.fetch_sums()

    def scale(self, records: Iterable[Record], factor: float) -> None:
        records = list(records) if factor != 1.0 else []
        for record in records:
            self.guard(record, "scaling the gradient", True)
        for record in records:
            self.entries[record.number].scale *= factor

    def norm_squared(self, record: Record) -> float:
        """Exactly rounded sum of the blocks' sums of squares, of the gradient as it reads; not finite if an element is not.

        With stages 2 and 3 of several ranks a collective.
        """
        entry = self.entries[record.number]
        if self.reduction is not None:
            self.reduction.complete()
        entry.settle()
        self._resident.fetch_sums(record)
        if self.reduction is not None:
            self._check_reduced(record)
            self.settle()
            self.reduction.agree()
        total = math.fsum(record.sums.tolist()) * entry.scale**2
        if abs(entry.scale) > 1.0 and total > _FLT_MAX**2 and not self.read(record).isfinite().all():
            return math.inf
        return total

    def flush(self) -> None:
        """Every landing is done and every chunk on NVMe is written; all staging buffers are free that no update was lent."""
        self.settle()
        for record in self.records:
            if record.number in self.places.zeroed:
                self._put(record, torch.zeros(record.numel, dtype=self.places.dtype, device="cpu"))
        summed = [r for r in self.records if r.trained and r.grad is not None and self.units[r.unit].sums is not None]
        for record in summed:
            self._copy_sum(record)
        for record in summed:
            self.entries[record.number].settle()
        self.places.flush()

    def _changed(self) -> None:
        if self.reduction is not None:
            self.reduction.changed()

    # For updates that start in the backward

    def landed(self, records: Sequence[Record], wait: bool = False) -> bool:
        """Whether what came has landed. Never waits unless it is to; raises what went wrong."""
        for record in records:
            self._copy_sum(record)
        entries = [self.entries[r.number] for r in records]
        if not wait and (any(r.number in self.places.zeroed for r in records) or not all(t.done for e in entries for t in e.landing)):
            return False
        for entry in entries:
            entry.settle()
        return True

    def give(self, unit: int, at_once: Callable[[int, int], bool], start: Start, keep: bool) -> bool:
        """As `Places.lend`, and knows afterwards what was lent and not kept. Whether anything was done."""
        lent = self.places.lend(unit, at_once, start, keep)
        if lent and not keep:
            self.entries.spend(r for r in self.units[unit].records if any(chunk in lent for chunk, _ in r.slices))
        return lent is not None
