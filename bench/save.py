"""What a checkpoint costs: seconds of `offload.save` against the time in which this drive writes as many bytes, and memory against budgets.

    .venv/bin/python bench/save.py [--layers 32] [--rounds 7] [--where DIR] [--only nvme] [--json] [--out bench/results/save.json]

A model of bare 2048 x 2048 layers with random masters and moments is saved in two ways: "run", as a run that keeps two checkpoints does from its
third save on, over the file of the one that was deleted last, and "new", to a new directory by `offload.save`. Each takes turns with probes of the
drive: reads, writes and both at once by a swap file, over what was written before. The bound is the bytes over the rate of writing. Where state
rests on NVMe, a save reads it from the same drive as well: the bound is then the most of read/R, written/W and (read + written)/X, X being the total
while reading and writing at once. Each save is set against the bound by the probes of its own round; ratios are medians.

Blocks that no file had before can be slower to write: a drive that was told that they are free ("discard") has to find room for them again, and is
busy with it for a while; so in the turns of "run" no file is deleted, as none is between a run's saves. Both ways are judged by the bound. What new
blocks cost is told beside it: "new, to plain" sets a save to a new file against the better of plain programs that write one as large, past the page
cache, and synchronise it: 8 MiB at a time, or 4 MiB by four threads into space that was reserved. Where a save reads as well, four more threads read
as much from another file meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import _result
import offload
from offload import _core
from offload.memory.limits import resident_bytes_max
from offload.observe import base, measure
from offload.train.checkpoints import Checkpoints

LIMIT = 1.10
WIDTH = 2048
PROBE = 1 << 30  # bytes
BLOCK = 8 << 20
PLAIN = (1, 4)  # threads of the plain programs
MIB = 1 << 20
FORMS = {
    "host": ("host", offload.Precision()),
    "nvme": ("nvme", offload.Precision()),
    "nvme, split and int8": ("nvme", offload.Precision(master="split", moments="int8")),
}
DEVICE = 256 * MIB


def trained(layers: int, place: str, precision: offload.Precision, where: Path) -> tuple[nn.Module, Any, int]:
    """A prepared model after one step with random gradients, its optimizer, and the bytes of its budgets."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    nbytes = 18 * WIDTH * WIDTH * layers
    host = nbytes + 128 * MIB if place == "host" else 256 * MIB
    tiers = offload.Tiers(device=DEVICE, host=host, nvme=[(str(where / "swap"), nbytes + 64 * MIB)])
    roles = dict.fromkeys(("parameter", "gradient", "optimizer"), place)
    offload.prepare(model, tiers, device="cpu", precision=precision, place=roles, batch=(1, 16))
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.empty(p.shape).normal_()
    optimizer.step()
    optimizer.zero_grad()
    offload.runtime(model).synchronize()
    _core.trim()  # gradients and weights that were made here, and freed
    return model, optimizer, DEVICE + host


def opened(path: Path, flags: int) -> int:
    """Past the page cache where that is to be had."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags & ~os.O_EXCL)  # it is made before it is refused


def plain_seconds(path: Path, nbytes: int, memory: memoryview, threads: int = 1, source: Path | None = None, read: int = 0) -> float:
    """A new file of so many bytes, past the page cache where that is to be had, until it is on the drive. Of several threads each has a write under
    way, into space that was reserved before; as many read `read` bytes of the file `source` meanwhile."""
    file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    other = opened(source, os.O_RDONLY) if source is not None else None
    block = BLOCK if threads == 1 else BLOCK // 2
    buffers = [memoryview(mmap.mmap(-1, block)) for _ in range(threads)]

    def write(at: int) -> None:
        os.pwrite(file, memory[at % len(memory) :][:block], at)

    def fetch(thread: int) -> None:
        for at in range(thread * block, read, threads * block):
            os.preadv(other, [buffers[thread]], at % PROBE)

    try:
        start = time.perf_counter()
        if threads > 1:
            os.posix_fallocate(file, 0, nbytes)
        with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(threads) as reading:
            fetched = [reading.submit(fetch, thread) for thread in range(threads)] if other is not None else []
            for _ in pool.map(write, range(0, nbytes, block)):
                pass
            for future in fetched:
                future.result()
        os.fsync(file)
        return time.perf_counter() - start
    finally:
        os.close(file)
        if other is not None:
            os.close(other)
        path.unlink()


def forget_peak() -> None:
    """The most that is resident counts from here."""
    Path("/proc/self/clear_refs").write_text("5")


def run_saves(where: Path, model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Saves as a run does that keeps two checkpoints, the next one at each call."""
    checkpoints, steps = Checkpoints(where / "run" / "checkpoints"), itertools.count(1)

    def save() -> None:
        step = next(steps)
        checkpoints.save(step, model, optimizer, None)
        checkpoints.retain(2, step, print, more=True)

    return save


