"""What this machine and its container allow: memory, locked memory, free disk. Nothing here allocates."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload import _core
from offload.errors import ConfigError

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class HostLimits:
    """Bytes: the machine's memory, what the tightest memory cgroup above this process allows, what is free now, and what may be locked."""

    total: int
    cgroup: int | None
    available: int
    locked: int | None

    @property
    def room(self) -> int:
        """What may be taken beyond what this process has resident."""
        return min(self.available, self.cgroup - resident_bytes() if self.cgroup is not None else _UNLIMITED)

    @property
    def usable(self) -> int:
        """What a run may still take, this process's own resident memory included."""
        own = resident_bytes()
        return min(self.available + own, self.cgroup if self.cgroup is not None else _UNLIMITED)


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if text == "max" or not text.isdigit() or int(text) >= _UNLIMITED:
        return None
    return int(text)


def cgroup_memory_limit() -> int | None:
    """The lowest memory limit of this process's cgroup and its ancestors (v1 or v2); None where there is none."""
    found: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for directory in (here, *here.parents):
            limit = _read_limit(directory / name)
            if limit is not None:
                found.append(limit)
            if directory == root:
                break
    return min(found, default=None)


def check_environment() -> None:
    """ConfigError where OFFLOAD_SIMD or OFFLOAD_THREADS asks for what is not here."""
    try:
        _core.simd_level()
        _core.default_threads()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def host_limits() -> HostLimits:
    memory = psutil.virtual_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft
    return HostLimits(memory.total, cgroup_memory_limit(), memory.available, locked)


def resident_bytes() -> int:
    """Resident memory of this process now. OSError where the kernel does not say."""
    nbytes = _core.resident_bytes()  # units ask at each visit: it takes a microsecond
    if not nbytes:
        raise OSError("/proc/self/statm cannot be read, which budgets of memory are kept by")
    return nbytes


def resident_bytes_max() -> int:
    """The most this process ever had resident, as the kernel counted it since exec (`ru_maxrss` would carry the parent's over)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
