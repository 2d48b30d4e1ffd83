"""Messages between ranks' CPU memory, each to or from one named rank, so that who is late or gone is known.

Collectives are made of these and not of gloo's own, which take a copy of what they move, and an all-reduce where a reduce-scatter would do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch


class Lost(Exception):
    """A message did not come: from `peer`, which is `late`, or whose connection is gone; `seconds` were waited."""

    def __init__(self, peer: int, late: bool, seconds: float) -> None:
        super().__init__(peer, late, seconds)
        self.peer, self.late, self.seconds = peer, late, seconds


class Message:
    """One that was sent or asked for; the tensor is its until `wait` returns."""

    __slots__ = ("_peer", "_timeout", "_work")

    def __init__(self, work: Any, peer: int, timeout: float) -> None:
        self._work, self._peer, self._timeout = work, peer, timeout

    def wait(self) -> None:
        """Raises `Lost`."""
        start = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=self._timeout))
        except RuntimeError:
            seconds = time.monotonic() - start
            raise Lost(self._peer, seconds >= 0.95 * self._timeout, seconds) from None


class Link:
    """Connections from this rank to every other. Messages of one name between two ranks come in the order in which they were sent; those of
    different names do not wait for each other."""

    def __init__(self, group: Any, rank: int, size: int, timeout: float, numbers: Sequence[int] = ()) -> None:
        """`numbers`: of the ranks, what the group has them as, where that is not 0, 1, ..."""
        self._group, self.rank, self.size, self._timeout = group, rank, size, timeout
        self._numbers = list(numbers) or list(range(size))
        self.others = [(rank + i) % size for i in range(1, size)]

    def among(self, members: Sequence[int]) -> Link:
        """Some of the ranks, this one too, counted in this order, over the same connections. `Lost` names them as this link does."""
        return Link(self._group, members.index(self.rank), len(members), self._timeout, [self._numbers[member] for member in members])

    def send(self, tensor: torch.Tensor, peer: int, name: str) -> Message:
        """`tensor`, contiguous, on its way; it must not change until the message was waited for."""
        return self._message(self._group.send, tensor, peer, name)

    def receive(self, tensor: torch.Tensor, peer: int, name: str) -> Message:
        """`tensor`, contiguous, to be filled with as many bytes as were sent."""
        return self._message(self._group.recv, tensor, peer, name)

    def _message(self, act: Any, tensor: torch.Tensor, peer: int, name: str) -> Message:
        number = self._numbers[peer]
        try:
            return Message(act([tensor], number, crc32(name.encode()) & 0x7FFFFFFF), number, self._timeout)
        except RuntimeError:
            raise Lost(number, False, 0.0) from None

    def gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor, name: str) -> list[Message]:
        """Starts to fill `parts[r]`, contiguous, with what rank r gives as `own`; the own part is filled at once."""
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)
        messages = [self.receive(parts[peer], peer, name) for peer in self.others if parts[peer].numel()]
        return [*messages, *(self.send(own, peer, name) for peer in self.others if own.numel())]

    def cut(self) -> None:
        """Closes every connection, so that whoever waits on one, here or there, fails at once."""
        for peer in self.others:
            with suppress(RuntimeError):  # gloo has no other way: a wait that times out closes all, but where this peer's connection is gone already
                self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, crc32(b"cut") & 0x7FFFFFFF).wait(timedelta(milliseconds=1))
