"""A large file, written past the page cache: in blocks, each of which is filled, hashed and written while others are.

The drive always has blocks to write where those who fill them keep up, and nothing that is written stays in memory. Without torch.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import NamedTuple

import numpy as np
import xxhash

from offload.checkpoint import disk

PAGE = 4096
READERS = 2  # blocks that are filled at once
WRITERS = 3  # and that are with the drive
COUNT = READERS + WRITERS + 1  # blocks: one more is hashed
LEAST, MOST = 1 << 18, 1 << 22  # bytes of a block
FILE_LEAST = 1 << 26  # bytes from which on a file is worth it


class Part(NamedTuple):
    """`nbytes` of a file: `fill(at, out)` puts those from its byte `at` on in `out`, as many as there is room for, in any thread and any order.
    `there(at, nbytes)` gives so many where they lie in memory already, and stay until the file is written; else None.

    Parts are cut at pages of the file, so within one that lies aligned to its elements these are never cut.
    """

    nbytes: int
    fill: Callable[[int, memoryview], None]
    there: Callable[[int, int], memoryview | None] = lambda at, nbytes: None

    def read(self) -> memoryview:
        """All of it."""
        out = memoryview(bytearray(self.nbytes))
        if self.nbytes:
            self.fill(0, out)
        return out


def given(data: bytes | memoryview) -> Part:
    """A part that is there already."""
    whole = memoryview(data).cast("B")

    def fill(at: int, out: memoryview) -> None:
        out[:] = whole[at : at + out.nbytes]

    return Part(whole.nbytes, fill)


class _Cut(NamedTuple):
    """What fills bytes [to, to + nbytes) of a block: a part, from its byte `at` on."""

    part: Part
    at: int
    to: int
    nbytes: int


_Begun = tuple[memoryview, int, Future[None] | None]  # a block's memory, its bytes, and who fills it


def block_bytes(room: int) -> int:
    """The size of blocks of which all together take at most half of `room` bytes, where that is enough."""
    return max(LEAST, min(MOST, room // (2 * COUNT) // PAGE * PAGE))


def write_blocks(file: FileIO, parts: Iterable[Part], block: int) -> tuple[int, str]:
    """Writes the parts, in order, to a file of `disk.create_large`; returns their bytes and xxh3_128. OSError, and what parts raise."""
    with ThreadPoolExecutor(READERS, "offload-read") as reading, ThreadPoolExecutor(WRITERS, "offload-write") as writing:
        return _Blocks(file, block, reading, writing).take(parts)


def _blocks(parts: Iterable[Part], block: int) -> Iterator[list[_Cut]]:
    """For each block of a file what it is filled with. One that is whole pages ends before a part of many, which then has blocks of its own."""
    cuts: list[_Cut] = []
    filled = 0
    for part in parts:
        at = 0
        if cuts and filled % PAGE == 0 and part.nbytes >= min(LEAST, block):
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


class _Blocks:
    """A ring of blocks. What one thread of many has failed at ends it with the next block: what is under way is waited for, and no more begun."""

    def __init__(self, file: FileIO, block: int, reading: ThreadPoolExecutor, writing: ThreadPoolExecutor) -> None:
        self._file, self._block, self._reading, self._writing = file, block, reading, writing
        self._memory = np.frombuffer(mmap.mmap(-1, COUNT * block), np.uint8).reshape(COUNT, block)  # on pages, as direct writes want it
        self._filling: deque[_Begun] = deque()
        self._with_drive: deque[Future[None]] = deque()
        self._hash, self._sent = xxhash.xxh3_128(), 0

    def take(self, parts: Iterable[Part]) -> tuple[int, str]:
        try:
            for number, cuts in enumerate(_blocks(parts, self._block)):
                while len(self._filling) > READERS or len(self._filling) + len(self._with_drive) == COUNT - 1:
                    self._go_on()
                self._filling.append(self._begun(self._memory[number % COUNT].data, cuts))
            while self._filling or self._with_drive:
                self._go_on()
        except BaseException:
            for pool in (self._reading, self._writing):
                pool.shutdown(cancel_futures=True)
            raise
        self._file.truncate(self._sent)  # of the last page
        return self._sent, self._hash.hexdigest()

    def _begun(self, memory: memoryview, cuts: list[_Cut]) -> _Begun:
        """What lies in memory on pages, as the drive wants it, is written from there."""
        nbytes = cuts[-1].to + cuts[-1].nbytes
        if len(cuts) == 1 and nbytes % PAGE == 0:
            there = cuts[0].part.there(cuts[0].at, nbytes)
            if there is not None and np.frombuffer(there, np.uint8).ctypes.data % PAGE == 0:
                return there, nbytes, None
        return memory, nbytes, self._reading.submit(_fill, memory, cuts)

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


def _fill(memory: memoryview, cuts: list[_Cut]) -> None:
    for part, at, to, nbytes in cuts:
        part.fill(at, memory[to : to + nbytes])
