"""Updates under way.

[Note: updates under the forward]
`step()` submits its updates and returns. Whoever then touches what an update touches waits for that chunk's job, and for no other: a fetch, and
whoever reads or writes a value, for its update, or for its write-back where the value rests on NVMe; a gradient that lands, for the update that
still reads the earlier one. Jobs run in C++ and wait for nothing that Python holds, so a wait always ends. A job that failed fails every wait
for it; no job runs after it.

[Note: reading ahead]
From the start of a backward on, what the next updates need besides gradients is read into free buffers, the first units' first. Who writes to
what rests on NVMe drops what was read ahead; the next backward, or the step itself, reads again.

Units that rest whole on a device have no jobs here: their updates are the device's work (`engine/resident.py`). Both are waited for in one
way (`engine/jobs.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from offload.engine.jobs import Jobs, OnDevice, Reader, Waits, spoilt
from offload.engine.record import Unit
from offload.engine.resident import Resident
from offload.engine.update import Updates
from offload.errors import OffloadError, SwapError
from offload.memory.shard import Transfer
from offload.memory.stalls import NVME_READ, NVME_WRITE, UPDATE, Stalls

STEPS_MOST = 2  # steps whose write-backs may be under way
Hypers: TypeAlias = dict[str, float | int | bool]  # fields of ops.HYPER


class Gated(NamedTuple):
    """The updates of the step that comes, each of which waits until it is opened. `at`: by unit and chunk, the number of its job, in their order."""

    pipeline: Any
    batch: Any
    at: dict[tuple[int, int], int]
    hyper: np.ndarray[Any, Any]

    def has_frame(self, unit: int, chunk: int) -> bool:
        """Whether a chunk's update, once it is opened, waits for no buffer. From any thread."""
        return bool(self.pipeline.has_frame(self.batch, self.at[unit, chunk]))


