"""Models of several kinds on two ranks: parameters of several dtypes, units used twice, units that some ranks leave out; and memory of all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ranks import ROOT, ends, job, run

SCRIPT = f"""
import json, sys, tempfile
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from torch import nn
from offload.dist.world import World

RANKS = 2

class Mixed(nn.Module):
    '''Trained and frozen parameters of three dtypes, also within one unit; units used twice; a table of integers.'''

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 40)
        self.blocks = nn.ModuleList(cases.Block(40) for _ in range(3))
        self.twice = nn.Linear(40, 40)
        self.frozen = nn.Linear(40, 40)
        self.table = nn.Parameter(torch.arange(97) % 7, requires_grad=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.blocks[0](x, True)
        x = self.twice(x)
        x = self.blocks[1](x, True) + self.frozen(x)
        x = self.blocks[0](x, False)
        x = self.blocks[2](self.twice(x), True)
        return (x * (1 + self.table[ids])[..., None]).float().square().mean()

def mixed():
    torch.manual_seed(3)
    model = Mixed()
    model.blocks[1].bfloat16()
    model.blocks[2].up.bfloat16()
    model.frozen.bfloat16().requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    return model

def train(stage=3, place="host", device="cpu", activations="keep", precision=("fp32", "fp32"), accumulate=1, no_sync=False):
    model, rank = mixed(), World.current().rank
    mine = [(rank, m) for m in range(accumulate)] if World.current().size > 1 else [(r, m) for m in range(accumulate) for r in range(RANKS)]
    with tempfile.TemporaryDirectory() as swap:
        offload.prepare(
            model, offload.Tiers("8MiB", "16MiB", [(swap, "64MiB")]), device=device, precision=offload.Precision(*precision), stage=stage,
            place=dict.fromkeys(("parameter", "gradient", "optimizer"), place), activations=activations, accumulate=len(mine),
        )
        runtime, optimizer = offload.runtime(model), offload.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(2):
            total = 0.0
            for i, (r, m) in enumerate(mine):
                loss = model(cases.ids(step, m, r) % 97) / len(mine)
                if no_sync and i + 1 < len(mine):
                    with runtime.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                total += float(loss.detach())
            norm = float(offload.clip_grad_norm_(model, 1.0))
            kinds = sorted({{str(p.grad.dtype) for p in model.parameters() if p.grad is not None}})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(World.current().share(total)) / World.current().size)
        out = {{"losses": losses, "norm": norm, "digest": runtime.digest(), "dtypes": kinds, "state": cases._hash(model.state_dict().items())}}
        runtime.close()
    return out

for settings in json.loads(sys.argv[1]):
    print(json.dumps(train(**settings)), flush=True)
World.current().barrier("the end")
World.current().close()
"""

GROUPS: dict[str, list[dict[str, Any]]] = {
    "fp32": [{"stage": s} for s in range(4)]
    + [{"stage": s, "place": "nvme"} for s in (1, 3)]
    + [{"stage": 3, "activations": "recompute"}, {"stage": 2, "device": "sim"}, {"stage": 3, "device": "sim", "activations": "recompute"}],
    "bf16": [{"stage": s, "precision": ["bf16", "bf16"]} for s in range(4)],
    "summed": [{"stage": s, "accumulate": 2, "no_sync": True, "place": p} for s, p in ((0, "host"), (1, "nvme"))],
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    everything = [(name, settings) for name, group in GROUPS.items() for settings in group]
    outs = run(SCRIPT, 2, json.dumps([settings for _, settings in everything]), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})
    lines = [[json.loads(line) for line in out.splitlines()] for out in outs]
    by_group: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    for number, (name, settings) in enumerate(everything):
        by_group.setdefault(name, []).append((settings, [line[number] for line in lines]))
    return by_group


@pytest.mark.parametrize("name", GROUPS)
def test_parameters_of_several_dtypes_and_units_used_twice(found: Any, name: str) -> None:
    first = found[name][0][1][0]
    assert first["dtypes"] == ["torch.bfloat16", "torch.float32"]
    for settings, results in found[name]:
        assert results == [first, first], settings
    settings = found[name][0][0]
    (text,) = run(SCRIPT, 1, json.dumps([{**settings, "stage": 3}]))
    alone, tolerance = json.loads(text.splitlines()[-1]), 2e-2 if name == "bf16" else 2e-5
    assert first["losses"] == pytest.approx(alone["losses"], rel=tolerance) and first["norm"] == pytest.approx(alone["norm"], rel=5 * tolerance)


HEAD = f"""
import dataclasses, json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from offload.dist.world import World
from offload.memory.limits import resident_bytes
world = World.current(device="cpu")
"""

LEFT_OUT = (
    HEAD
    + """
stage, micro = int(sys.argv[1]), 2
model = offload.prepare(cases.net(), offload.Tiers("8MiB", "16MiB"), device="cpu", precision=offload.Precision("fp32", "fp32"), stage=stage,
                        accumulate=micro)
optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
told = None
try:
    for step in range(3):
        for m in range(micro):  # each rank leaves a unit out in another micro-batch, and both in one of the last step
            model(cases.ids(step, m, world.rank), side=m != world.rank and step < 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (model.idle.weight.grad is None) and optimizer.skipped == 0
    said = offload.runtime(model).digest()
except offload.OffloadError as error:
    said = f"{type(error).__name__}: {error}"
    world.fail(error)
print(json.dumps(said), flush=True)
os._exit(0)
"""
)


@pytest.mark.parametrize("stage", range(4))
def test_units_that_ranks_leave_out_in_turn_are_zeros_or_an_error(stage: int) -> None:
    with job(LEFT_OUT, 2, str(stage), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"}) as (processes, _):
        said = [json.loads(out) if out else err for _, out, err in ends(processes)]
    if stage < 3:
        assert said[0] == said[1] and ":" not in said[0], said
    else:
        assert said[0] == said[1] and said[0].startswith("RankError: ranks do different things") and "at the all-gather of side," in said[0], said


MEMORY = (
    HEAD
    + """
PRECISION, PLACE = offload.Precision("fp32", "fp32"), dict.fromkeys(("parameter", "gradient", "optimizer"), "host")
TIERS = offload.Tiers("64MiB", "256MiB")
def model():
    return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)))
made = model()
peak = offload.plan(made, TIERS, device="cpu", precision=PRECISION, place=PLACE, ranks=2, rank=world.rank, stage=0).peak_bytes
need = peak["host"] + peak["device"]
limits = offload.api.host_limits
def fits_one():  # there is room for this rank's memory and little of the other's
    own = resident_bytes()
    return dataclasses.replace(limits(), total=1 << 40, cgroup=None, available=need * 11 // 10)
offload.api.host_limits = fits_one
try:
    offload.prepare(made, TIERS, device="cpu", precision=PRECISION, place=PLACE, stage=0)
    said = None
except offload.PlanError as error:
    said = str(error)
kept = type(next(made.parameters())).__name__
offload.api.host_limits = limits
offload.runtime(offload.prepare(made, TIERS, device="cpu", precision=PRECISION, place=PLACE, stage=0)).close()
print(json.dumps([said, kept]), flush=True)
world.barrier("the end")
world.close()
"""
)


def test_budgets_of_all_ranks_on_a_machine_are_checked_together() -> None:
    for out in run(MEMORY, 2):
        said, kept = json.loads(out.splitlines()[-1])
        assert said is not None and "the machine is short" in said and "its 2 processes' own" in said and "lower the host budget" in said
        assert kept == "Parameter"
