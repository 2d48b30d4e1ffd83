"""Whole training steps on two ranks (gloo, on this machine's CPU) against FSDP2: same Llama, tokens, precision and clipping.

    python bench/ranks.py [--steps 5] [--rounds 5] [--stage 3] [--json] [--out bench/results/ranks.json]

Contenders take turns, each as two processes of their own (bench/_contenders.py) with half of the cores each; a round's seconds are the slower rank's.
The ratio is the median of those of a round's two. Stage 3 is against FSDP2 that reshards after the forward, stage 2 against one that does not.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
from typing import Any

import _children
import _contenders
import _llama
import _result

LIMIT = 0.8
RANKS = 2
OURS, PEER = "ours, all in host", "FSDP2"


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def measured(name: str, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of the slower rank, and the memory of both."""
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as directory:
        command = [sys.executable, _contenders.__file__, name, json.dumps(settings | {"directory": directory})]
        port = free_port()
        found = _children.ranks(RANKS, lambda _: command, MASTER_ADDR=lambda _: "127.0.0.1", MASTER_PORT=lambda _: port)
    if isinstance(found, str):
        raise SystemExit(f"{name}: {found}")
    return {"seconds": max(rank["seconds"] for rank in found), "rss": sum(rank["rss"] for rank in found)}


def table(taken: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for name, rounds in taken.items():
        seconds, rss = statistics.median(r["seconds"] for r in rounds), max(r["rss"] for r in rounds)
        rows.append({"what": name, "seconds": round(seconds, 3), "rss_gib_all_ranks": round(rss / 2**30, 2),
                     "all_seconds": [round(r["seconds"], 3) for r in rounds]})  # fmt: skip
    return rows


def main() -> None:
    parser = _result.parser(__doc__)
    _llama.add_sizes(parser, width=768, blocks=12, vocabulary=32000, tokens=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, choices=(2, 3), default=3)
    given = parser.parse_args()
    settings = {"sizes": _llama.sizes(given), "steps": given.steps, "warm": given.warm, "stage": given.stage, "device": "2GiB", "host": "4GiB",
                "nvme": "0"}  # fmt: skip
    taken: dict[str, list[dict[str, float]]] = {OURS: [], PEER: []}
    for number in range(given.rounds):
        for name in (OURS, PEER) if number % 2 == 0 else (PEER, OURS):
            taken[name].append(measured(name, settings))
            if not given.json:
                print(f"round {number + 1}, {name}: {taken[name][-1]['seconds']:.3f} s", flush=True)
    ratios = [ours["seconds"] / peer["seconds"] for ours, peer in zip(taken[OURS], taken[PEER], strict=True)]
    ratio = statistics.median(ratios)
    whole: dict[str, Any] = settings | {"ranks": RANKS, "rounds": given.rounds, "rows": table(taken), "ours_over_fsdp2": round(ratio, 3),
                                        "all_ratios": [round(r, 3) for r in ratios], "limit": LIMIT, "holds": ratio <= LIMIT}  # fmt: skip
    _result.finish(whole, given)
    if given.json:
        return
    for row in whole["rows"]:
        print(f"{row['what']:24} {row['seconds']:8.3f} s a step, {row['rss_gib_all_ranks']:.2f} GiB on {RANKS} ranks")
    print(f"ours / FSDP2: {ratio:.3f}, at most {LIMIT} {'holds' if ratio <= LIMIT else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
