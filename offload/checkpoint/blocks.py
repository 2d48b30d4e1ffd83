"""A large file, written past the page cache: in blocks, each of which is filled, hashed and written while others are.

The drive always has blocks to write where those who fill them keep up, and nothing that is written stays in memory. Without torch.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
import xxhash

from offload.checkpoint import disk

PAGE, HUGE_PAGE = 4096, 2 << 20
READERS = 2  # threads that finish blocks
AHEAD = 4  # blocks that are being filled
WRITERS = 3  # and that are with the drive
COUNT = AHEAD + WRITERS + 1  # blocks: one more is hashed
LEAST, MOST = 1 << 18, 1 << 22  # bytes of a block
OWN = 1 << 20  # bytes from which on what lies in memory is worth blocks of its own
FILE_LEAST = 1 << 26  # bytes from which on a file is worth it


class Part(NamedTuple):
    """`nbytes` of a file: `fill(at, out, beside)` begins to put those from its byte `at` on in `out`, as many as there is room for, and may use as
    much memory `beside`; they are there once what it gives was called, in any thread. `there(at, nbytes)`: so many where they lie in memory already,
    until the file is written; else None.

    Parts are cut at pages of the file, so within one that lies aligned to its elements these are never cut.
    """

    nbytes: int
    fill: Callable[[int, memoryview, memoryview], Callable[[], object]]
    there: Callable[[int, int], memoryview | None] = lambda at, nbytes: None

    def read(self) -> memoryview:
        """All of it."""
        out = memoryview(bytearray(self.nbytes))
        if self.nbytes:
            self.fill(0, out, memoryview(bytearray(self.nbytes)))()
        return out


def given(data: bytes | memoryview) -> Part:
    """A part that is there already."""
    whole = memoryview(data).cast("B")

    def fill(at: int, out: memoryview, beside: memoryview) -> Callable[[], object]:
        out[:] = whole[at : at + out.nbytes]
        return lambda: None

    return Part(whole.nbytes, fill)


class _Cut(NamedTuple):
    """What fills bytes [to, to + nbytes) of a block: a part, from its byte `at` on."""

    part: Part
    at: int
    to: int
    nbytes: int


_Begun = tuple[memoryview, int, Future[None] | None]  # a block's memory, its bytes, and who fills it


def block_bytes(room: int) -> int:
    """The size of blocks of which all together, with as much beside them, take at most `room` bytes, where that is enough."""
    return max(LEAST, min(MOST, room // (2 * COUNT) // PAGE * PAGE))


def write_blocks(file: FileIO, parts: Iterable[Part], block: int) -> tuple[int, str]:
    """Writes the parts, in order, to a file of `disk.create_large`; returns their bytes and xxh3_128. OSError, and what parts raise."""
    with ThreadPoolExecutor(READERS, "offload-read") as reading, ThreadPoolExecutor(WRITERS, "offload-write") as writing:
        return _Blocks(file, block, reading, writing).take(parts)


def _blocks(parts: Iterable[Part], block: int) -> Iterator[list[_Cut]]:
    """For each block of a file what it is filled with. What lies in memory on pages, as the drive wants it, has blocks of its own."""
    cuts: list[_Cut] = []
    filled = 0
    for part in parts:
        at = 0
        if cuts and filled % PAGE == 0 and part.nbytes >= min(OWN, block) and _there(part, at, part.nbytes) is not None:
            yield cuts
            cuts, filled = [], 0
        while at < part.nbytes:
            n = min(block - filled, part.nbytes - at)
            cuts.append(_Cut(part, at, filled, n))
            at, filled = at + n, filled + n
            if filled == block:
                yield cuts
                cuts, filled = [], 0
    if cuts:
        yield cuts


def _there(part: Part, at: int, nbytes: int) -> memoryview | None:
    found = part.there(at, nbytes)
    return found if found is not None and np.frombuffer(found, np.uint8).ctypes.data % PAGE == 0 else None


def _memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """On huge pages, if it is that large: a drive takes in one request as many stretches of memory as it takes, which pages are else."""
    slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0  # address space alone
    memory = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    if slack:
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % slack if slack else 0
    return whole[start : start + nbytes]


class _Blocks:
    """A ring of blocks. What one thread of many has failed at ends it with the next block: what is under way is waited for, and no more begun."""

    def __init__(self, file: FileIO, block: int, reading: ThreadPoolExecutor, writing: ThreadPoolExecutor) -> None:
        self._file, self._block, self._reading, self._writing = file, block, reading, writing
        self._memory, self._beside = _memory(2 * COUNT * block).reshape(2, COUNT, block)
        self._filling: deque[_Begun] = deque()
        self._with_drive: deque[Future[None]] = deque()
        self._hash, self._sent = xxhash.xxh3_128(), 0

    def take(self, parts: Iterable[Part]) -> tuple[int, str]:
        try:
            for number, cuts in enumerate(_blocks(parts, self._block)):
                while len(self._filling) == AHEAD or len(self._filling) + len(self._with_drive) == COUNT - 1:
                    self._go_on()
                self._filling.append(self._begun(self._memory[number % COUNT].data, self._beside[number % COUNT].data, cuts))
            while self._filling or self._with_drive:
                self._go_on()
        except BaseException:
            for pool in (self._reading, self._writing):
                pool.shutdown(cancel_futures=True)
            raise
        self._file.truncate(self._sent)  # of the last page
        return self._sent, self._hash.hexdigest()

    def _begun(self, memory: memoryview, beside: memoryview, cuts: list[_Cut]) -> _Begun:
        """A block of what lies in memory, which is written from there, or one that is being filled."""
        nbytes = cuts[-1].to + cuts[-1].nbytes
        there = _there(cuts[0].part, cuts[0].at, nbytes) if len(cuts) == 1 and nbytes % PAGE == 0 else None
        if there is not None:
            return there, nbytes, None
        filling = [part.fill(at, memory[to : to + n], beside[to : to + n]) for part, at, to, n in cuts]
        return memory, nbytes, self._reading.submit(_finish, filling)

    def _go_on(self) -> None:
        """Waits for what the drive has, where it has enough; else the oldest block that is being filled goes to it, and is hashed meanwhile."""
        if not self._filling or len(self._with_drive) == WRITERS:
            self._with_drive.popleft().result()
            return
        memory, nbytes, filled = self._filling.popleft()
        if filled is not None:
            filled.result()
        padded = -(-nbytes // PAGE) * PAGE
        if padded > nbytes:
            memory[nbytes:padded] = bytes(padded - nbytes)
        self._with_drive.append(self._writing.submit(self._write, memory[:padded], self._sent))
        self._hash.update(memory[:nbytes])
        self._sent += nbytes
        while self._with_drive and self._with_drive[0].done():  # a block that failed is known at once
            self._with_drive.popleft().result()

    def _write(self, data: memoryview, at: int) -> None:
        disk.write_at(self._file, data, at)
        disk.write_behind(self._file.fileno(), at, at + data.nbytes)


def _finish(filling: list[Callable[[], object]]) -> None:
    for finish in filling:
        finish()
