"""What a trace is made of, while one is recorded: spans of time on named tracks, and values that change with time.

[Note: recording]
Wherever something is worth a span, `stalls.recorder` is asked for: None, and nothing else happens, unless a trace is on. Times are seconds of
`time.perf_counter`, which is CLOCK_MONOTONIC, as in C++. The newest events are kept, up to a bound; how many gave way is known.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

EVENTS_MOST = 100_000
STEPS_MOST = 1000


class Span(NamedTuple):
    """Spans of one track do not overlap, but those of "compute" may lie within each other."""

    track: str
    name: str
    start: float
    stop: float
    detail: Mapping[str, float] | None


class Sample(NamedTuple):
    """Values at a time, by name."""

    counter: str
    at: float
    values: Mapping[str, float]


class Recorder:
    """The newest `most` events. Any thread may add to it."""

    def __init__(self, most: int = EVENTS_MOST, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most, self.clock = most, clock
        self._events: deque[tuple[Any, ...]] = deque(maxlen=most)  # a Span's or a Sample's fields, which cost less to make
        self._added = itertools.count()
        self.steps: deque[float] = deque([clock()], maxlen=STEPS_MOST)  # when the newest ended
        self.on_visit: Callable[[], None] = lambda: None  # called as a unit begins

    def span(self, track: str, name: str, start: float, detail: Mapping[str, float] | None = None, stop: float | None = None) -> None:
        """Something that began at `start` and ends now, or ended at `stop`."""
        next(self._added)
        self._events.append((track, name, start, self.clock() if stop is None else stop, detail))

    def sample(self, counter: str, values: Mapping[str, float]) -> None:
        next(self._added)
        self._events.append((counter, self.clock(), values))

    def stepped(self) -> None:
        """A step's updates are given out."""
        self.span("steps", "step", self.steps[-1])
        self.steps.append(self.clock())

    def taken(self) -> tuple[list[Span | Sample], int]:
        """All that is kept, and how many events gave way."""
        added = next(self._added)
        self._added = itertools.count(added)
        events: list[Span | Sample] = [Sample(*e) if len(e) == len(Sample._fields) else Span(*e) for e in list(self._events)]
        return events, max(0, added - len(events))
