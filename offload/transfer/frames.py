"""Staging buffers: the hop between NVMe and elsewhere, inside the host budget."""

from __future__ import annotations

import threading

import torch

from offload.memory.stalls import STAGING, Stalls


class FramePool:
    """`count` page-aligned buffers of `nbytes` each, as uint8 tensors. `take` waits for one; `give` returns it."""

    def __init__(self, memory: torch.Tensor, count: int, nbytes: int, stalls: Stalls | None = None) -> None:
        self._stalls = stalls or Stalls()
        self.count, self.nbytes = count, nbytes
        self.all = [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        self._free = list(reversed(self.all))
        self._changed = threading.Condition()

    def take(self) -> torch.Tensor:
        with self._changed:
            if not self._free:
                with self._stalls.waiting(STAGING):
                    self._changed.wait_for(lambda: self._free)
            return self._free.pop()

    def give(self, frame: torch.Tensor) -> None:
        with self._changed:
            self._free.append(frame)
            self._changed.notify()

    @property
    def free(self) -> int:
        return len(self._free)
