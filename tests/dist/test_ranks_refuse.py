"""What several ranks cannot do together: said on all of them, with what differs or who is missing, and within a stated time."""

from __future__ import annotations

import json
import re

import pytest
from ranks import ROOT, ends, job, run

HEAD = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from cases import refused
from offload.dist.world import World
world = World.current(device="cpu")
TIERS = offload.Tiers("8MiB", "16MiB")
FP32 = offload.Precision(compute="fp32", grad="fp32")
"""

REFUSED = (
    HEAD
    + """
out = {
    "updates": refused(lambda: offload.prepare(cases.net(), TIERS, device="cpu", precision=FP32, updates="backward")),
    "stage": refused(lambda: offload.prepare(cases.net(), TIERS, device="cpu", precision=FP32, stage=7)),
    "model": refused(lambda: offload.prepare(torch.nn.Linear(3 + world.rank, 3), TIERS, device="cpu", precision=FP32)),
    "stages differ": refused(lambda: offload.prepare(cases.net(), TIERS, device="cpu", precision=FP32, stage=world.rank)),
    "plan": refused(lambda: offload.prepare(cases.net(), TIERS, device="cpu", precision=FP32, plan=offload.plan(cases.net(), TIERS, precision=FP32))),
}
tiers = offload.Tiers("8MiB", "16MiB", [(sys.argv[1], "16MiB")])
model = offload.prepare(cases.net(), tiers, device="cpu", precision=FP32, place={"optimizer": "nvme"})
world.barrier("all have files")
out["files"] = sorted(name for name in os.listdir(sys.argv[1]))
world.barrier("all have looked")
model(cases.ids(0, 0, world.rank)).backward(inputs=[model.embed.weight])
out["only asked for"] = [n for n, p in model.named_parameters() if p.grad is not None]
offload.runtime(model).close()
print(json.dumps(out))
world.close()
"""
)


def test_refusals_and_names(tmp_path: object) -> None:
    found = [json.loads(out) for out in run(REFUSED, 2, str(tmp_path))]
    for said in found:
        assert said["updates"].startswith("ConfigError: updates = 'backward'")
        assert said["stage"].startswith("ConfigError: stage = 7")
        assert said["model"].startswith("ConfigError: the model") and "on rank 1" in said["model"]
        assert said["stages differ"].startswith("ConfigError: the plan's stage")
        assert said["plan"].startswith("ConfigError: plan is for one rank")
        assert [name.split("-")[:2] for name in said["files"]] == [["offload", "rank0"], ["offload", "rank1"]]
        assert said["only asked for"] == ["embed.weight"]


UNIT = (
    HEAD
    + """
model = offload.prepare(cases.net(), TIERS, device=sys.argv[1], precision=FP32, stage=3, batch=(2, 12))
ids = cases.ids(0, 0, world.rank)
error = refused(lambda: model(ids).backward() if world.rank == 0 else model.embed(ids).sum().backward())
print(json.dumps(error), flush=True)
world.fail(offload.OffloadError(error or "nothing"))
os._exit(0)
"""
)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_units_that_a_rank_does_not_use_at_stage_3_are_an_error_that_names_one(device: str) -> None:
    with job(UNIT, 2, device, env={"OFFLOAD_COLLECTIVE_TIMEOUT": "3"}) as (processes, _):
        said = [json.loads(out) if out else None for _, out, _ in ends(processes)]
    assert all(text and text.startswith("RankError") for text in said), said
    assert any(re.search("rank 0 has (not come to the all-gather of .*, part 0|failed)", text) for text in said), said
    assert any("rank 1 has not come to the start of a forward" in text or "rank 1 has failed" in text for text in said), said
