"""Whole training steps against plain torch (autocast, fused AdamW), FSDP2 and DeepSpeed ZeRO-3: same Llama, tokens, precision and clipping.

    python bench/step.py [--steps 5] [--rounds 3] [--peers PYTHON] [--path DIR] [--json] [--out bench/results/step.json]

Contenders take turns, each in a process of its own (bench/_contenders.py); medians of rounds. `--peers` names an interpreter that has DeepSpeed, if
this one has not; without any its rows are missing. One rank, on the CPU. What of ours does not fit in 3 GiB is on NVMe;
DeepSpeed takes the memory it takes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _children
import _contenders
import _llama
import _result

OURS = "ours, all in host"
ON_NVME = ("ours, 3 GiB and NVMe", "DeepSpeed ZeRO-3, NVMe")


def has_deepspeed(python: str) -> bool:
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    return subprocess.run([python, "-c", found], check=False).returncode == 0


def measured(name: str, python: str, settings: dict[str, Any], path: Path) -> dict[str, float] | str:
    """Seconds and memory, or the last that a contender said."""
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=path) as directory:
        command = [python, _contenders.__file__, name, json.dumps(settings | {"directory": directory})]
        return _children.alone(command)


def table(taken: dict[str, list[dict[str, float]]], tokens: int) -> list[dict[str, Any]]:
    rows = []
    for name, rounds in taken.items():
        if not rounds:
            continue
        base = taken[ON_NVME[0] if name in ON_NVME else OURS]
        seconds = statistics.median(r["seconds"] for r in rounds)
        over = [r["seconds"] / b["seconds"] for r, b in zip(rounds, base, strict=False)]
        rows.append({"what": name, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1),
                     "over_ours": round(statistics.median(over), 3) if over else None, "rss_gib": round(max(r["rss"] for r in rounds) / 2**30, 2),
                     "all_seconds": [round(r["seconds"], 3) for r in rounds]})  # fmt: skip
    return rows


def main() -> None:
    parser = _result.parser(__doc__)
    _llama.add_sizes(parser, width=1024, blocks=16, vocabulary=32000, tokens=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable, help="an interpreter with torch, transformers and DeepSpeed")
    parser.add_argument("--only", action="append", choices=list(_contenders.CONTENDERS), help="one of the contenders; may be given again")
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"), help="a directory on the drive to swap to")
    given = parser.parse_args()
    settings = {"sizes": _llama.sizes(given), "steps": given.steps, "warm": given.warm, "device": "2GiB", "host": "6GiB",
                "nvme_device": "1GiB", "nvme_host": "2GiB", "nvme": "8GiB"}  # fmt: skip
    names = [name for name in _contenders.CONTENDERS if not given.only or name in given.only]
    if not has_deepspeed(given.peers):
        names = [name for name in names if "DeepSpeed" not in name]
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for i in range(given.rounds):
        for name in names:
            found = measured(name, given.peers if "DeepSpeed" in name else sys.executable, settings, given.path)
            if isinstance(found, str):
                failed[name] = found
            else:
                taken[name].append(found)
            if not given.json:
                print(f"round {i + 1}, {name}: {found if isinstance(found, str) else round(found['seconds'], 3)}", flush=True)
    rows = table(taken, given.tokens)
    whole: dict[str, Any] = settings | {"rounds": given.rounds, "failed": failed, "rows": rows}
    _result.finish(whole, given)
    if given.json:
        return
    for row in rows:
        over = f"{row['over_ours']:.2f} x ours" if row["over_ours"] else ""
        print(f"{row['what']:24} {row['seconds']:8.3f} s {row['tokens_per_second']:8.1f} tokens/s {over:>12} {row['rss_gib']:6.2f} GiB")


if __name__ == "__main__":
    main()
