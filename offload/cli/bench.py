"""`offload bench`: this machine's links and kernels against their limits and peers; what is measured is kept as the machine's profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.cli.app import write
from offload.errors import ConfigError

PARTS = ("copy", "swap", "adam", "step")
MIB = 1 << 20
BLOCK, DEPTH = MIB, 32  # SwapFile's own
SWEEP = tuple((block, depth) for block in (MIB, 4 * MIB, MIB // 4) for depth in (32, 8, 64))
SECONDS_A_MEASUREMENT = 0.3
SWAP_SECONDS_MOST = 55.0
STEP_SECONDS_MOST = 60.0


@contextmanager
def _status(quiet: bool, text: str) -> Iterator[None]:
    """Says on a terminal what is being measured."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def measure_copy() -> dict[str, Any]:
    import torch

    from offload.observe.measure import copy_rates

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "sim: no GPU here, copies within this machine's memory"
    return {"device": device, "gb_per_second": copy_rates()}


def _against_fio(where: Path, nbytes: int, until: float) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, float]]:
    """GB/s of ours, ours with checksums and fio, in turns; ours over fio, and the share of time that checksums cost, by operation."""
    from offload.observe import measure, peers

    buffers = measure.random_buffers()
    ours = measure.SwapProbe(where / "ours", nbytes, block=BLOCK, queue_depth=DEPTH, checksum=False, buffers=buffers)
    summed = measure.SwapProbe(where / "ours", nbytes, block=BLOCK, queue_depth=DEPTH, checksum=True, buffers=buffers)
    rates: dict[str, dict[str, float]] = {"SwapFile": {}, "SwapFile with checksums": {}, "fio": {}}
    of_fio, cost = {}, {}
    has_fio = peers.fio_seconds(where / "fio", "write", nbytes, DEPTH, BLOCK) is not None
    try:
        summed.fill()
        for op in measure.SWAP_OPS:
            calls: dict[str, Callable[[], float]] = {"SwapFile": lambda op=op: ours.seconds(op)}  # type: ignore[misc]
            if has_fio:
                calls["fio"] = lambda op=op: peers.fio_seconds(where / "fio", op, nbytes, DEPTH, BLOCK) or float("nan")  # type: ignore[misc]
            calls["SwapFile with checksums"] = lambda op=op: summed.seconds(op)  # type: ignore[misc]
            taken = measure.turns(calls, 3 if time.monotonic() < until else 1)
            for name, times in taken.items():
                rates[name][op] = measure.rate(nbytes, times)
            cost[op] = 1 - measure.ratio(taken["SwapFile with checksums"], taken["SwapFile"])
            if has_fio:
                of_fio[op] = measure.ratio(taken["SwapFile"], taken["fio"])
    finally:
        ours.close()
        summed.close()
    return {name: row for name, row in rates.items() if row}, of_fio, cost


