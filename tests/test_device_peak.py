"""What a device that is RAM really holds, as the runtime counts it, with units so large that no gradient of theirs hides in what plans leave out.

At the least budget that can be planned for, and a little more; a process each, and little of everything else, as all memory of a process counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.observe.base import base_bytes
from offload.train import loop
from runs import SMALL

CASES = {
    "cpu": ["cpu,1,keep,1.05", "cpu,1,recompute,1.1", "cpu,0,keep,1.05", "cpu,0,recompute,1.1"],
    "sim": ["sim,1,keep,1.0", "sim,1,recompute,1.0", "sim,0,keep,1.3", "sim,0,recompute,1.05"],
}


@pytest.mark.parametrize("device", CASES)
def test_peaks_of_large_units_stay_within(tmp_path: Path, device: str) -> None:
    """Gradients passing to updates in the backward and not, activations kept and computed again."""
    script = Path(__file__).parent / "peaks.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path), *CASES[device]], capture_output=True, text=True, cwd=script.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for case, r in zip(CASES[device], found, strict=True):
        assert (r["passing"] > 0) == (",1," in case), case
        assert all(r["peak"][tier] <= r["budget"][tier] for tier in r["budget"]), (case, r)
        assert r["peak"]["device"] > r["gradient"], "not as much as one gradient: the case counts nothing"


def test_what_libraries_keep_for_the_shapes_of_blocks_is_in_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make kernels for them, which a toy's shapes do not need: else these count as the device's."""
    before, kept, estimate = [0], [], loop.estimate

    def keeping(*given: Any, **how: Any) -> Any:
        before[0] = base_bytes()
        kept.append(torch.ones(64 << 20, dtype=torch.uint8))
        return estimate(*given, **how)

    monkeypatch.setattr(loop, "estimate", keeping)
    summary = SMALL.train(tmp_path)
    assert kept and summary["base_bytes"] - before[0] > 48 << 20
