"""A large file, written past the page cache: in blocks, each of which is filled, hashed and written while others are.

The drive always has blocks to write where those who fill them keep up, and nothing that is written stays in memory. Without torch.

[Note: stretches]
Of several ranks each writes stretches of one file. These begin and end within pages, of which another rank then writes the rest: what of a stretch is
no whole page goes through the page cache, by a descriptor of its own, all else past it. No rank writes a byte of another's.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from offload.checkpoint import disk

PAGE, HUGE_PAGE = 4096, 2 << 20
READERS = 2  # threads that finish blocks
AHEAD = 4  # blocks that are being filled
WRITERS = 3  # threads that write them
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


class Stretch(NamedTuple):
    """A part of a file, from byte `start` on. `alone`: all that is before it is hashed before its parts are asked for."""

    start: int
    parts: Iterable[Part]
    alone: bool = False


class Hash(Protocol):
    def update(self, data: memoryview, at: int) -> None:
        """Byte `at` of the file and what follows, in order."""
        ...


class _Whole:
    """The hash of a file that one rank writes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: memoryview, at: int) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())


class _Cut(NamedTuple):
    """What fills bytes [to, to + nbytes) of a block: a part, from its byte `at` on."""

    part: Part
    at: int
    to: int
    nbytes: int


class _Block(NamedTuple):
    """What fills bytes [first, stop) of a block, which begins with byte `at` of the file, on a page."""

    at: int
    first: int
    stop: int
    cuts: list[_Cut]


_Begun = tuple[memoryview, _Block, Future[None] | None]  # a block's memory, what is in it, and who fills it


def block_bytes(room: int) -> int:
    """The size of blocks of which all together, with as much beside them, take at most `room` bytes, where that is enough."""
    return max(LEAST, min(MOST, room // (2 * COUNT) // PAGE * PAGE))


def write_blocks(file: FileIO, parts: Iterable[Part], block: int) -> tuple[int, str]:
    """Writes the parts, in order, to a file of `disk.create_large`; returns their bytes and xxh3_128. OSError, and what parts raise."""
    whole = _Whole()
    nbytes = _in_blocks(file, None, [Stretch(0, parts)], block, whole)
    file.truncate(nbytes)  # of the last page
    return nbytes, whole.hexdigest()


def write_stretches(file: FileIO, edges: FileIO, stretches: Iterable[Stretch], block: int, hashed: Hash) -> None:
    """Writes stretches of a file that is as long as it will be. `edges`: it again, through the page cache. See [Note: stretches]; OSError, and
    what parts and `hashed` raise: nothing is being written then."""
    _in_blocks(file, edges, stretches, block, hashed)


def _in_blocks(file: FileIO, edges: FileIO | None, stretches: Iterable[Stretch], block: int, hashed: Hash) -> int:
    with (
        ThreadPoolExecutor(READERS, "offload-read") as reading,
        ThreadPoolExecutor(WRITERS, "offload-write") as writing,
        ThreadPoolExecutor(1, "offload-hash") as hashing,
    ):
        return _Blocks(file, edges, block, (reading, writing, hashing), hashed).take(stretches)


def _blocks(stretch: Stretch, block: int) -> Iterator[_Block]:
    """For each block of a stretch what it is filled with. What lies in memory on pages, as the drive wants it, has blocks of its own."""
    cuts: list[_Cut] = []
    first = filled = stretch.start % PAGE
    at = stretch.start - first

    def cut() -> _Block:
        nonlocal cuts, first, filled, at
        made = _Block(at, first, filled, cuts)
        cuts, first, filled, at = [], 0, 0, at + filled
        return made

    for part in stretch.parts:
        done = 0
        if cuts and filled % PAGE == 0 and part.nbytes >= min(OWN, block) and _there(part, 0, part.nbytes) is not None:
            yield cut()
        while done < part.nbytes:
            n = min(block - filled, part.nbytes - done)
            cuts.append(_Cut(part, done, filled, n))
            done, filled = done + n, filled + n
            if filled == block:
                yield cut()
    if cuts:
        yield cut()


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

    def __init__(
        self, file: FileIO, edges: FileIO | None, block: int, pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor, ThreadPoolExecutor], hashed: Hash
    ) -> None:  # fmt: skip
        self._file, self._edges, self._block, self._pools, self._hashed = file, edges, block, pools, hashed
        self._reading, self._writing, self._hashing = pools
        self._memory, self._beside = _memory(2 * COUNT * block).reshape(2, COUNT, block)
        self._filling: deque[_Begun] = deque()
        self._sent: deque[tuple[Future[None], Future[None]]] = deque()  # to the drive, and to be hashed
        self._most = WRITERS + 1 if edges is None else COUNT - 2  # of those; a hash may have to wait for other ranks

    def take(self, stretches: Iterable[Stretch]) -> int:
        """Writes them; the end of the last one."""
        number = end = 0
        try:
            for stretch in stretches:
                while stretch.alone and (self._filling or self._sent):
                    self._go_on()
                for made in _blocks(stretch, self._block):
                    while len(self._filling) == AHEAD or len(self._filling) + len(self._sent) == COUNT - 1:
                        self._go_on()
                    self._filling.append(self._begun(self._memory[number % COUNT].data, self._beside[number % COUNT].data, made))
                    number, end = number + 1, made.at + made.stop
            while self._filling or self._sent:
                self._go_on()
        except BaseException:
            for pool in self._pools:
                pool.shutdown(cancel_futures=True)
            raise
        return end

    def _begun(self, memory: memoryview, beside: memoryview, made: _Block) -> _Begun:
        """A block of what lies in memory, which is written from there, or one that is being filled."""
        cuts = made.cuts
        there = _there(cuts[0].part, cuts[0].at, made.stop) if len(cuts) == 1 and not made.first and made.stop % PAGE == 0 else None
        if there is not None:
            return there, made, None
        filling = [part.fill(at, memory[to : to + n], beside[to : to + n]) for part, at, to, n in cuts]
        return memory, made, self._reading.submit(_finish, filling)

    def _go_on(self) -> None:
        """Waits for what the drive has, where it has enough; else the oldest block that is being filled goes to it, and is hashed meanwhile."""
        if not self._filling or len(self._sent) == self._most:
            self._finish_oldest()
            return
        memory, (at, first, stop, _), filled = self._filling.popleft()
        if filled is not None:
            filled.result()
        end = stop if self._edges is not None else -(-stop // PAGE) * PAGE
        if end > stop:
            memory[stop:end] = bytes(end - stop)
        written = self._writing.submit(self._write, memory[first:end], at + first)
        self._sent.append((written, self._hashing.submit(self._hashed.update, memory[first:stop], at + first)))
        while self._sent and all(future.done() for future in self._sent[0]):  # a block that failed is known at once
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for future in self._sent.popleft():
            future.result()

    def _write(self, data: memoryview, at: int) -> None:
        if self._edges is not None:
            before = min(-at % PAGE, data.nbytes)
            behind = (data.nbytes - before) % PAGE
            disk.write_at(self._edges, data[:before], at)
            disk.write_at(self._edges, data[data.nbytes - behind :], at + data.nbytes - behind)
            data, at = data[before : data.nbytes - behind], at + before
        disk.write_at(self._file, data, at)
        disk.write_behind(self._file.fileno(), at, at + data.nbytes)


def _finish(filling: list[Callable[[], object]]) -> None:
    for finish in filling:
        finish()
