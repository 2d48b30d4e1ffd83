"""Whom to wait for: the newest job of each chunk in the host's pipeline, or, of a unit that rests on the device, the device's work.

Both are asked in one way (`Waits`), by unit and chunk, so nobody else needs to know which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offload.engine.record import Unit
from offload.engine.resident import Resident
from offload.errors import SwapError
from offload.memory.stalls import NVME_WRITE, UPDATE, Stalls


class Waits(Protocol):
    """What can be waited for of a unit's updates."""

    def wait(self, unit: int, chunk: int, written: bool, tell: bool) -> None:
        """Returns when a chunk is updated (or `written` back too). SwapError if it cannot be; unless `tell`, the caller may keep it to itself."""

    def let_go(self, unit: int, chunk: int) -> None:
        """Returns when no update reads the chunk's gradient any more, whatever became of it."""

    def wait_unit(self, unit: int, tell: bool, own: bool) -> None:
        """Returns when the unit's parameters are, where they rest, what they are to be; `own`: those of them that this rank updates."""

    def ready(self, unit: int) -> bool:
        """Whether `wait_unit` would not wait."""


class Others(Protocol):
    """What other ranks update of parameters that rest here too, and bring."""

    def wait(self, unit: int) -> None: ...

    def done(self, unit: int) -> bool: ...


class _NoOthers:
    def wait(self, unit: int) -> None:
        return None

    def done(self, unit: int) -> bool:
        return True


class Reader:
    """A job that takes its gradient from memory that was lent to it. `wait` returns when it does no more, whatever became of it."""

    def __init__(self, batch: Any, index: int, stalls: Stalls, behind: Callable[[], dict[str, float]]) -> None:
        self._batch, self._index, self._stalls, self._behind = batch, index, stalls, behind

    @property
    def done(self) -> bool:
        return bool(self._batch.reached(self._index, False))

    def wait(self) -> None:
        if self.done:
            return
        try:
            with self._stalls.waiting(UPDATE, self._behind):
                self._batch.wait_job(self._index, False)
        except SwapError:
            if not self.done:  # a device is stuck
                raise


@dataclass
class _Job:
    """The newest job of a chunk. `updated`: known to be."""

    batch: Any
    index: int
    updated: bool = False


class Jobs:
    """The jobs of all steps that may not be done, by unit and chunk. `behind`: what a wait for one waits for itself."""

    def __init__(self, units: Sequence[Unit], stalls: Stalls, behind: Callable[[], dict[str, float]]) -> None:
        self._units, self._stalls, self._behind = units, stalls, behind
        self.others: Others = _NoOthers()
        self.error: SwapError | None = None
        self.told = False  # the user was
        self.clear()

    def clear(self) -> None:
        self._jobs: list[dict[int, _Job]] = [{} for _ in self._units]

    def note(self, unit: int, chunk: int, batch: Any, index: int) -> None:
        """From here on this is the chunk's newest."""
        self._jobs[unit][chunk] = _Job(batch, index)

    def wait(self, unit: int, chunk: int, written: bool, tell: bool) -> None:
        job = self._jobs[unit].get(chunk)
        if job is None or (job.updated and not written):
            return
        try:
            if not job.batch.reached(job.index, False):
                with self._stalls.waiting(UPDATE, self._behind):
                    job.batch.wait_job(job.index, False)
            if written and not job.batch.reached(job.index, True):
                with self._stalls.waiting(NVME_WRITE):
                    job.batch.wait_job(job.index, True)
            job.batch.wait_job(job.index, written)  # raises what went wrong
        except SwapError as error:
            if not job.batch.reached(job.index, written):  # a device is stuck, and may yet come round
                raise
            self.error, self.told = spoilt(error), self.told or tell
            raise self.error from None
        job.updated = True
        if written and self._jobs[unit].get(chunk) is job:
            self._jobs[unit].pop(chunk, None)  # another reader may just have

    def let_go(self, unit: int, chunk: int) -> None:
        job = self._jobs[unit].get(chunk)
        try:
            self.wait(unit, chunk, False, tell=False)
        except SwapError:
            if job is None or not job.batch.reached(job.index, False):
                raise

    def wait_unit(self, unit: int, tell: bool, own: bool) -> None:
        written = self._must_be_written(unit)
        for chunk in list(self._jobs[unit]):
            self.wait(unit, chunk, written, tell)
        if not own:
            self.others.wait(unit)

    def ready(self, unit: int) -> bool:
        written = self._must_be_written(unit)
        jobs = list(self._jobs[unit].values())
        return self.others.done(unit) and all((j.updated and not written) or j.batch.reached(j.index, written) for j in jobs)

    def synchronize(self) -> None:
        """Returns when all are written back."""
        for unit, jobs in enumerate(self._jobs):
            for chunk in list(jobs):
                self.wait(unit, chunk, True, tell=True)

    def _must_be_written(self, unit: int) -> bool:
        return bool(self._jobs[unit]) and self._units[unit].parameters[0].memory is None


class OnDevice:
    """As `Jobs`, of units that rest on the device."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident

    def wait(self, unit: int, chunk: int, written: bool, tell: bool) -> None:
        self._resident.wait(unit)

    def let_go(self, unit: int, chunk: int) -> None:
        return None  # work on the device has its order

    def wait_unit(self, unit: int, tell: bool, own: bool) -> None:
        self._resident.wait(unit)

    def ready(self, unit: int) -> bool:
        return self._resident.ready(unit)


def spoilt(error: SwapError) -> SwapError:
    """What all are told once an update has failed."""
    return SwapError(f"{error}. An update failed by it, so a step may be applied in part: this model can only be closed; go on from a checkpoint")
