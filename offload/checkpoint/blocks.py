"""A large file, written past the page cache: gathered in blocks, each of which is hashed and written while the next ones are filled.

The drive always has a block to write where whoever gives the parts keeps up, and nothing that is written stays in memory. Without torch.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import Any

import numpy as np
import xxhash

from offload.checkpoint import disk

PAGE = 4096
COUNT = 4  # blocks: one is filled, one hashed, one written, and the drive's next waits
LEAST, MOST = 1 << 18, 1 << 22  # bytes of a block
FILE_LEAST = 1 << 26  # bytes from which on a file is worth it


def block_bytes(room: int) -> int:
    """The size of blocks of which all together take at most half of `room` bytes, where that is enough."""
    return max(LEAST, min(MOST, room // (2 * COUNT) // PAGE * PAGE))


def write_blocks(file: FileIO, parts: Iterable[memoryview | bytes], block: int) -> tuple[int, str]:
    """Writes the parts, in order, to a file of `disk.create_direct`; returns their bytes and xxh3_128. OSError."""
    with ThreadPoolExecutor(1, "offload-hash") as hashing, ThreadPoolExecutor(1, "offload-write") as writing:
        return _Blocks(file, block, hashing, writing).take(parts)


class _Blocks:
    def __init__(self, file: FileIO, block: int, hashing: ThreadPoolExecutor, writing: ThreadPoolExecutor) -> None:
        self._file, self._block, self._hashing, self._writing = file, block, hashing, writing
        self._memory = np.frombuffer(mmap.mmap(-1, COUNT * block), np.uint8).reshape(COUNT, block)  # on pages, as direct writes want it
        self._busy: list[tuple[Future[Any], ...]] = [() for _ in range(COUNT)]
        self._hash, self._at, self._filled, self._sent = xxhash.xxh3_128(), 0, 0, 0

    def take(self, parts: Iterable[memoryview | bytes]) -> tuple[int, str]:
        for part in parts:
            if not memoryview(part).nbytes:
                continue
            values, done = np.frombuffer(part, np.uint8), 0
            while done < values.size:
                n = min(self._block - self._filled, values.size - done)
                self._memory[self._at, self._filled : self._filled + n] = values[done : done + n]
                self._filled, done = self._filled + n, done + n
                if self._filled == self._block:
                    self._send()
        nbytes = self._sent + self._filled
        self._send()
        for further in range(COUNT):  # the oldest first: what failed first is told
            self._settle((self._at + further) % COUNT)
        self._file.truncate(nbytes)  # of the last page
        return nbytes, self._hash.hexdigest()

    def _send(self) -> None:
        """What is filled goes its way, and the block after it is free."""
        filled, padded = self._filled, -(-self._filled // PAGE) * PAGE
        self._memory[self._at, filled:padded] = 0
        data = self._memory[self._at].data
        self._busy[self._at] = (self._hashing.submit(self._hash.update, data[:filled]), self._writing.submit(self._write, data[:padded], self._sent))
        self._sent, self._filled, self._at = self._sent + filled, 0, (self._at + 1) % COUNT
        self._settle(self._at)

    def _settle(self, at: int) -> None:
        for future in self._busy[at]:
            future.result()

    def _write(self, data: memoryview, at: int) -> None:
        try:
            disk.write(self._file, data)
        except OSError as error:
            if error.errno != errno.EINVAL or self._file.tell() != at:
                raise
            disk.through_cache(self._file)  # a file system that says only now that it cannot
            disk.write(self._file, data)
        disk.write_behind(self._file.fileno(), at, at + data.nbytes)
