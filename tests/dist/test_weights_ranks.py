"""Weights in and out with several ranks, of models that tensor parallelism has divided too: each rank moves what rests on it, of whole tensors."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from ranks import ROOT, run
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

import hub
import offload
from offload.checkpoint.manifest import verify

HEAD = f"""
import errno, json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from cases import refused, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from offload.checkpoint import disk, shared
from offload.dist.world import World

job = World.current(device="cpu")
dp, tp = json.loads(sys.argv[1])
MESH = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))

def made(kind, meta, width=45):
    if kind == "net":
        torch.manual_seed(7 + job.rank)
        with torch.device("meta" if meta else "cpu"):
            model = cases.Net(width=width)
        plans = [(block, {{"up": ColwiseParallel(), "down": RowwiseParallel()}}) for block in model.blocks]
    else:
        from transformers import AutoModelForCausalLM
        from test_weights_ranks import CONFIGS
        torch.manual_seed(7)
        with torch.device("meta" if meta else "cpu"):
            model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
        column, row = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()), {{"o_proj": RowwiseParallel()}}
        plans = [(layer.self_attn, column | row) for layer in model.model.layers]
    for module, plan in plans if tp > 1 else ():
        parallelize_module(module, MESH["tp"], plan)
    return model

def prepared(kind="net", stage=3, meta=False, place="host", compute="fp32", master="fp32", device="cpu"):
    places = dict.fromkeys(("parameter", "gradient", "optimizer"), place)
    precision = offload.Precision(compute, compute, master)
    tiers = offload.Tiers("8MiB", "16MiB", [(os.environ["SWAP"], "64MiB")])
    mesh = MESH["dp"] if tp > 1 else None
    return offload.prepare(made(kind, meta), tiers, device=device, precision=precision, place=places, stage=stage, mesh=mesh)

def hashed(model):
    return cases._hash((name, whole(p)) for name, p in sorted(model.named_parameters()))
