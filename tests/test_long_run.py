"""A run of many steps needs no more memory than one of a few: nothing that is recorded, traced or kept a step grows."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

RUN = """
[model]
type = "llama"
config = {{ vocab_size = 64, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 6, num_attention_heads = 2 }}
[data]
source = "random"
seq_length = 8
[tiers]
device = "12MiB"
host = "4MiB"
nvme = [["swap", "64MiB"]]
place = {{ optimizer = "nvme" }}
[precision]
compute = "fp32"
[train]
steps = {steps}
device = "cpu"
activations = "recompute"
"""
MIB = 1 << 20
STEPS, EARLY = 260, 30
MOST = 3 * MIB  # rings of events fill up only after EARLY steps


def test_resident_memory_does_not_grow(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.format(steps=STEPS))
    command = [sys.executable, "-m", "offload", "train", str(run), "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    held = [record["tier_bytes"]["device"] for record in records]
    early, late = max(held[EARLY // 2 : EARLY]), max(held[-EARLY:])
    assert late <= early + MOST, f"{(late - early) / MIB:.1f} MiB more after {STEPS} steps than after {EARLY}"
    summary = json.loads(done.stdout)
    assert all(summary["peak_bytes"][tier] <= n for tier, n in summary["budget_bytes"].items())
    events = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))["traceEvents"]
    assert len(events) > 1000