class Background:
    """The updates of all steps that may not be done, and who is waited for."""

    def __init__(self, units: Sequence[Unit], updates: Updates, resident: Resident, stalls: Stalls | None = None) -> None:
        self._units, self._updates, self._resident, self._stalls = units, updates, resident, stalls or Stalls()
        self.jobs, on_device = Jobs(units, self._stalls, self._behind), OnDevice(resident)
        self._waits: list[Waits] = [on_device if resident.has(u.number) else self.jobs for u in units]
        self._batches: deque[Any] = deque()
        self._prepared: tuple[Any, list[tuple[int, int]]] | None = None
        self.gated: Gated | None = None  # see [Note: updates under the backward]
        self._dropped: Any = None
        self._seconds: dict[str, float] = {}

    def start(self, hyper: np.ndarray[Any, Any], order: Sequence[int]) -> None:
        """Submits the updates of one step, those of units that are computed first before others. `hyper` is copied."""
        while len(self._batches) >= STEPS_MOST:
            self._retire()
        places: Iterable[tuple[int, int]]
        if self.gated is not None:
            (pipeline, batch, places, _), self.gated = self.gated, None
            pipeline.settle(batch, hyper)
        elif self._prepared is not None:
            (batch, places), self._prepared = self._prepared, None
            self._updates.pipeline.begin(batch, hyper)
        else:
            batch, places = self._updates.submit(hyper, order)
        self._batches.append(batch)
        active = self._updates.active(hyper)
        for index, place in enumerate(places):
            if place in active:  # an earlier job of any other may be still to be written
                self.jobs.note(*place, batch, index)
        for unit in order:
            if self._resident.has(unit):
                self._resident.update(unit, hyper)
        self.check()

    def gate(self, hypers: dict[int, Hypers], order: Sequence[int]) -> None:
        """Begins the updates of the next step, units in `order`, each to wait until it is opened; `start` does the rest."""
        while len(self._batches) >= STEPS_MOST:
            self._retire()
        if self.gated is not None or (self._prepared is not None and not self._updates.arranged(order)):
            self.drop()
        batch, places = self._prepared or self._updates.prepare(order)
        self._prepared, table = None, self.hyper()
        for number, fields in hypers.items():
            for key, value in (fields | {"active": 1}).items():
                table[number][key] = value
        self._updates.pipeline.gate(batch, table)
        self.gated = Gated(self._updates.pipeline, batch, {place: index for index, place in enumerate(places)}, table)

    def open(self, unit: int, lent: Mapping[int, int]) -> dict[int, Transfer]:
        """The unit's updates may run from here on. `lent`: by chunk, the address of its gradient in a buffer; and until when it is read there."""
        gated = self.gated
        if gated is None:
            raise OffloadError("there is no update to open")
        if self._resident.has(unit):
            self._resident.update(unit, gated.hyper)
            return {}
        readers: dict[int, Transfer] = {}
        for chunk in range(len(self._units[unit].states)):
            index = gated.at[unit, chunk]
            self.jobs.note(unit, chunk, gated.batch, index)
            gated.pipeline.open(gated.batch, index, lent.get(chunk, 0))
            if chunk in lent:
                readers[chunk] = Reader(gated.batch, index, self._stalls, self._behind)
        return readers

    def read_ahead(self, order: Sequence[int]) -> None:
        """Starts reading for the next step's updates, unless that was done. See [Note: reading ahead]."""
        while self._batches and self._batches[0].done and not self._batches[0].failed:
            self._retire()
        if self._prepared is None and self.gated is None and self._updates.moves and len(self._batches) < STEPS_MOST:
            self._prepared = self._updates.prepare(order)

    def drop(self) -> None:
        """Gives up what was read ahead; returns when nothing is being read. SwapError if it failed.

        Of a gated batch what was opened stays under way.
        """
        self._abandon()
        if self._prepared is not None:
            (self._dropped, _), self._prepared = self._prepared, None
            self._updates.pipeline.cancel(self._dropped)
        if self._dropped is not None:
            with self._stalls.waiting(NVME_READ):
                self._dropped.wait()
            self._dropped = None

    def _abandon(self) -> None:
        if self.gated is not None:
            self._dropped, self.gated = self.gated.batch, None
            self._updates.pipeline.cancel(self._dropped)
            self._batches.append(self._dropped)

    def wait(self, unit: int, chunk: int, written: bool, tell: bool = True) -> None:
        """Returns when a chunk is updated (or `written` back too). SwapError if it cannot be; unless `tell`, the caller may keep it to itself."""
        self._waits[unit].wait(unit, chunk, written, tell)

    def let_go(self, unit: int, chunk: int) -> None:
        """Returns when no update reads the chunk's gradient any more, whatever became of it."""
        self._waits[unit].let_go(unit, chunk)

    def wait_unit(self, unit: int, tell: bool = True, own: bool = False) -> None:
        """Returns when the unit's parameters are, where they rest, what they are to be; `own`: those of them that this rank updates."""
        self._waits[unit].wait_unit(unit, tell, own)

    def ready(self, unit: int) -> bool:
        """Whether `wait_unit` would not wait."""
        return self._waits[unit].ready(unit)

    def synchronize(self) -> None:
        """Returns when nothing is under way but what is still to be opened. SwapError if any of it failed."""
        while self._batches:
            self._retire()
        self.check()
        self.jobs.synchronize()
        self._resident.synchronize()

    def check(self) -> None:
        """Raises the error that ended an earlier step, if it is known by now."""
        if self.gated is not None and self.gated.batch.failed:
            self._abandon()
        if self.jobs.error is None and any(b.failed for b in self._batches):
            while self.jobs.error is None:
                self._retire(raising=False)
        if self.jobs.error is not None:
            self.jobs.told = True
            raise self.jobs.error.with_traceback(None)
        self._resident.check()

    def finish(self) -> None:
        """As `synchronize`, and nothing is opened any more; an error that the user was told of is not raised once more."""
        self._abandon()
        while self._batches:
            self._retire(raising=False)
        if not (self.jobs.told or self._resident.failed):
            self.check()
        self._resident.finish()

    def replace(self, updates: Updates) -> None:
        """From now on these are the jobs. Nothing is under way or read ahead."""
        if self._stalls.recorder is not None:
            updates.pipeline.trace(self._stalls.recorder.most)
        self._updates = updates

    def hyper(self) -> np.ndarray[Any, Any]:
        """A record (ops.HYPER) for each parameter, none active."""
        return self._updates.hyper()

    def close(self) -> None:
        self._updates.close()
        self._prepared = self.gated = self._dropped = None
        self._batches.clear()
        self._resident.close()
        self.jobs.clear()

    def trace(self, most: int) -> None:
        """From here on the newest `most` jobs are noted; 0: none."""
        if self._updates.pipeline is not None:
            self._updates.pipeline.trace(most)

    def traced(self) -> tuple[list[tuple[str, tuple[float, ...]]], int]:
        """What was noted, oldest first: the chunk's name, and when its read, update and write began and ended; and how many gave way."""
        if self._updates.pipeline is None:
            return [], 0
        jobs, gone = self._updates.pipeline.traced()
        places = self._updates.places()
        named = [(f"{self._units[places[job[0]][0]].name} {places[job[0]][1]}", job[1:]) for job in jobs]
        return named, gone

    def seconds(self) -> dict[str, float]:
        """What the pipeline did so far: seconds read_wait, write_wait, compute; bytes_read, bytes_written."""
        total = dict(self._seconds)
        for batch in list(self._batches):
            _add(total, batch)
        return total

    def reset_seconds(self) -> None:
        under_way: dict[str, float] = {}
        for batch in self._batches:
            _add(under_way, batch)
        self._seconds = {key: -value for key, value in under_way.items()}

    def _behind(self) -> dict[str, float]:
        return dict(zip((NVME_READ, NVME_WRITE), self._updates.pipeline.waited(), strict=True))

    def _retire(self, raising: bool = True) -> None:
        batch = self._batches[0]
        try:
            with self._stalls.waiting(UPDATE, self._behind):
                batch.wait()
        except SwapError as error:
            if not batch.done:
                raise
            self.jobs.error = spoilt(error)
        self._batches.popleft()
        _add(self._seconds, batch)
        if raising:
            self.check()


def _add(total: dict[str, float], batch: Any) -> None:
    for key, value in batch.stats().items():
        total[key] = total.get(key, 0.0) + value