"""

CONFIGS: dict[str, Any] = {
    "llama": hub.CONFIGS["llama"],
    "mixtral": lambda: MixtralConfig(**hub.SIZES, num_key_value_heads=1, num_local_experts=4),
}
PLACES = [("[2, 2]", 3), ("[2, 2]", 0), ("[1, 2]", 3), ("[3, 1]", 3), ("[2, 1]", 1)]


def run_on(script: str, shape: str, *args: object, swap: Path) -> list[Any]:
    """The last line of each rank."""
    env = {"OFFLOAD_COLLECTIVE_TIMEOUT": "60", "SWAP": str(swap), "PYTHONDONTWRITEBYTECODE": "1"}
    return [json.loads(out.splitlines()[-1]) for out in run(HEAD + script, math.prod(json.loads(shape)), shape, *map(str, args), env=env)]


def alone(kind: str = "net", seed: int = 5, width: int = 45) -> nn.Module:
    torch.manual_seed(seed)
    return cases.Net(width=width) if kind == "net" else AutoModelForCausalLM.from_config(CONFIGS[kind]())  # type: ignore[no-any-return]


def write(directory: Path, model: nn.Module, shards: int = 2) -> Path:
    """Files with these weights, as ours or transformers' own."""
    directory.mkdir()
    if not isinstance(model, cases.Net):
        model.save_pretrained(directory, max_shard_size="20KB")  # type: ignore[operator]
        return directory
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name].contiguous() for name in where if where[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files of a directory."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def hashed(model: nn.Module) -> str:
    return cases._hash((name, p) for name, p in sorted(model.named_parameters()))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


LOADS = """
kind, source, target, stage, precision = sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), json.loads(sys.argv[6])
read, counted = disk.read, [0]
def counting(file, into):
    counted[0] += into.nbytes
    read(file, into)
disk.read = counting
out = []
for place, meta, device in (("host", False, "cpu"), ("nvme", True, "cpu"), ("host", True, "sim")):
    model = prepared(kind, stage, meta, place, *precision, device=device)
    if kind == "net" and not meta:
        model(cases.ids(0, 0, 0))  # slots have the values before
    counted[0] = 0
    loaded = offload.load_pretrained(model, source)
    total = counted[0]
    assert not loaded.missing and not loaded.unexpected, loaded
    out.append([hashed(model), total])
    if kind == "net":
        out[-1].append(sum(job.share(float(model(cases.ids(0, 0, 0)).detach()))))
    offload.save_pretrained(model, f"{target}-{len(out)}", max_shard_size="20KB")
    offload.runtime(model).close()
print(json.dumps(out))
job.barrier("the end")
job.close()
"""


@pytest.mark.parametrize(("shape", "stage"), PLACES)
@pytest.mark.parametrize("precision", [("fp32", "fp32"), ("bf16", "split")])
def test_weights_go_in_and_out_and_each_rank_reads_its_part(tmp_path: Path, shape: str, stage: int, precision: tuple[str, str]) -> None:
    source = write(tmp_path / "w", alone())
    said = run_on(LOADS, shape, "net", source, tmp_path / "out", stage, json.dumps(precision), swap=tmp_path)
    ranks = len(said)
    form = offload.Precision(precision[0], precision[0], precision[1])  # type: ignore[arg-type]
    reference = offload.prepare(alone(seed=1), offload.Tiers("8MiB", "64MiB"), device="cpu", precision=form)
    offload.load_pretrained(reference, source)
    loss = float(reference(cases.ids(0, 0, 0)).detach())
    offload.save_pretrained(reference, tmp_path / "one", max_shard_size="20KB")
    nbytes = {name: p.numel() * 4 for name, p in alone().named_parameters()}
    divided = sum(n for name, n in nbytes.items() if name.endswith(("up.weight", "up.bias", "down.weight")))
    dp, tp = json.loads(shape)
    for case in range(3):
        for of_rank in said:
            assert of_rank[case][0] == hashed(alone())
            assert of_rank[case][2] == pytest.approx(loss * ranks, rel=1e-2 if precision[0] == "bf16" else 1e-5)
        read = sum(of_rank[case][1] for of_rank in said)
        copies = 1 if stage == 3 else dp
        assert read == copies * (divided + tp * (sum(nbytes.values()) - divided)), (case, read)
        assert contents(tmp_path / f"out-{case + 1}") == contents(tmp_path / "one")
    offload.runtime(reference).close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("kind", "shape", "stage"), [("llama", "[1, 2]", 3), ("llama", "[2, 2]", 1), ("mixtral", "[2, 1]", 3), ("mixtral", "[1, 2]", 0)]
)
def test_models_of_transformers_come_back_as_transformers_writes_them(tmp_path: Path, kind: str, shape: str, stage: int) -> None:
    source = write(tmp_path / "w", alone(kind))
    said = run_on(LOADS, shape, kind, source, tmp_path / "out", stage, json.dumps(["fp32", "fp32"]), swap=tmp_path)
    assert {case[0] for of_rank in said for case in of_rank} == {hashed(alone(kind))}
    for case in (1, 2, 3):
        want, found = (stored(directory) for directory in (source, tmp_path / f"out-{case}"))
        assert want.keys() == found.keys() and all(torch.equal(want[key], found[key]) for key in want)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out-1")
    assert hashed(again) == hashed(alone(kind))


RULES = """
out = []
for stage, place, device in ((3, "host", "cpu"), (1, "nvme", "cpu"), (0, "host", "sim")):
    model = prepared(stage=stage, meta=True, place=place, device=device)
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor) == (tp > 1) and weight.device.type == "cpu"
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
    if 136 % tp:  # torch itself does not compute with uneven parts of this model
        offload.save(f"{sys.argv[2]}/saved-{stage}", model, optimizer)
        offload.save_pretrained(model, f"{sys.argv[2]}/weights-{stage}")
        out.append([hashed(model), None, None])
        offload.load(f"{sys.argv[2]}/saved-{stage}", model, optimizer)
    else:
        before = hashed(model) if stage else None  # at stage 0 the first forward asks for the values
        loss = model(cases.ids(0, 0, 0))
        before = before or hashed(model)
        loss.backward()
        optimizer.step()
        out.append([before, float(loss.detach()), hashed(model) != before])
    offload.runtime(model).close()
print(json.dumps(out))
job.barrier("the end")
job.close()
"""


