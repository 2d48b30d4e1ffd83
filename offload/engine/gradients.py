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
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from offload import _core
from offload.engine.atrest import AtRest
from offload.engine.chunk_cache import ChunkCache
from offload.engine.graph import accumulates
from offload.engine.record import CODES, NORM_BLOCK, Record, Unit
from offload.engine.reduction import Arrival, Reduction
from offload.engine.resident import Resident
from offload.engine.sources import Contribution, GradientSource
from offload.errors import OffloadError
from offload.memory.shard import Shard, check_process
from offload.memory.stalls import GRADIENT
from offload.transfer.device import Device, Landing, Put
from offload.transfer.frames import FramePool
from offload.transfer.queue import Transfer

SUM_PIECE = 1 << 30  # elements of a sum that one piece of work takes: kernels count them in 32 bits
_FLT_MAX = torch.finfo(torch.float32).max
_FP16_OVER = 65520.0  # from here on fp32 rounds to an infinite fp16


@dataclass
class _Entry:
    """What is known of one parameter's gradient at rest."""

    generation: int = 0
    scale: float = 1.0
    zeroed: bool = False  # it reads as zeros, which are yet to be stored: an update may still read what is there
    spent: bool = False  # an update took it from memory, and it was not kept
    landing: list[Transfer] = field(default_factory=list)
    failed: Transfer | None = None  # a landing whose error is raised to whoever needs the gradient, until another takes its place
    collecting: bool = False  # it has come and is not reduced; see [Note: reduction]
    backwards: int = 0  # that it is a sum of
    copied: bool = True  # there is nothing on the device that its copy has not, or is to have; see [Note: copies of sums]
    early_task: int = -1
    epoch: int = -1
    task: int = -1


