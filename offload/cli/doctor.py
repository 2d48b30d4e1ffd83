"""`offload doctor`: what this machine has, what is degraded, and how to mend it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.cli.app import emit
from offload.config import format_size
from offload.errors import ConfigError, OffloadError


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and how to mend it where it is degraded (empty: fine)."""

    name: str
    found: str
    mend: str = ""


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _software() -> Iterator[Finding]:
    import torch

    yield Finding("python", platform.python_version())
    yield Finding("torch", torch.__version__)
    if torch.cuda.is_available():
        yield Finding("device", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    else:
        yield Finding("device", "cpu (torch finds no CUDA device)")
    for package, extra in {"transformers": "hf", "accelerate": "hf", "matplotlib": "report", "jinja2": "report"}.items():
        version = _package(package)
        yield Finding(package, version or "missing", "" if version else f"pip install 'offload[{extra}]'")


def _processor() -> Iterator[Finding]:
    import torch

    from offload import _core

    level = _core.simd_level()
    levels = ", ".join(_core.simd_levels())
    mend = "" if level in ("avx512", "neon") else f"this CPU or OFFLOAD_SIMD allows {levels}; the optimizer is slower without avx512 or neon"
    yield Finding("instruction set", level, mend)
    threads = _core.default_threads()
    cores = len(os.sched_getaffinity(0))
    yield Finding("threads of the optimizer", str(threads), "" if threads > 1 or cores == 1 else "OFFLOAD_THREADS or a cpu quota allows one thread")
    own = torch.get_num_threads()
    yield Finding("threads of torch", str(own), "OMP_NUM_THREADS=1 makes compute slow; unset it" if own == 1 and cores > 1 else "")


def _memory() -> Iterator[Finding]:
    from offload.memory.limits import host_limits

    limits = host_limits()
    yield Finding("memory", f"{format_size(limits.total)}, {format_size(limits.available)} available")
    if limits.cgroup is not None:
        yield Finding("memory limit of the container", format_size(limits.cgroup))
    locked = "unlimited" if limits.locked is None else format_size(limits.locked)
    mend = "" if limits.locked is None or limits.locked >= limits.total // 2 else "raise ulimit -l: host memory for a GPU is locked"
    yield Finding("memory that may be locked", locked, mend)
    with contextlib.suppress(OSError):
        huge = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        chosen = huge.partition("[")[2].partition("]")[0]
        command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", chosen, f"slower updates; as root: {command}" if chosen == "never" else "")


def _disk(directory: Path) -> Iterator[Finding]:
    from offload.memory.swap import SwapFile

    yield Finding("free disk", f"{format_size(shutil.disk_usage(directory).free)} at {directory}")
    try:
        scratch = tempfile.mkdtemp(prefix="offload-doctor-", dir=directory)
    except OSError as error:
        yield Finding("swap files", f"cannot be written at {directory}: {error.strerror}", "give --path a directory that can be written")
        return
    try:
        with SwapFile(Path(scratch) / "probe", "1MiB", delete=True) as file:
            found = file.describe()
        engine = str(found["engine"])
        mend = "install liburing-dev, rebuild, and allow io_uring in the container" if engine != "io_uring" and "OFFLOAD_IO" not in os.environ else ""
        yield Finding("I/O engine", engine, mend)
        yield Finding(
            "direct I/O", "yes" if found["direct"] else f"no: {found['refusal']}", "" if found["direct"] else "use a directory on ext4 or xfs"
        )
    except OffloadError as error:
        yield Finding("swap files", str(error), "see the message")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _text(result: dict[str, Any]) -> str:
    findings = result["findings"]
    width = max(len(f["name"]) for f in findings)
    lines = [f"{'degraded' if f['mend'] else 'ok':8}  {f['name']:{width}}  {f['found']}{'  -> ' + f['mend'] if f['mend'] else ''}" for f in findings]
    return "\n".join(lines)


def doctor_command(path: str, as_json: bool) -> int:
    """Prints the findings; 0 also where something is degraded, as everything works without it."""
    from offload.memory.limits import check_environment

    check_environment()
    directory = Path(path).resolve()
    if not os.path.isdir(directory):
        raise ConfigError(f"--path {path} is no directory; give one on the drive in question")
    findings = [*_software(), *_processor(), *_memory(), *_disk(directory)]
    emit({"findings": [asdict(f) for f in findings], "degraded": [f.name for f in findings if f.mend]}, as_json, _text)
    return 0
