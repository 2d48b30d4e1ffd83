"""torch.amp.GradScaler under two ranks: loss scale, skipped steps and norms are the same on all, at every stage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ranks import ROOT, run

SCRIPT = f"""
import json, sys, warnings
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from offload.dist.world import World
world = World.current(device="cpu")

def train(stage, device="cpu", ranks=2):
    precision = offload.Precision("fp16", "fp16")
    model = offload.prepare(cases.net(), offload.Tiers("8MiB", "16MiB"), device=device, precision=precision, stage=stage, accumulate=2 // world.size)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, norms, losses = [], [], []
    for number in range(5):
        for rank in range(2) if world.size == 1 else (world.rank,):
            loss = model(cases.ids(number, 0, rank)) * world.size / 2
            losses.append(float(loss.detach()))
            scaler.scale(loss * (float("inf") if (number, rank) == (2, 1) else 1.0)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            norms.append(float(offload.clip_grad_norm_(model, 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    out = {{"scales": scales, "norms": norms, "skipped": optimizer.skipped, "digest": offload.runtime(model).digest()}}
    offload.runtime(model).close()
    return out

for settings in json.loads(sys.argv[1]):
    print(json.dumps(train(*settings)), flush=True)
world.barrier("the end")
world.close()
"""

SETTINGS = [*((stage, "cpu") for stage in range(4)), (1, "sim"), (3, "sim")]


def _trained(ranks: int) -> list[list[dict[str, Any]]]:
    return [[json.loads(line) for line in out.splitlines()] for out in run(SCRIPT, ranks, json.dumps(SETTINGS))]


def test_scales_and_skipped_steps_are_alike_on_all_ranks_and_as_on_one() -> None:
    found, (alone, *_) = _trained(2), _trained(1)[0]
    first = found[0][0]
    assert [result for of_rank in found for result in of_rank] == [first] * (2 * len(SETTINGS))
    assert first["scales"] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0] == alone["scales"] and first["skipped"] == alone["skipped"] == 1
    assert first["norms"] == pytest.approx(alone["norms"], rel=2e-2)
