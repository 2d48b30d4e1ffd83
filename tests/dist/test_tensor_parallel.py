"""Models whose parameters tensor parallelism has divided already: the other dimension of the mesh divides their parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from ranks import ROOT, run

from offload.checkpoint.manifest import verify
from offload.dist.divided import Place
from offload.dist.mesh import beside
from offload.errors import ConfigError

HEAD = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from cases import refused, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from offload.dist.world import World

job = World.current(device="cpu")
MESH = init_device_mesh("cpu", tuple(json.loads(sys.argv[1])), mesh_dim_names=("dp", "tp"))
DATA = MESH["dp"].get_local_rank()

def divided(seed=1):
    torch.manual_seed(seed)
    model = cases.Net(width=45)
    for block in model.blocks:
        parallelize_module(block, MESH["tp"], {{"up": ColwiseParallel(), "down": RowwiseParallel()}})
    return model

def prepared(stage=3, place="host", device="cpu", activations="auto", precision=cases.FP32, seed=1, swap=None, mesh=MESH["dp"]):
    tiers = offload.Tiers("8MiB", "16MiB", [(swap, "64MiB")] if swap else [])
    place = dict.fromkeys(("parameter", "gradient", "optimizer"), place)
    how = {{"device": device, "precision": offload.Precision(*precision), "place": place, "stage": stage, "mesh": mesh, "activations": activations}}
    model = offload.prepare(divided(seed), tiers, **how)
    return model, offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

def step(model, optimizer, number, clip=0.5, factor=1.0):
    loss = model(cases.ids(number, 0, DATA), extra=True)
    (loss * factor).backward()
    norm = float(offload.clip_grad_norm_(model, clip))
    gradients = cases._hash((n, whole(p.grad) if p.grad is not None else None) for n, p in model.named_parameters())
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), norm, gradients
"""

TRAINS = (
    HEAD
    + """
import tempfile
for settings in json.loads(sys.argv[2]):
    with tempfile.TemporaryDirectory() as swap:
        model, optimizer = prepared(**settings, swap=swap)
        weight = model.blocks[0].up.weight
        assert isinstance(weight, DTensor) and tuple(weight.shape) == (136, 45) and weight.placements == (Shard(0),) and weight.device.type == "cpu"
        told = [step(model, optimizer, number) for number in range(3)]
        runtime = offload.runtime(model)
        state, moments = model.state_dict(), optimizer.state_dict()["state"]
        assert isinstance(state["blocks.1.down.weight"], DTensor) and state["blocks.1.down.weight"].placements == (Shard(1),)
        print(json.dumps({
            "losses": [sum(job.share(loss)) / job.size for loss, _, _ in told],
            "norms": [norm for _, norm, _ in told],
            "gradients": [text for _, _, text in told],
            "digest": runtime.digest(),
            "state_dict": cases._hash((name, whole(value)) for name, value in state.items()),
            "moments": cases._hash((f"{i}{key}", whole(values[key])) for i, values in moments.items() for key in ("exp_avg", "exp_avg_sq")),
            "values": [float(whole(p).double().sum()) for _, p in sorted(model.named_parameters())],
            "held": runtime.stats()["state_bytes_per_rank"],
        }), flush=True)
        runtime.close()
job.close()
"""
)

GROUPS: dict[str, list[dict[str, Any]]] = {
    "fp32": [{"stage": s} for s in range(4)]
    + [{"stage": s, "place": "nvme"} for s in (1, 3)]
    + [{"stage": s, "device": "sim"} for s in (0, 3)]
    + [{"stage": 3, "activations": "recompute"}, {"stage": 3, "device": "sim", "place": "nvme", "activations": "recompute"}],
    "bf16": [{"stage": s, "precision": ("bf16", "bf16", "split", "int8")} for s in (0, 1, 2, 3)],
}  # fmt: skip
BITS = ("losses", "norms", "gradients", "digest", "state_dict", "moments")


def alone() -> dict[str, Any]:
    """The model of one rank at the whole batch, in torch."""
    torch.manual_seed(1)
    model = cases.Net(width=45)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for number in range(3):
        both = [model(cases.ids(number, 0, rank), extra=True) for rank in range(2)]
        loss = sum(both) / 2
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "values": [float(p.detach().double().sum()) for _, p in sorted(model.named_parameters())]}


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[dict[str, Any]]]]:
    """By group, what came of each of its settings on each of four ranks, two of data by two over which parameters are divided."""
    settings = [s for group in GROUPS.values() for s in group]
    outs = run(TRAINS, 4, "[2, 2]", json.dumps(settings), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})
    results = [list(of) for of in zip(*([json.loads(line) for line in out.splitlines()] for out in outs), strict=True)]
    ends = iter(results)
    return {name: [next(ends) for _ in group] for name, group in GROUPS.items()}


