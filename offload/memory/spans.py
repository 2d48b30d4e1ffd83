"""Ranges of bytes that are handed out and come back, in any order. Pure."""

from __future__ import annotations

import bisect


class Spans:
    """First fit in several blocks. Neighbours that are free become one, so that a block is whole again once everything has come back."""

    def __init__(self) -> None:
        self._free: list[list[tuple[int, int]]] = []  # by block, (start, end) in order

    def add(self, nbytes: int) -> int:
        """A further block of `nbytes`, all free; returns its number."""
        self._free.append([(0, nbytes)] if nbytes else [])
        return len(self._free) - 1

    @property
    def free_bytes(self) -> int:
        return sum(end - start for free in self._free for start, end in free)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """(block, first byte) of `nbytes`, None where no block has so many in one piece."""
        for block, free in enumerate(self._free):
            for i, (start, end) in enumerate(free):
                if end - start >= nbytes:
                    free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return block, start
        return None

    def give(self, block: int, start: int, nbytes: int) -> None:
        """`nbytes` from `start` on, which were taken, are free again."""
        free, end = self._free[block], start + nbytes
        i = bisect.bisect(free, (start, end))
        if i < len(free) and free[i][0] == end:
            end = free.pop(i)[1]
        if i and free[i - 1][1] == start:
            i -= 1
            start = free.pop(i)[0]
        free.insert(i, (start, end))
