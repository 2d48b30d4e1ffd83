"""Updates that run as late as they may: each when somebody waits for it, or earlier by choice of a seed. For tests of who waits for what."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from offload.engine.registry import engine_of
from offload.engine.update import Updates


class LateBatch:
    """A batch whose jobs each become one of the pipeline's own when they are waited for."""

    def __init__(self, pipeline: Any, jobs: list[int], hyper: np.ndarray[Any, Any], chance: random.Random | None) -> None:
        self._pipeline, self._jobs, self._hyper, self._chance = pipeline, jobs, hyper.copy(), chance
        self._batches: list[Any] = [None] * len(jobs)
        self._lock = threading.Lock()
        if chance is not None:
            for index in range(len(jobs)):
                if chance.random() < 0.3:
                    self._begin(index)

    def _begin(self, index: int) -> Any:
        with self._lock:  # queues wait too
            if self._batches[index] is None:
                self._batches[index] = self._pipeline.submit([self._jobs[index]], self._hyper)
            return self._batches[index]

    @property
    def begun(self) -> bool:
        """Whether anything of it has been allowed to run."""
        return any(b is not None for b in self._batches)

    def begin_all(self) -> None:
        for index in range(len(self._jobs)):
            self._begin(index)

    def wait_job(self, index: int, written: bool = False) -> None:
        self._begin(index).wait_job(0, written)

    def reached(self, index: int, written: bool = False) -> bool:
        return self._batches[index] is not None and bool(self._batches[index].reached(0, written))

    def wait(self) -> None:
        self.begin_all()
        for batch in self._batches:
            batch.wait()

    @property
    def done(self) -> bool:
        return all(b is not None and b.done for b in self._batches)

    @property
    def failed(self) -> bool:
        return any(b is not None and b.failed for b in self._batches)

    def stats(self) -> dict[str, float]:
        return {}


class LatePrepared:
    """A prepared batch, which reads ahead, and begins when it is waited for. A gated one's jobs open when they are waited for."""

    def __init__(self, pipeline: Any, batch: Any) -> None:
        self._pipeline, self.batch = pipeline, batch
        self.hyper: np.ndarray[Any, Any] | None = None
        self.begun = False
        self.gated = False
        self.to_open: dict[int, int] = {}  # with the address of what is lent to each
        self._lock = threading.Lock()

    def begin_all(self) -> None:
        with self._lock:
            for index in sorted(self.to_open):
                self._pipeline.open(self.batch, index, self.to_open[index])
            self.to_open.clear()
            if not self.begun and self.hyper is not None:
                self.begun = True
                (self._pipeline.settle if self.gated else self._pipeline.begin)(self.batch, self.hyper)

    def wait_job(self, index: int, written: bool = False) -> None:
        with self._lock:
            if index in self.to_open:
                self._pipeline.open(self.batch, index, self.to_open.pop(index))
        if self.hyper is not None:
            self.begin_all()
        self.batch.wait_job(index, written)

    def reached(self, index: int, written: bool = False) -> bool:
        return (self.begun or self.gated) and bool(self.batch.reached(index, written))

    def wait(self) -> None:
        if self.hyper is not None:
            self.begin_all()
        self.batch.wait()

    @property
    def done(self) -> bool:
        return bool(self.batch.done)

    @property
    def failed(self) -> bool:
        return bool(self.batch.failed)

    def stats(self) -> dict[str, float]:
        return {}


class LatePipeline:
    """Stands before a pipeline."""

    def __init__(self, pipeline: Any, chance: random.Random | None) -> None:
        self._pipeline, self._chance = pipeline, chance
        self.waiting: list[LateBatch | LatePrepared] = []

    def _settle(self) -> None:
        """A chunk's jobs run in order."""
        for batch in self.waiting:
            batch.begin_all()
        self.waiting.clear()

    def submit(self, jobs: list[int], hyper: np.ndarray[Any, Any]) -> LateBatch:
        self._settle()
        batch = LateBatch(self._pipeline, jobs, hyper, self._chance)
        self.waiting.append(batch)
        return batch

    def prepare(self, jobs: list[int]) -> LatePrepared:
        self._settle()
        return LatePrepared(self._pipeline, self._pipeline.prepare(jobs))

    def begin(self, batch: LatePrepared, hyper: np.ndarray[Any, Any]) -> None:
        batch.hyper = hyper.copy()
        self.waiting.append(batch)
        if self._chance is not None and self._chance.random() < 0.3:
            batch.begin_all()

    def gate(self, batch: LatePrepared, hyper: np.ndarray[Any, Any]) -> None:
        batch.gated = True
        self._pipeline.gate(batch.batch, hyper)

    def has_frame(self, batch: LatePrepared, index: int) -> bool:
        return bool(self._pipeline.has_frame(batch.batch, index))

    def open(self, batch: LatePrepared, index: int, late: int = 0) -> None:
        if self._chance is not None and self._chance.random() < 0.5:
            self._pipeline.open(batch.batch, index, late)
        else:
            batch.to_open[index] = late

    def settle(self, batch: LatePrepared, hyper: np.ndarray[Any, Any]) -> None:
        self.begin(batch, hyper)

    def cancel(self, batch: LatePrepared) -> None:
        batch.begin_all()
        self._pipeline.cancel(batch.batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


@contextmanager
def late(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Updates of a prepared model are late: all of them, or those that the seed chooses."""
    background = engine_of(model).background
    chance = random.Random(seed) if seed is not None else None
    kept = Updates.__init__

    def wrapped(self: Updates, *args: Any, **kwargs: Any) -> None:
        kept(self, *args, **kwargs)
        self.pipeline = LatePipeline(self.pipeline, chance)

    updates = background._updates
    updates.pipeline = LatePipeline(updates.pipeline, chance)
    Updates.__init__ = wrapped  # type: ignore[method-assign]  # should sums become fp32 meanwhile
    try:
        yield
    finally:
        Updates.__init__ = kept  # type: ignore[method-assign]


