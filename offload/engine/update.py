"""Updates: one job a chunk, read from where it rests, updated in one pass, written back where it rests."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload import _core
from offload.engine.initialise import derived_seed
from offload.engine.record import CODES, DTYPES, Record, Unit
from offload.memory.shard import Shard
from offload.ops import HYPER, MASTERS, MOMENTS, RULES
from offload.planner.form import StateForm
from offload.planner.layout import Slice
from offload.planner.schedule import update_order
from offload.planner.share import ALONE, Share

_ABSOLUTE, _FRAME = 0, 1
_Where = tuple[int, int]
_NOWHERE: _Where = (-1, 0)


@dataclass(frozen=True)
class _Job:
    """A chunk's job: its number in the pipeline, and the numbers of the parameters it updates."""

    number: int
    unit: int
    chunk: int
    records: tuple[int, ...]


class Updates:
    """The jobs of every chunk whose state rests here, built once; a step picks those with gradients and gives each parameter its hyperparameters.

    `frames`: buffers of `frame_bytes` for chunks that rest on NVMe. `lazy`: what rests in memory is updated when somebody waits. Units in `resident`
    are updated on the device, and have no jobs here. `lent`: further memory from which gradients may be taken.
    """

    def __init__(
        self, units: list[Unit], records: list[Record], form: StateForm, grad: torch.dtype, frames: list[torch.Tensor], frame_bytes: int, seed: int,
        lazy: bool, resident: Container[int] = (), lent: Sequence[torch.Tensor] = (), share: Share = ALONE,
    ) -> None:  # fmt: skip
        self._form, self._compute, self._grad, self._share = form, DTYPES[form.compute], grad, share
        self._blank = _blank(records, seed)
        self._chunks = [0 if u.number in resident else len(u.states) for u in units]
        units = [u for u in units if u.number not in resident]
        resting = [s.memory for u in units for s in (*u.parameters, *u.gradients, *u.states) if s.memory is not None]
        # Updates may run on after a model is dropped, so the pipeline holds what they touch.
        self.pipeline = _core.Pipeline([f.data_ptr() for f in frames], frame_bytes, 0, 0, [*frames, *lent, *resting], lazy)
        self.moves = any(s.memory is None for u in units for s in u.states)  # reading ahead is of use
        self._jobs: list[_Job] = []
        self._order: tuple[int, ...] = ()
        of_unit: dict[int, list[Record]] = {}
        for record in records:
            of_unit.setdefault(record.unit, []).append(record)
        for unit in units:
            for chunk in share.chunks(unit.layout.trained, "optimizer"):
                self._jobs.append(self._job(unit, chunk, of_unit[unit.number]))

    def _job(self, unit: Unit, number: int, records: list[Record]) -> _Job:
        trained = unit.layout.trained
        assert trained is not None
        chunk = trained.chunks[number]
        reads: list[Any] = []
        late: list[Any] = []  # gradients, which are there last
        writes: list[Any] = []
        at = 0

        def place(shard: Shard, start: int, nbytes: int, written: bool, read: list[Any] | None) -> _Where:
            """Where a stretch of a shard is during the update: in memory, or in the job's frame between a read and a write."""
            nonlocal at
            if shard.memory is not None:
                return _ABSOLUTE, shard.address(start)
            assert shard.space is not None and shard.extent is not None
            here, at = at, at + -(-nbytes // 4096) * 4096
            part = (shard.space.native(shard.extent.file), shard.extent.offset + start, here, nbytes)
            if read is not None:
                read.append(part)
            if written:
                writes.append(part)
            return _FRAME, here

        n, size = chunk.numel, self._compute.itemsize
        state = place(unit.states[number], 0, unit.states[number].nbytes, written=True, read=reads)
        grad = place(unit.gradients[number], 0, unit.gradients[number].nbytes, written=False, read=late)
        first = chunk.start - self._share.span(trained, "parameter")[0]
        value = place(unit.parameters[0], first * size, n * size, written=True, read=reads if self._form.value_is_master else None)
        segments = []
        by_index = {r.slices[0][1].parameter: r for r in records if r.trained and r.slices}
        for piece in chunk.slices:
            record = by_index[piece.parameter]
            if piece.stop > piece.start:
                segments.append(self._segment(record, piece, piece.offset - chunk.start, n, state, grad, value))
        codes = MASTERS["split" if self._form.master == "split" else "fp32"], MOMENTS[self._form.moments]
        job = self.pipeline.add_job(reads, segments, writes, CODES[self._grad], CODES[self._compute], RULES["adam"], *codes, late)
        return _Job(job, unit.number, number, tuple(s[0] for s in segments))

    def _segment(self, record: Record, piece: Slice, at: int, chunk: int, state: _Where, grad: _Where, value: _Where) -> tuple[Any, ...]:
        base, start = state
        has = {p.role: (base, start + self._form.at(p.role, chunk, at)) for p in self._form.parts}
        copy = value[0], value[1] + at * self._compute.itemsize
        gradient = grad[0], grad[1] + at * self._grad.itemsize
        master, out = (copy, _NOWHERE) if self._form.value_is_master else (has["master"], copy)
        rest = (has.get(role, _NOWHERE) for role in ("low", "exp_avg_scale", "exp_avg_sq_scale"))
        return record.number, piece.stop - piece.start, master, gradient, has["exp_avg"], has["exp_avg_sq"], out, *rest, piece.start

    def close(self) -> None:
        self.pipeline, self._jobs, self.moves = None, [], False

    def places(self) -> dict[int, tuple[int, int]]:
        """The unit and chunk of each job, by its number in the pipeline."""
        return {job.number: (job.unit, job.chunk) for job in self._jobs}

    def hyper(self) -> np.ndarray[Any, Any]:
        """A record a parameter, none active, each with its seed."""
        return self._blank.copy()

    def submit(self, hyper: np.ndarray[Any, Any], order: Sequence[int]) -> tuple[Any, list[tuple[int, int]]]:
        """Starts updating every chunk that has an active parameter, units in `order`: the batch, and the unit and chunk of each of its jobs."""
        self._arrange(tuple(order))
        active = hyper["active"].tolist()
        jobs = [job for job in self._jobs if any(active[i] for i in job.records)]
        return self.pipeline.submit([job.number for job in jobs], hyper), [(job.unit, job.chunk) for job in jobs]

    def prepare(self, order: Sequence[int]) -> tuple[Any, list[tuple[int, int]]]:
        """As `submit` of all chunks whose updates are to begin later: as many as find a buffer are read, but for their gradients."""
        self._arrange(tuple(order))
        return self.pipeline.prepare([job.number for job in self._jobs]), [(job.unit, job.chunk) for job in self._jobs]

    def active(self, hyper: np.ndarray[Any, Any]) -> set[tuple[int, int]]:
        """The unit and chunk of every job that has an active parameter."""
        active = hyper["active"].tolist()
        return {(job.unit, job.chunk) for job in self._jobs if any(active[i] for i in job.records)}

    def arranged(self, order: Sequence[int]) -> bool:
        """Whether what was last prepared has its units in this order."""
        return self._order == tuple(order)

    def _arrange(self, order: tuple[int, ...]) -> None:
        if order != self._order:
            jobs = {(job.unit, job.chunk): job for job in self._jobs}
            self._jobs = [jobs[place] for place in update_order(self._chunks, order) if place in jobs]
            self._order = order

def _blank(records: list[Record], seed: int) -> np.ndarray[Any, Any]:
    """Inactive hyperparameters. What is rounded at random depends on the run's seed and the parameter's name alone, and on the step."""
    table = np.zeros(max((r.number for r in records), default=-1) + 1, dtype=HYPER)
    for record in records:
        table[record.number]["seed"] = derived_seed(seed, record.name, 0) & 0xFFFFFFFF
    return table
