"""Gradient chunks that rest on NVMe, while they are written to: a write-back cache over a few staging buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offload.errors import SwapError
from offload.memory.shard import Shard
from offload.transfer.frames import FramePool
from offload.transfer.queue import Transfer


@dataclass
class _Entry:
    shard: Shard
    frame: torch.Tensor
    valid: bool = False  # the frame has the chunk's bytes
    dirty: bool = False
    writing: Transfer | None = None
    reader: Transfer | None = None  # an update that the frame was lent to

    @property
    def lent(self) -> bool:
        return self.reader is not None and not self.reader.done


class ChunkCache:
    """Holds at most `quota` frames.

    `memory` gives a chunk's bytes to read and write; `finish` starts its write-back; `flush` ends with all written and every frame returned
    that is not lent. A frame that is `lend`ed to an update is neither written to nor returned until its reader has ended.
    """

    def __init__(self, frames: FramePool, quota: int) -> None:
        self._frames, self._quota = frames, max(1, quota)
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._on_disk: set[int] = set()

    def memory(self, key: int, shard: Shard, *, fresh: bool, dirty: bool) -> torch.Tensor:
        """The chunk's bytes. `fresh`: what was there no longer counts, so nothing is read. `dirty`: the caller writes to them."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(shard, self._frame())
        if not entry.valid:  # it is new, or reading it failed
            if key in self._on_disk and not fresh:
                shard.read(0, entry.frame[: shard.nbytes])
            else:
                entry.frame[: shard.nbytes].zero_()
            entry.valid = True
        elif dirty:
            self._await(entry)
            self._settle(entry)
        self._entries.move_to_end(key)
        entry.dirty = entry.dirty or dirty
        return entry.frame[: shard.nbytes]

    def finish(self, key: int) -> None:
        """Starts writing a chunk back: nothing more is expected of it for now."""
        entry = self._entries.get(key)
        if entry is not None and entry.dirty:
            self._start_write(key, entry)

    def written(self, key: int) -> bool:
        """Whether the chunk's bytes are in the file. Never waits; raises what its write-back did."""
        entry = self._entries.get(key)
        if entry is not None and entry.writing is not None and entry.writing.done:
            self._settle(entry)
        return entry is None or not (entry.dirty or entry.writing is not None)

    def frame(self, key: int) -> torch.Tensor | None:
        """The chunk's bytes, if they are here."""
        entry = self._entries.get(key)
        return entry.frame[: entry.shard.nbytes] if entry is not None and entry.valid else None

    def lend(self, key: int, reader: Transfer, *, keep: bool) -> None:
        """What reads the chunk's frame until it ends. Unless it is to `keep`, the chunk counts no more: it is not written."""
        entry = self._entries[key]
        entry.reader = reader
        if not keep:
            entry.dirty = False
            self._on_disk.discard(key)

    def flush(self) -> None:
        for key, entry in self._entries.items():
            if entry.dirty:
                self._start_write(key, entry)
        error: SwapError | None = None
        for key, entry in list(self._entries.items()):
            try:
                self._settle(entry)
            except SwapError as failed:  # it stays: nothing but its frame has the bytes
                if entry.writing is not None:
                    raise
                error = error or failed
                continue
            if not entry.lent:
                del self._entries[key]
                self._frames.give(entry.frame)
        if error is not None:
            raise error

    def _start_write(self, key: int, entry: _Entry) -> None:
        self._settle(entry)
        entry.writing = entry.shard.write_async(0, entry.frame[: entry.shard.nbytes])
        entry.dirty = False
        self._on_disk.add(key)

    def _settle(self, entry: _Entry) -> None:
        if entry.writing is None:
            return
        try:
            entry.writing.wait()
        except BaseException:
            entry.dirty = True  # the drive may not have it
            raise
        finally:
            if entry.writing.done:  # else its drive is stuck, and still reads the frame
                entry.writing = None

    def _await(self, entry: _Entry) -> None:
        if entry.reader is not None:
            entry.reader.wait()
        entry.reader = None

    def _frame(self) -> torch.Tensor:
        if len(self._entries) < self._quota:
            return self._frames.take()
        free = [(k, e) for k, e in self._entries.items() if not e.lent] or list(self._entries.items())
        key, entry = next(((k, e) for k, e in free if not e.dirty), free[0])
        if entry.dirty:
            self._start_write(key, entry)
        self._await(entry)
        self._settle(entry)
        del self._entries[key]
        return entry.frame

    def moved(self, keys: Iterable[int]) -> None:
        """These chunks' shards are others now, and hold what they should."""
        self._on_disk.update(keys)