@pytest.mark.parametrize("name", GROUPS)
def test_stages_and_places_give_the_same_bits_on_all_ranks(found: Any, name: str) -> None:
    first = found[name][0][0]
    for settings, results in zip(GROUPS[name], found[name], strict=True):
        for result in results:
            assert {key: result[key] for key in BITS} == {key: first[key] for key in BITS}, settings


def test_as_one_rank_at_the_whole_batch(found: Any) -> None:
    result, want = found["fp32"][0][0], alone()
    assert result["losses"] == pytest.approx(want["losses"], rel=2e-5)
    assert result["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert result["values"] == pytest.approx(want["values"], rel=1e-3, abs=0.05)  # sums; Adam magnifies what rounds to either side of zero


def test_parts_are_divided_again(found: Any) -> None:
    held = [sum(result["held"] for result in results) for results in found["fp32"][:4]]
    assert held == [held[0], held[0] * 12 / 16, held[0] * 10 / 16, held[0] * 8 / 16]


ELSE = (
    HEAD
    + """
import os
out = {}

# values are the first rank's, where they are not divided too; files have ranks' numbers in the job
strange, _ = prepared(seed=job.rank, swap=sys.argv[2], place="nvme")
out["values"] = cases._hash((name, whole(value)) for name, value in sorted(strange.named_parameters()))
job.barrier("all have files")
out["files"] = sorted(name.split("-")[1] for name in os.listdir(sys.argv[2]))
job.barrier("all have looked")
offload.runtime(strange).close()

# what ranks of data sum by themselves first
from contextlib import nullcontext
out["summed"] = []
for apart in (False, True):
    summing, _ = prepared(stage=1)
    for micro in range(2):
        with offload.runtime(summing).no_sync() if apart and not micro else nullcontext():
            summing(cases.ids(0, micro, DATA)).backward()
    norm = float(offload.clip_grad_norm_(summing, 1e9))
    sums = [float(whole(p.grad).double().abs().sum()) for n, p in sorted(summing.named_parameters()) if p.grad is not None]
    out["summed"].append([norm, *sums])
    offload.runtime(summing).close()

# one rank's gradient is not finite: none steps
model, optimizer = prepared()
step(model, optimizer, 0)
before = offload.runtime(model).digest()
step(model, optimizer, 1, factor=float("inf") if job.rank == job.size - 1 else 1.0)
out["skipped"] = [optimizer.skipped, offload.runtime(model).digest() == before]

# what is read can be put back, also into another model, and goes on to the same bits
model.to("cpu")
state = {name: DTensor.from_local(value.to_local().clone(), value.device_mesh, value.placements) if isinstance(value, DTensor) else value.clone()
         for name, value in model.state_dict().items()}
import copy
moments = copy.deepcopy(optimizer.state_dict())
want = [step(model, optimizer, number) for number in (2, 3)]
other, another = prepared(stage=1, seed=2)
other.load_state_dict(state)
another.load_state_dict(moments)
out["same"] = [step(other, another, number) for number in (2, 3)] == want and offload.runtime(other).digest() == offload.runtime(model).digest()
weight = other.blocks[0].down.weight
with torch.no_grad():
    weight.copy_(distribute_tensor(torch.full((45, 136), 2.0), MESH["tp"], (Shard(1),)))
out["written"] = [float(whole(weight).min()), float(whole(weight).max())]
weight.grad = distribute_tensor(torch.ones(45, 136), MESH["tp"], (Replicate(),))
out["norm"] = [float(offload.clip_grad_norm_(other, 1e9)), (45 * 136) ** 0.5]
out["grad"] = [type(weight.grad).__name__, float(whole(weight.grad).sum())]

out["no mesh"] = refused(lambda: prepared(mesh=None)) if job.size > 2 else "ConfigError: say which ranks"
out["own mesh"] = refused(lambda: prepared(mesh=MESH["tp"]))
out["fp16"] = refused(lambda: prepared(precision=("fp16", "fp16", "fp32", "fp32")))
offload.runtime(model).close()
offload.runtime(other).close()
print(json.dumps(out))
job.barrier("the end")
job.close()
"""
)


@pytest.mark.parametrize("shape", ["[2, 2]", "[1, 2]"])
def test_writes_skips_and_refusals(tmp_path: Path, shape: str) -> None:
    ranks = 4 if shape == "[2, 2]" else 2
    said = [json.loads(out.splitlines()[-1]) for out in run(ELSE, ranks, shape, str(tmp_path), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})]
    torch.manual_seed(0)
    values = cases._hash((name, p) for name, p in sorted(cases.Net(width=45).named_parameters()))
    for out in said:
        assert out["values"] == values and out["files"] == [f"rank{rank}" for rank in range(ranks)]
        assert out["summed"][1] == pytest.approx(out["summed"][0], rel=1e-4) and len(out["summed"][0]) > 10
        assert out["skipped"] == [1, True] and out["same"] is True and out["written"] == [2.0, 2.0]
        assert out["norm"][0] == pytest.approx(out["norm"][1]) and out["grad"] == ["DTensor", 45 * 136]
        assert out["no mesh"].startswith("ConfigError") and "say which ranks" in out["no mesh"]
        assert out["own mesh"].startswith("ConfigError") and "mesh['dp']" in out["own mesh"]
        assert out["fp16"].startswith("ConfigError: compute = 'fp16'")


