"""Safetensors directories streamed into prepared models: what Hugging Face writes, and what is wrong with some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import offload
from helpers import BF16, FP32, SETTINGS, Bag, Net, Prepared, bag, ids, net, noise, plain, same, same_models
from hub import CONFIGS, hub
from offload.checkpoint import weights

everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)
INDEX = "model.safetensors.index.json"


def write(directory: Path, model: nn.Module, shards: int = 1, tied_twice: bool = False, **over: torch.Tensor | None) -> Path:
    """A safetensors directory of a model: one file, or shards with an index. `over` replaces entries (dots as __); None leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {n: plain(v).contiguous() for n, v in model.state_dict().items()}
    if not tied_twice and isinstance(model, Net) and model.head.weight is model.embed.weight:
        del tensors["head.weight"]
    for key, value in over.items():
        name = key.replace("__", ".")
        if value is None:
            tensors.pop(name)
        else:
            tensors[name] = value
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    index = {}
    for i in range(shards):
        part = {n: t for j, (n, t) in enumerate(tensors.items()) if j % shards == i}
        save_file(part, directory / f"model-{i}.safetensors")
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


@everywhere
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_those_of_the_files(prepared: Prepared, tmp_path: Path, device: str, place: str, shards: int) -> None:
    want = net(seed=5)
    for start in (net(seed=1), _meta()):
        twin = prepared(start, place, device, keep=True)
        loaded = offload.load_pretrained(twin, write(tmp_path / f"w{shards}", want, shards))
        assert loaded.missing == [] and loaded.unexpected == []
        same_models(twin, want)
        same(twin(ids()), want(ids()))


def _meta(**over: Any) -> Net:
    with torch.device("meta"):
        return Net(**over)


@everywhere
def test_a_tensor_comes_in_pieces(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, place: str) -> None:
    """None held is larger than a piece; slots that hold a unit already follow."""
    monkeypatch.setattr(weights, "PIECE", 100)
    held = []
    parts = weights.Stored.parts
    monkeypatch.setattr(weights.Stored, "parts", lambda self, file: (held.append(p.numel()) or p for p in parts(self, file)))
    want = net(seed=5)
    for precision in (FP32, BF16):
        for start in (net(seed=1), _meta()):
            twin = prepared(start, place, device, keep=True, precision=precision)
            if not start.embed.weight.is_meta:
                twin(ids())
            offload.load_pretrained(twin, write(tmp_path / "w", want))
            same_models(twin, want)
            after = prepared(net(seed=5), place, device, precision=precision)
            same(twin(ids()), after(ids()))
    assert max(held) == 100 and min(held) < 100


