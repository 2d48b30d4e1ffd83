"""Where gradients rest, and what stores, reads and scales them there: in memory, on NVMe behind staging buffers, or summed on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offload import _core
from offload.engine.chunk_cache import ChunkCache
from offload.engine.record import CODES, NORM_BLOCK, Record, Unit
from offload.engine.resident import Resident
from offload.errors import OffloadError
from offload.memory.shard import Shard
from offload.memory.stalls import GRADIENT
from offload.transfer.device import Device, Put
from offload.transfer.frames import FramePool
from offload.transfer.queue import Transfer

SUM_PIECE = 1 << 30  # elements of a sum that one piece of work takes: kernels count them in 32 bits

Start = Callable[[int, Mapping[int, int]], Mapping[int, Transfer]]


class Places:
    """The elements of gradients, in `dtype`, on the tiers of their chunks' shards. One thread at a time stores or reads what the host can.

    `zeroed`: numbers of parameters whose gradients read as zeros, which are yet to be stored: an update may still read what is there.
    """

    def __init__(self, units: Sequence[Unit], dtype: torch.dtype, device: Device, frames: FramePool | None, resident: Resident) -> None:
        self._units, self.dtype, self._device, self._resident = units, dtype, device, resident
        self.zeroed: set[int] = set()
        self.let_go: Callable[[int, int], None] = lambda unit, chunk: None  # waits for a chunk's update, which reads what rests here
        self.takes: Callable[[int, int], bool] = lambda unit, chunk: False  # whether a chunk's update will take it from memory, and nobody else
        self._lock = threading.RLock()
        self._cache = ChunkCache(frames, frames.count - 1) if frames is not None else None  # a fetch needs one
        self._awaited: dict[int, set[int]] = {}  # by chunk on NVMe, the parameters that have come
        self._first_chunk = [0]
        for unit in units:
            self._first_chunk.append(self._first_chunk[-1] + len(unit.gradients))

    def close(self) -> None:
        self._cache = None

    # One parameter's

    def sum_of(self, record: Record) -> torch.Tensor | None:
        """A gradient's elements on the device, where it is summed there."""
        sums = self._units[record.unit].sums
        return sums[record.offset : record.offset + record.numel] if sums is not None and record.trained else None

    def store(self, record: Record, value: torch.Tensor, accumulate: bool, shift: int = 0, factor: float = 1.0) -> None:
        """Stores the gradient, which starts `shift` elements behind the start of `value`, times `factor`, and the sums of squares of its blocks.

        `value` is in memory that the host can read; or, inside of the device's work, in that of the device on which the gradient rests.
        """
        if value.dtype not in CODES:
            value = value.float()
        if accumulate and record.number in self.zeroed:
            self.store(record, torch.zeros(record.numel, dtype=self.dtype, device=value.device), accumulate=False)
        if self._resident.lands(record.unit):
            self.zeroed.discard(record.number)
            value = value.view(-1)
            for part, first, stop in self._resident_parts(record):
                self._resident.store(record, part, value[first:stop], first, accumulate)
            return
        self._release(record)
        with self._alone(), self._landing(record):
            self.zeroed.discard(record.number)
            for chunk, start, first, stop in self._pieces(record):
                part = self._memory(record, chunk, fresh=not accumulate and self._members(record, chunk) == 1, dirty=True)
                _core.land(
                    part.data_ptr() + start, CODES[self.dtype], value.data_ptr() + (first + shift) * value.element_size(), CODES[value.dtype],
                    stop - first, accumulate, factor, record.sums.data_ptr() + first // NORM_BLOCK * 8, 0,
                )  # fmt: skip
                self._came(record, chunk)

    def copy_sum(self, record: Record, sums: torch.Tensor, put: Put) -> None:
        """What was summed on the device goes, by `put`, to where its update reads it."""
        self._release(record)
        with self._alone(), self._landing(record):
            for chunk, start, first, stop in self._pieces(record):
                part, there = sums[first:stop].view(torch.uint8), self._memory(record, chunk, fresh=self._members(record, chunk) == 1, dirty=True)
                put(there[start : start + part.numel()], part)
                self._came(record, chunk)

    def scale(self, record: Record, factor: float) -> None:
        """Multiplies the elements; as `store`, inside of the device's work where they rest there."""
        if self._resident.lands(record.unit):
            for part, _, _ in self._resident_parts(record):
                self._resident.scale(part, factor)
            return
        self._release(record)
        with self._alone():
            for chunk, start, first, stop in self._pieces(record):
                part = self._memory(record, chunk, fresh=False, dirty=True)
                _core.scale(part.data_ptr() + start, CODES[self.dtype], stop - first, factor, 0)

    def read(self, record: Record, out: torch.Tensor) -> None:
        """Fills those elements of `out`, flat and in `dtype`, that rest here."""
        sums = self.sum_of(record)
        if sums is not None:
            out.copy_(sums)
            return
        for chunk, start, first, stop in self._pieces(record):
            with self._alone():
                part = self._memory(record, chunk, fresh=False, dirty=False)
                out[first:stop].view(torch.uint8).copy_(part[start : start + (stop - first) * self.dtype.itemsize])

    # Chunks

    def chunk(self, records: Sequence[Record], chunk: int) -> torch.Tensor:
        """The elements of a chunk of these parameters' unit, fp32: themselves if they rest so in memory, else a copy."""
        unit = self._units[records[0].unit]
        self.let_go(unit.number, chunk)
        with self._alone():
            there = self._memory(records[0], chunk, fresh=False, dirty=False).view(self.dtype)
            in_place = unit.gradients[chunk].memory is not None and there.dtype == torch.float32
            return there if in_place else there.to(torch.float32, copy=True)  # a staging buffer may be wanted for another chunk meanwhile

    def replace(self, records: Sequence[Record], chunk: int, total: torch.Tensor, factor: float) -> None:
        """The elements of a chunk, all of which are these parameters', are those of `total` (fp32) times `factor` from here on."""
        with self._alone():
            out = self._memory(records[0], chunk, fresh=True, dirty=True)
            for record in records:
                for number, start, first, stop in self._pieces(record):
                    if number == chunk:
                        _core.land(
                            out.data_ptr() + start, CODES[self.dtype], total.data_ptr() + start // self.dtype.itemsize * 4, CODES[torch.float32],
                            stop - first, False, factor, record.sums.data_ptr() + first // NORM_BLOCK * 8, 0,
                        )  # fmt: skip
            if self._cache is not None and self._units[records[0].unit].gradients[chunk].memory is None:
                self._cache.finish(self._first_chunk[records[0].unit] + chunk)

    def lend(self, unit: int, at_once: Callable[[int, int], bool], start: Start, keep: bool) -> Mapping[int, int] | None:
        """Starts the updates of a unit whose gradients have landed; None, and nothing done, where one could read its gradient neither from
        NVMe nor, `at_once`, from a staging buffer. Never waits. Unless they are to `keep`, gradients taken from a buffer are not written.

        `start(unit, lent)`: `lent` has by chunk the address of the gradient, where the update is to take it from; gives what reads there, by chunk.
        """
        cache, shards = self._cache, self._units[unit].gradients
        lent: dict[int, int] = {}
        if cache is None or all(shard.memory is not None for shard in shards):
            start(unit, lent)
            return lent
        if not self._lock.acquire(blocking=False):  # something lands, which may wait for a drive
            return None
        try:
            first, ready = self._first_chunk[unit], True
            for chunk, shard in enumerate(shards):
                frame = cache.frame(first + chunk) if shard.memory is None else None
                if frame is not None and at_once(unit, chunk):
                    lent[chunk] = frame.data_ptr()
                elif frame is not None and not cache.written(first + chunk):
                    cache.finish(first + chunk)
                    ready = False
            if not ready:
                return None
            for chunk, reader in start(unit, lent).items():
                cache.lend(first + chunk, reader, keep=keep)
            return lent
        finally:
            self._lock.release()

    def flush(self) -> None:
        """Every chunk on NVMe is written, and all staging buffers are free that no update was lent. Nothing is landing."""
        if self._cache is not None:
            with self._alone():
                self._cache.flush()
                self._awaited.clear()

    def widen(self, reshard: Callable[[Unit, int], Shard]) -> None:
        """After a `flush`: from now on elements are fp32; each chunk moves to the shard that `reshard(unit, chunk)` makes for it."""
        for unit in self._units:
            for i, old in enumerate(unit.gradients):
                if not old.tier:
                    continue
                new = reshard(unit, i)
                raw = torch.empty(old.nbytes, dtype=torch.uint8)
                old.read(0, raw)
                new.write(0, raw.view(self.dtype).float())
                unit.gradients[i] = new
        self.dtype = torch.float32
        if self._cache is not None:
            self._cache.moved(range(self._first_chunk[-1]))

    # In one thread at a time

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps the landing thread out; waits while it stores another gradient."""
        if not self._lock.acquire(blocking=False):
            with self._device.stalls.waiting(GRADIENT):
                self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _landing(self, record: Record) -> Iterator[None]:
        recorder = self._device.stalls.recorder
        start = recorder.clock() if recorder is not None else 0.0
        yield
        if recorder is not None:
            recorder.span("landing", record.name, start)

    def _release(self, record: Record) -> None:
        """The last step's updates have read what is to be written over."""
        for chunk, _ in record.slices:
            self.let_go(record.unit, chunk)

    def _pieces(self, record: Record) -> Iterable[tuple[int, int, int, int]]:
        """(chunk, first byte in it, first element of the parameter, end element) of each slice that rests here."""
        unit = self._units[record.unit]
        trained = unit.layout.trained
        assert trained is not None
        for chunk, piece in record.slices:
            if unit.gradients[chunk].tier:
                yield chunk, (piece.offset - trained.chunks[chunk].start) * self.dtype.itemsize, piece.start, piece.stop

    def _resident_parts(self, record: Record) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(bytes in device memory, first element of the parameter, end element) of each slice."""
        sums = self.sum_of(record)
        if sums is not None:
            for first in range(0, record.numel, SUM_PIECE):
                part = sums[first : first + SUM_PIECE]
                yield part.view(torch.uint8), first, first + part.numel()
            return
        for chunk, start, first, stop in self._pieces(record):
            if stop > first:
                memory = self._memory(record, chunk, fresh=False, dirty=True)
                yield memory[start : start + (stop - first) * self.dtype.itemsize], first, stop

    def _memory(self, record: Record, chunk: int, *, fresh: bool, dirty: bool) -> torch.Tensor:
        shard = self._units[record.unit].gradients[chunk]
        if shard.memory is not None:
            return shard.memory
        if self._cache is None:
            raise OffloadError("gradients rest on NVMe without staging buffers")
        return self._cache.memory(self._first_chunk[record.unit] + chunk, shard, fresh=fresh, dirty=dirty)

    def _members(self, record: Record, chunk: int) -> int:
        """How many parameters lie in the chunk."""
        trained = self._units[record.unit].layout.trained
        assert trained is not None
        return len(trained.chunks[chunk].slices)

    def _came(self, record: Record, chunk: int) -> None:
        """A chunk on NVMe is written back as soon as all its parameters have come; one that waits for an unused one goes at the flush."""
        if self._cache is None or self._units[record.unit].gradients[chunk].memory is not None:
            return
        key = self._first_chunk[record.unit] + chunk
        awaited = self._awaited.setdefault(key, set())
        awaited.add(record.number)
        if len(awaited) == self._members(record, chunk):
            del self._awaited[key]
            if not self.takes(record.unit, chunk):
                self._cache.finish(key)
