"""What a process weighs before it holds any state: its base.

On a machine whose "device" is its RAM, budgets can only be checked against resident memory less this base.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

from offload.memory.limits import resident_bytes

BASE_BYTES_MOST = 768 << 20  # the interpreter with everything imported

_measured: list[int] = []


def measure(step: Callable[[], None] | None = None) -> int:
    """Runs `step` (a toy's training step, so that libraries have made what they keep), then takes resident memory as the base, in bytes.

    To be measured before there is state; again where libraries have come to keep more since.
    """
    if step is not None:
        step()
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if malloc_trim is not None:
        malloc_trim(0)
    _measured[:] = [resident_bytes()]
    return _measured[0]


def base_bytes(unknown: int = BASE_BYTES_MOST) -> int:
    """The base that was measured last; `unknown` where none was."""
    return _measured[0] if _measured else unknown