def test_which_ranks_make_up_two_dimensions() -> None:
    assert beside([[1, 3]], [2, 3], 3, 4) == [0, 1, 2, 3]
    assert beside([[0, 2], [4, 6]], [4, 5], 4, 8) == list(range(8))
    with pytest.raises(ConfigError, match="mesh\\['dp'\\]"):
        beside([[0, 1]], [0, 1], 0, 4)
    with pytest.raises(ConfigError, match="no two dimensions"):
        beside([[0, 1]], [0, 3], 0, 4)


# Checkpoints hold whole tensors, so any number of parts loads them


def test_places_of_a_part() -> None:
    assert list(Place(6, 6, 12, 6).runs(2, 5)) == [(2, 5, 14)]
    assert list(Place(3, 7, 3).runs(2, 8)) == [(2, 3, 5), (3, 6, 10), (6, 8, 17)]
    assert Place(512, 512, 1024, 512).grouped(256) == Place(2, 2, 4, 2) and Place(500, 500, 1024, 512).grouped(256) == Place(2, 2, 4, 2)
    assert Place(512, 512, 1000, 500).grouped(256) is None and Place(256, 1024, 256).grouped(256) is None


SAVES = (
    HEAD
    + """
import os
from offload.checkpoint import disk
from offload.errors import ConfigError
what, where, stage, moments = sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
precision = ("bf16", "fp32", "split", moments)
if MESH.size() == 1:
    torch.manual_seed(1)
    model = offload.prepare(cases.Net(width=45), offload.Tiers("8MiB", "16MiB"), device="cpu", precision=offload.Precision(*precision))
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
else:
    model, optimizer = prepared(stage=stage, precision=precision, seed=1 if what == "save" else 2, place="host")
refused = None
if what == "save":
    step(model, optimizer, 0)
    try:
        offload.save(where, model, optimizer, extra={"t": torch.tensor([1.5])})
    except ConfigError as error:
        refused = str(error)
else:
    assert offload.load(where, model, optimizer)["t"].tolist() == [1.5]
    real, count = disk.write_at, [0]
    def full(file, data, at):
        count[0] += 1
        if job.rank == job.size - 1 and count[0] > 3:
            raise OSError(28, os.strerror(28))
        real(file, data, at)
    if job.size > 1:
        disk.write_at = full
        try:
            offload.save(where + "-full", model, optimizer)
            refused = "nothing"
        except offload.CheckpointError as error:
            assert "No space left" in str(error), error
        disk.write_at = real
    offload.save(where + "-again", model, optimizer, extra={"t": torch.tensor([1.5])})
values = cases._hash((name, whole(value)) for name, value in model.state_dict().items())
moments = cases._hash((f"{i}{key}", whole(v[key])) for i, v in optimizer.state_dict()["state"].items() for key in ("exp_avg", "exp_avg_sq"))
print(json.dumps([values, moments, refused]))
offload.runtime(model).close()
job.barrier("the end")
job.close()
"""
)


def on(shape: str, *args: object) -> Any:
    data, parts = json.loads(shape)
    said = [json.loads(out.splitlines()[-1]) for out in run(SAVES, data * parts, shape, *map(str, args))]
    assert said == [said[0]] * len(said)
    return said[0]


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_checkpoints_go_from_parts_to_the_whole_and_back(tmp_path: Path, moments: str) -> None:
    path = tmp_path / "saved"
    saved = on("[2, 2]", "save", path, 3, moments)
    verify(path)
    for shape, stage in (("[2, 2]", 1), ("[1, 2]", 3), ("[1, 1]", 3)):
        assert on(shape, "load", path, stage, moments) == saved, shape
        for name in ("tensors.safetensors", "state.json", "manifest.json"):
            assert (path / name).read_bytes() == (tmp_path / "saved-again" / name).read_bytes(), (shape, name)
        shutil.rmtree(tmp_path / "saved-again")
    assert not (tmp_path / "saved-full").exists()
    whole = on("[1, 1]", "save", path, 3, moments)
    assert whole != saved and on("[2, 2]", "load", path, 2, moments) == whole


def test_moments_whose_groups_are_cut_are_refused_by_all_before_anything_is_written(tmp_path: Path) -> None:
    _, _, refused = on("[1, 2]", "save", tmp_path / "saved", 3, "int8")
    assert "Precision(moments='bf16')" in refused and not (tmp_path / "saved").exists()
