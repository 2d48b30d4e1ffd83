"""Sums over ranks in CPU memory, in the order of ranks, so that their bits depend on neither the collective nor the number of pieces.

One thread sums, piece by piece as pieces come, while others compute. bf16 and fp16 are summed in fp32 and rounded once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from offload.dist.link import Link, Message

PIECE = 1 << 19  # bytes of one message; 2 a peer are awaited at once
GRAIN = 32768  # elements; more at once, and torch would take threads of its own for them


class Job:
    """Something that the thread does; `wait` raises what it raised."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._over, self._error = run, threading.Event(), None  # type: tuple[Callable[[], None], threading.Event, BaseException | None]

    def __call__(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


class Summer:
    """The thread, and the memory that pieces come to: 2 x PIECE for each other rank."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._space = torch.empty(2, link.size, PIECE, dtype=torch.uint8) if link.size > 1 else None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # a daemon: a process that fails must end, whoever its peers keep waiting
        self._thread = threading.Thread(target=self._serve, name="offload-sums", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _do(self, run: Callable[[], None]) -> Job:
        job = Job(run)
        self._jobs.put(job)
        return job

    def reduce_scatter(self, own: torch.Tensor, full: torch.Tensor, name: str) -> Job:
        """Starts to set `own` [S] to the sum of every rank's `full[rank * S : (rank + 1) * S]`; it may be that part itself."""
        parts = list(full.view(self._link.size, -1))
        return self._do(lambda: self._reduce(parts, own, name, torch.add))

    def all_reduce(self, x: torch.Tensor, name: str, largest: bool) -> Job:
        """Starts to set `x` [N], on every rank, to the sum or the largest of every rank's."""
        parts = list(x.tensor_split(self._link.size))
        own = parts[self._link.rank]

        def run() -> None:
            self._reduce(parts, own, name, torch.maximum if largest else torch.add)
            for message in self._link.gather(parts, own, f"{name} summed"):
                message.wait()

        return self._do(run)

    def _reduce(self, parts: list[torch.Tensor], own: torch.Tensor, name: str, combine: Callable[..., torch.Tensor]) -> None:
        link, mine = self._link, parts[self._link.rank]
        step = PIECE // mine.element_size()
        sent = [
            link.send(parts[peer][at : at + step], peer, name)
            for at in range(0, max(p.numel() for p in parts), step)
            for peer in link.others
            if at < parts[peer].numel()
        ]  # pieces in the order in which they are wanted
        starts = range(0, mine.numel(), step)
        coming: list[list[Message]] = []
        for i in range(len(starts) + 1):
            if i < len(starts):
                coming.append([link.receive(self._piece(i, peer, mine, starts[i], step), peer, name) for peer in link.others])
            if i:
                for message in coming[i - 1]:
                    message.wait()
                at = starts[i - 1]
                pieces = [mine[at : at + step] if r == link.rank else self._piece(i - 1, r, mine, at, step) for r in range(link.size)]
                _combine(own[at : at + step], pieces, combine)
                coming[i - 1] = []
        for message in sent:
            message.wait()

    def _piece(self, index: int, peer: int, like: torch.Tensor, at: int, step: int) -> torch.Tensor:
        assert self._space is not None
        numel = min(step, like.numel() - at)
        return self._space[index % 2, peer, : numel * like.element_size()].view(like.dtype)

    def close(self) -> None:
        """Ends the thread once its jobs are over, unless they never are."""
        self._jobs.put(None)
        self._thread.join(timeout=10)


def _combine(out: torch.Tensor, pieces: list[torch.Tensor], combine: Callable[..., torch.Tensor]) -> None:
    wide = torch.promote_types(pieces[0].dtype, torch.float32) if pieces[0].is_floating_point() else pieces[0].dtype
    total = torch.empty(min(GRAIN, out.numel()), dtype=wide)
    with torch.no_grad():
        for at in range(0, out.numel(), GRAIN):
            some = total[: min(GRAIN, out.numel() - at)]
            some.copy_(pieces[0][at : at + GRAIN])
            for piece in pieces[1:]:
                combine(some, piece[at : at + GRAIN].to(wide), out=some)
            out[at : at + GRAIN].copy_(some)
