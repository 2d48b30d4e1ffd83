"""Every form of the update against torch's fused AdamW, fp32 state and the machine's own in-place bandwidth, taking turns in one process.

    python bench/adam.py [--params 64] [--rounds 15] [--json] [--out bench/results/adam.json]

Bytes counted are those the algorithm needs: fp32 reads and writes parameter and moments and reads the gradient (28 B a
parameter); with bf16 gradients in and a bf16 copy out it is 24 + 2 + 2 B. A split master is 8 B and is its own copy; moments
in bf16 are 8 B, in int8 4 B and 16/256 for the scales. The ceiling scales one array in place (8 B), and so reads as much as
it writes; an array that is only read shows what reading alone can do.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import _result
from offload import _core, ops
from offload.observe.adam import adam_rates
from offload.observe.measure import rate, turns


def read_rate(n: int, rounds: int) -> float:
    """GB/s of reading one array of 4 n bytes, on all threads: sums of squares."""
    array = ops.empty(n).normal_()

    def call() -> float:
        start = time.perf_counter()
        ops.sumsq(array)
        return time.perf_counter() - start

    return rate(4 * n, turns({"read": call}, rounds)["read"])


def main() -> None:
    parser = _result.parser(__doc__)
    parser.add_argument("--params", type=int, default=64, help="Mi parameters; well over the last-level cache")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    n = given.params << 20
    torch.set_num_threads(_core.default_threads())
    figures: dict[str, Any] = {
        "parameters": n,
        "instruction_set": _core.simd_level(),
        "threads": _core.default_threads(),
        "read_gb_per_second": round(read_rate(n, given.rounds), 2),
        "rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in adam_rates(n, rounds=given.rounds)],
    }
    _result.finish(figures, given)
    if given.json:
        return
    for row in figures["rows"]:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    print(f"reading alone: {figures['read_gb_per_second']} GB/s")


if __name__ == "__main__":
    main()
