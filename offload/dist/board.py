"""What ranks tell each other when something is wrong: where each is, and what ended the first that failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("offload")
_FIRST = "failed/first"
_MOST = 3  # ranks that a warning names


@dataclass(eq=False)
class _Wait:
    what: str
    ranks: Sequence[int]
    start: float


class Board:
    """Notes in the job's store. A thread writes this rank's now and then, warns of waits that last, and calls `alarm()` once when another rank has
    failed. `patience`: seconds of a wait that is warned of; after each warning twice as long."""

    def __init__(self, store: Any, rank: int, interval: float, patience: float, alarm: Callable[[], None]) -> None:
        self._store, self._rank, self._interval, self._patience, self._alarm = store, rank, interval, patience, alarm
        self.at = "its start"  # what this rank is at, or was last, while it waits for nothing
        self._waits: dict[_Wait, None] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="offload-board", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """This rank waits for `what` of these ranks while the context lasts. Any number of threads may."""
        wait = _Wait(what, ranks, time.monotonic())
        self._waits[wait] = None
        try:
            yield
        except BaseException:
            self.at = f"a wait for {what}"
            raise
        finally:
            del self._waits[wait]

    def _now(self) -> str:
        waits = " and for ".join(wait.what for wait in list(self._waits))
        return f"a wait for {waits}" if waits else self.at

    def _watch(self) -> None:
        written, alarmed = "", False
        while not self._over.wait(self._interval):
            at = self._now()
            try:
                if at != written:
                    self._store.set(f"at/{self._rank}", at)
                    written = at
                if not alarmed and self.failure() is not None:
                    alarmed = True
                    self._alarm()
                self._warn()
            except RuntimeError:  # the store's owner may be gone, which is no news of others
                return

    def _warn(self) -> None:
        """Says which wait lasts, where other ranks are at something else: that all are at it means that it takes long."""
        for wait in list(self._waits):
            seconds = time.monotonic() - wait.start
            if seconds < self._patience:
                continue
            notes = ((rank, self.last(rank)) for rank in wait.ranks if rank != self._rank)
            elsewhere = [(rank, at) for rank, at in notes if at is None or wait.what not in at]
            if elsewhere:
                self._patience *= 2
                named = [f"rank {rank} {f'was last at {at}' if at else 'has not told where it is'}" for rank, at in elsewhere[:_MOST]]
                more = f" and {len(elsewhere) - _MOST} more are elsewhere too" if len(elsewhere) > _MOST else ""
                with suppress(Exception):  # a handler's; this thread is to go on
                    log.warning("rank %d has waited %.0f s for %s; %s%s", self._rank, seconds, wait.what, ", ".join(named), more)

    def fail(self, text: str) -> None:
        """Tells the others what ends this rank; the first to tell is the one that is heard."""
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set(_FIRST, f"{self._rank} {text}")
        except RuntimeError:
            pass

    def failure(self) -> tuple[int, str] | None:
        """The first other rank that failed, and what it said."""
        found = self._read(_FIRST)
        if found is None:
            return None
        rank, _, text = found.partition(" ")
        return (int(rank), text) if int(rank) != self._rank else None

    def last(self, rank: int) -> str | None:
        """What a rank was at when it last told."""
        return self._read(f"at/{rank}")

    def _read(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=10)
