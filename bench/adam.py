"""CPU-Adam against torch's fused AdamW and the machine's own in-place bandwidth, taking turns in one process.

    python bench/adam.py [--params 64] [--pairs 15] [--threads N] [--json]

Bytes counted are those the algorithm needs: fp32 reads and writes parameter and moments and reads the gradient (28 B a
parameter); with bf16 gradients in and a bf16 copy out it is 24 + 2 + 2 B. The ceiling scales one array in place (8 B).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from offload import _core, ops

BYTES = {"ceiling": 8, "fp32": 28, "bf16": 28, "torch fused": 28}


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
    given = parser.parse_args()
    n = given.params << 20
    torch.set_num_threads(given.threads)
    seconds = measure(contenders(n, given.threads), given.pairs)
    rates = {name: [BYTES[name] * n / t / 1e9 for t in times] for name, times in seconds.items()}

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))

    result = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, {_core.simd_level()}, {given.threads} threads",
        "torch": torch.__version__,
        "parameters": n,
        "gb_per_second": {name: round(statistics.median(rate), 1) for name, rate in rates.items()},
        "fp32_over_torch_fused": round(ratio("fp32", "torch fused"), 3),
        "fp32_share_of_ceiling": round(ratio("fp32", "ceiling"), 3),
        "bf16_share_of_ceiling": round(ratio("bf16", "ceiling"), 3),
    }
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
