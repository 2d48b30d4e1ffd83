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

    def wait_job(self, index: int, written: bool = False) -> None:
        self._begin(index).wait_job(0, written)

    def reached(self, index: int, written: bool = False) -> bool:
        return self._batches[index] is not None and bool(self._batches[index].reached(0, written))

    def wait(self) -> None:
        for index in range(len(self._jobs)):
            self._begin(index)
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


class LatePipeline:
    """Stands before a pipeline."""

    def __init__(self, pipeline: Any, chance: random.Random | None) -> None:
        self._pipeline, self._chance = pipeline, chance
        self.waiting: list[LateBatch] = []

    def submit(self, jobs: list[int], hyper: np.ndarray[Any, Any]) -> LateBatch:
        for batch in self.waiting:  # jobs of one chunk run in order
            for index in range(len(batch._jobs)):
                if batch._jobs[index] in jobs:
                    batch._begin(index)
        self.waiting = [b for b in self.waiting if not all(b._batches)]
        self.waiting.append(LateBatch(self._pipeline, jobs, hyper, self._chance))
        return self.waiting[-1]

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


