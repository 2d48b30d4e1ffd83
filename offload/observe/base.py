"""What a process weighs before it holds any state: its base.

On a machine whose "device" is its RAM, budgets can only be checked against resident memory less this base.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

_measured: list[int] = []


def resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


def trim() -> None:
    """Returns freed memory to the kernel, as far as the C library lets it."""
    gc.collect()
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim_heap is not None:
        trim_heap(0)


def measure(step: Callable[[], None] | None = None) -> int:
    """Runs `step` (a toy's training step, so that libraries have made what they keep), then takes resident memory as the base, in bytes."""
    if step is not None:
        step()
    trim()
    _measured[:] = [resident_bytes()]
    return _measured[0]


def base_bytes() -> int:
    """The base that was measured last; without a measurement, resident memory at the first call."""
    return _measured[0] if _measured else measure()
