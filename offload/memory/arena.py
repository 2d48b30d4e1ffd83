"""Host memory reserved once, at its exact size.

[Note: arena memory]
An arena is one anonymous mapping: rounded to pages and not to a power of two, aligned to huge pages when it has any,
advised for them, and left out of forks, so that a DataLoader's workers never double it. Its pages become resident
when first written. The mapping lives as long as any tensor that views it.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch.utils.dlpack import from_dlpack

from offload.errors import OffloadError

PAGE = 4096
HUGE_PAGE = 2 << 20


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def reserve(nbytes: int) -> torch.Tensor:
    """Maps `nbytes` (rounded up to pages) and returns them as a uint8 tensor of exactly `nbytes` elements."""
    if nbytes <= 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    size = round_up(nbytes, PAGE)
    slack = HUGE_PAGE if size >= HUGE_PAGE else 0  # address space alone: never touched, never resident
    block = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if slack:
        block.madvise(mmap.MADV_HUGEPAGE)
    block.madvise(mmap.MADV_DONTFORK)
    start = 0
    if slack:
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        start = -address % HUGE_PAGE
    return torch.frombuffer(block, dtype=torch.uint8, count=nbytes, offset=start)


class Arena:
    """One tier's RAM, cut into regions in the order asked for and freed as a whole.

    Every region starts on a page, and is a storage of its own, so that a view is recognised by its storage.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = round_up(nbytes, PAGE)
        self._memory = reserve(self.nbytes)
        self._used = 0
        self._owner = os.getpid()

    @property
    def whole(self) -> torch.Tensor:
        """All of it, as one uint8 tensor."""
        return self._memory

    @property
    def used_bytes(self) -> int:
        return self._used

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 region of `nbytes`; the plan has sized the arena for all of them."""
        size = round_up(nbytes, PAGE)
        if self._used + size > self.nbytes:
            raise OffloadError(f"the {self.name} arena of {self.nbytes} bytes has {self.nbytes - self._used} left, {size} were asked for")
        start, self._used = self._used, self._used + size
        # from_dlpack of a slice shares the mapping and has a storage of its own
        return from_dlpack(self._memory[start : start + nbytes]) if nbytes else self._memory[:0]

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0