@pytest.mark.parametrize("shape", ["[2, 2]", "[1, 3]"])
def test_meta_models_are_initialised_as_one_rank_does_it(tmp_path: Path, shape: str) -> None:
    said = run_on(RULES, shape, tmp_path, swap=tmp_path)
    with torch.device("meta"):
        model: nn.Module = cases.Net(width=45)
    precision = offload.Precision("fp32", "fp32")
    offload.prepare(model, offload.Tiers("8MiB", "64MiB"), device="cpu", precision=precision)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, want = float(model(cases.ids(0, 0, 0)).detach()), cases._hash(sorted(values.items()))
    offload.runtime(model).close()
    for of_rank in said:
        for before, found, changed in of_rank:
            assert before == want and (found is None or (found == pytest.approx(loss, rel=1e-5) and changed))
    for path in tmp_path.glob("saved-*"):
        verify(path)
        assert all(torch.equal(values[name.partition("/")[2]], tensor) for name, tensor in stored(path).items())
    for path in tmp_path.glob("weights-*"):
        assert all(torch.equal(values[name], tensor) for name, tensor in stored(path).items())


FAILS = """
what, source, target = sys.argv[2:5]
model = prepared(stage=3)
before, last = hashed(model), job.rank == job.size - 1
out = []

def broken(*args):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

read, write, compare = disk.read, disk.write_at, shared._write
if last and what == "read":
    disk.read = broken
out.append(refused(lambda: offload.load_pretrained(model, source)))
disk.read = read
if what == "write" and last:
    disk.write_at = broken
if what == "flip" and last:
    def flipped(file, start, piece):
        note = compare(file, start, piece)
        first, _, at = next(iter(piece.runs()))
        os.pwrite(file.fileno(), bytes([255 - piece.values.view(torch.uint8)[first * 4].item()]), start + at * 4)
        return note
    shared._write = flipped
out.append(refused(lambda: offload.save_pretrained(model, target)))
disk.write_at, shared._write = write, compare
out.append(refused(lambda: offload.load_pretrained(model, source)))
out.append(hashed(model))
print(json.dumps(out))
job.barrier("the end")
job.close()
"""


@pytest.mark.parametrize("what", ["read", "write", "flip"])
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, what: str) -> None:
    source, target = write(tmp_path / "w", alone()), tmp_path / "out"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"what was there")
    (target / "notes.txt").write_text("of the user's")
    before = contents(target)
    said = run_on(FAILS, "[1, 2]", what, source, target, swap=tmp_path)
    for rank, (loading, saving, again, values) in enumerate(said):
        assert again is None and values == hashed(alone())
        if what == "read":
            assert loading.startswith("CheckpointError") and "in part" in loading and (rank == 1 or "on rank 1" in loading), loading
            assert saving is None
        else:
            assert loading is None and saving.startswith("CheckpointError"), saving
            assert ("on rank 1" in saving and "Input/output error" in saving) if what == "write" else "reads back other bytes" in saving, saving
    if what == "read":
        assert contents(target).keys() == {"model.safetensors", "notes.txt"} and contents(target) != before
    else:
        assert contents(target) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "w"]


REFUSES = """
out = []
model = prepared()
before = hashed(model)
for source in sys.argv[2:]:
    out.append(refused(lambda: offload.load_pretrained(model, source)))
assert hashed(model) == before
print(json.dumps(out))
job.barrier("the end")
job.close()
"""


def test_what_is_wrong_is_said_by_all_and_nothing_is_written(tmp_path: Path) -> None:
    small = write(tmp_path / "small", alone(width=44))
    lacking = write(tmp_path / "lacking", alone())
    (lacking / "model-1.safetensors").unlink()
    cut = write(tmp_path / "cut", alone())
    (cut / "model-0.safetensors").write_bytes((cut / "model-0.safetensors").read_bytes()[:-7])
    for said in run_on(REFUSES, "[2, 2]", small, lacking, cut, swap=tmp_path):
        shape, missing, damaged = said
        assert "the model's is (" in shape and "model-1.safetensors" in missing and "cannot be read as safetensors" in damaged
        assert all(text.startswith("CheckpointError") for text in said)
