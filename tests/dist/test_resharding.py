"""Four ranks, two and one, in one launch: they train alike, and what any number saves any other loads to the bit, whatever its stage and places.

Four processes are one group of four ranks, then two groups of two, then four of one; each group of a round does a case of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, run

SPLIT = ("bf16", "bf16", "split", "int8")
FP32 = ("fp32", "fp32", "fp32", "fp32")
MICRO = 4  # micro-batches of a step, of all ranks

SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
MESHES = {{n: init_device_mesh("cpu", (4 // n, n), mesh_dim_names=("group", "rank"))["rank"] for n in (4, 2, 1)}}
where = sys.argv[1]

def case(ranks, precision, stage=3, place="host", load=None, save=None, clip=None, steps=2, device="cpu"):
    own = rank % ranks
    model = cases.net(seed=1 if own == 0 and load is None else 99)
    places = dict.fromkeys(("parameter", "gradient", "optimizer"), place) if place != "any" else None
    tiers = offload.Tiers("8MiB", "16MiB", [(os.path.join(where, f"swap-{{rank}}"), "64MiB")])
    mine = range(own, {MICRO}, ranks)
    offload.prepare(
        model, tiers, device=device, precision=offload.Precision(*precision), place=places, stage=stage, mesh=MESHES[ranks], seed=5,
        accumulate=len(mine),
    )
    runtime, optimizer = offload.runtime(model), offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    out = {{}}
    if load is not None:
        extra = offload.load(os.path.join(where, load), model, optimizer)
        assert extra["note"] == load
        out["at"] = state(model, optimizer, runtime)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro in mine:
            loss = model(cases.ids(step, 0, micro)) / len(mine)
            loss.backward()
            total += float(loss.detach())
        if clip is not None:
            norms.append(float(offload.clip_grad_norm_(model, clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    out |= {{"losses": losses, "norms": norms, "after": state(model, optimizer, runtime)}}
    if save is not None:
        offload.save(os.path.join(where, save), model, optimizer, extra={{"note": save}})
    runtime.close()
    return out

def state(model, optimizer, runtime):
    kept = optimizer.state_dict()["state"]
    return {{
        "digest": runtime.digest(),
        "parameters": cases._hash(model.state_dict().items()),
        "moments": cases._hash((f"{{i}} {{k}}", v[k]) for i, v in kept.items() for k in ("exp_avg", "exp_avg_sq")),
        "steps": sorted({{int(v["step"]) for v in kept.values()}}),
    }}

for ranks, settings in json.loads(sys.argv[2]):
    group = rank // ranks
    print(json.dumps(case(ranks, **settings[group]) if settings[group] is not None else None), flush=True)
    dist.barrier()
dist.destroy_process_group()
"""

Case = dict[str, Any]
ROUNDS: list[tuple[int, list[Case | None]]] = [
    # training alone
    (4, [{"precision": FP32, "stage": 3, "place": "nvme", "clip": 0.5}]),
    *[(4, [{"precision": FP32, "stage": stage, "clip": 0.5}]) for stage in (0, 1, 2)],
    (4, [{"precision": FP32, "stage": 3, "clip": 0.5, "device": "sim"}]),
    (2, [{"precision": FP32, "stage": 3, "place": "nvme", "clip": 0.5}, {"precision": FP32, "stage": 0, "clip": 0.5}]),
    (1, [{"precision": FP32, "place": "nvme", "clip": 0.5}, {"precision": FP32, "clip": 0.5}, None, None]),
    # what is saved
    (2, [{"precision": SPLIT, "place": "nvme", "save": "split two"}, {"precision": FP32, "place": "nvme", "save": "fp32 two"}]),
    (4, [{"precision": SPLIT, "place": "nvme", "save": "split four"}]),
    (1, [{"precision": SPLIT, "place": "nvme", "save": "split one"}, {"precision": FP32, "save": "fp32 one"}, None, None]),
    # by whom it is loaded
    (4, [{"precision": SPLIT, "load": "split two", "place": "nvme"}]),
    (4, [{"precision": SPLIT, "load": "split two", "stage": 0}]),
    (4, [{"precision": SPLIT, "load": "split one", "stage": 1, "place": "nvme"}]),
    (4, [{"precision": FP32, "load": "fp32 two", "stage": 2, "place": "any"}]),
    (2, [{"precision": SPLIT, "load": "split one", "place": "nvme"}, {"precision": SPLIT, "load": "split four", "place": "nvme"}]),
    (2, [{"precision": SPLIT, "load": "split one", "stage": 2}, {"precision": SPLIT, "load": "split four", "stage": 1}]),
    (2, [{"precision": SPLIT, "load": "split two", "stage": 0}, {"precision": SPLIT, "load": "split two", "stage": 2, "place": "nvme"}]),
    (2, [{"precision": FP32, "load": "fp32 one", "place": "nvme"}, {"precision": FP32, "load": "fp32 two", "stage": 1, "place": "any"}]),
    (1, [{"precision": SPLIT, "load": "split two", "place": "nvme"}, {"precision": SPLIT, "load": "split four"},
         {"precision": FP32, "load": "fp32 two", "place": "nvme"}, {"precision": SPLIT, "load": "split two", "device": "sim"}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, Case, list[dict[str, Any]]]]:
    """(ranks, what was done, what came of it on each of them)."""
    where: Path = tmp_path_factory.mktemp("saved")
    outs = run(SCRIPT, 4, str(where), json.dumps(ROUNDS), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith(("{", "null"))] for out in outs]
    return [
        (ranks, settings, [lines[group * ranks + own][number] for own in range(ranks)])
        for number, (ranks, groups) in enumerate(ROUNDS)
        for group, settings in enumerate(groups)
        if settings is not None
    ]


def test_ranks_of_a_group_agree(found: Any) -> None:
    for ranks, settings, results in found:
        assert [{**r, "losses": 0} for r in results] == [{**results[0], "losses": 0}] * ranks, (ranks, settings)


def test_four_ranks_train_as_two_and_as_one(found: Any) -> None:
    trained = [(n, s, results) for n, s, results in found if "clip" in s]
    losses = [[sum(part) / n for part in zip(*(r["losses"] for r in results), strict=True)] for n, _, results in trained]
    for (n, s, results), mean in zip(trained, losses, strict=True):
        assert mean == pytest.approx(losses[-1], rel=2e-5), (n, s)
        assert results[0]["norms"] == pytest.approx(trained[-1][2][0]["norms"], rel=1e-4), (n, s)
    for ranks in (4, 2, 1):
        states = [results[0]["after"] for n, _, results in trained if n == ranks]
        assert len(states) > 1 and states == [states[0]] * len(states), ranks


def test_any_number_loads_what_any_other_saved(found: Any) -> None:
    saved = {s["save"]: results[0]["after"] for _, s, results in found if "save" in s}
    assert all(state["steps"] == [2] for state in saved.values())
    loaded = [(n, s, results) for n, s, results in found if "load" in s]
    assert {(name.split()[1], n) for n, s, _ in loaded for name in [s["load"]]} >= {("two", 1), ("two", 4), ("one", 2), ("four", 2)}
    for n, s, results in loaded:
        assert results[0]["at"] == saved[s["load"]], (n, s)


def test_they_go_on_to_the_same_bits_at_any_stage(found: Any) -> None:
    went: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for n, s, results in found:
        if "load" in s:
            went.setdefault((n, s["load"]), []).append(results[0]["after"])
    several = {key: states for key, states in went.items() if len(states) > 1}
    assert len(several) >= 4
    for key, states in several.items():
        assert states[0]["steps"] == [4] and states == [states[0]] * len(states), key
