"""A shard's bytes at rest, on whichever tier: a region of an arena, or an extent of a swap file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload import _core
from offload.errors import OffloadError
from offload.memory.stalls import NVME_READ, NVME_WRITE, Stalls
from offload.memory.swap import Extent, SwapSpace


class Transfer(Protocol):
    """One submitted move. `wait()` returns when it is done and raises what went wrong with it."""

    def wait(self) -> None: ...

    @property
    def done(self) -> bool: ...


class _Moving:
    """A transfer of the swap space's: whoever waits for it stalls for `cause`."""

    __slots__ = ("_cause", "_native", "_stalls")

    def __init__(self, native: Any, stalls: Stalls, cause: str) -> None:
        self._native, self._stalls, self._cause = native, stalls, cause

    @property
    def done(self) -> bool:
        return bool(self._native.done)

    def wait(self) -> None:
        if self._native.done:
            self._native.wait()  # raises what went wrong
        else:
            with self._stalls.waiting(self._cause):
                self._native.wait()


def check_process(owner: int) -> None:
    """Arenas are left out of forks: what rests in them is not there in a child."""
    if os.getpid() != owner:
        raise OffloadError("a prepared model was used in a forked process, which does not have its state; use it where prepare() was called")


@dataclass
class Shard:
    """`nbytes` at rest. Exactly one of `memory` (uint8 tensor) and `extent` is set; `space` goes with the latter."""

    tier: str
    nbytes: int
    memory: torch.Tensor | None = None
    extent: Extent | None = None
    space: SwapSpace | None = None
    owner: int = 0

    def __post_init__(self) -> None:
        self.owner = os.getpid()

    @classmethod
    def absent(cls) -> Shard:
        """In place of one that rests on another rank: of no bytes, and no tier."""
        return cls("", 0, memory=torch.empty(0, dtype=torch.uint8, device="cpu"))

    def address(self, start: int = 0) -> int:
        """Where byte `start` lies in RAM; only for shards that rest in memory."""
        assert self.memory is not None
        return self.memory.data_ptr() + start

    def read_async(self, start: int, out: torch.Tensor) -> Transfer:
        """Starts filling `out` (any dtype, contiguous) with the bytes from `start` on; only for shards on NVMe."""
        assert self.space is not None and self.extent is not None
        if not out.is_contiguous():  # what lies between its elements would be written over
            raise ValueError(f"a shard is read into contiguous memory, not into shape {tuple(out.shape)} with strides {out.stride()}")
        with self.space.stalls.waiting(NVME_READ):  # while more are queued than the drive's queue holds
            return _Moving(self.space.read(self.extent, start, out.data_ptr(), out.nbytes, keep=out), self.space.stalls, NVME_READ)

    def write_async(self, start: int, data: torch.Tensor) -> Transfer:
        assert self.space is not None and self.extent is not None
        with self.space.stalls.waiting(NVME_WRITE):
            return _Moving(self.space.write(self.extent, start, data.data_ptr(), data.numel(), keep=data), self.space.stalls, NVME_WRITE)

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fills `out` (any dtype, contiguous, CPU) with the bytes from `start` on."""
        raw = out.view(-1).view(torch.uint8)
        if not raw.numel():
            return
        check_process(self.owner)
        if self.memory is not None:
            raw.copy_(self.memory[start : start + raw.numel()])
        else:
            self.read_async(start, raw).wait()

    def begin_read(self, start: int, out: torch.Tensor) -> Callable[[], None]:
        """As `read`, in this thread alone: what rests in memory is copied, the rest is there once the value was called."""
        check_process(self.owner)
        if self.memory is None:
            return self.read_async(start, out).wait
        raw = out.view(-1).view(torch.uint8)
        _core.copy(raw.data_ptr(), self.memory[start : start + raw.numel()].data_ptr(), raw.numel(), 1)
        return lambda: None

    def there(self, start: int, n: int, dtype: torch.dtype) -> torch.Tensor | None:
        """`n` values from byte `start` on, only to be read, where they rest in memory."""
        if self.memory is None:
            return None
        check_process(self.owner)
        return self.memory[start : start + n * dtype.itemsize].view(dtype)

    def write(self, start: int, data: torch.Tensor) -> None:
        """Puts the bytes of `data` (any dtype, contiguous, CPU) at `start`."""
        raw = data.view(-1).view(torch.uint8)
        if not raw.numel():
            return
        check_process(self.owner)
        if self.memory is not None:
            self.memory[start : start + raw.numel()].copy_(raw)
        else:
            self.write_async(start, raw).wait()
