"""Swap bandwidth of a directory: `SwapFile` against fio in turn, then the update pipeline, whose reads and writes share the disk.

    python bench/swap.py [--path DIR] [--size 2GiB] [--pairs 5] [--json] [--out bench/results/swap.json]

Random data, direct I/O, equal block and depth; medians of rounds, the first a warm-up. fio is taken as it is and with its buffers and files
registered; `SwapFile` as it is, with its memory registered, and with checksums. Needs free space of three times the size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import _result
from offload import _core, ops
from offload.config import parse_size
from offload.memory.swap import SwapFile, SwapSpace

PIECE = 64 << 20
IN_FLIGHT = 4
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "grad_scale": 1.0, "step": 1, "active": 1, "decoupled": 1}
FIO_OPS = {"read": "read", "write": "write", "mixed": "rw"}


def fio_seconds(path: Path, op: str, size: int, depth: int, block: int, registered: bool = False) -> float:
    """Seconds fio needs to move `size` bytes."""
    command = ["fio", "--name=x", f"--filename={path}", f"--size={size}", f"--bs={block}", f"--rw={FIO_OPS[op]}", "--direct=1",
               "--ioengine=io_uring", f"--iodepth={depth}", "--output-format=json",
               *(["--fixedbufs=1", "--registerfiles=1"] if registered else [])]  # fmt: skip
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"][0]
    return size / float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


class OurSwap:
    """The same work by `SwapFile`: pieces of 64 MiB, four in flight; mixed alternates them."""

    def __init__(self, path: Path, size: int, args: argparse.Namespace, buffers: list[torch.Tensor], checksum: bool, registered: bool) -> None:
        self.size, self.buffers = size, buffers
        self.file = SwapFile(path, size, engine=args.engine, queue_depth=args.depth, block=parse_size(args.block), checksum=checksum)
        if registered:
            for buffer in buffers:
                self.file.register(buffer)
        self.seconds("write")  # the same bytes at the same place, whichever of the contenders for the file writes them

    def seconds(self, op: str) -> float:
        start = time.perf_counter()
        pending: deque[Any] = deque()
        for i, offset in enumerate(range(0, self.size, PIECE)):
            if len(pending) >= IN_FLIGHT:
                pending.popleft().wait()
            move = self.file.read if op == "read" or (op == "mixed" and i % 2) else self.file.write
            pending.append(move(offset, self.buffers[i % len(self.buffers)]))
        while pending:
            pending.popleft().wait()
        return time.perf_counter() - start


class OurPipeline:
    """AdamW states of `size` bytes (12 a parameter) streamed through frames: every byte is read, updated and written back."""

    def __init__(self, directory: Path, size: int, engine: str, depth: int, block: int, frames: int, group: int, frame_bytes: int = 24 << 20) -> None:
        n = frame_bytes // 12
        count = size // frame_bytes
        self.size = count * frame_bytes
        self.space = SwapSpace([(directory, self.size)], engine=engine, queue_depth=depth, block=block)
        extents = [self.space.allocate(frame_bytes) for _ in range(count)]
        self.space.open()
        self.memory = ops.empty(frames * frame_bytes // 4, torch.float32)
        self.memory.uniform_(0.5, 1.0)
        for extent in extents:
            self.space.write(extent, 0, self.memory.data_ptr(), frame_bytes).wait()
        self.grad, self.out = (ops.empty(n, torch.bfloat16) for _ in range(2))
        self.grad.normal_()
        self.pipeline = _core.Pipeline([self.memory.data_ptr() + i * frame_bytes for i in range(frames)], frame_bytes, 0, group)
        arrays = [(0, n, (1, 0), (0, self.grad.data_ptr()), (1, 4 * n), (1, 8 * n), (0, self.out.data_ptr()))]
        moves = [[(self.space.native(e.file), e.offset, 0, frame_bytes)] for e in extents]
        self.jobs = [self.pipeline.add_job(move, arrays, move, 1, 1) for move in moves]
        self.hyper = np.zeros(1, ops.HYPER)
        for key, value in HYPER.items():
            self.hyper[key] = value
        self.stats: dict[str, float] = {}

    def seconds(self) -> float:
        start = time.perf_counter()
        batch = self.pipeline.submit(self.jobs, self.hyper)
        batch.wait()
        self.stats = batch.stats()
        return time.perf_counter() - start

    def close(self) -> None:
        self.space.close()


def pairs(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> tuple[float, float, float]:
    """Median seconds of ours and theirs, and the median of theirs / ours by pair, after one pair of warm-up."""
    timed = [(ours(), theirs()) for _ in range(count + 1)][1:]
    return statistics.median(o for o, _ in timed), statistics.median(t for _, t in timed), statistics.median(t / o for o, t in timed)


def bench_swap(where: Path, args: argparse.Namespace, size: int, block: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    buffers = [ops.empty(PIECE, torch.uint8).random_(0, 255) for _ in range(8)]
    ours = {
        "SwapFile": OurSwap(where / "ours", size, args, buffers, checksum=False, registered=False),
        "registered": OurSwap(where / "ours", size, args, buffers, checksum=False, registered=True),
        "checksums": OurSwap(where / "ours", size, args, buffers, checksum=True, registered=False),
    }
    fio_seconds(where / "fio", "write", size, args.depth, block)
    for op in FIO_OPS:
        calls: dict[str, Callable[[], float]] = {name: lambda swap=swap, op=op: swap.seconds(op) for name, swap in ours.items()}  # type: ignore[misc]
        for name, registered in {"fio": False, "fio registered": True}.items():
            calls[name] = lambda op=op, registered=registered: fio_seconds(where / "fio", op, size, args.depth, block, registered)  # type: ignore[misc]
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.pairs + 1):
            for name, call in calls.items():
                taken[name].append(call())
        times = {name: seconds[1:] for name, seconds in taken.items()}

        def ratio(a: str, b: str, times: dict[str, list[float]] = times) -> float:
            return statistics.median(y / x for x, y in zip(times[a], times[b], strict=True))

        row: dict[str, object] = {"what": f"swap {op}", "gb_per_second": size / statistics.median(times["SwapFile"]) / 1e9,
                                  "fio_gb_per_second": size / statistics.median(times["fio"]) / 1e9, "ratio": ratio("SwapFile", "fio"),
                                  "fio_registered_gb_per_second": size / statistics.median(times["fio registered"]) / 1e9,
                                  "over_fio_registered": ratio("SwapFile", "fio registered"),
                                  "registered_over_plain": ratio("registered", "SwapFile"),
                                  "checksum_cost": 1 - ratio("checksums", "SwapFile")}  # fmt: skip
        rows.append(row)
        report(row, args.json)
    rows.append({"what": "counters of SwapFile", **ours["SwapFile"].file.counters()})
    for swap in ours.values():
        swap.file.close()
    return rows


def bench_pipeline(where: Path, args: argparse.Namespace, size: int, block: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for frames in args.frames:
        for group in sorted({1, max(1, frames // 4), max(1, frames // 2), *args.groups}):
            ours = OurPipeline(where, size, args.engine, args.depth, block, frames, group, parse_size(args.frame))

            def fio(moved: int = ours.size) -> float:
                return sum(fio_seconds(where / "fio", op, moved // (1 << 20) << 20, args.depth, block) for op in ("read", "write"))

            o, t, ratio = pairs(ours.seconds, fio, args.pairs)
            stats = {key: round(value, 3) for key, value in ours.stats.items() if not key.startswith("bytes")}
            rows.append({"what": f"pipeline, {frames} frames, groups of {group}", "gb_per_second": 2 * ours.size / o / 1e9,
                         "fio_gb_per_second": 2 * ours.size / t / 1e9, "ratio": ratio, **stats})  # fmt: skip
            report(rows[-1], args.json)
            ours.close()
    return rows


def report(row: dict[str, Any], as_json: bool) -> None:
    rest = {k: round(v, 3) for k, v in row.items() if k not in ("what", "gb_per_second", "fio_gb_per_second", "ratio")}
    text = f"{row['what']}: {row['gb_per_second']:.2f} GB/s, fio {row['fio_gb_per_second']:.2f}, ratio {row['ratio']:.3f} {rest or ''}"
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="/var/tmp", help="a directory on the drive to measure")
    parser.add_argument("--size", default="2GiB", help="bytes moved in one measurement")
    parser.add_argument("--engine", default="auto", choices=("auto", "io_uring", "threads"))
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--block", default="1MiB")
    parser.add_argument("--frame", default="24MiB", help="bytes of a pipeline frame")
    parser.add_argument("--frames", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--groups", type=int, nargs="*", default=[])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=("swap", "pipeline"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result, with the machine, versions, commit and command")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("error: fio is what this compares with; install it")
    size, block = parse_size(args.size) // PIECE * PIECE, parse_size(args.block)
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=args.path) as directory:
        rows = [] if args.only == "pipeline" else bench_swap(Path(directory), args, size, block)
        rows += [] if args.only == "swap" else bench_pipeline(Path(directory), args, size, block)
    figures = {"engine": args.engine, "depth": args.depth, "block": block, "size": size, "rows": rows}
    result = _result.save(figures, args.out) if args.out else figures
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
