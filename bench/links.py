"""Steps on `sim` whose links take 0.5, 1 and 2 times as long as compute, against what perfect overlap would make of them.

    python bench/links.py [--rounds 5] [--steps 3] [--ratios 0.5 1 2] [--json] [--out bench/results/links.json]

All state rests in the host. The bound is max(forward + Adam, link of the forward) + max(backward, link of the backward): forward and backward are
plain torch's on the same weights and batch, and Adam is the update alone on the same cores, all timed in turn with the steps. Parameters go over a
link once in each pass, gradients over the other in backward; a link's speed is what it does alone, which is its set bandwidth less the copying that
stands for it here. Compute leaves one core to the threads that play copy engines: a device's compute would take none from them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

import _llama
import _result
import offload
from offload import ops
from offload.memory.shard import Shard
from offload.observe.adam import form_of
from offload.planner.cost import Traffic, traffic_of
from offload.transfer.device import Copy, SimDevice

LIMIT = 1.10
TIERS = offload.Tiers("12GiB", "6GiB")  # what else this process holds, the plain model among it, counts against the device where it is RAM


class Plain:
    """Forward and backward in plain torch, in bf16."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.model, self.ids = _llama.build(sizes, "cpu", torch.bfloat16), _llama.batch(sizes)

    def seconds(self) -> tuple[float, float]:
        start = time.perf_counter()
        value = _llama.loss(self.model, self.ids)
        middle = time.perf_counter()
        value.backward()
        end = time.perf_counter()
        self.model.zero_grad()
        return middle - start, end - middle


def link_rate(device: SimDevice, nbytes: int) -> float:
    """Bytes a second of a link by itself."""
    shard = Shard("host", nbytes, memory=ops.empty(nbytes, torch.uint8).random_(0, 255))
    copy = Copy(ops.empty(nbytes, torch.uint8).zero_(), shard, 0, torch.uint8)

    def fetched() -> float:
        start = time.perf_counter()
        for transfer in [device.fetch([copy], None, lambda: None) for _ in range(4)]:
            transfer.wait()
        return time.perf_counter() - start

    return 4 * nbytes / statistics.median(fetched() for _ in range(4))


class Linked:
    """A run on `sim` whose links need `ratio` times `compute` seconds for what a step fetches."""

    def __init__(self, sizes: dict[str, int], ratio: float, compute: float, moved: Traffic) -> None:
        bandwidth = moved.h2d / (ratio * compute) if ratio else math.inf
        device = SimDevice(h2d=bandwidth, d2h=bandwidth)
        rate = link_rate(device, moved.h2d // 2 // sizes["blocks"])
        self.link = {"forward": moved.h2d / 2 / rate, "backward": max(moved.h2d / 2, moved.d2h) / rate}
        self.run = _llama.Run(sizes, TIERS, device=device, place=_llama.HOST, activations="keep")
        self.run.seconds([None] * 2)
        self.run.runtime.reset_counters()
        self.rounds: list[dict[str, float]] = []

    def measure(self, plain: Plain, update: Callable[[], object], steps: int) -> None:
        forward, backward = (statistics.median(side) for side in zip(*(plain.seconds() for _ in range(3)), strict=True))
        start = time.perf_counter()
        update()
        adam = time.perf_counter() - start
        bound = max(forward + adam, self.link["forward"]) + max(backward, self.link["backward"])
        self.rounds.append({"step": self.run.seconds([None] * steps), "bound": bound, "forward": forward, "backward": backward, "adam": adam})

    def row(self, steps: int) -> dict[str, Any]:
        found = {"ratio": statistics.median(r["step"] / r["bound"] for r in self.rounds)}
        found |= {f"{name}_seconds": statistics.median(r[name] for r in self.rounds) for name in self.rounds[0]}
        found |= {f"{name}_link_seconds": seconds for name, seconds in self.link.items()}
        found |= {f"{cause}_stall_seconds": s / len(self.rounds) / steps for cause, s in self.run.runtime.stats()["stall_seconds"].items()}
        return {name: round(value, 4) for name, value in found.items()}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    sizes = _llama.sizes(given)
    torch.set_num_threads(given.threads)
    plain = Plain(sizes)
    n = sum(p.numel() for p in plain.model.parameters())
    update = form_of(offload.Precision()).make(n)
    compute = statistics.median(sum(plain.seconds()) for _ in range(3))
    plan = offload.plan(_llama.build(sizes), TIERS, device="sim", place=_llama.HOST, batch=(1, given.tokens), activations="keep")
    rows = []
    with ExitStack() as stack:
        moved = replace(traffic_of(plan, direct=False), h2d=2 * plan.describe()["parameter"]["host"])  # as if no slot kept any at the turn
        runs = {ratio: Linked(sizes, ratio, compute, moved) for ratio in given.ratios}
        for linked in runs.values():
            stack.enter_context(linked.run)
        for _ in range(given.rounds):
            for linked in runs.values():
                linked.measure(plain, update, given.steps)
        rows = [{"link_over_compute": ratio, **linked.row(given.steps)} for ratio, linked in runs.items()]
    return {"parameters": n, "sizes": sizes, "threads": given.threads, "limit": LIMIT, "rows": rows}


def main() -> None:
    parser = _result.parser(__doc__)
    _llama.add_sizes(parser, width=512, blocks=24, vocabulary=4096, tokens=512)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="times of the links over that of compute; 0: no limit")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="of compute")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    figures = measure(given)
    _result.finish(figures, given)
    if not given.json:
        for row in figures["rows"]:
            print(", ".join(f"{key} {value}" for key, value in row.items()))
    if any(row["ratio"] > LIMIT for row in figures["rows"]):
        raise SystemExit(f"a step takes more than {LIMIT} times its bound")


if __name__ == "__main__":
    main()
