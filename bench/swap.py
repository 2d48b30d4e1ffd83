"""Swap bandwidth of a directory: `SwapFile` against fio in turn, then the update pipeline, whose reads and writes share the disk.

    python bench/swap.py [--path DIR] [--size 2GiB] [--pairs 5] [--json] [--out bench/results/swap.json]

Random data, direct I/O, equal block and depth; medians of rounds, the first a warm-up. fio is taken as it is and with its buffers and files
registered; `SwapFile` as it is, with its memory registered, and with checksums. Needs free space of three times the size.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import _result
from offload import _core, ops
from offload.config import parse_size
from offload.memory.swap import SwapSpace
from offload.observe import measure, peers

PIECE = 64 << 20
IN_FLIGHT = 4
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "grad_scale": 1.0, "step": 1, "active": 1, "decoupled": 1}


def fio_seconds(path: Path, op: str, size: int, depth: int, block: int, registered: bool = False) -> float:
    """Seconds fio needs to move `size` bytes."""
    more = ("--fixedbufs=1", "--registerfiles=1") if registered else ()
    seconds = peers.fio_seconds(path, op, size, depth, block, *more, limit=3600)
    if seconds is None:
        raise SystemExit(f"error: fio cannot {op} {path}")
    return seconds


def our_swap(path: Path, size: int, args: argparse.Namespace, buffers: list[torch.Tensor], checksum: bool, registered: bool) -> measure.SwapProbe:
    """The same work by `SwapFile`: pieces of 64 MiB, four in flight."""
    settings = {"engine": args.engine, "queue_depth": args.depth, "block": parse_size(args.block), "checksum": checksum}
    probe = measure.SwapProbe(path, size, buffers=buffers, in_flight=IN_FLIGHT, **settings)
    if registered:
        for buffer in buffers:
            probe.file.register(buffer)
    probe.fill()
    return probe


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


def bench_swap(where: Path, args: argparse.Namespace, size: int, block: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    buffers = [ops.empty(PIECE, torch.uint8).random_(0, 255) for _ in range(8)]
    ours = {
        "SwapFile": our_swap(where / "ours", size, args, buffers, checksum=False, registered=False),
        "registered": our_swap(where / "ours", size, args, buffers, checksum=False, registered=True),
        "checksums": our_swap(where / "ours", size, args, buffers, checksum=True, registered=False),
    }
    fio_seconds(where / "fio", "write", size, args.depth, block)
    for op in measure.SWAP_OPS:
        calls: dict[str, Callable[[], float]] = {name: lambda swap=swap, op=op: swap.seconds(op) for name, swap in ours.items()}  # type: ignore[misc]
        for name, registered in {"fio": False, "fio registered": True}.items():
            calls[name] = lambda op=op, registered=registered: fio_seconds(where / "fio", op, size, args.depth, block, registered)  # type: ignore[misc]
        taken = measure.turns(calls, args.pairs)
        rates = {name: measure.rate(size, seconds) for name, seconds in taken.items()}
        row: dict[str, object] = {"what": f"swap {op}", "gb_per_second": rates["SwapFile"],
                                  "fio_gb_per_second": rates["fio"], "ratio": measure.ratio(taken["SwapFile"], taken["fio"]),
                                  "fio_registered_gb_per_second": rates["fio registered"],
                                  "over_fio_registered": measure.ratio(taken["SwapFile"], taken["fio registered"]),
                                  "registered_over_plain": measure.ratio(taken["registered"], taken["SwapFile"]),
                                  "checksum_cost": 1 - measure.ratio(taken["checksums"], taken["SwapFile"])}  # fmt: skip
        rows.append(row)
        report(row, args.json)
    rows.append({"what": "counters of SwapFile", **ours["SwapFile"].file.counters()})
    for swap in ours.values():
        swap.close()
    return rows


def bench_pipeline(where: Path, args: argparse.Namespace, size: int, block: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for frames in args.frames:
        for group in sorted({1, max(1, frames // 4), max(1, frames // 2), *args.groups}):
            ours = OurPipeline(where, size, args.engine, args.depth, block, frames, group, parse_size(args.frame))

            def fio(moved: int = ours.size) -> float:
                return sum(fio_seconds(where / "fio", op, moved // (1 << 20) << 20, args.depth, block) for op in ("read", "write"))

            taken = measure.turns({"ours": ours.seconds, "fio": fio}, args.pairs)
            stats = {key: round(value, 3) for key, value in ours.stats.items() if not key.startswith("bytes")}
            rows.append({"what": f"pipeline, {frames} frames, groups of {group}", "gb_per_second": measure.rate(2 * ours.size, taken["ours"]),
                         "fio_gb_per_second": measure.rate(2 * ours.size, taken["fio"]), "ratio": measure.ratio(taken["ours"], taken["fio"]),
                         **stats})  # fmt: skip
            report(rows[-1], args.json)
            ours.close()
    return rows


def report(row: dict[str, Any], as_json: bool) -> None:
    rest = {k: round(v, 3) for k, v in row.items() if k not in ("what", "gb_per_second", "fio_gb_per_second", "ratio")}
    text = f"{row['what']}: {row['gb_per_second']:.2f} GB/s, fio {row['fio_gb_per_second']:.2f}, ratio {row['ratio']:.3f} {rest or ''}"
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def main() -> None:
    parser = _result.parser(__doc__)
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
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("error: fio is what this compares with; install it")
    size, block = parse_size(args.size) // PIECE * PIECE, parse_size(args.block)
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=args.path) as directory:
        rows = [] if args.only == "pipeline" else bench_swap(Path(directory), args, size, block)
        rows += [] if args.only == "swap" else bench_pipeline(Path(directory), args, size, block)
    figures = {"engine": args.engine, "depth": args.depth, "block": block, "size": size, "rows": rows}
    _result.finish(figures, args)


if __name__ == "__main__":
    main()
