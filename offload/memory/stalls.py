"""Where the compute thread's time goes: each of its waits under one named cause.

[Note: stalls]
The compute thread runs forward, backward (for which autograd may have a thread) and step(). Whatever in the runtime may keep a thread waiting says
so: `with stalls.waiting(cause)`. What such a thread moves or lands by itself, as it does on `cpu`, counts as a wait too; all else is compute.
No moment counts twice. Of waits inside each other the inner one counts while it lasts and the outer one counts the rest, but "activation" counts
whole, whatever it waits for. A wait for another thread of ours, a queue's or the pipeline's, counts as what that thread waits for meanwhile, and
under its own cause for the rest: a fetch whose queue reads NVMe is "nvme_read", one that is being copied is "fetch", one that waits for
other ranks is "ranks".
Waits of threads that are neither the compute thread nor serve it count nowhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from offload.memory.recorder import Recorder

FETCH, NVME_READ, NVME_WRITE, GRADIENT, UPDATE, STAGING, ACTIVATION, RANKS = CAUSES = (
    "fetch", "nvme_read", "nvme_write", "gradient", "update", "staging", "activation", "ranks",
)  # fmt: skip

Behind = Callable[[], Mapping[str, float]]  # seconds by cause that what is waited for has itself waited until now
SHORTEST_NOTED = 1e-6  # seconds, in a trace
_NO_WAIT = nullcontext()


class Lane:
    """One thread's seconds by cause, and its waits under way, the innermost last. `Stalls` guards it."""

    __slots__ = ("seconds", "waits")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.waits: list[_Wait] = []


class _Wait:
    __slots__ = ("_before", "_behind", "_lane", "_since", "_stalls", "cause")

    def __init__(self, stalls: Stalls, lane: Lane, cause: str, behind: Behind | None) -> None:
        self._stalls, self._lane, self.cause, self._behind = stalls, lane, cause, behind

    def __enter__(self) -> None:
        stalls, waits = self._stalls, self._lane.waits
        with stalls.lock:
            now = stalls.clock()
            if waits:
                waits[-1]._book(now)
            waits.append(self)
            self._resume(now)

    def __exit__(self, *error: object) -> None:
        stalls, waits = self._stalls, self._lane.waits
        with stalls.lock:
            now = stalls.clock()
            if self not in waits:  # computing() was called inside it
                return
            self._book(now)
            while waits.pop() is not self:
                pass
            if waits:
                waits[-1]._resume(now)

    def _resume(self, now: float) -> None:
        self._since = now
        if self._behind is not None:
            self._before = self._behind()

    def _book(self, now: float) -> None:
        if self._behind is None and self._stalls.recorder is None:
            self._lane.seconds[self.cause] += now - self._since
            return
        parts = self.parts(now)
        for cause, seconds in parts.items():
            self._lane.seconds[cause] += seconds
        self._stalls.note(self._lane, self._since, now, parts)

    def parts(self, now: float) -> dict[str, float]:
        """Seconds by cause since it was entered or resumed."""
        elapsed = now - self._since
        if self._behind is None:
            return {self.cause: elapsed}
        parts = {c: s for c, v in self._behind().items() if (s := v - self._before.get(c, 0.0)) > 0.0}
        over = sum(parts.values()) / elapsed if elapsed > 0.0 else 0.0
        if over > 1.0:  # the other thread's clock is read a little later
            parts = {c: s / over for c, s in parts.items()}
        elif over == 0.0:
            parts = {}
        parts[self.cause] = parts.get(self.cause, 0.0) + max(0.0, elapsed - sum(parts.values()))
        return parts


class Stalls:
    """The waits of one runtime's threads; see [Note: stalls]. The thread that makes it computes, until another says that it does."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.lock = clock, threading.RLock()
        self.recorder: Recorder | None = None  # while a trace is recorded; see [Note: recording]
        self._compute = Lane()
        self._threads = dict.fromkeys(("forward", "backward"), threading.get_ident())
        self._lanes = {threading.get_ident(): self._compute}

    def waiting(self, cause: str, behind: Behind | None = None) -> AbstractContextManager[None]:
        """While the context lasts, the calling thread waits for this cause, or for what `behind` tells."""
        lane = self._lanes.get(threading.get_ident())
        if lane is None or (lane.waits and lane.waits[-1].cause == ACTIVATION):
            return _NO_WAIT
        return _Wait(self, lane, cause, behind)

    def computing(self, phase: str = "forward") -> None:
        """From here on the calling thread is the one that computes this phase, "forward" (and step) or "backward"; it waits for nothing now."""
        ident = threading.get_ident()
        self._compute.waits.clear()  # what an interrupt left
        if self._threads[phase] != ident:
            with self.lock:
                before, self._threads[phase] = self._threads[phase], ident
                if before not in self._threads.values():
                    self._lanes.pop(before, None)
                self._lanes[ident] = self._compute

    def serve(self, lane: Lane) -> None:
        """The calling thread serves others: its waits are those of whoever waits for it, by `of(lane)`."""
        self._lanes[threading.get_ident()] = lane

    def leave(self) -> None:
        """The calling thread serves no longer."""
        self._lanes.pop(threading.get_ident(), None)

    def of(self, lane: Lane) -> dict[str, float]:
        """Seconds by cause that a thread has waited so far, what is under way included."""
        with self.lock:
            total = dict(lane.seconds)
            if lane.waits:
                for cause, seconds in lane.waits[-1].parts(self.clock()).items():
                    total[cause] += seconds
            return total

    def note(self, lane: Lane, since: float, now: float, parts: Mapping[str, float]) -> None:
        """Records a wait of the compute thread, named by what took most of it."""
        recorder = self.recorder
        if recorder is not None and lane is self._compute and now - since > SHORTEST_NOTED:
            recorder.span("stalls", max(parts, key=lambda c: parts[c]), since, parts if len(parts) > 1 else None, now)

    def seconds(self) -> dict[str, float]:
        """Seconds by cause that compute has waited so far."""
        return self.of(self._compute)
