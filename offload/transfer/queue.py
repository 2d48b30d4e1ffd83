"""A swap queue: a bounded FIFO of transfers on one link, run by one thread."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from offload.memory.shard import Transfer
from offload.memory.stalls import FETCH, Lane, Stalls

__all__ = ["Done", "Pace", "SwapQueue", "Transfer"]


class Done:
    """A transfer that was finished when it was made."""

    done = True

    def wait(self) -> None:
        return None


class _Job:
    def __init__(self, queue: SwapQueue, run: Callable[[], None], nbytes: int, what: str) -> None:
        self._queue, self.what = queue, what
        self._run: Callable[[], None] | None = run
        self.nbytes, self.counted, self.together = nbytes, 0, False
        self.error: BaseException | None = None
        self.done = False

    def wait(self) -> None:
        self._queue._wait_for(self)
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        run, self._run = self._run, None  # what it holds is let go as soon as it has run
        try:
            assert run is not None
            run()
        except BaseException as error:  # raised again at the transfer's own wait()
            self.error = error


class Pace:
    """When a queue runs what was submitted.

    `bandwidth` in bytes a second makes a transfer take its time. With a `seed`, some transfers are put off until somebody
    waits for them or the queue is full, which is the latest that a stream may run them; the choice is the seed's.
    """

    def __init__(self, bandwidth: float | None = None, seed: int | None = None) -> None:
        self.bandwidth = bandwidth
        self._random = random.Random(seed) if seed is not None else None

    def lazy(self) -> bool:
        return self._random is not None and self._random.random() < 0.7

    def spend(self, nbytes: int) -> None:
        if self.bandwidth:
            time.sleep(nbytes / self.bandwidth)


class SwapQueue:
    """Runs submitted jobs in order on a thread of its own. `submit` waits while `bound` jobs are pending, or too many bytes. `close()` drains.

    Whoever waits for it stalls for `cause`, or for what its thread waits for.
    """

    def __init__(self, name: str, bound: int = 16, pace: Pace | None = None, stalls: Stalls | None = None, cause: str = FETCH) -> None:
        self.name = name
        self._stalls, self._cause, self._lane = stalls or Stalls(), cause, Lane()
        self.moved_bytes = 0
        self._bound = bound
        self._pace = pace or Pace()
        self._jobs: deque[_Job] = deque()
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._demanded = 0  # waiters; a put-off transfer runs once there is one
        self._awaited_elsewhere = 0  # pending jobs that other processes wait for, which are not put off
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"offload-{name}", daemon=True)
        self._thread.start()

    def submit(
        self, run: Callable[[], None], nbytes: int, pending_bytes_most: int | None = None, what: str = "", together: bool = False
    ) -> _Job:  # fmt: skip
        """Queues a transfer of `nbytes`, called `what` in a trace. `together`: other processes take part in it.

        Waits first until what is pending and it are no more than `pending_bytes_most`, or nothing is pending; None: it counts among neither.
        """
        room = math.inf if pending_bytes_most is None else pending_bytes_most - nbytes
        job = _Job(self, run, nbytes, what)
        with self._changed:
            if self._closing:
                raise RuntimeError(f"the {self.name} queue is closed")
            if self._full(room):
                self._demand(lambda: not self._full(room))  # a full queue demands its head
            self._jobs.append(job)
            job.together = together
            self._awaited_elsewhere += together
            job.counted = nbytes if pending_bytes_most is not None else 0
            self._pending_bytes += job.counted
            self._changed.notify_all()
        return job

    def until(self, pending_bytes_most: int) -> None:
        """Returns when what is pending, of what counts, is no more than that, or nothing is."""
        with self._changed:
            if self._pending_bytes > max(pending_bytes_most, 0):
                self._demand(lambda: self._pending_bytes <= max(pending_bytes_most, 0))

    def _full(self, room: float) -> bool:
        return len(self._jobs) >= self._bound or self._pending_bytes > max(room, 0)

    def _waiting(self) -> AbstractContextManager[None]:
        return self._stalls.waiting(self._cause, lambda: self._stalls.of(self._lane))

    @property
    def depth(self) -> int:
        """Transfers that are not done."""
        return len(self._jobs)

    def drain(self) -> None:
        with self._changed:
            last = self._jobs[-1] if self._jobs else None
        if last is not None:
            self._wait_for(last)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wait_for(self, job: _Job) -> None:
        if job.done:
            return
        with self._changed:
            self._demand(lambda: job.done)

    def _demand(self, enough: Callable[[], bool]) -> None:
        """Returns when it is enough, with what was put off run for it."""
        self._demanded += 1
        try:
            self._changed.notify_all()
            with self._waiting():
                self._changed.wait_for(enough)
        finally:  # whoever waits may be interrupted
            self._demanded -= 1

    def _serve(self) -> None:
        self._stalls.serve(self._lane)
        try:
            self._run()
        finally:
            self._stalls.leave()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if not self._jobs:
                    return
                lazy = self._pace.lazy()
                while lazy and not self._demanded and not self._awaited_elsewhere and not self._closing and len(self._jobs) < self._bound:
                    self._changed.wait()
                job = self._jobs[0]
            recorder = self._stalls.recorder
            start = recorder.clock() if recorder is not None else 0.0
            self._pace.spend(job.nbytes)
            job.run()
            if recorder is not None:
                recorder.span(self.name, job.what, start, {"bytes": job.nbytes})
            with self._changed:
                self._jobs.popleft()
                self._awaited_elsewhere -= job.together
                self._pending_bytes -= job.counted
                self.moved_bytes += job.nbytes
                job.done = True
                self._changed.notify_all()
