"""The write-back cache of gradients on NVMe, where the drive fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.engine.chunk_cache import ChunkCache
from offload.errors import SwapError

NBYTES = 64


class Frames:
    def __init__(self) -> None:
        self.free = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(2)]

    def take(self) -> torch.Tensor:
        return self.free.pop()

    def give(self, frame: torch.Tensor) -> None:
        self.free.append(frame)


class Writing:
    def __init__(self, shard: Drive) -> None:
        self._shard = shard

    @property
    def done(self) -> bool:
        return not self._shard.stuck

    def wait(self) -> None:
        if self._shard.stuck:
            raise SwapError("stuck")
        self._shard.fail()


class Drive:
    """A shard whose reads and writes fail, or whose writes do not end, while it is told so."""

    nbytes = NBYTES

    def __init__(self) -> None:
        self.bytes, self.broken, self.stuck = torch.zeros(NBYTES, dtype=torch.uint8), False, False

    def fail(self) -> None:
        if self.broken:
            raise SwapError("broken")

    def read(self, start: int, out: torch.Tensor) -> None:
        self.fail()
        out.copy_(self.bytes)

    def write_async(self, start: int, data: torch.Tensor) -> Writing:
        if not self.broken:
            self.bytes.copy_(data)
        return Writing(self)


def cache(frames: Frames | None = None) -> tuple[Any, list[Any]]:
    return ChunkCache(frames or Frames(), 1), [Drive(), Drive()]  # type: ignore[arg-type]


def put(there: Any, key: int, drive: Any, value: int) -> None:
    there.memory(key, drive, fresh=True, dirty=True).fill_(value)


def test_a_chunk_that_could_not_be_read_is_read_again() -> None:
    there, drives = cache()
    put(there, 0, drives[0], 3)
    put(there, 1, drives[1], 5)  # in the frame of the first, which was written
    drives[0].broken = True
    for _ in range(2):
        with pytest.raises(SwapError):
            there.memory(0, drives[0], fresh=False, dirty=False)
    drives[0].broken = False
    assert there.memory(0, drives[0], fresh=False, dirty=False).eq(3).all()


def test_a_chunk_that_could_not_be_written_is_written_again() -> None:
    there, drives = cache()
    put(there, 0, drives[0], 3)
    drives[0].broken = True
    for _ in range(2):
        with pytest.raises(SwapError):
            there.memory(1, drives[1], fresh=True, dirty=True)
    drives[0].broken = False
    put(there, 1, drives[1], 5)
    assert drives[0].bytes.eq(3).all()
    there.flush()
    assert drives[1].bytes.eq(5).all()


def test_a_chunk_that_could_not_be_flushed_is_flushed_again() -> None:
    """Nothing but its frame has its bytes, so a step that is tried again does not go on without them."""
    frames = Frames()
    there, drives = cache(frames)
    put(there, 0, drives[0], 3)
    drives[0].broken = True
    for _ in range(2):
        with pytest.raises(SwapError, match="broken"):
            there.flush()
        assert len(frames.free) == 1
    drives[0].broken = False
    there.flush()
    assert drives[0].bytes.eq(3).all() and len(frames.free) == 2


def test_a_frame_that_a_stuck_drive_reads_is_nobody_elses() -> None:
    frames = Frames()
    there, drives = cache(frames)
    put(there, 0, drives[0], 3)
    drives[0].stuck = True
    for act in (there.flush, there.flush, lambda: put(there, 0, drives[0], 4), lambda: put(there, 1, drives[1], 5)):
        with pytest.raises(SwapError, match="stuck"):
            act()
        assert len(frames.free) == 1
    drives[0].stuck = False
    there.flush()
    assert drives[0].bytes.eq(3).all() and len(frames.free) == 2


class Reader:
    """An update whose drive is stuck until it is done."""

    done = False

    def wait(self) -> None:
        if not self.done:
            raise SwapError("stuck")


def test_a_frame_that_a_stuck_update_reads_is_nobody_elses() -> None:
    there, drives = cache()
    put(there, 0, drives[0], 3)
    reader = Reader()
    there.lend(0, reader, keep=False)
    for act in (lambda: put(there, 0, drives[0], 4), lambda: put(there, 1, drives[1], 5)) * 2:
        with pytest.raises(SwapError, match="stuck"):
            act()
    there.flush()
    assert there.frame(0).eq(3).all()
    reader.done = True
    put(there, 1, drives[1], 5)
    assert there.frame(0) is None
