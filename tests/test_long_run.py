"""A run of many steps needs no more memory than one of a few: nothing that is recorded, traced or kept a step grows."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

from runs import SMALL, records_of, sizes

MIB = 1 << 20
STEPS, EARLY = 260, 30
MOST = 3 * MIB  # rings of events fill up only after EARLY steps


def test_resident_memory_does_not_grow(tmp_path: Path) -> None:
    run = SMALL.but(
        model={"config": sizes(inner=48, layers=6, heads=2)},
        data={"seq_length": 8, "eval_sequences": 8},
        tiers={"device": "12MiB", "host": "4MiB", "place": {"optimizer": "nvme"}},
        precision={"compute": "fp32"},
        train={"steps": STEPS, "activations": "recompute"},
    ).write(tmp_path)
    command = [sys.executable, "-m", "offload", "train", str(run), "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    held = [record["tier_bytes"]["device"] for record in records_of(tmp_path / "out")]
    assert len(held) == STEPS
    early, late = max(held[EARLY // 2 : EARLY]), max(held[-EARLY:])
    assert late <= early + MOST, f"{(late - early) / MIB:.1f} MiB more after {STEPS} steps than after {EARLY}"
    summary = json.loads(done.stdout)
    assert all(summary["peak_bytes"][tier] <= n for tier, n in summary["budget_bytes"].items())
    events = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))["traceEvents"]
    assert len(events) > 1000