def row(name: str, given: argparse.Namespace, where: Path, probe: measure.SwapProbe, memory: memoryview) -> dict[str, Any]:
    place, precision = FORMS[name]
    model, optimizer, budgets = trained(given.layers, place, precision, where)
    runtime, target, peaks = offload.runtime(model), where / "saved", []
    gc.collect()

    def timed(save: Callable[[], None]) -> float:
        if save is new:
            shutil.rmtree(target)
        forget_peak()
        start = time.perf_counter()
        save()
        seconds = time.perf_counter() - start
        peaks.append(resident_bytes_max() - base.base_bytes())
        return seconds

    def new() -> None:
        offload.save(target, model, optimizer)

    saves = {"new": new, "run": run_saves(where, model, optimizer)}
    try:
        before = runtime.stats()["moved_bytes"]["nvme_read"]
        new()
        written, read = sum(f.stat().st_size for f in target.iterdir()), runtime.stats()["moved_bytes"]["nvme_read"] - before
        for _ in range(3):
            saves["run"]()
        probes: dict[str, Callable[[], float]] = {op: partial(probe.seconds, op) for op in measure.SWAP_OPS}
        plain = {f"plain {n}": partial(plain_seconds, where / "plain", written, memory, n) for n in PLAIN}
        if read:
            plain = {"plain, reading": partial(plain_seconds, where / "plain", written, memory, PLAIN[-1], where / "probe", read)}
        taken = {
            "run": measure.turns(probes | {"run": partial(timed, saves["run"])}, given.rounds),
            "new": measure.turns(probes | plain | {"new": partial(timed, saves["new"])}, given.rounds),
        }
    finally:
        runtime.close()
        for left in (target, where / "run"):
            shutil.rmtree(left, ignore_errors=True)
    bounds = {way: [bound_seconds({op: t[op][i] for op in probes}, read, written) for i in range(given.rounds)] for way, t in taken.items()}
    programs = [min(times) for times in zip(*(taken["new"][name] for name in plain), strict=True)]
    ratios = {way: 1 / measure.ratio(t[way], bounds[way]) for way, t in taken.items()}
    ratios["new, to plain"] = 1 / measure.ratio(taken["new"]["new"], programs)
    return {
        "seconds": {name: statistics.median(t[name]) for t in taken.values() for name in t if name not in probes},
        "bound_seconds": {way: statistics.median(seconds) for way, seconds in bounds.items()}, "ratio": ratios,
        "bytes_written": written, "bytes_read": read,
        "gb_per_second": {way: {op: measure.rate(PROBE, t[op]) for op in probes} for way, t in taken.items()},
        "rounds": taken, "resident_beside_base": max(peaks), "budgets": budgets, "within_budgets": max(peaks) <= budgets,
        "within_bound": {way: ratios[way] <= LIMIT for way in saves},
    }  # fmt: skip


def bound_seconds(seconds: dict[str, float], read: int, written: int) -> float:
    """By what the probes of one round took."""
    return max(written * seconds["write"], read * seconds["read"], (read + written) * seconds["mixed"] if read else 0.0) / PROBE


def main() -> None:
    parser = _result.parser(__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of 4.2 M parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--where", type=Path, default=Path("/var/tmp"), help="a directory on the drive")
    parser.add_argument("--only", choices=list(FORMS))
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=given.where) as scratch:
        where = Path(scratch)
        probe = measure.SwapProbe(where / "probe", PROBE, delete=True)
        memory = memoryview(mmap.mmap(-1, 16 * BLOCK))
        memory[:] = torch.randint(0, 256, (len(memory),), dtype=torch.uint8).numpy().data
        probe.fill()
        base.measure(lambda: toy(where))
        try:
            for name in [given.only] if given.only else list(FORMS):
                rows[name] = row(name, given, where, probe, memory)
        finally:
            probe.close()
    _result.finish({"layers": given.layers, "limit": LIMIT, "forms": rows}, given)
    if not given.json:
        for name, r in rows.items():
            ways = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in r["seconds"].items())
            bounds = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in r["bound_seconds"].items())
            ratios = ", ".join(f"{way} {ratio:.3f}" for way, ratio in r["ratio"].items())
            print(f"{name}: {r['bytes_written'] / 1e9:.2f} GB; bound: {bounds}; taken: {ways}; ratios: {ratios}; "
                  f"{r['resident_beside_base'] / MIB:.0f} of {r['budgets'] / MIB:.0f} MiB")  # fmt: skip
            for way, rates in r["gb_per_second"].items():
                print(f"   beside {way}: " + ", ".join(f"{op} {rate:.2f}" for op, rate in rates.items()) + " GB/s")
    short = [name for name, r in rows.items() if not (all(r["within_bound"].values()) and r["within_budgets"])]
    if short:
        raise SystemExit(f"over {LIMIT} times the bound, or over budgets: {', '.join(short)}")


def toy(where: Path) -> None:
    """What a save imports and keeps is part of the base."""
    model, optimizer, _ = trained(2, "nvme", offload.Precision(), where)
    offload.save(where / "toy", model, optimizer)
    offload.runtime(model).close()
    shutil.rmtree(where / "toy")


if __name__ == "__main__":
    main()
