"""CPU-Adam, every form, against torch's fused AdamW and the machine's own in-place bandwidth, taking turns in one process.

    python bench/adam.py [--params 64] [--pairs 15] [--threads N] [--json] [--out bench/results/adam.json]

Bytes counted are those the algorithm needs: fp32 reads and writes parameter and moments and reads the gradient (28 B a
parameter); with bf16 gradients in and a bf16 copy out it is 24 + 2 + 2 B. A split master is 8 B and is its own copy, moments
in bf16 are 8 B, in int8 4 B and 2/128 for the scales; all of these have bf16 gradients. The ceiling scales one array in
place (8 B).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload import _core, ops

BYTES = {"ceiling": 8, "fp32": 28, "bf16": 28, "torch fused": 28}
# (rule, master, moments) of the other forms
FORMS = {
    "bf16 moments": ("adam", "fp32", "bf16"),
    "int8 moments": ("adam", "fp32", "int8"),
    "split": ("adam", "split", "fp32"),
    "split, bf16 moments": ("adam", "split", "bf16"),
    "split, int8 moments": ("adam", "split", "int8"),
    "lion": ("lion", "fp32", "fp32"),
    "lion, split, int8 moments": ("lion", "split", "int8"),
    "adagrad": ("adagrad", "fp32", "fp32"),
    "adagrad, split, int8 moments": ("adagrad", "split", "int8"),
}


def form_bytes(rule: str, master: str, moments: str) -> float:
    """Read and written for a parameter."""
    moment = {"fp32": 8, "bf16": 4, "int8": 2 + 8 / ops.GROUP}[moments]
    return {"fp32": 8 + 2, "split": 8}[master] + 2 + moment * (2 if rule == "adam" else 1)


def contenders(n: int, threads: int) -> dict[str, Callable[[], object]]:
    """One step each of n parameters: ours on memory of ours, torch's on memory of torch's."""
    torch.manual_seed(0)
    master, exp_avg, exp_avg_sq, grad, scaled = (ops.empty(n, torch.float32) for _ in range(5))
    for tensor in (master, grad, scaled):
        tensor.normal_()
    exp_avg.normal_(std=1e-3)
    exp_avg_sq.fill_(1e-6)
    grad_bf16, out = ops.empty(n, torch.bfloat16), ops.empty(n, torch.bfloat16)
    grad_bf16.copy_(grad)
    out.zero_()
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = torch.randn(n)
    peer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, fused=True)
    options = {"step": 10, "lr": 1e-3, "weight_decay": 0.01, "threads": threads}
    return {
        "ceiling": lambda: scaled.mul_(0.999),
        "fp32": lambda: ops.adamw_(master, grad, exp_avg, exp_avg_sq, **options),
        "bf16": lambda: ops.adamw_(master, grad_bf16, exp_avg, exp_avg_sq, out=out, **options),
        "torch fused": peer.step,
    }


def form_step(rule: str, master: str, moments: str, n: int, threads: int, grad: torch.Tensor) -> Callable[[], object]:
    """One step of n parameters of a form, with bf16 gradients; an fp32 master has a bf16 copy."""
    whole, state = torch.randn(n), ops.moments(n, moments, rule)
    weight = ops.empty(n, torch.bfloat16 if master == "split" else torch.float32)
    if master == "split":
        state["low"] = ops.empty(n, torch.int16)
        ops.split_(weight, state["low"], whole)
    else:
        weight.copy_(whole)
        state["out"] = ops.empty(n, torch.bfloat16).zero_()
    del whole
    hyper = ops.hyper_record(rule=rule, step=10, lr=1e-3, weight_decay=0.01, seed=1)

    def step() -> object:
        hyper["step"] += 1
        return ops.update_(weight, grad, hyper, threads=threads, **state)

    for _ in range(3):
        step()  # moments as training leaves them
    return step


def measure_forms(n: int, threads: int, pairs: int, calls: dict[str, Callable[[], object]], grad: torch.Tensor) -> dict[str, Any]:
    """Each form in turn beside the fp32 state with bf16 gradients, so that memory holds two at a time."""
    found: dict[str, Any] = {}
    for name, form in FORMS.items():
        seconds = measure({"ours": form_step(*form, n, threads, grad), "bf16": calls["bf16"]}, pairs)
        found[name] = {
            "bytes": form_bytes(*form),
            "gb_per_second": round(form_bytes(*form) * n / statistics.median(seconds["ours"]) / 1e9, 1),
            "ns_per_parameter": round(statistics.median(seconds["ours"]) / n * 1e9, 4),
            "times_fp32_state": round(statistics.median(b / a for a, b in zip(seconds["ours"], seconds["bf16"], strict=True)), 3),
        }
    return found


def git_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(calls: dict[str, Callable[[], object]], pairs: int) -> dict[str, list[float]]:
    """Seconds of each call, `pairs` rounds after two that warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(pairs + 2):
        for name, call in calls.items():
            time.sleep(0.02)  # OpenMP's threads spin for some milliseconds after their work
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[2:] for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=64, help="Mi parameters; well over the last-level cache")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=_core.default_threads())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result")
    given = parser.parse_args()
    n = given.params << 20
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    calls = contenders(n, given.threads)
    seconds = measure(calls, given.pairs)
    grad = ops.empty(n, torch.bfloat16).copy_(torch.randn(n))
    rates = {name: [BYTES[name] * n / t / 1e9 for t in times] for name, times in seconds.items()}

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))

    result = {
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs, {_core.simd_level()}, {given.threads} threads",
        "load_before": round(load, 2),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()},
        "commit": git_commit(),
        "command": f"python bench/adam.py {' '.join(sys.argv[1:])}".strip(),
        "parameters": n,
        "gb_per_second": {name: round(statistics.median(rate), 1) for name, rate in rates.items()},
        "fp32_over_torch_fused": round(ratio("fp32", "torch fused"), 3),
        "fp32_share_of_ceiling": round(ratio("fp32", "ceiling"), 3),
        "bf16_share_of_ceiling": round(ratio("bf16", "ceiling"), 3),
        "forms": measure_forms(n, given.threads, given.pairs, calls, grad),
    }
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
