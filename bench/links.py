"""Steps on `sim` whose links take 0.5, 1 and 2 times as long as compute, against what perfect overlap would make of them.

    python bench/links.py [--rounds 7] [--steps 4] [--ratios 0.5 1 2] [--json] [--out bench/results/links.json]

All state rests in the host. The bound is max(forward + Adam, link of the forward) + max(backward, link of the backward): forward and backward are
plain torch's on the same weights and batch, and Adam is the update alone on the same memory and cores, all timed in turn with the steps. A link
takes its bytes over its bandwidth: the parameters once in each pass; the gradients go the other way in backward.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import _llama
import _result
import offload
from offload.observe.adam import form_of
from offload.planner.cost import traffic_of
from offload.transfer.device import SimDevice

LIMIT = 1.10


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


def bound(forward: float, backward: float, adam: float, link: dict[str, float]) -> float:
    return max(forward + adam, link["forward"]) + max(backward, link["backward"])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    sizes = _llama.sizes(given)
    plain = Plain(sizes)
    n = sum(p.numel() for p in plain.model.parameters())
    update = form_of(offload.Precision()).make(n)
    first = [plain.seconds() for _ in range(4)][1:]
    compute = statistics.median(f + b for f, b in first)
    plan = offload.plan(_llama.build(sizes), offload.Tiers("2GiB", "6GiB"), device="sim", place=_llama.HOST, batch=(1, given.tokens))
    moved = traffic_of(plan, direct=False)
    taken: dict[float, list[dict[str, float]]] = {ratio: [] for ratio in given.ratios}
    stalls: dict[float, dict[str, float]] = {}
    with ExitStack() as stack:
        runs, links = {}, {}
        for ratio in given.ratios:
            bandwidth = moved.h2d / (ratio * compute) if ratio else math.inf
            links[ratio] = {"forward": moved.h2d / 2 / bandwidth, "backward": max(moved.h2d / 2, moved.d2h) / bandwidth}
            device = SimDevice(h2d=bandwidth, d2h=bandwidth)
            runs[ratio] = stack.enter_context(
                _llama.Run(sizes, offload.Tiers("2GiB", "6GiB"), device=device, place=_llama.HOST, activations="keep")
            )
            runs[ratio].seconds([None] * 2)
            runs[ratio].runtime.reset_counters()
        for _ in range(given.rounds):
            for ratio, run in runs.items():
                passes = [plain.seconds() for _ in range(3)]
                forward, backward = (statistics.median(side) for side in zip(*passes, strict=True))
                start = time.perf_counter()
                update()
                adam = time.perf_counter() - start
                step = run.seconds([None] * given.steps)
                taken[ratio].append({"step": step, "forward": forward, "backward": backward, "adam": adam,
                                     "bound": bound(forward, backward, adam, links[ratio])})  # fmt: skip
        for ratio, run in runs.items():
            steps = given.rounds * given.steps
            stalls[ratio] = {cause: round(seconds / steps, 4) for cause, seconds in run.runtime.stats()["stall_seconds"].items()}
    rows = []
    for ratio, rounds in taken.items():
        row: dict[str, Any] = {"link_over_compute": ratio, "ratio": round(statistics.median(r["step"] / r["bound"] for r in rounds), 4)}
        row |= {f"{name}_seconds": round(statistics.median(r[name] for r in rounds), 4) for name in rounds[0]}
        rows.append(row | {f"{name}_link_seconds": round(links[ratio][name], 4) for name in links[ratio]} | {"stall_seconds": stalls[ratio]})
    return {"parameters": n, "sizes": sizes, "limit": LIMIT, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _llama.add_sizes(parser, width=1024, blocks=8, vocabulary=8192, tokens=512)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="times of the links over that of compute; 0: no limit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result")
    given = parser.parse_args()
    figures = measure(given)
    whole = _result.save(figures, given.out) if given.out else figures
    if given.json:
        print(json.dumps(whole))
    else:
        for row in figures["rows"]:
            print(", ".join(f"{key} {value}" for key, value in row.items()))
    if any(row["ratio"] > LIMIT for row in figures["rows"]):
        raise SystemExit(f"a step takes more than {LIMIT} times its bound")


if __name__ == "__main__":
    main()
