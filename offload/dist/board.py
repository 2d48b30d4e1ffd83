"""What ranks tell each other when something is wrong: where each is, and what ended the first that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_FIRST = "failed/first"


class Board:
    """Notes in the job's store. A thread writes this rank's now and then, and calls `alarm()` once when another rank has failed."""

    def __init__(self, store: Any, rank: int, interval: float, alarm: Callable[[], None]) -> None:
        self._store, self._rank, self._interval, self._alarm = store, rank, interval, alarm
        self.at = "its start"  # what this rank is at, or was last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="offload-board", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        written, alarmed = "", False
        while not self._over.wait(self._interval):
            at = self.at
            try:
                if at != written:
                    self._store.set(f"at/{self._rank}", at)
                    written = at
                if not alarmed and self.failure() is not None:
                    alarmed = True
                    self._alarm()
            except RuntimeError:  # the store's owner may be gone, which is no news of others
                return

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