def _baselines(where: Path, nbytes: int, until: float) -> dict[str, dict[str, float]]:
    """GB/s of what else a program may do: the file is `ours`, as the measurement before left it."""
    from offload.observe import peers

    ways: dict[str, Callable[[str], float | None]] = {
        "direct, one request at a time": lambda op: peers.plain_seconds(where / "ours", op, nbytes, direct=True),
        "buffered, one request at a time": lambda op: peers.plain_seconds(where / "ours", op, nbytes, direct=False),
        "aiofiles": lambda op: peers.aiofiles_seconds(where / "ours", op, nbytes),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        for op in ("read", "write"):
            seconds = way(op) if time.monotonic() < until else None
            if seconds is not None:
                rows.setdefault(name, {})[op] = nbytes / seconds / 1e9
    return rows


def measure_swap(directory: Path) -> dict[str, Any]:
    from offload.errors import OffloadError
    from offload.memory.swap import SwapFile
    from offload.observe import measure

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=directory) as made:
        where = Path(made)
        nbytes = measure.probe_bytes(where, SECONDS_A_MEASUREMENT)
        sweep = measure.swap_sweep(where, nbytes, SWEEP, start + SWAP_SECONDS_MOST * 0.3)
        rates, of_fio, cost = _against_fio(where, nbytes, start + SWAP_SECONDS_MOST * 0.6)
        until = start + SWAP_SECONDS_MOST
        if time.monotonic() < until:
            rates["SwapFile, engine threads"] = measure.swap_rates(where, nbytes, 1, engine="threads", block=BLOCK, queue_depth=DEPTH, checksum=False)
        rates |= _baselines(where, nbytes // 2 // measure.PIECE * measure.PIECE, until)
        try:
            with SwapFile(where / "described", MIB, delete=True) as file:
                described = {k: v for k, v in file.describe().items() if k in ("engine", "direct", "refusal", "checksum")}
        except OffloadError as error:
            described = {"refusal": str(error)}
    best = sweep[0]
    return {"directory": str(directory), "bytes": nbytes, "block": BLOCK, "depth": DEPTH, **described, "gb_per_second": rates, "of_fio": of_fio,
            "checksum_cost": cost, "sweep": sweep, "best": {"block": int(best["block"]), "depth": int(best["depth"])}}  # fmt: skip


def measure_adam() -> dict[str, Any]:
    from offload import _core
    from offload.observe import adam, measure, peers

    n = adam.adam_parameters()
    rows = adam.adam_rates(n)
    theirs = peers.deepspeed_adam_seconds(n)
    if theirs is not None:
        rows.append({"form": "DeepSpeedCPUAdam, fp32", "bytes_per_parameter": 28, "gb_per_second": measure.rate(28 * n, theirs),
                     "seconds_per_billion": sorted(theirs)[len(theirs) // 2] / n * 1e9})  # fmt: skip
    return {"parameters": n, "instruction_set": _core.simd_level(), "threads": _core.default_threads(), "rows": rows}


def measure_step(directory: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=directory) as made:
        command = [sys.executable, "-m", "offload.cli.bench_step", made]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_SECONDS_MOST)
        except subprocess.TimeoutExpired:
            return {"seconds": {}, "refused": {"step": f"not done within {STEP_SECONDS_MOST:.0f} s"}}
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            found: dict[str, Any] = json.loads(line[1:])
            return found
    return {"seconds": {}, "refused": {"step": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}}


def _figure(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _tables(result: dict[str, Any]) -> Iterator[Any]:
    from rich.table import Table

    def table(title: str, *columns: str) -> Any:
        made = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if i == 0 else "right")
        return made

    if "copy" in result:
        made = table(f"copy: {result['copy']['device']}", "", "GB/s")
        for name, value in result["copy"]["gb_per_second"].items():
            made.add_row(name, _figure(value, ".1f"))
        yield made
    if "swap" in result:
        yield from _swap_tables(result["swap"], table)
    if "adam" in result:
        adam = result["adam"]
        made = table(f"adam: {adam['parameters']:,} parameters, {adam['instruction_set']}, {adam['threads']} threads", "", "B a parameter", "GB/s",
                     "share of in-place", "times fp32 state", "s a billion")  # fmt: skip
        for row in adam["rows"]:
            figures = (row["gb_per_second"], row.get("share_of_in_place"), row.get("times_fp32_state"), row.get("seconds_per_billion"))
            made.add_row(row["form"], _figure(row["bytes_per_parameter"], ".4g"), *map(_figure, figures))
        yield made
    if "step" in result:
        step = result["step"]
        title = f"step: {step.get('parameters', 0):,} parameters, {step.get('tokens', 0)} tokens, {step.get('device', '')}"
        made = table(title, "", "s", "times as fast")
        plain = step["seconds"].get("plain torch")
        for name, value in step["seconds"].items():
            made.add_row(name, _figure(value, ".3f"), _figure(plain / value if plain else None))
        for name, why in step["refused"].items():
            made.add_row(name, why, "")
        yield made


def _swap_tables(swap: dict[str, Any], table: Callable[..., Any]) -> Iterator[Any]:
    road = "direct" if swap.get("direct") else f"not direct: {swap.get('refusal')}"
    title = f"swap: {swap['directory']}, {swap.get('engine')}, {road}, {swap['bytes'] // MIB} MiB, blocks of 1 MiB, depth {swap['depth']}, GB/s"
    made = table(title, "", "read", "write", "mixed")
    for name, row in swap["gb_per_second"].items():
        made.add_row(name, *(_figure(row.get(op)) for op in ("read", "write", "mixed")))
    if swap["of_fio"]:
        made.add_row("SwapFile over fio", *(_figure(swap["of_fio"].get(op)) for op in ("read", "write", "mixed")))
    made.add_row("cost of checksums", *(_figure(swap["checksum_cost"].get(op), ".1%") for op in ("read", "write", "mixed")))
    yield made
    best = swap["best"]
    title = f"swap sweep: best with blocks of {best['block'] // 1024} KiB, depth {best['depth']}, GB/s"
    made = table(title, "block KiB", "depth", "read", "write", "mixed")
    for row in swap["sweep"]:
        made.add_row(str(int(row["block"]) // 1024), str(int(row["depth"])), *(_figure(row[op]) for op in ("read", "write", "mixed")))
    yield made


def bench_command(what: str, path: str, as_json: bool) -> int:
    """Measures a part or all, prints tables (or JSON), and keeps the figures as the machine's profile."""
    from offload.memory.limits import check_environment
    from offload.observe import profile

    check_environment()
    if what not in (*PARTS, "all"):
        raise ConfigError(f"offload bench {what}: give one of {', '.join(PARTS)}, or all")
    directory = Path(path).resolve()
    if not os.path.isdir(directory):
        raise ConfigError(f"--path {path} is no directory; give one on the drive in question")
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "copy": measure_copy, "swap": lambda: measure_swap(directory), "adam": measure_adam, "step": lambda: measure_step(directory)
    }  # fmt: skip
    start = time.monotonic()
    result: dict[str, Any] = {"machine": profile.machine(), "versions": profile.versions()}
    for part in PARTS if what == "all" else (what,):
        with _status(as_json, f"measuring {part} ..."):
            result[part] = measures[part]()
        try:
            kept = profile.save(part, result[part], where=directory if part in ("swap", "step") else None)
        except OSError as error:
            print(f"the machine's profile cannot be written: {error}", file=sys.stderr)
        else:
            result["profile"] = str(kept)
    result["seconds"] = round(time.monotonic() - start, 1)
    if as_json:
        write(json.dumps(result, indent=1))
        return 0
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for made in _tables(result):
        console.print(made)
    console.print(f"measured in {result['seconds']} s" + (f", kept in {result['profile']}" if "profile" in result else ""), highlight=False)
    return 0
