"""The machine's profile: figures that `offload bench` measured, kept with their date and the machine's identity.

One file, `$XDG_CACHE_HOME/offload/profile.json` or `~/.cache/offload/profile.json`. Figures older than `DAYS_MOST`, of another machine, or of another
drive are not used: `load` returns None for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

DAYS_MOST = 30
PARTS = ("copy", "swap", "adam", "step")
_FORMAT = 1


def profile_path() -> Path:
    """Where the profile is kept. OSError for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "offload" / "profile.json"
    except RuntimeError as error:
        raise OSError(f"{error} Set HOME or XDG_CACHE_HOME") from None


def _first_line(path: str, start: str = "") -> str:
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith(start):
                return line[len(start) :].lstrip("\t :").rstrip()
    return ""


def machine() -> dict[str, Any]:
    """What tells this machine from others: its own number, processor, CPUs of this process, memory (bytes), GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "number": hashlib.sha256((_first_line("/etc/machine-id") or platform.node()).encode()).hexdigest()[:16],
        "processor": _first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
    }


def versions() -> dict[str, str]:
    """What was measured with: not part of a machine's identity."""
    import importlib.metadata

    import torch

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"offload": importlib.metadata.version("offload"), "torch": torch.__version__, "kernel": platform.release()}
    return {"torch": torch.__version__, "kernel": platform.release()}


def drive(directory: str | os.PathLike[str]) -> str:
    """The file system that `directory`, or the nearest of its parents that exists, is on: its mount point and device."""
    path = Path(directory).resolve()
    while not path.exists():
        path = path.parent
    number = path.stat().st_dev
    mount = path
    while mount != mount.parent and mount.parent.stat().st_dev == number:
        mount = mount.parent
    return f"{mount} ({os.major(number)}:{os.minor(number)})"


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(profile_path().read_text())
        if isinstance(found, dict) and found.get("format") == _FORMAT and isinstance(found.get("entries"), dict):
            return found
    return {"format": _FORMAT, "entries": {}}


def _key(part: str, where: str | os.PathLike[str] | None) -> str:
    if part not in PARTS:
        raise ValueError(f"no part {part!r} of a profile: {', '.join(PARTS)}")
    return part if where is None else f"{part} {drive(where)}"


def save(part: str, figures: dict[str, Any], *, where: str | os.PathLike[str] | None = None, now: datetime | None = None) -> Path:
    """Keeps a part's figures, replacing earlier ones of the same part (and drive, `where` being a directory on it). OSError: cannot be written."""
    path, whole = profile_path(), _read()
    whole["entries"][_key(part, where)] = {
        "date": (now or datetime.now(UTC)).isoformat(timespec="seconds"), "machine": machine(), "versions": versions(), "figures": figures
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".profile-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(whole, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def load(part: str, *, where: str | os.PathLike[str] | None = None, now: datetime | None = None) -> dict[str, Any] | None:
    """The figures of a part that were measured on this machine (and drive) in the last `DAYS_MOST` days, else None."""
    entry = _read()["entries"].get(_key(part, where))
    if not isinstance(entry, dict) or not isinstance(entry.get("figures"), dict) or entry.get("machine") != machine():
        return None
    try:
        age = (now or datetime.now(UTC)) - datetime.fromisoformat(str(entry.get("date")))
    except (ValueError, TypeError):
        return None
    return entry["figures"] if timedelta(days=-1) <= age <= timedelta(days=DAYS_MOST) else None
