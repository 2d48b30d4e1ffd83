"""Sums over ranks in CPU memory, in the order of ranks, so that their bits depend on neither the collective nor the number of pieces.

bf16 and fp16 are summed in fp32 and rounded once. Whoever waits for a sum makes it, piece by piece as pieces come: no thread of its own could take
sums in an order that suits all ranks, as each rank's threads begin them in an order of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offload.dist.link import Link, Message

PIECE = 1 << 19  # bytes of one message; 2 a peer are awaited at once
GRAIN = 32768  # elements; more at once, and torch would take threads of its own for them


class Spaces:
    """Memory that pieces come to, 2 x PIECE for each rank, of as many sums as there are at once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        with self._lock:
            return self._free.pop() if self._free else torch.empty(2, self._ranks, PIECE, dtype=torch.uint8, device="cpu")

    def give(self, space: torch.Tensor) -> None:
        with self._lock:
            self._free.append(space)


class Sum:
    """A reduction under way: `parts[r]` goes to rank r, and `wait` sets `own` to the sum (or what `combine` makes) of every rank's part for this one;
    it may be that part itself."""

    def __init__(self, link: Link, spaces: Spaces, parts: list[torch.Tensor], own: torch.Tensor, name: str, largest: bool = False) -> None:
        self._link, self._spaces, self._parts, self._own, self._name = link, spaces, parts, own, name
        self._combine: Callable[..., torch.Tensor] = torch.maximum if largest else torch.add
        self._step = PIECE // parts[0].element_size()
        self._mine, self._space = parts[link.rank], spaces.take()
        self._sent = [
            link.send(parts[peer][at : at + self._step], peer, name)
            for at in range(0, max(p.numel() for p in parts), self._step)
            for peer in link.others
            if at < parts[peer].numel()
        ]  # pieces in the order in which they are wanted
        self._starts = range(0, self._mine.numel(), self._step)
        self._coming: list[list[Message]] = []
        self._receive()

    def _receive(self) -> None:
        index = len(self._coming)
        if index < len(self._starts):
            self._coming.append([self._link.receive(self._piece(index, peer), peer, self._name) for peer in self._link.others])

    def _piece(self, index: int, rank: int) -> torch.Tensor:
        """What rank gives for the piece of that number."""
        part = self._mine[self._starts[index] : self._starts[index] + self._step]
        return part if rank == self._link.rank else self._space[index % 2, rank, : part.nbytes].view(part.dtype)

    def wait(self) -> None:
        """Raises `Lost`."""
        for index, at in enumerate(self._starts):
            self._receive()
            for message in self._coming[index]:
                message.wait()
            self._coming[index] = []
            _combine(self._own[at : at + self._step], [self._piece(index, r) for r in range(self._link.size)], self._combine)
        for message in self._sent:
            message.wait()
        self._spaces.give(self._space)


class SumForAll:
    """An all-reduce under way: `wait` sets `x` [N], on every rank, to the sum or the largest of every rank's."""

    def __init__(self, link: Link, spaces: Spaces, x: torch.Tensor, name: str, largest: bool) -> None:
        self._parts, self._link, self._name = list(x.tensor_split(link.size)), link, f"{name}, summed"
        self._own = self._parts[link.rank]
        self._sum = Sum(link, spaces, self._parts, self._own, name, largest)

    def wait(self) -> None:
        """Raises `Lost`."""
        self._sum.wait()
        for message in self._link.gather(self._parts, self._own, self._name):
            message.wait()


def _combine(out: torch.Tensor, pieces: list[torch.Tensor], combine: Callable[..., torch.Tensor]) -> None:
    wide = torch.promote_types(pieces[0].dtype, torch.float32) if pieces[0].is_floating_point() else pieces[0].dtype
    total = torch.empty(min(GRAIN, out.numel()), dtype=wide, device="cpu")
    with torch.no_grad():
        for at in range(0, out.numel(), GRAIN):
            some = total[: min(GRAIN, out.numel() - at)]
            some.copy_(pieces[0][at : at + GRAIN])
            for piece in pieces[1:]:
                combine(some, piece[at : at + GRAIN].to(wide), out=some)
            out[at : at + GRAIN].copy_(some)