def test_a_file_cut_while_it_is_read(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded stays, the rest has its rule's values, and loading again mends it."""
    directory = write(tmp_path / "w", net(seed=5, tied=False))
    header = weights.header

    def cut(path: Path) -> Any:
        found = header(path)
        path.write_bytes(path.read_bytes()[:-50])
        return found

    twin, fresh = prepared(_meta(tied=False), keep=True), prepared(_meta(tied=False), keep=True)
    with monkeypatch.context() as patch, pytest.raises(offload.CheckpointError, match="in part"):
        patch.setattr(weights, "header", cut)
        offload.load_pretrained(twin, directory)
    stored = dict(net(seed=5, tied=False).named_parameters())
    loaded = [n for n, p in twin.named_parameters() if torch.equal(plain(p), plain(stored[n]))]
    assert 0 < len(loaded) < len(stored)
    for n, p in twin.named_parameters():
        same(p, stored[n] if n in loaded else dict(fresh.named_parameters())[n], n)
    offload.load_pretrained(twin, write(tmp_path / "w", net(seed=5, tied=False)))
    same_models(twin, net(seed=5, tied=False))


def test_masters_follow(prepared: Prepared, tmp_path: Path) -> None:
    """The first step after loading starts from the weights loaded, not from stale masters."""
    want = net(seed=5)
    for place in ("host", "nvme"):
        twin = prepared(net(seed=1), place, precision=BF16)
        opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
        twin(ids()).backward()
        opt.step()
        opt.zero_grad()
        offload.load_pretrained(twin, write(tmp_path / "w", want))
        same_models(twin, want)
        still = offload.optim.AdamW(twin.parameters(), lr=0.0, weight_decay=0.0)
        twin(ids()).backward()
        still.step()
        same_models(twin, want)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_dtypes_are_converted_to_the_parameters(prepared: Prepared, tmp_path: Path, stored: torch.dtype, own: torch.dtype) -> None:
    source = net(seed=5).to(stored)
    twin = prepared(net(seed=1).to(own), precision=BF16)
    offload.load_pretrained(twin, write(tmp_path / "w", source))
    for n, p in twin.named_parameters():
        same(p, dict(source.named_parameters())[n].detach().to(own), n)


@pytest.mark.parametrize("kept", ["embed", "head", "both"])
def test_tied_weights_under_either_name(prepared: Prepared, tmp_path: Path, kept: str) -> None:
    want = net(seed=5)
    over = {"both": {}, "embed": {"head__weight": None}, "head": {"embed__weight": None}}[kept]
    twin = prepared(_meta(), keep=True)
    offload.load_pretrained(twin, write(tmp_path / "w", want, tied_twice=True, **over))
    same_models(twin, want)
    assert twin.head.weight is twin.embed.weight


def test_awkward_shapes_and_frozen_integers(prepared: Prepared, tmp_path: Path) -> None:
    def model(seed: int) -> Bag:
        m = bag(seed=seed)
        m.register_parameter("steps", nn.Parameter(torch.arange(5) + seed, requires_grad=False))
        m.matrix.requires_grad_(False)
        return m

    twin = prepared(model(1), "nvme", precision=BF16)
    offload.load_pretrained(twin, write(tmp_path / "w", model(9)))
    same_models(twin, model(9))


def test_buffers_are_loaded_too(prepared: Prepared, tmp_path: Path) -> None:
    def model(seed: int) -> nn.Module:
        m = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        for i, t in enumerate(m.state_dict().values()):
            t.copy_(noise(t.shape, seed + i).abs() * 5)
        return m

    for make in (lambda: model(1), lambda: nn.Sequential(nn.Linear(3, 4, device="meta"), nn.BatchNorm1d(4, device="meta"))):
        twin = prepared(make(), keep=True)
        offload.load_pretrained(twin, write(tmp_path / "w", model(9)))
        same_models(twin, model(9))


def test_names_the_model_has_no_place_for_are_returned(prepared: Prepared, tmp_path: Path) -> None:
    twin = prepared(net(seed=1))
    loaded = offload.load_pretrained(twin, write(tmp_path / "w", net(seed=5), stray__weight=torch.ones(2), other=torch.ones(())))
    assert sorted(loaded.unexpected) == ["other", "stray.weight"]
    same_models(twin, net(seed=5))


# What is wrong


def _cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


SPOILS: dict[str, tuple[Any, str]] = {
    "missing": (lambda d: write(d, net(seed=5), blocks__1__up__bias=None), r"blocks\.1\.up\.bias"),
    "missing in shards": (lambda d: write(d, net(seed=5), 3, blocks__1__up__bias=None), r"blocks\.1\.up\.bias"),
    "wrong shape": (lambda d: write(d, net(seed=5), blocks__1__up__bias=torch.ones(7)), r"blocks\.1\.up\.bias.*\(7,\)"),
    "same numel": (lambda d: write(d, net(seed=5), blocks__1__up__weight=torch.ones(12, 25)), r"blocks\.1\.up\.weight.*\(12, 25\)"),
    "truncated": (lambda d: _cut(write(d, net(seed=5)) / "model.safetensors", 0.7), r"model\.safetensors"),
    "truncated shard": (lambda d: _cut(write(d, net(seed=5), 3) / "model-2.safetensors", 0.7), r"model-2\.safetensors"),
    "cut in the header": (lambda d: _cut(write(d, net(seed=5)) / "model.safetensors", 0.01), r"model\.safetensors"),
    "empty file": (lambda d: _cut(write(d, net(seed=5)) / "model.safetensors", 0.0), r"model\.safetensors"),
    "no safetensors": (lambda d: (write(d, net(seed=5)) / "model.safetensors").write_bytes(b"not weights at all" * 50), r"model\.safetensors"),
    "no files": (lambda d: d.mkdir(), "neither"),
    "no directory": (lambda d: None, "w"),
    "a file": (lambda d: d.write_text("x"), "w"),
    "index is no json": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_text("{"), "index"),
    "index is a list": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_text("[]"), "index"),
    "index has no map": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_text("{}"), "index"),
    "index of no names": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_text('{"weight_map": null}'), "index"),
    "index names an absent file": (lambda d: (write(d, net(seed=5), 3) / "model-1.safetensors").unlink(), r"model-1\.safetensors"),
    "index leaves the directory": (
        lambda d: (write(d, net(seed=5), 3) / INDEX).write_text(json.dumps({"weight_map": {"a": "../w/model-1.safetensors"}})),
        r"model-1\.safetensors",
    ),
    "shard is a directory": (
        lambda d: [(write(d, net(seed=5), 3) / "model-1.safetensors").unlink(), (d / "model-1.safetensors").mkdir()],
        r"model-1\.safetensors",
    ),
    "quantized": (lambda d: write(d, net(seed=5), blocks__1__up__weight=torch.ones(25, 12, dtype=torch.int8)), r"blocks\.1\.up\.weight.*I8"),
    "eight bits": (
        lambda d: write(d, net(seed=5), blocks__1__up__weight=torch.ones(25, 12).to(torch.float8_e4m3fn)),
        r"blocks\.1\.up\.weight.*F8_E4M3",
    ),
    "header larger than the file": (
        lambda d: (write(d, net(seed=5)) / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        r"model\.safetensors",
    ),
    "header beyond its limit": (lambda d: _header_of(write(d, net(seed=5)) / "model.safetensors", 200_000_000), r"model\.safetensors"),
    "tensors that overlap": (lambda d: _overlapping(write(d, net(seed=5)) / "model.safetensors"), r"model\.safetensors"),
    "index is deep": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_text("[" * 100_000), "index"),
    "index is no text": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_bytes(b"\xff\xfe"), "index"),
    "index is huge": (lambda d: _sparse(write(d, net(seed=5), 3) / INDEX, 200_000_000), "index"),
    "index names the directory above": (
        lambda d: (write(d, net(seed=5), 3) / INDEX).write_text(json.dumps({"weight_map": {"a": ".."}})),
        r"\.\.",
    ),
    "index names an absolute path": (
        lambda d: (write(d, net(seed=5), 3) / INDEX).write_text(json.dumps({"weight_map": {"a": str(d / "model-1.safetensors")}})),
        r"model-1\.safetensors",
    ),
    "index names no file name": (lambda d: (write(d, net(seed=5), 3) / INDEX).write_text(json.dumps({"weight_map": {"a": "x\0y"}})), "index"),
    "index names what its file lacks": (lambda d: [write(d, net(seed=5), 3), _move(d)], r"blocks\.1\.up\.bias"),
}  # fmt: skip


