"""Devices: where a model computes, and how bytes get there and back.

[Note: device]
`cpu` computes in RAM: it binds parameters where they rest in memory, reads NVMe straight into slots, and gradients land at once.
`sim` computes on the CPU too, but behind an arena of its own: everything goes in and out through asynchronous queues, which may
run as late as a CUDA stream may. `cuda` is the same with streams and events. A `Copy` fills device memory from host memory or
from NVMe; a landing is a function that takes a gradient in memory the host can read and stores it. What rests in the memory of `sim` and `cuda`
stays there through a step, as the host works on neither: see [Note: work on the device].

[Note: freed memory]
To map pages anew for every activation takes a fifth of a step, so where the device budget is ample the C library is asked to keep what is freed for
the next block. There it counts as resident: activations that are gone would still fill a device budget that is RAM. Between units, free memory is
returned to the kernel unless the budget has room for what the next unit may add, beside what of it fits in free memory. Where memory is scarce from
the start, or turns out to be, large blocks go back as they are freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from offload import _core
from offload.errors import SwapError
from offload.memory.arena import PAGE, Arena
from offload.memory.limits import resident_bytes
from offload.memory.shard import Shard
from offload.memory.stalls import ACTIVATION, FETCH, GRADIENT, UPDATE, Stalls
from offload.transfer.frames import FramePool
from offload.transfer.kernels import HostKernels, Kernels
from offload.transfer.queue import Done, Pace, SwapQueue, Transfer

REUSED_SHARE = 2  # one part in so many of what is allocated next fits in what is free in the heap, if that is enough

Landing = Callable[[torch.Tensor], None]
Put = Callable[[torch.Tensor, torch.Tensor], None]  # fills its first argument from its second; the bytes are there when it returns


@dataclass(frozen=True)
class Copy:
    """Fill `target` (a device tensor) with the bytes of `shard` from byte `start` on, cast from `dtype` to the target's."""

    target: torch.Tensor
    shard: Shard
    start: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize

    @property
    def plain(self) -> bool:
        return self.dtype == self.target.dtype


