"""What others reach on the same machine: fio, aiofiles, plain reads and writes, DeepSpeed's CPU-Adam. Where one is missing, so is its figure."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from offload.observe.measure import evict

MIB = 1 << 20
_FIO_OPS = {"read": "read", "write": "write", "mixed": "rw"}
_AIO_TASKS = 4


def fio_seconds(path: Path, op: str, nbytes: int, depth: int, block: int, *more: str, limit: float = 60) -> float | None:
    """Seconds fio needs to move `nbytes` by io_uring, or by libaio where that is forbidden, told `more`; None without fio, or past `limit`."""
    if shutil.which("fio") is None:
        return None
    for engine in ("io_uring", "libaio"):
        command = ["fio", "--name=x", f"--filename={path}", f"--size={nbytes}", f"--bs={block}", f"--rw={_FIO_OPS[op]}", "--direct=1",
                   f"--ioengine={engine}", f"--iodepth={depth}", "--output-format=json", *more]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
            job = json.loads(done.stdout)["jobs"][0]
            return nbytes / float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])
        except (subprocess.SubprocessError, ValueError, KeyError, ZeroDivisionError):
            continue
    return None


def plain_seconds(path: Path, op: str, nbytes: int, direct: bool) -> float | None:
    """One request of 1 MiB after the other, through the page cache (writes until they are on the disk) or past it; None where that is refused."""
    buffer = mmap.mmap(-1, MIB)
    torch.frombuffer(buffer, dtype=torch.uint8).random_(0, 255)
    evict(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
    except OSError:
        return None
    try:
        start = time.perf_counter()
        for offset in range(0, nbytes, MIB):
            moved = os.preadv(descriptor, [buffer], offset) if op == "read" else os.pwritev(descriptor, [buffer], offset)
            if moved != MIB:
                return None
        if op == "write":
            os.fdatasync(descriptor)
        return time.perf_counter() - start
    except OSError:
        return None
    finally:
        os.close(descriptor)


def aiofiles_seconds(path: Path, op: str, nbytes: int) -> float:
    """Four tasks with a file handle and a quarter of the file each, 1 MiB at a time; writes until they are on the disk."""
    import aiofiles  # type: ignore[import-untyped]

    data = bytes(torch.randint(0, 256, (MIB,), dtype=torch.uint8).numpy())

    async def part(first: int, stop: int) -> None:
        async with aiofiles.open(path, "rb" if op == "read" else "r+b") as file:
            await file.seek(first)
            for _ in range(first, stop, MIB):
                await (file.read(MIB) if op == "read" else file.write(data))

    async def whole() -> None:
        quarter = -(-nbytes // _AIO_TASKS // MIB) * MIB
        await asyncio.gather(*(part(i, min(i + quarter, nbytes)) for i in range(0, nbytes, quarter)))

    evict(path)
    start = time.perf_counter()
    asyncio.run(whole())
    if op == "write":
        evict(path)
    return time.perf_counter() - start


_DEEPSPEED = """
import sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
n = int(sys.argv[1])
p = torch.nn.Parameter(torch.randn(n)); p.grad = torch.randn(n)
o = DeepSpeedCPUAdam([p], lr=1e-3)
for i in range(9):
    t = time.perf_counter(); o.step()
    if i > 1: print('@', time.perf_counter() - t, flush=True)
"""


def deepspeed_adam_seconds(n: int, limit: float = 30) -> list[float] | None:
    """Seconds of DeepSpeedCPUAdam steps on `n` fp32 parameters; None where it is not importable, or not built within `limit` seconds."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    environment: dict[str, Any] = {**os.environ, "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run([sys.executable, "-c", _DEEPSPEED, str(n)], capture_output=True, text=True, timeout=limit, env=environment, check=True)
    except subprocess.SubprocessError:
        return None
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("@")] or None
