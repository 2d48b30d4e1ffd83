"""The CUDA device: the same contract as `sim`, with streams and events. The only module that creates streams."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from offload.memory.arena import Arena
from offload.memory.stalls import FETCH, GRADIENT
from offload.transfer.device import Copy, Device, Landing, Put, host_view, through_frames
from offload.transfer.frames import FramePool
from offload.transfer.queue import SwapQueue, Transfer

log = logging.getLogger("offload")


class CudaArena(Arena):
    """Device memory cut like an arena; each region is a storage of its own."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__("device", 0)
        self.nbytes = nbytes
        self._device = device

    def take(self, nbytes: int) -> torch.Tensor:
        self._used += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class _Arrived:
    """Waits for the copying thread to have enqueued, then makes the compute stream wait for the copy; the host does not."""

    def __init__(self, job: Transfer, event: torch.cuda.Event) -> None:
        self._job, self._event = job, event

    @property
    def done(self) -> bool:
        return bool(self._job.done and self._event.query())

    def wait(self) -> None:
        self._job.wait()
        torch.cuda.current_stream().wait_event(self._event)


class _Worked:
    """Work on the stream it was given on: what is computed there later sees it anyway, and any other stream is made to wait; the host does not."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _forget_error() -> None:
    """CUDA keeps the error of a call that failed, which the next kernel of anybody's would be taken to have made."""
    with suppress(OSError, AttributeError):  # a torch without CUDA, or one that has its runtime within itself
        ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}").cudaGetLastError()


class CudaDevice(Device):
    name = "cuda"
    rests = importlib.util.find_spec("triton") is not None  # its kernels update what rests there
    direct = False

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.compute = device or torch.device("cuda", torch.cuda.current_device())
        self._copy_in = torch.cuda.Stream(self.compute)
        self._copy_out = torch.cuda.Stream(self.compute)
        self._beside = torch.cuda.Stream(self.compute)
        self._pinned: list[int] = []
        self._worked = _Worked(torch.cuda.Event())
        if self.rests:
            from offload.transfer.triton_kernels import TritonKernels

            self.kernels = TritonKernels()
        else:
            log.warning("no Triton here, so nothing is updated on the device: its budget holds parameters while they are computed with, and no state")
        self._in = SwapQueue("h2d", stalls=self.stalls, cause=FETCH)
        self._out = SwapQueue("d2h", stalls=self.stalls, cause=GRADIENT)

    def register(self, host: Arena) -> None:
        """Pins the host arena at its exact size; where the system refuses, copies are slower and that is said."""
        memory = host.whole
        if memory.numel() and int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            self._pinned.append(memory.data_ptr())
        elif memory.numel():
            _forget_error()
            log.warning("the host arena of %d bytes could not be pinned (see `ulimit -l`): copies to the device are slower", memory.numel())

    def memory(self, nbytes: int) -> Arena:
        return CudaArena(nbytes, self.compute)

    def fetch(
        self, copies: Sequence[Copy], frames: FramePool | None, ready: Callable[[], None], what: str = "", then: Callable[[], None] | None = None
    ) -> Transfer:  # fmt: skip
        free = torch.cuda.Event()
        free.record(torch.cuda.current_stream(self.compute))  # the slot's last readers are on the compute stream
        arrived = torch.cuda.Event()

        def put(target: torch.Tensor, staged: torch.Tensor) -> None:
            target.copy_(staged, non_blocking=True)
            self._copy_in.synchronize()  # the staging buffer is used again

        def run() -> None:
            with torch.cuda.stream(self._copy_in):
                ready()  # an update on the device is waited for by the stream that copies what it made
                self._copy_in.wait_event(free)
                for copy in copies:
                    if copy.shard.memory is not None:
                        host = host_view(copy)
                        copy.target.view(-1).copy_(host if copy.plain else host.to(copy.target.dtype), non_blocking=True)
                    else:
                        assert frames is not None
                        through_frames(copy, frames, put)
                if then is not None:
                    then()  # what it starts and waits for, this stream waits for
                arrived.record(self._copy_in)

        nbytes = sum(c.nbytes for c in copies)
        self.moved["h2d"] += nbytes
        return _Arrived(self._in.submit(run, nbytes, what=what), arrived)

    def send(self, source: torch.Tensor, land: Landing) -> Transfer:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.compute))

        def run() -> None:
            with torch.cuda.stream(self._copy_out):
                self._copy_out.wait_event(ready)
                host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                host.copy_(source, non_blocking=True)
                self._copy_out.synchronize()
            source.record_stream(self._copy_out)
            land(host)

        nbytes = source.numel() * source.element_size()
        self.moved["d2h"] += nbytes
        return self._out.submit(run, nbytes, self.in_flight_bytes_most, "gradient")

    def make_way(self) -> None:
        self._out.until(self.in_flight_bytes_most - self.gradient_bytes_most)

    def stow(
        self, source: torch.Tensor, store: Callable[[Put], None], after: Sequence[Transfer] | None = None, what: str = "activation"
    ) -> Transfer:  # fmt: skip
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.compute))

        def put(target: torch.Tensor, part: torch.Tensor) -> None:
            target.copy_(part, non_blocking=True)
            self._copy_out.synchronize()  # so the source is free once all is put, and a staging buffer may be written to a file

        def run(source: torch.Tensor = source) -> None:
            with torch.cuda.stream(self._copy_out):
                self._copy_out.wait_event(ready)
                for work in after or ():
                    work.wait()
                store(put)

        self.moved["d2h"] += source.nbytes
        return self._out.submit(run, source.nbytes, self.in_flight_bytes_most if after is None else None, what)

    def work(self, run: Callable[[], None], nbytes: int, what: str = "") -> Transfer:
        """On the stream that computes, so that what is computed next needs no wait."""
        with torch.cuda.device(self.compute):
            self._worked.wait()  # backward may have another stream
            run()
            self._worked = _Worked(torch.cuda.Event())
            self._worked.event.record(torch.cuda.current_stream(self.compute))
        return self._worked

    def read(self, source: torch.Tensor, after: Sequence[Transfer]) -> torch.Tensor:
        """By the stream that copies out: the host waits for `after`, and for nothing that was started later."""
        with torch.cuda.stream(self._copy_out):
            for work in after:
                work.wait()
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
            self._copy_out.synchronize()
        return host

    def scratch(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.compute)
        memory.record_stream(self._copy_in)  # dropped unused, it must outlive the copy into it
        return memory

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.compute))
        return event

    @contextmanager
    def beside(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._beside):
            self._beside.wait_event(mark)
            yield

    def relieve(self) -> None:
        return None  # device memory is not resident memory

    def keep(self, freed: bool, margin_bytes: int, reuses_freed: bool = True) -> None:
        super().keep(False, 0)  # the heap holds no activations, and nobody would give back what it keeps

    def depths(self) -> dict[str, int]:
        return {"h2d": self._in.depth, "d2h": self._out.depth}

    def settle(self) -> None:
        self._in.drain()
        self._out.drain()
        torch.cuda.synchronize(self.compute)

    def close(self) -> None:
        self._in.close()
        self._out.close()
        pinned, self._pinned = self._pinned, []
        for address in pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