class Device(ABC):
    """Where a model computes. `rests`: state may rest in its memory and be updated there; `direct`: it computes from host memory.

    `kernels` work on its memory, inside of what is given to `work`.
    """

    name: str
    rests: bool
    direct: bool
    compute: torch.device
    kernels: Kernels

    def __init__(self) -> None:
        self.moved = {"h2d": 0, "d2h": 0}
        self.stalls = Stalls()
        self.resident_bytes_most, self.margin_bytes, self.keeps_freed, self.reuses_freed = 1 << 62, 0, False, True
        self.in_flight_bytes_most, self.gradient_bytes_most = 1 << 62, 0

    @abstractmethod
    def memory(self, nbytes: int) -> Arena:
        """An arena of device memory."""

    @abstractmethod
    def fetch(
        self, copies: Sequence[Copy], frames: FramePool | None, ready: Callable[[], None], what: str = "", then: Callable[[], None] | None = None
    ) -> Transfer:  # fmt: skip
        """Starts the copies, once `ready()` has returned; after the transfer's wait() what is computed sees them. `what`: a trace's name for it.

        `then()` is called, in one thread in the order of these calls, when the copies are there for what it has the device do.
        """

    @abstractmethod
    def send(self, source: torch.Tensor, land: Landing) -> Transfer:
        """Starts moving a gradient to the host and lands it there; `source` is kept until then.

        Waits first while those under way and this one come to more than `in_flight_bytes_most`; one alone always may go.
        """

    def make_way(self) -> None:
        """Waits until those under way leave room for a gradient of `gradient_bytes_most`, which is computed next. Apart from `send`, as whoever
        is interrupted in a wait has to know by then what was sent."""
        return None

    @abstractmethod
    def stow(
        self, source: torch.Tensor, store: Callable[[Put], None], after: Sequence[Transfer] | None = None, what: str = "activation"
    ) -> Transfer:  # fmt: skip
        """Starts `store(put)`, which moves the bytes of `source` to host memory with `put`; `source` is kept until then.

        Waits first as `send` does. What the transfer's wait() raises is what `store` raised. `after`: `source` lies in an arena, and has
        what it should once these works are done; it takes no room, so nothing is waited for.
        """

    def work(self, run: Callable[[], None], nbytes: int, what: str = "") -> Transfer:
        """Starts `run()`, which uses `kernels` on `nbytes` of device memory, after all such work before it; what it holds is kept until then.

        After the transfer's wait() what is computed, and what copies device memory, sees what it did.
        """
        run()
        return Done()

    def read(self, source: torch.Tensor, after: Sequence[Transfer]) -> torch.Tensor:
        """What a tensor in device memory holds once the works `after` are done, in memory of the host's own."""
        for work in after:
            work.wait()
        return source.clone()

    def mark(self) -> Any:
        """The present point of what the calling thread has the device do."""
        return None

    def beside(self, mark: Any) -> AbstractContextManager[None]:
        """While the context lasts, what the calling thread has the device do comes after `mark`, and compute does not wait for it."""
        return nullcontext()

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Device memory to fetch into, `nbytes` of uint8 on a page; it may be dropped while the fetch is under way."""
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]

    def register(self, host: Arena) -> None:
        """Makes the host arena fit for fast copies, where that means anything."""
        return None

    def relieve(self) -> None:
        """Called between units: gives memory that compute has freed back, where it is scarce. See [Note: freed memory]."""
        room = self.resident_bytes_most - resident_bytes()
        if room >= self.margin_bytes:
            return
        if self.keeps_freed and self.reuses_freed:
            if room >= self.margin_bytes - min(_core.freed_bytes(), self.margin_bytes) // REUSED_SHARE:
                return
            self.keep(False, self.margin_bytes)
        _core.trim()

    def make_room(self, nbytes: int) -> None:
        """Gives memory that was freed back unless there is room for so much more."""
        if self.resident_bytes_most - resident_bytes() < nbytes:
            _core.trim()

    def keep(self, freed: bool, margin_bytes: int, reuses_freed: bool = True) -> None:
        """Whether memory that compute has `freed` is kept for what it allocates next; `margin_bytes`: what one unit may add, for which there is to be
        room; `reuses_freed`: what is kept may be counted on for part of that."""
        self.keeps_freed, self.margin_bytes, self.reuses_freed = freed, margin_bytes, reuses_freed
        _core.keep_freed(freed)

    def depths(self) -> dict[str, int]:
        """Transfers not done, by link."""
        return {}

    def settle(self) -> None:
        """Waits for everything under way."""
        return None

    def close(self) -> None:
        self.settle()
        self.keep(False, 0)


def _pieces(copy: Copy, frame_bytes: int) -> list[tuple[int, int]]:
    """(first element, elements) of each part of a copy that fits a staging buffer."""
    most = frame_bytes // copy.dtype.itemsize
    most = most // 4096 * 4096 or most
    n = copy.target.numel()
    return [(i, min(most, n - i)) for i in range(0, n, most)]


def through_frames(copy: Copy, frames: FramePool, put: Put) -> None:
    """Reads a shard on NVMe piece by piece through a staging buffer; `put(target, staged)` takes each piece on."""
    flat = copy.target.view(-1)
    frame = frames.take()
    try:
        for first, count in _pieces(copy, frames.nbytes):
            raw = frame[: count * copy.dtype.itemsize]
            copy.shard.read_async(copy.start + first * copy.dtype.itemsize, raw).wait()
            put(flat[first : first + count], raw.view(copy.dtype))
    finally:
        frames.give(frame)


def _put(target: torch.Tensor, staged: torch.Tensor) -> None:
    """On one thread: torch would take as many as compute does, and a team of its own spins while the cores are wanted."""
    if target.dtype == staged.dtype and target.is_contiguous() and staged.is_contiguous():
        _core.copy(target.data_ptr(), staged.data_ptr(), target.nbytes, 1)
    else:
        target.copy_(staged)


def host_view(copy: Copy) -> torch.Tensor:
    assert copy.shard.memory is not None
    return copy.shard.memory[copy.start : copy.start + copy.nbytes].view(copy.dtype)


class _Several:
    """Transfers waited for as one."""

    def __init__(self, parts: list[Transfer]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        return all(p.done for p in self._parts)

    def wait(self) -> None:
        """Returns or raises when none of them is under way: what they fill may then have other uses."""
        errors: list[SwapError] = []
        for part in self._parts:
            try:
                part.wait()
            except SwapError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class CpuDevice(Device):
    name = "cpu"
    rests = True
    direct = True
    compute = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self._in: SwapQueue | None = None  # what other ranks take part in waits for them on a thread of its own

    def memory(self, nbytes: int) -> Arena:
        return Arena("device", nbytes)

    def fetch(
        self, copies: Sequence[Copy], frames: FramePool | None, ready: Callable[[], None], what: str = "", then: Callable[[], None] | None = None
    ) -> Transfer:  # fmt: skip
        if then is None:
            return self._fetch(copies, frames, ready, lambda target, host: target.copy_(host))
        together = then

        def run() -> None:
            self._fetch(copies, frames, ready, _put).wait()
            together()

        self._in = self._in or SwapQueue("h2d", stalls=self.stalls, cause=FETCH)
        return self._in.submit(run, sum(c.nbytes for c in copies), what=what)

    def _fetch(self, copies: Sequence[Copy], frames: FramePool | None, ready: Callable[[], None], put: Callable[..., object]) -> Transfer:
        ready()
        parts: list[Transfer] = []
        try:
            with self.stalls.waiting(FETCH):
                for copy in copies:
                    if copy.shard.memory is not None:
                        put(copy.target.view(-1), host_view(copy))
                    elif copy.plain:
                        parts.append(copy.shard.read_async(copy.start, copy.target.view(-1).view(torch.uint8)))
                    else:
                        assert frames is not None
                        through_frames(copy, frames, _put)
        except BaseException:  # nothing is to come any more where something else may be put
            with suppress(SwapError):
                _Several(parts).wait()
            raise
        return _Several(parts)

    def send(self, source: torch.Tensor, land: Landing) -> Transfer:
        self.moved["d2h"] += source.numel() * source.element_size()
        with self.stalls.waiting(GRADIENT):
            land(source)
        return Done()

    def stow(
        self, source: torch.Tensor, store: Callable[[Put], None], after: Sequence[Transfer] | None = None, what: str = "activation"
    ) -> Transfer:  # fmt: skip
        self.moved["d2h"] += source.nbytes
        with self.stalls.waiting(ACTIVATION):
            store(_put)
        return Done()

    def settle(self) -> None:
        if self._in is not None:
            self._in.drain()

    def close(self) -> None:
        if self._in is not None:
            self._in.close()
        self.keep(False, 0)


class SimDevice(Device):
    """Computes on the CPU behind an arena and two queues. `h2d` and `d2h` are bytes a second; `seed` puts transfers off by choice of the seed."""

    name = "sim"
    rests = True
    direct = False
    compute = torch.device("cpu")

    def __init__(self, h2d: float | None = None, d2h: float | None = None, seed: int | None = None) -> None:
        super().__init__()
        self._in = SwapQueue("h2d", pace=Pace(h2d, seed), stalls=self.stalls, cause=FETCH)
        self._out = SwapQueue("d2h", pace=Pace(d2h, None if seed is None else seed + 1), stalls=self.stalls, cause=GRADIENT)
        self.kernels = HostKernels()
        self._seed, self._work = seed, list[SwapQueue]()  # a queue once there is work for it

    def memory(self, nbytes: int) -> Arena:
        return Arena("device", nbytes)

    def fetch(
        self, copies: Sequence[Copy], frames: FramePool | None, ready: Callable[[], None], what: str = "", then: Callable[[], None] | None = None
    ) -> Transfer:  # fmt: skip
        for copy in copies:
            copy.target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN: computing before the copy arrived shows

        def run() -> None:
            ready()
            for copy in copies:
                if copy.shard.memory is not None:
                    _put(copy.target.view(-1), host_view(copy))
                else:
                    assert frames is not None
                    through_frames(copy, frames, _put)
            if then is not None:
                then()

        nbytes = sum(c.nbytes for c in copies)
        self.moved["h2d"] += nbytes
        return self._in.submit(run, nbytes, what=what, together=then is not None)

    def send(self, source: torch.Tensor, land: Landing) -> Transfer:
        nbytes = source.numel() * source.element_size()
        self.moved["d2h"] += nbytes
        return self._out.submit(lambda: land(source), nbytes, self.in_flight_bytes_most, "gradient")

    def make_way(self) -> None:
        self._out.until(self.in_flight_bytes_most - self.gradient_bytes_most)

    def stow(
        self, source: torch.Tensor, store: Callable[[Put], None], after: Sequence[Transfer] | None = None, what: str = "activation"
    ) -> Transfer:  # fmt: skip
        nbytes = source.nbytes
        self.moved["d2h"] += nbytes

        def run(source: torch.Tensor = source) -> None:  # holds the source until it has run
            for work in after or ():
                work.wait()
            store(_put)

        return self._out.submit(run, nbytes, self.in_flight_bytes_most if after is None else None, what)

    def work(self, run: Callable[[], None], nbytes: int, what: str = "") -> Transfer:
        if not self._work:
            self._work.append(SwapQueue("device", pace=Pace(None, None if self._seed is None else self._seed + 2), stalls=self.stalls, cause=UPDATE))
        return self._work[0].submit(run, nbytes, what=what)

    def depths(self) -> dict[str, int]:
        return {queue.name: queue.depth for queue in (self._in, self._out, *self._work)}

    def settle(self) -> None:
        for queue in (self._in, self._out, *self._work):
            queue.drain()

    def close(self) -> None:
        for queue in (self._in, self._out, *self._work):
            queue.close()
        self.keep(False, 0)
