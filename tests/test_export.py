"""Prepared models written as directories that transformers loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
)

import offload
from helpers import BF16, FP32, Prepared, bag, flip, ids, net, noise, plain, same, same_models
from hub import CONFIGS, SIZES, hub
from offload.checkpoint import export, names, writer
from offload.checkpoint.content import SavedParameter, SavedPrecision, SavedState
from offload.checkpoint.weights import Loaded, header
from offload.cli import export as cli_export
from offload.cli import main
from offload.engine.record import DTYPE_NAMES
from runs import SMALL

INDEX = "model.safetensors.index.json"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def on_meta(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype).eval()  # type: ignore[no-any-return]


def weights(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if "safetensors" in p.name}


def stored(directory: Path) -> dict[str, torch.Tensor]:
    out = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            out |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return out


def same_tensors(got: Path, want: Path) -> None:
    ours, theirs = stored(got), stored(want)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        same(ours[name], value, name)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids(rows=2, length=8, vocab=96)).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize(("dtype", "place"), [(torch.float32, "host"), (torch.float32, "nvme"), (torch.bfloat16, "host")])
def test_in_and_out_again(prepared: Prepared, tmp_path: Path, kind: str, shard: str, dtype: torch.dtype, place: str) -> None:
    """The files are transformers' own to the bit, and its model from them is the one that was saved."""
    want = hub(kind, dtype)
    want.save_pretrained(tmp_path / "in", max_shard_size=shard)
    twin = prepared(on_meta(tmp_path / "in", dtype), place, keep=True, precision=FP32 if dtype == torch.float32 and place == "host" else BF16)
    loaded = offload.load_pretrained(twin, tmp_path / "in")
    assert loaded.missing == [] and loaded.unexpected == []
    same_models(twin, want)
    offload.save_pretrained(twin, tmp_path / "out", max_shard_size=shard)
    theirs, ours = weights(tmp_path / "in"), weights(tmp_path / "out")
    assert (INDEX in ours) == (shard == "20KB")
    if shard == "5GB" or not hasattr(want.config, "num_experts_per_tok"):  # transformers shards experts by the size of what they are views of
        assert ours == theirs
    same_tensors(tmp_path / "out", tmp_path / "in")
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "in/config.json").read_text())
    assert (tmp_path / "out/generation_config.json").exists() == (tmp_path / "in/generation_config.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    same_models(again, want)
    same(logits(again), logits(want))


def test_tensors_whose_names_and_form_are_the_models_own(prepared: Prepared, tmp_path: Path) -> None:
    """transformers writes them so with save_original_format=False."""
    want = hub("mixtral")
    want.save_pretrained(tmp_path / "in", save_original_format=False)
    twin = prepared(hub("mixtral", seed=1))
    loaded = offload.load_pretrained(twin, tmp_path / "in")
    assert loaded.unexpected == []
    same_models(twin, want)


def test_masters_are_written_where_the_parameter_is_fp32(prepared: Prepared, tmp_path: Path) -> None:
    """Under both kinds of master, and after a step; what is read is what the parameter reads."""
    for master in ("fp32", "split"):
        for own in (torch.float32, torch.bfloat16):
            twin = prepared(net(seed=1).to(own), "nvme", precision=offload.Precision(master=master))
            opt = offload.optim.AdamW(twin.parameters(), lr=1e-3)
            twin(ids()).backward()
            opt.step()
            offload.save_pretrained(twin, tmp_path / f"{master}{own}")
            found = stored(tmp_path / f"{master}{own}")
            assert "head.weight" not in found and not (tmp_path / f"{master}{own}/config.json").exists()
            for name, p in twin.named_parameters():
                same(found[name], plain(p), name)
            again = prepared(net(seed=2).to(own), precision=offload.Precision(master=master))
            offload.load_pretrained(again, tmp_path / f"{master}{own}")
            same_models(again, twin)


def test_awkward_shapes_buffers_and_pieces(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PIECE", 100)

    def model(seed: int) -> nn.Module:
        m = nn.Sequential(bag(seed=seed), nn.BatchNorm1d(4))
        m.register_buffer("scratch", torch.ones(3), persistent=False)
        m[0].register_parameter("steps", nn.Parameter(torch.arange(5) + seed, requires_grad=False))
        m[0].matrix.requires_grad_(False)
        m[1].running_mean.copy_(noise((4,), seed))
        return m

    for place in ("host", "nvme"):
        twin, again = prepared(model(3), place, precision=BF16), prepared(model(4), place, precision=BF16)
        offload.save_pretrained(twin, tmp_path / place)
        with monkeypatch.context() as patch:  # as a large one is
            patch.setattr(writer, "FILE_LEAST", 1)
            offload.save_pretrained(twin, tmp_path / "large")
        assert (tmp_path / "large/model.safetensors").read_bytes() == (tmp_path / place / "model.safetensors").read_bytes()
        assert set(stored(tmp_path / place)) == set(model(3).state_dict())
        assert offload.load_pretrained(again, tmp_path / place) == Loaded()
        same_models(again, model(3))


# Names


def test_older_names_are_known(prepared: Prepared, tmp_path: Path) -> None:
    config = BertConfig(vocab_size=96, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40, max_position_embeddings=32)
    torch.manual_seed(0)
    want = BertForMaskedLM(config)
    want.save_pretrained(tmp_path / "in")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for n, t in stored(tmp_path / "in").items()
    }
    assert set(old) != set(stored(tmp_path / "in"))
    save_file(old, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(1)
    twin = prepared(BertForMaskedLM(config))
    assert offload.load_pretrained(twin, tmp_path / "in").unexpected == []
    same_models(twin, want)


def test_what_is_missing_stays_where_that_is_asked_for(prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = hub("llama")
    want.base_model.save_pretrained(tmp_path / "in")
    twin, before = prepared(hub("llama", seed=1)), hub("llama", seed=1)
    with pytest.raises(offload.CheckpointError, match=r"lm_head\.weight.*strict=False"):
        offload.load_pretrained(twin, tmp_path / "in")
    assert offload.load_pretrained(twin, tmp_path / "in", strict=False).missing == ["lm_head.weight"]
    assert "lm_head.weight" in caplog.text
    same(twin.lm_head.weight, before.lm_head.weight)
    same_models(twin.base_model, want.base_model)


def test_an_expert_that_is_missing(prepared: Prepared, tmp_path: Path) -> None:
    want = hub("mixtral")
    want.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    name = next(n for n in stored(tmp_path / "in") if "experts.2." in n)
    index = json.loads((tmp_path / "in" / INDEX).read_text())
    path = tmp_path / "in" / index["weight_map"].pop(name)
    save_file({n: t for n, t in load_file(path).items() if n != name}, path, metadata={"format": "pt"})
    (tmp_path / "in" / INDEX).write_text(json.dumps(index))
    twin = prepared(hub("mixtral", seed=1))
    with pytest.raises(offload.CheckpointError, match=r"experts\.(gate_up|down)_proj"):
        offload.load_pretrained(twin, tmp_path / "in")
    same_models(twin, hub("mixtral", seed=1))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(noise((4, 6), 1)), nn.Parameter(noise((4, 6), 2))


@pytest.mark.parametrize(
    "act",
    [
        lambda a, b: {"x": torch.cat([a, b], 0)},
        lambda a, b: {"x": torch.cat([a, b], dim=1)},
        lambda a, b: {"x": torch.stack([a, b], dim=1), "y": a[1:3].contiguous()},
        lambda a, b: {f"x{i}": c.contiguous() for i, c in enumerate(torch.cat([a, b], 1).chunk(3, 1))},
        lambda a, b: {"x": torch.cat([torch.stack([a, b])[1], a.t().contiguous().t()])},
        lambda a, b: {"x": a.t().contiguous(), "y": b[2].clone()},
    ],
)
def test_elements_are_followed_through_conversions(act: Any) -> None:
    model = _Pair()
    values = {n: plain(p) for n, p in model.named_parameters()}
    trace = names._Trace(given := {n: torch.empty_like(v, device="meta") for n, v in values.items()})
    with trace:
        out = act(*given.values())
    for name, want in act(*values.values()).items():
        place = trace.place(out[name])
        got = torch.cat([values[r.name].view(-1)[r.start : r.start + r.numel] for r in place.runs])
        same(got.view(place.shape), want.contiguous(), name)


@pytest.mark.parametrize("act", [lambda t: t * 2, lambda t: t.t().contiguous().view(-1)])
def test_what_cannot_be_followed_is_written_under_the_models_own_names(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, act: Any
) -> None:
    from transformers import core_model_loading

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda m, s: {n: act(t) if t.ndim == 2 else t for n, t in s.items()})
    want = hub("llama")
    offload.save_pretrained(prepared(hub("llama")), tmp_path / "out")
    assert "own names" in caplog.text
    same_models(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), want)


# Putting it in place


def test_other_files_stay_and_earlier_weights_go(prepared: Prepared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    twin = prepared(hub("llama"))
    offload.save_pretrained(twin, out, max_shard_size="20KB")
    (out / "tokenizer.json").write_text("{}")
    dead = out / ".offload-saving-0123456789abcdef"
    dead.mkdir()
    offload.save_pretrained(twin, out)
    assert {p.name for p in out.iterdir()} == {"tokenizer.json", "config.json", "generation_config.json", "model.safetensors"}
    offload.save_pretrained(twin, out, max_shard_size="20KB")
    assert INDEX in weights(out) and "model.safetensors" not in weights(out)
    same_models(AutoModelForCausalLM.from_pretrained(out), hub("llama"))


@pytest.mark.parametrize("earlier", [False, True])
def test_a_disk_that_returns_other_bytes(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    twin = prepared(hub("llama"))
    out = tmp_path / "out"
    if earlier:
        offload.save_pretrained(twin, out)
    before = weights(out) if earlier else None
    sync = writer._sync

    def flipping(path: Path) -> None:
        sync(path)
        if path.name == "model.safetensors":
            flip(path, -3)

    monkeypatch.setattr(writer, "_sync", flipping)
    with pytest.raises(offload.CheckpointError, match=r"model\.safetensors reads back other bytes"):
        offload.save_pretrained(twin, out)
    assert (weights(out) if earlier else None) == before and out.exists() == earlier
    assert not list(tmp_path.rglob(".offload-saving-*"))


def test_what_cannot_be_written(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = prepared(net(seed=1))
    (tmp_path / "file").write_text("x")
    with pytest.raises(offload.CheckpointError, match="no directory"):
        offload.save_pretrained(twin, tmp_path / "file")
    with pytest.raises(offload.CheckpointError, match="proc"):
        offload.save_pretrained(twin, "/proc/none/out")
    with pytest.raises(offload.ConfigError, match="max_shard_size"):
        offload.save_pretrained(twin, tmp_path / "out", max_shard_size=0)
    with pytest.raises(offload.ConfigError, match="no size"):
        offload.save_pretrained(twin, tmp_path / "out", max_shard_size="5GBs")
    with pytest.raises(offload.ConfigError, match="prepare"):
        offload.save_pretrained(net(), tmp_path / "out")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(offload.CheckpointError, match="10 B free"):
        offload.save_pretrained(twin, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".offload-saving-*"))


def test_a_full_disk(prepared: Prepared, tmp_path: Path) -> None:
    code = f"""
import resource, torch, offload
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = offload.prepare(torch.nn.Linear(300, 300), offload.Tiers(device="8MiB", host="8MiB"), device="cpu")
try:
    offload.save_pretrained(model, {str(tmp_path / "out")!r})
except offload.CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "could not be written" in done.stdout and "too large" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["exchanged", "no exchange", "subdirectory", "working directory", "link"])
def test_every_way_of_replacing(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    out, real = tmp_path / "out", tmp_path / "real"
    hub("llama", seed=1).save_pretrained(real if way == "link" else out, max_shard_size="20KB")
    if way == "link":
        out.symlink_to(real)
    elif way == "no exchange":
        monkeypatch.setattr("offload.checkpoint.disk._renameat2", None)
    elif way == "subdirectory":
        (out / "runs").mkdir()
        (out / "runs/x").write_text("x")
    elif way == "working directory":
        monkeypatch.chdir(out)
    (out / "notes").write_text("mine")
    out.chmod(0o750)
    before = out.stat().st_ino
    offload.save_pretrained(prepared(hub("llama", seed=2)), "." if way == "working directory" else out)
    assert (out.stat().st_ino != before) == (way in ("exchanged", "link")) and out.stat().st_mode & 0o777 == 0o750
    assert out.is_symlink() == (way == "link") and (out / "notes").read_text() == "mine" and (out / "runs/x").exists() == (way == "subdirectory")
    assert list(weights(out)) == ["model.safetensors"] and not list(tmp_path.rglob(".offload-saving-*"))
    same_models(AutoModelForCausalLM.from_pretrained(out), hub("llama", seed=2))


@pytest.mark.parametrize("at", range(12))
def test_killed_while_files_are_put_in_place(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """What is there is the old model, the new one or none that loads, never parts of both."""
    old, new = hub("llama", seed=1), hub("llama", seed=2)
    out = tmp_path / "out"
    old.save_pretrained(out, max_shard_size="20KB")
    (out / "runs").mkdir()  # so that they are replaced one by one
    twin = prepared(new)
    left = [at]

    def counted(act: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return act(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "replace", counted(os.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        try:
            offload.save_pretrained(twin, out, max_shard_size="20KB" if at % 2 else "5GB")
        except KeyboardInterrupt:
            assert not list(out.glob(".offload-saving-*"))
    try:
        found = AutoModelForCausalLM.from_pretrained(out)
    except (OSError, ValueError):
        return
    same_models(found, old if torch.equal(found.lm_head.weight, old.lm_head.weight) else new)


# From a checkpoint, without the model


def checkpoint(directory: Path, model: nn.Module, master: str = "fp32") -> Path:
    """What of a checkpoint has to do with weights."""
    directory.mkdir(parents=True)
    also = {n: [m for m, q in model.named_parameters(remove_duplicate=False) if q is p and m != n] for n, p in model.named_parameters()}
    parameters = {
        n: SavedParameter(dtype=DTYPE_NAMES[p.dtype], shape=list(p.shape), trained=True, step=1, also=also[n]) for n, p in model.named_parameters()
    }
    state = SavedState(
        precision=SavedPrecision(compute="bf16", master=master, moments="fp32"), seed=0, parameters=parameters, buffers=[], groups=[], more={},
        skipped=0, extra=None,
    )  # fmt: skip
    tensors = {f"master/{n}": plain(p).float() for n, p in model.named_parameters()} | {f"buffer/{n}": plain(b) for n, b in model.named_buffers()}
    tensors |= {f"exp_avg/{n}": torch.ones(p.shape) for n, p in model.named_parameters()}
    save_file(tensors, directory / "tensors.safetensors")
    (directory / "state.json").write_bytes(state.render())
    return directory


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []
    monkeypatch.setattr(cli_export, "check", done.append)
    return done


@pytest.mark.parametrize("by", ["run", "checkpoint", "model"])
def test_a_runs_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], verified: list[Path], by: str) -> None:
    old, new = hub("llama", seed=1), hub("llama", seed=2)
    new.save_pretrained(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    run = tmp_path / "run"
    checkpoint(run / "checkpoints/step-00000001", old)
    newest = checkpoint(run / "checkpoints/step-00000002", new)
    if by == "model":
        newest = newest.rename(tmp_path / "alone")
        argv = [newest, "--model", tmp_path / "model"]
    else:
        SMALL.but(model={"config": SIZES}).write(run, "config.toml")
        argv = [run if by == "run" else newest]
    capsys.readouterr()
    assert main(["export", *map(str, argv), str(tmp_path / "out"), "--json", "--max-shard-size", "20KB"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert verified == [newest] and said["checkpoint"] == str(newest)
    assert said["parameters"] == new.num_parameters() and sorted(said["files"]) == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert (tmp_path / "out/tokenizer.json").exists() == (by == "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same_models(again, new)
    assert again.config.use_cache


@pytest.mark.parametrize("kind", ["llama tied", "mixtral"])
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_tied_experts_and_split_masters_of_a_checkpoint(tmp_path: Path, kind: str, master: str) -> None:
    model = hub(kind, torch.bfloat16)
    model.save_pretrained(tmp_path / "want")
    saved = export.saved_tensors(checkpoint(tmp_path / "saved", model, master))
    export.export(on_meta(tmp_path / "want", torch.float32), saved, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "want")


def test_a_split_masters_upper_half(tmp_path: Path) -> None:
    tie = torch.tensor([1.00390625, 1.01171875, -1.00390625])  # halfway between two bf16 numbers
    save_file({"x": tie}, tmp_path / "x.safetensors")
    entry = header(tmp_path / "x.safetensors")["x"]
    even, away = (torch.cat(list(export.OfFile(entry, torch.bfloat16, split).read(0, 3))) for split in (False, True))
    assert even.tolist() == [1.0, 1.015625, -1.0] and away.tolist() == [1.0078125, 1.015625, -1.0078125]


def test_a_checkpoint_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    model = hub("llama")
    saved = export.saved_tensors(checkpoint(tmp_path / "saved", model))
    os.truncate(tmp_path / "saved/tensors.safetensors", 20_000)
    with pytest.raises(offload.CheckpointError, match=r"tensors\.safetensors could not be read"):
        export.export(model, saved, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_what_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], verified: list[Path]) -> None:
    def refused(*argv: object) -> str:
        assert main(["export", *map(str, argv), str(tmp_path / "out")]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err and not (tmp_path / "out").exists()
        return said.err

    assert "no directory" in refused(tmp_path / "none")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "no checkpoint yet" in refused(tmp_path / "run")
    found = checkpoint(tmp_path / "run/checkpoints/step-00000001", hub("gpt2"))
    assert "--model" in refused(tmp_path / "run")
    SMALL.but(model={"config": SIZES}).write(tmp_path / "run", "config.toml")
    assert "of this architecture" in refused(tmp_path / "run")
    assert "no config.json" in refused(found, "--model", tmp_path)
    (found / "state.json").write_text("[]")
    assert "is not what a checkpoint says of its state" in refused(tmp_path / "run")


# Memory

BOUNDED = """
import resource, sys, threading, time, torch, offload
from pathlib import Path
base = Path({where!r})
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(24)])
tiers = offload.Tiers(device="48MiB", host="64MiB", nvme=[(str(base / "swap"), "3GiB")])
place = dict.fromkeys(("parameter", "gradient", "optimizer"), "nvme")
offload.prepare(model, tiers, device="cpu", place=place, precision=offload.Precision(master="split", moments="int8"))
for p in model.parameters():
    with torch.no_grad():
        p.zero_()

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

most, done = [rss()], threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], rss())
before = rss()
thread = threading.Thread(target=watch)
thread.start()
offload.save_pretrained(model, base / "out", max_shard_size="100MB")
between = most[0]
offload.load_pretrained(model, base / "out")
done.set(); thread.join()
offload.runtime(model).close()
print(sum(p.stat().st_size for p in (base / "out").glob("*.safetensors")), between - before, most[0] - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """384 MiB of weights through a few MiB."""
    done = subprocess.run([sys.executable, "-c", BOUNDED.format(where=str(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written, saving, loading = map(int, done.stdout.split())
    assert written > 380 << 20
    assert saving < 24 << 20 and loading < 64 << 20, (saving >> 20, loading >> 20)
