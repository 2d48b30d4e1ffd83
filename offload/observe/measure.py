"""Measures this machine's links and kernels: what `offload bench` shows and plans are made of.

Contenders take turns, and figures are medians; sizes are well over the last-level cache, data is random. Bandwidths are in GB/s (10^9 bytes).
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from offload import _core, ops
from offload.config import format_size
from offload.errors import ConfigError
from offload.memory.swap import SwapFile

MIB = 1 << 20
PIECE = 32 * MIB
PIECES_IN_FLIGHT = 8
SWAP_OPS = ("read", "write", "mixed")


def turns(calls: dict[str, Callable[[], float]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """What each call returns (seconds), round by round, the first `warm` rounds dropped."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + warm):
        for name, call in calls.items():
            taken[name].append(call())
    return {name: times[warm:] for name, times in taken.items()}


def rate(nbytes: float, seconds: Iterable[float]) -> float:
    return nbytes / statistics.median(seconds) / 1e9


def ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast ours is, by pair."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


# --- Swap -------------------------------------------------------------------------------------------------------------------------------------


class SwapProbe:
    """A file of `nbytes` of random data, moved by the piece, eight (or `in_flight`) at a time; "mixed" alternates reads and writes.

    A piece is as large as a buffer, by default `PIECE`, of which `nbytes` is a multiple.
    """

    def __init__(self, path: Path, nbytes: int, **settings: Any) -> None:
        self.nbytes = nbytes
        self.buffers = settings.pop("buffers", None) or random_buffers()
        self._in_flight = settings.pop("in_flight", PIECES_IN_FLIGHT)
        self.piece = self.buffers[0].numel()
        self.file = SwapFile(path, nbytes, **settings)

    def fill(self) -> None:
        """Every piece at the same place always has the same bytes, so that probes of one file may follow each other."""
        self._run("write")

    def seconds(self, op: str) -> float:
        start = time.perf_counter()
        self._run(op)
        return time.perf_counter() - start

    def _run(self, op: str) -> None:
        pending: deque[Any] = deque()
        for i, offset in enumerate(range(0, self.nbytes, self.piece)):
            if len(pending) >= self._in_flight:
                pending.popleft().wait()
            move = self.file.read if op == "read" or (op == "mixed" and i % 2) else self.file.write
            pending.append(move(offset, self.buffers[i % len(self.buffers)]))
        while pending:
            pending.popleft().wait()

    def close(self) -> None:
        self.file.close()


def random_buffers(piece: int | None = None) -> list[torch.Tensor]:
    return [ops.empty(piece or PIECE, torch.uint8).random_(0, 255) for _ in range(PIECES_IN_FLIGHT)]


def probe_bytes(directory: Path, seconds: float, most: int = 1 << 30) -> int:
    """How much is moved in about `seconds` there: a multiple of `PIECE` from 128 MiB to `most`, half of what is free. ConfigError: too little is."""
    free = shutil.disk_usage(directory).free
    if free < 8 * PIECE:
        raise ConfigError(f"{format_size(free)} free in {directory}; measuring needs {format_size(8 * PIECE)}")
    probe = SwapProbe(directory / "size", 4 * PIECE, delete=True, checksum=False)
    try:
        probe.fill()
        bandwidth = probe.nbytes / min(probe.seconds("write"), probe.seconds("read"))
    finally:
        probe.close()
    return max(4 * PIECE, int(min(bandwidth * seconds, most, free / 2)) // PIECE * PIECE)


def swap_rates(directory: Path, nbytes: int, rounds: int = 3, **settings: Any) -> dict[str, float]:
    """GB/s of reading, of writing, and of both at once (in all), as `SwapFile` does it with `settings`."""
    probe = SwapProbe(directory / "probe", nbytes, delete=True, **settings)
    try:
        probe.fill()
        taken = turns({op: lambda op=op: probe.seconds(op) for op in SWAP_OPS}, rounds)  # type: ignore[misc]
    finally:
        probe.close()
    return {op: rate(nbytes, times) for op, times in taken.items()}


def swap_sweep(directory: Path, nbytes: int, settings: Iterable[tuple[int, int]], until: float = math.inf) -> list[dict[str, float]]:
    """Rows of block (bytes), depth, and GB/s of reading, writing and both, one measurement each; best by their geometric mean first.

    `settings`: pairs of block and depth, of which those not begun at `until` (`time.monotonic()`) are left out.
    """
    rows: list[dict[str, float]] = []
    buffers = random_buffers()
    for block, depth in settings:
        if rows and time.monotonic() > until:
            break
        probe = SwapProbe(directory / "sweep", nbytes, block=block, queue_depth=depth, checksum=False, buffers=buffers)
        try:
            if not rows:
                probe.fill()
            rows.append({"block": block, "depth": depth} | {op: rate(nbytes, [probe.seconds(op)]) for op in SWAP_OPS})
        finally:
            probe.close()
    (directory / "sweep").unlink(missing_ok=True)
    return sorted(rows, key=lambda row: -row["read"] * row["write"] * row["mixed"])


# --- Copies -----------------------------------------------------------------------------------------------------------------------------------


def _timed(call: Callable[[], object], settle: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        settle()
        start = time.perf_counter()
        call()
        settle()
        return time.perf_counter() - start

    return run


def copy_rates(nbytes: int = 256 * MIB, rounds: int = 5) -> dict[str, float]:
    """GB/s of copies. With CUDA: host to device and back, of pinned and of pageable memory; else to `sim`, whose device is this machine's RAM."""
    if torch.cuda.is_available():
        return _cuda_copies(nbytes, rounds)
    from offload.transfer.device import SimDevice

    host, there = ops.empty(nbytes, torch.uint8).random_(0, 255), ops.empty(nbytes, torch.uint8).zero_()
    sim = SimDevice()

    def land(source: torch.Tensor) -> None:
        host.copy_(source)

    try:
        calls = {
            "host to host": _timed(lambda: _core.copy(there.data_ptr(), host.data_ptr(), nbytes), lambda: None),
            "sim device to host": _timed(lambda: sim.send(there, land).wait(), lambda: None),
        }
        return {name: rate(nbytes, times) for name, times in turns(calls, rounds).items()}
    finally:
        sim.close()


def _cuda_copies(nbytes: int, rounds: int) -> dict[str, float]:
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    pageable = torch.empty(nbytes, dtype=torch.uint8).random_(0, 255)
    pinned = pageable.pin_memory()
    calls = {
        "host to device, pinned": lambda: device.copy_(pinned, non_blocking=True),
        "device to host, pinned": lambda: pinned.copy_(device, non_blocking=True),
        "host to device, pageable": lambda: device.copy_(pageable),
        "device to host, pageable": lambda: pageable.copy_(device),
    }
    taken = turns({name: _timed(call, torch.cuda.synchronize) for name, call in calls.items()}, rounds)
    return {name: rate(nbytes, times) for name, times in taken.items()}


# --- Files ------------------------------------------------------------------------------------------------------------------------------------


def evict(path: Path) -> None:
    """Takes a file out of the page cache, so that what reads it next reads the disk."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
