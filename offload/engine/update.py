"""Updates: one job a chunk, read from where it rests, updated in one pass, written back where it rests."""

from __future__ import annotations

from collections.abc import Iterable
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
from offload.transfer.frames import FramePool

_ABSOLUTE, _FRAME = 0, 1
_Where = tuple[int, int]
_NOWHERE: _Where = (-1, 0)


class Updates:
    """The jobs of every chunk, built once; a step picks those with gradients and gives each parameter its hyperparameters."""

    def __init__(
        self, units: list[Unit], records: list[Record], form: StateForm, grad: torch.dtype, frames: FramePool | None, seed: int
    ) -> None:
        self._form, self._compute, self._grad = form, DTYPES[form.compute], grad
        self._blank = _blank(records, seed)
        memory = frames.all if frames else []
        self.pipeline = _core.Pipeline([f.data_ptr() for f in memory], frames.nbytes if frames else 0, 0, 0, memory)
        self._jobs: list[tuple[int, bool, tuple[int, ...]]] = []  # (pipeline job, does I/O, record numbers)
        of_unit: dict[int, list[Record]] = {}
        for record in records:
            of_unit.setdefault(record.unit, []).append(record)
        for unit in units:
            for chunk in range(len(unit.states)):
                self._jobs.append(self._job(unit, chunk, of_unit[unit.number]))
        self._jobs = _interleaved(self._jobs)

    def _job(self, unit: Unit, number: int, records: list[Record]) -> tuple[int, bool, tuple[int, ...]]:
        trained = unit.layout.trained
        assert trained is not None
        chunk = trained.chunks[number]
        reads: list[Any] = []
        writes: list[Any] = []
        at = 0

        def place(shard: Shard, start: int, nbytes: int, written: bool, read: bool) -> _Where:
            """Where a stretch of a shard is during the update: in memory, or in the job's frame between a read and a write."""
            nonlocal at
            if shard.memory is not None:
                return _ABSOLUTE, shard.address(start)
            assert shard.space is not None and shard.extent is not None
            here, at = at, at + -(-nbytes // 4096) * 4096
            part = (shard.space.native(shard.extent.file), shard.extent.offset + start, here, nbytes)
            if read:
                reads.append(part)
            if written:
                writes.append(part)
            return _FRAME, here

        n, size = chunk.numel, self._compute.itemsize
        state = place(unit.states[number], 0, unit.states[number].nbytes, written=True, read=True)
        grad = place(unit.gradients[number], 0, unit.gradients[number].nbytes, written=False, read=True)
        value = place(unit.parameters[0], chunk.start * size, n * size, written=True, read=self._form.value_is_master)
        segments = []
        by_index = {r.slices[0][1].parameter: r for r in records if r.trained and r.slices}
        for piece in chunk.slices:
            record = by_index[piece.parameter]
            if piece.stop > piece.start:
                segments.append(self._segment(record, piece, piece.offset - chunk.start, n, state, grad, value))
        codes = MASTERS["split" if self._form.master == "split" else "fp32"], MOMENTS[self._form.moments]
        job = self.pipeline.add_job(reads, segments, writes, CODES[self._grad], CODES[self._compute], RULES["adam"], *codes)
        return job, bool(reads or writes), tuple(s[0] for s in segments)

    def _segment(self, record: Record, piece: Slice, at: int, chunk: int, state: _Where, grad: _Where, value: _Where) -> tuple[Any, ...]:
        base, start = state
        has = {p.role: (base, start + self._form.at(p.role, chunk, at)) for p in self._form.parts}
        copy = value[0], value[1] + at * self._compute.itemsize
        gradient = grad[0], grad[1] + at * self._grad.itemsize
        master, out = (copy, _NOWHERE) if self._form.value_is_master else (has["master"], copy)
        rest = (has.get(role, _NOWHERE) for role in ("low", "exp_avg_scale", "exp_avg_sq_scale"))
        return record.number, piece.stop - piece.start, master, gradient, has["exp_avg"], has["exp_avg_sq"], out, *rest, piece.start

    def close(self) -> None:
        self.pipeline, self._jobs = None, []

    def hyper(self) -> np.ndarray[Any, Any]:
        """A record a parameter, none active, each with its seed."""
        return self._blank.copy()

    def run(self, hyper: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Updates every chunk that has an active parameter and waits; raises SwapError. Returns the pipeline's own counters."""
        active = hyper["active"]
        jobs = [job for job, _, numbers in self._jobs if any(active[i] for i in numbers)]
        if not jobs:
            return {}
        batch = self.pipeline.submit(jobs, hyper)
        batch.wait()
        return dict(batch.stats())


def _blank(records: list[Record], seed: int) -> np.ndarray[Any, Any]:
    """Inactive hyperparameters. What is rounded at random depends on the run's seed and the parameter's name alone, and on the step."""
    table = np.zeros(max((r.number for r in records), default=-1) + 1, dtype=HYPER)
    for record in records:
        table[record.number]["seed"] = derived_seed(seed, record.name, 0) & 0xFFFFFFFF
    return table


def _interleaved(jobs: list[tuple[int, bool, tuple[int, ...]]]) -> list[tuple[int, bool, tuple[int, ...]]]:
    """Jobs that do I/O spread evenly among those that do not, so that the link is never idle while the cores work, nor they."""

    def spread(part: Iterable[tuple[int, bool, tuple[int, ...]]]) -> list[tuple[float, tuple[int, bool, tuple[int, ...]]]]:
        part = list(part)
        return [((i + 0.5) / len(part), job) for i, job in enumerate(part)]

    return [job for _, job in sorted(spread(j for j in jobs if j[1]) + spread(j for j in jobs if not j[1]), key=lambda x: x[0])]
