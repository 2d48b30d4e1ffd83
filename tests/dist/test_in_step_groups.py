"""Ranks of groups that do different things are told so at once, though some of what each does is shared by its group alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import ROOT, ends, job

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from offload.dist.world import World
World.current(device="cpu")
rank, what, where = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
precision, tiers = offload.Precision("fp32", "fp32"), offload.Tiers("8MiB", "16MiB")
model = offload.prepare(cases.net(), tiers, device="cpu", precision=precision, stage=3, mesh=cases.mesh_of((2, 2)))
optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
acts = {{
    "saves": lambda: offload.save(os.path.join(where, "saved"), model, optimizer),
    "forward": lambda: model(cases.ids(0, 0, rank)).backward(),
    "digest": lambda: offload.runtime(model).digest(),
    "reads": lambda: model.embed.weight.sum(),
}}
acts[what if rank == 0 else "forward"]()
raise SystemExit("no rank was told")
"""


@pytest.mark.parametrize(("what", "said"), [("saves", "the saving"), ("digest", "the digest"), ("reads", "the value of embed.weight")])
def test_of_four_ranks_in_two_groups_all_are_told(tmp_path: Path, what: str, said: str) -> None:
    with job(SCRIPT, 4, what, str(tmp_path)) as (processes, _):
        found = ends(processes)
    for code, _, err in found:
        assert code == 1 and "RankError" in err, err
    told = f"ranks do different things: rank 0 is at {said}, rank 1 at the start of a forward with gradients"
    assert any(told in err for _, _, err in found), "\n".join(err[-600:] for _, _, err in found)