class Gradients:
    """The gradients of all trained parameters, in `dtype`, on the tiers of their chunks' shards."""

    def __init__(
        self, units: list[Unit], records: list[Record], dtype: torch.dtype, device: Device, frames: FramePool | None, resident: Resident,
        declared: int = 1,
    ) -> None:  # fmt: skip
        """`declared`: how many backwards a step is to have."""
        self._declared = declared
        self.units, self.records, self.dtype, self.device, self._resident = units, records, dtype, device, resident
        self._entries = {r.number: _Entry() for r in records}
        self._lock = threading.RLock()
        self._cache = ChunkCache(frames, frames.count - 1) if frames is not None else None  # a fetch needs one
        self.closed = False
        self._owner = os.getpid()
        self._epoch = 0  # forwards seen: what landed before the last one belongs to an earlier micro-batch
        self._nested_tasks: set[int] = set()
        self.before_sums: Callable[[], None] = lambda: None
        self.let_go: Callable[[int, int], None] = lambda unit, chunk: None  # waits for a chunk's update, which reads what rests here
        self.before_backward: Callable[[], None] = lambda: None  # called at each gradient that arrives
        self.came: Callable[[Record], None] = lambda record: None
        self.takes: Callable[[int, int], bool] = lambda unit, chunk: False  # whether a chunk's update will take it from memory, and nobody else
        self.guard: Callable[[Record, str, bool], None] = lambda record, doing, whole: None  # raises where an update must not see a change
        self.claim: Callable[[Record], None] = lambda record: None  # makes places that units share the record's unit's, or raises
        self.reduction: Reduction | None = None  # with several ranks
        self._awaited: dict[int, set[int]] = {}
        self._first_chunk = [0]
        for unit in units:
            self._first_chunk.append(self._first_chunk[-1] + len(unit.gradients))
        for r in records:
            if r.trained:
                r.sums = torch.zeros(max(1, -(-r.numel // NORM_BLOCK)), dtype=torch.float64, device="cpu")

    def close(self) -> None:
        """Nothing is kept: gradients at rest are gone with the arenas."""
        self.closed, self._cache = True, None
        if self.reduction is not None:
            self.reduction.close()

    def _check(self) -> None:
        check_process(self._owner)
        if self.closed:
            raise OffloadError("the runtime that held this gradient was closed")

    def _check_reduced(self, record: Record) -> None:
        self._check()
        if self._entries[record.number].collecting:
            raise OffloadError(
                f"the gradient of {record.name} is not averaged over ranks yet, or never was, as its backward raised: use it after the backward"
            )

    # Arrival

    def contribution(self, record: Record, value: torch.Tensor) -> Contribution:
        """One use's gradient. A first use of several lands early where that keeps its bits and nothing looks at it on the way."""
        self._check()
        self.before_backward()
        if value.layout != torch.strided:
            raise OffloadError(f"parameter {record.name} has a sparse gradient, which is not supported; build its module with sparse=False")
        out = Contribution(record, self, value)
        p, entry, task = record.parameter, self._entries[record.number], torch._C._current_graph_task_id()
        first = len(record.uses) > 1 and p.grad is None and entry.early_task != task and self.reduction is None
        if first and value.dtype == self.dtype and not p._backward_hooks and accumulates(p):
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

    def earlier(self, record: Record) -> bool:
        """In a backward: whether the parameter has a gradient of an earlier one, to which this one adds."""
        entry, now = self._entries[record.number], torch._C._current_graph_task_id()
        if record.grad is None:
            return False
        return entry.epoch < self._epoch or (entry.task != now and entry.task not in self._nested_tasks)

    def nested_backward(self) -> None:
        """The backward that runs now is part of another one."""
        self._nested_tasks.add(torch._C._current_graph_task_id())
        if self.reduction is not None:
            self.reduction.nested()

    def new_forward(self) -> None:
        self._epoch += 1
        self._nested_tasks.clear()

    def generation(self, record: Record) -> int:
        return self._entries[record.number].generation

    def _take(self, record: Record, value: torch.Tensor) -> GradientSource:
        """A backward's gradient, on the device: a fresh start."""
        packing = self._packing(record)
        if packing is None:
            return self.land(record, value)
        packing.add(self._arrival(record, False), value)
        return GradientSource(record, self, self.generation(record))

    def _packing(self, record: Record) -> Reduction | None:
        """What collects the parameter's gradient; None: it lands as one rank's does."""
        if self.reduction is None or self.reduction.packs:
            return self.reduction
        self.reduction.keep(record)
        return None

    def _arrival(self, record: Record, accumulate: bool) -> Arrival:
        """Of a gradient that is to be reduced: how it lands."""
        self._check()
        entry = self._entries[record.number]
        entry.collecting = True
        if accumulate:
            if self.dtype != torch.float32:
                self.before_sums()
            scale, entry.scale = entry.scale, 1.0
            return Arrival(record, True, scale)
        entry.generation += 1
        entry.failed = None
        entry.scale, entry.epoch, entry.task = 1.0, self._epoch, torch._C._current_graph_task_id()
        return Arrival(record, False, 1.0)

    def _reducing(self, record: Record, transfer: Transfer) -> None:
        """A gradient is reduced and lands: `.grad` stands for it, also where other ranks alone have one."""
        entry = self._entries[record.number]
        entry.landing.append(transfer)
        entry.collecting = False
        if record.grad is None:
            record.grad = AtRest(GradientSource(record, self, entry.generation))

    def _land_reduced(self, unit: Unit, host: torch.Tensor, first: int, arrivals: Sequence[Arrival], factor: float) -> None:
        """Lands `host`, elements of the unit's trained flat from `first` on, times `factor`."""
        for record, accumulate, scale in arrivals:
            if scale != 1.0:
                self._rescale(record, scale)
            self._store(record, host, accumulate, record.offset - first, factor)

    def land(self, record: Record, value: torch.Tensor, scale: float = 1.0) -> GradientSource:
        """A fresh start: `value` times `scale` replaces whatever was here."""
        if not record.trained:
            raise OffloadError(
                f"parameter {record.name} was frozen when prepare() ran, so it has no master and no moments; set requires_grad before prepare()"
            )
        self._check()
        self.guard(record, "a gradient", False)
        self.claim(record)
        entry = self._entries[record.number]
        self._settle(entry, fresh=True)
        entry.generation += 1
        entry.scale, entry.spent, entry.backwards = scale, False, 1
        entry.epoch, entry.task = self._epoch, torch._C._current_graph_task_id()
        self._changed()
        self._send(record, value.contiguous(), lambda there: self._store(record, there, accumulate=False))
        return GradientSource(record, self, entry.generation)

    def sum_up(self, record: Record, contribution: Contribution) -> None:
        """Adds a later micro-batch's gradient: in fp32, whatever was declared."""
        self._check_kept(record)
        if self.dtype != torch.float32:
            self.before_sums()
        self.accumulate(record, contribution)
        entry = self._entries[record.number]
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
        entry = self._entries[record.number]
        if self.reduction is not None:
            self._settle(entry)  # it may be averaged where it rests
            self._changed()
        elif self.units[record.unit].sums is not None and entry.copied:
            self._settle(entry)  # the copy reads what this adds to
        scale, entry.scale = entry.scale, 1.0
        value = contribution.held().contiguous()

        def landing(there: torch.Tensor) -> None:
            if scale != 1.0:
                self._rescale(record, scale)
            self._store(record, there, accumulate=True)

        self._send(record, value, landing)

    def _send(self, record: Record, source: torch.Tensor, landing: Landing) -> None:
        """Moves a gradient to where landings of the parameter's run, and starts one."""
        if self._resident.lands(record.unit):
            self._entries[record.number].copied = False
            taken = self._resident.taken(source)
            transfer = self._resident.start(record, lambda: landing(taken), source.nbytes)
        else:
            transfer = self.device.send(source, landing)
        self._entries[record.number].landing.append(transfer)

    def _put(self, record: Record, value: torch.Tensor) -> None:
        """Stores a value of the host's, at once or in the order of the device's work."""
        if self._resident.lands(record.unit):
            self._send(record, value, lambda there: self._store(record, there, accumulate=False))
            self._settle(self._entries[record.number])  # the value may be the user's memory
        else:
            self._store(record, value, accumulate=False)

    def _copy_sum(self, record: Record) -> None:
        """Starts to copy a sum on the device to where its update reads it, unless that was done."""
        entry, sums = self._entries[record.number], self._sum(record)
        if sums is None or entry.copied or entry.zeroed:
            return
        entry.copied = True

        def store(put: Put) -> None:
            self._release(record)
            with self._alone_here(), self._landing(record):
                for chunk, start, first, stop in self._pieces(record):
                    part, there = sums[first:stop].view(torch.uint8), self._memory(record, chunk, fresh=self._alone(record, chunk), dirty=True)
                    put(there[start : start + part.numel()], part)
                    self._came(record, chunk)

        entry.landing.append(self.device.stow(sums, store, entry.landing[-1:], f"sum {record.name}"))

    def _sum(self, record: Record) -> torch.Tensor | None:
        """A gradient's elements on the device, where it is summed there."""
        sums = self.units[record.unit].sums
        return sums[record.offset : record.offset + record.numel] if sums is not None and record.trained else None

    # Access

    def _check_kept(self, record: Record) -> None:
        if self._entries[record.number].spent:
            raise OffloadError(
                f"the gradient of {record.name} went into its update during the backward and was not kept (keep_gradients=False): "
                "read none after a backward, and call zero_grad() after step(); or keep them"
            )

    def read(self, record: Record) -> torch.Tensor:
        """The gradient, flat, in the dtype at rest (fp32 where it is scaled). With stages 2 and 3 of several ranks a collective."""
        self._check_reduced(record)
        self._check_kept(record)
        entry = self._entries[record.number]
        self._settle(entry)
        if entry.zeroed:
            return torch.zeros(record.numel, dtype=self.dtype, device="cpu")
        out = (torch.empty if self.reduction is None else torch.zeros)(record.numel, dtype=self.dtype, device="cpu")
        sums = self._sum(record)
        if sums is not None:
            out.copy_(sums)
        for chunk, start, first, stop in self._pieces(record) if sums is None else ():
            with self._alone_here():
                part = self._memory(record, chunk, fresh=False, dirty=False)
                out[first:stop].view(torch.uint8).copy_(part[start : start + (stop - first) * self.dtype.itemsize])
        if self.reduction is not None:
            self.reduction.whole(record, out)
        return out if entry.scale == 1.0 else out.float().mul_(entry.scale)

    @contextmanager
    def _alone_here(self) -> Iterator[None]:
        """Keeps the landing thread out; waits while it stores another gradient."""
        if not self._lock.acquire(blocking=False):
            with self.device.stalls.waiting(GRADIENT):
                self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _landing(self, record: Record) -> Iterator[None]:
        recorder = self.device.stalls.recorder
        start = recorder.clock() if recorder is not None else 0.0
        yield
        if recorder is not None:
            recorder.span("landing", record.name, start)

    def write(self, record: Record, value: torch.Tensor) -> None:
        self._check_reduced(record)
        self.guard(record, "writing to the gradient", True)
        entry = self._entries[record.number]
        self._settle(entry, fresh=True)
        stored, entry.scale = self._fitted(value.detach().to("cpu").contiguous())
        entry.spent = False
        self._changed()
        self._put(record, stored)

    def _fitted(self, value: torch.Tensor) -> tuple[torch.Tensor, float]:
        """What is to be stored for `value`, and the scale that gives it back; see [Note: fp16 at rest]."""
        most = float(value.abs().max()) if self.dtype == torch.float16 and value.numel() else 0.0
        if not 0.0 < most < math.inf:
            return value, 1.0
        exponent = min(16 - math.frexp(most)[1], 126)
        exponent -= math.ldexp(most, exponent) >= _FP16_OVER
        return value.float().mul(math.ldexp(1.0, exponent)), math.ldexp(1.0, -exponent)

    def zero(self, record: Record) -> None:
        """As `write` of zeros, at once."""
        self._check_reduced(record)
        self.guard(record, "zeroing the gradient", True)
        entry = self._entries[record.number]
        self._settle(entry, fresh=True)
        entry.scale, entry.zeroed, entry.spent, entry.backwards = 1.0, True, False, 0
        self._resident.forget_sums(record)
        record.sums.zero_()

    def settle(self, again: bool = True) -> None:
        """Every landing is done; its error, if any, is raised, `again` where that was done before and the gradient is still there."""
        for record in self.records:
            self._settle(self._entries[record.number], fresh=not again or record.parameter.grad is None)
        self._resident.fetch_sums()

    def scale_of(self, record: Record) -> float:
        return self._entries[record.number].scale

    def scale(self, records: Iterable[Record], factor: float) -> None:
        records = list(records) if factor != 1.0 else []
        for record in records:
            self.guard(record, "scaling the gradient", True)
        for record in records:
            self._entries[record.number].scale *= factor

    def norm_squared(self, record: Record) -> float:
        """Exactly rounded sum of the blocks' sums of squares, of the gradient as it reads; not finite if an element is not.

        With stages 2 and 3 of several ranks a collective.
        """
        entry = self._entries[record.number]
        if self.reduction is not None:
            self.reduction.complete()
        self._settle(entry)
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
            if self._entries[record.number].zeroed:
                self._put(record, torch.zeros(record.numel, dtype=self.dtype, device="cpu"))
        summed = [r for r in self.records if r.trained and r.grad is not None and self.units[r.unit].sums is not None]
        for record in summed:
            self._copy_sum(record)
        for record in summed:
            self._settle(self._entries[record.number])
        if self._cache is not None:
            with self._alone_here():
                self._cache.flush()
                self._awaited.clear()

    def widen(self, reshard: Callable[[Unit, int], Shard]) -> None:
        """From now on sums are fp32: each chunk moves to the shard that `reshard(unit, chunk)` makes for it."""
        self.flush()
        for unit in self.units:
            for i, old in enumerate(unit.gradients):
                if not old.tier:
                    continue
                new = reshard(unit, i)
                raw = torch.empty(old.nbytes, dtype=torch.uint8, device="cpu")
                old.read(0, raw)
                new.write(0, raw.view(self.dtype).float())
                unit.gradients[i] = new
        self.dtype = torch.float32
        if self._cache is not None:
            self._cache.moved(key for key in range(self._first_chunk[-1]))

    # Storing, in one thread at a time

    def _changed(self) -> None:
        if self.reduction is not None:
            self.reduction.changed()

    def _release(self, record: Record) -> None:
        """The last step's updates have read what is to be written over."""
        for chunk, _ in record.slices:
            self.let_go(record.unit, chunk)

    def _settle(self, entry: _Entry, fresh: bool = False) -> None:
        """What is under way has landed, or its error is raised; unless another is to be there, a `fresh` start, so is one of before."""
        entry.failed = None if fresh else entry.failed
        while entry.landing:
            try:
                entry.landing[0].wait()
            except Exception:
                entry.failed = entry.failed or entry.landing[0]
            del entry.landing[0]
        if entry.failed is not None:
            entry.failed.wait()

    def _pieces(self, record: Record) -> Iterable[tuple[int, int, int, int]]:
        """(chunk, first byte in it, first element of the parameter, end element) of each slice that rests here."""
        trained = self.units[record.unit].layout.trained
        assert trained is not None
        for chunk, piece in record.slices:
            if not self.units[record.unit].gradients[chunk].tier:
                continue
            yield chunk, (piece.offset - trained.chunks[chunk].start) * self.dtype.itemsize, piece.start, piece.stop

    def _memory(self, record: Record, chunk: int, *, fresh: bool, dirty: bool) -> torch.Tensor:
        shard = self.units[record.unit].gradients[chunk]
        if shard.memory is not None:
            return shard.memory
        if self._cache is None:
            raise OffloadError("gradients rest on NVMe without staging buffers")
        return self._cache.memory(self._first_chunk[record.unit] + chunk, shard, fresh=fresh, dirty=dirty)

    def _store(self, record: Record, host: torch.Tensor, accumulate: bool, shift: int = 0, factor: float = 1.0) -> None:
        """Stores the gradient, which starts `shift` elements behind the start of `host`, times `factor`, and the sums of squares of its blocks."""
        if host.dtype not in CODES:
            host = host.float()
        entry = self._entries[record.number]
        if entry.zeroed and accumulate:
            self._store(record, torch.zeros(record.numel, dtype=self.dtype, device=host.device), accumulate=False)
        if self._resident.lands(record.unit):
            self._store_resident(record, host.view(-1), accumulate)
            return
        self._release(record)
        with self._alone_here(), self._landing(record):
            entry.zeroed = False
            for chunk, start, first, stop in self._pieces(record):
                part = self._memory(record, chunk, fresh=not accumulate and self._alone(record, chunk), dirty=True)
                _core.land(
                    part.data_ptr() + start, CODES[self.dtype], host.data_ptr() + (first + shift) * host.element_size(), CODES[host.dtype],
                    stop - first, accumulate, factor, record.sums.data_ptr() + first // NORM_BLOCK * 8, 0,
                )  # fmt: skip
                self._came(record, chunk)

    def _store_resident(self, record: Record, source: torch.Tensor, accumulate: bool) -> None:
        self._entries[record.number].zeroed = False
        for part, first, stop in self._resident_parts(record):
            self._resident.store(record, part, source[first:stop], first, accumulate)

    def _resident_parts(self, record: Record) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(bytes in device memory, first element of the parameter, end element) of each slice."""
        sums = self._sum(record)
        if sums is not None:
            for first in range(0, record.numel, SUM_PIECE):
                part = sums[first : first + SUM_PIECE]
                yield part.view(torch.uint8), first, first + part.numel()
            return
        for chunk, start, first, stop in self._pieces(record):
            if stop > first:
                memory = self._memory(record, chunk, fresh=False, dirty=True)
                yield memory[start : start + (stop - first) * self.dtype.itemsize], first, stop

    def _rescale(self, record: Record, factor: float) -> None:
        if self._resident.lands(record.unit):
            for part, _, _ in self._resident_parts(record):
                self._resident.scale(part, factor)
            return
        self._release(record)
        with self._alone_here():
            for chunk, start, first, stop in self._pieces(record):
                part = self._memory(record, chunk, fresh=False, dirty=True)
                _core.scale(part.data_ptr() + start, CODES[self.dtype], stop - first, factor, 0)

    def _alone(self, record: Record, chunk: int) -> bool:
        trained = self.units[record.unit].layout.trained
        assert trained is not None
        return len(trained.chunks[chunk].slices) == 1

    def _came(self, record: Record, chunk: int) -> None:
        """A chunk on NVMe is written back as soon as all its parameters have come; one that waits for an unused one goes at the flush."""
        unit = self.units[record.unit]
        if self._cache is None or unit.gradients[chunk].memory is not None:
            return
        assert unit.layout.trained is not None
        key = self._first_chunk[record.unit] + chunk
        awaited = self._awaited.setdefault(key, set())
        awaited.add(record.number)
        if len(awaited) == len(unit.layout.trained.chunks[chunk].slices):
            del self._awaited[key]
            if not self.takes(record.unit, chunk):
                self._cache.finish(key)