def _sparse(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(nbytes)


def _header_of(path: Path, nbytes: int) -> None:
    _sparse(path, nbytes + 100)
    with path.open("r+b") as file:
        file.write(nbytes.to_bytes(8, "little"))


def _overlapping(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    text = json.dumps({"a": entry, "b": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def _move(d: Path) -> None:
    for path in d.glob("model-*.safetensors"):
        tensors = load_file(path)
        tensors.pop("blocks.1.up.bias", None)
        save_file(tensors, path)


@pytest.mark.parametrize("name", SPOILS)
def test_what_is_wrong_is_said_and_the_model_is_as_it_was(prepared: Prepared, tmp_path: Path, name: str) -> None:
    spoil, message = SPOILS[name]
    directory = tmp_path / "w"
    spoil(directory)
    twin = prepared(net(seed=1))
    with pytest.raises(offload.CheckpointError, match=message):
        offload.load_pretrained(twin, directory)
    same_models(twin, net(seed=1))


@pytest.mark.parametrize("name", ["missing", "wrong shape", "truncated", "truncated shard"])
def test_a_meta_model_is_never_left_without_values(prepared: Prepared, tmp_path: Path, name: str) -> None:
    """After a refused load, what was not loaded has the values of its own rule, or using the model raises."""
    SPOILS[name][0](tmp_path / "w")
    twin, fresh, file = prepared(_meta(tied=False), keep=True), prepared(_meta(tied=False), keep=True), net(seed=5)
    with pytest.raises(offload.CheckpointError):
        offload.load_pretrained(twin, tmp_path / "w")
    stored = dict(file.named_parameters())
    try:
        values = {n: plain(p) for n, p in twin.named_parameters()}
    except offload.OffloadError:
        return
    for n, p in fresh.named_parameters():
        if n not in stored or not torch.equal(values[n], stored[n]):
            same(values[n], p, n)


def test_only_prepared_models(tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match="prepare"):
        offload.load_pretrained(net(), write(tmp_path / "w", net()))


# Hugging Face


@pytest.mark.parametrize("kind", ["llama", "llama tied", "gpt2"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize(("device", "place"), [("cpu", "device"), ("sim", "nvme")])
def test_hugging_face_directories_load_on_meta(prepared: Prepared, tmp_path: Path, kind: str, shard: str, device: str, place: str) -> None:
    want = hub(kind)
    want.save_pretrained(tmp_path / "w", max_shard_size=shard)
    assert (tmp_path / "w" / INDEX).exists() == (shard == "20KB")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "w")).eval()
    twin = prepared(model, place, device, keep=True)
    loaded = offload.load_pretrained(twin, tmp_path / "w")
    assert loaded.missing == [] and loaded.unexpected == []
    same_models(twin, want)
    tokens = ids(rows=2, length=8, vocab=96)
    with torch.no_grad():
        same(twin(input_ids=tokens).logits, want(input_ids=tokens).logits)
    twin(input_ids=tokens, labels=tokens).loss.backward()
    want(input_ids=tokens, labels=tokens).loss.backward()
    for n, p in want.named_parameters():
        same(dict(twin.named_parameters())[n].grad, p.grad, n)


@pytest.mark.parametrize("kind", ["llama tied", "gpt2"])
def test_a_base_models_directory_loads_into_the_model_with_a_tied_head_and_back(prepared: Prepared, tmp_path: Path, kind: str) -> None:
    """Names with and without the base model's prefix."""
    want = hub(kind)
    want.base_model.save_pretrained(tmp_path / "base")
    want.save_pretrained(tmp_path / "whole")
    with torch.device("meta"):
        whole, base = AutoModelForCausalLM.from_config(CONFIGS[kind]()), AutoModel.from_config(CONFIGS[kind]())
    twin = prepared(whole, keep=True)
    assert offload.load_pretrained(twin, tmp_path / "base").unexpected == []
    same_models(twin, want)
    twin = prepared(base, keep=True)
    offload.load_pretrained(twin, tmp_path / "whole")
    same_models(twin, want.base_model)


def test_a_base_models_directory_lacks_an_untied_head(prepared: Prepared, tmp_path: Path) -> None:
    want = hub("llama")
    want.base_model.save_pretrained(tmp_path / "base")
    twin = prepared(hub("llama", seed=1), keep=True)
    with pytest.raises(offload.CheckpointError, match=r"lm_head\.weight"):
        offload.load_pretrained(twin, tmp_path / "base")


def test_another_architecture_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    hub("gpt2").save_pretrained(tmp_path / "w")
    twin = prepared(hub("llama"), keep=True)
    with pytest.raises(offload.CheckpointError, match="architecture"):
        offload.load_pretrained(twin, tmp_path / "w")


def test_save_pretrained_of_a_prepared_model_is_whole_or_refused(prepared: Prepared, tmp_path: Path) -> None:
    """Hugging Face's own save reads memory by address: it must get the values or an error, never something else."""
    want = hub("llama")
    twin = prepared(hub("llama"), keep=True)
    try:
        twin.save_pretrained(tmp_path / "out")
    except (offload.OffloadError, RuntimeError, NotImplementedError):
        return
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same_models(again, want)


def test_safetensors_of_a_state_dict_is_whole_or_refused(prepared: Prepared, tmp_path: Path) -> None:
    twin = prepared(net(tied=False), precision=FP32)
    try:
        save_file(dict(twin.state_dict()), tmp_path / "x.safetensors")
    except (offload.OffloadError, RuntimeError, NotImplementedError):
        return
    for n, v in load_file(tmp_path / "x.safetensors").items():
        same(v, net(tied=False).state_dict()[n], n)
