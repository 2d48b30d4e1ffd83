"""Checkpoints: what is saved comes back to the bit, wherever it goes; what is damaged, newer or another's is refused before anything is changed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from checkpoints import adam, digest, steps, trained
from helpers import BF16, FEW, FP32, PRECISIONS, SETTINGS, Bag, Prepared, bag, give, ids, net, noise, same
from offload.checkpoint import disk
from offload.checkpoint.codec import Encoder, decode
from offload.checkpoint.manifest import Manifest, verify
from offload.checkpoint.tensorfile import read_header
from offload.errors import CheckpointError, ConfigError, OffloadError

FILES = ("manifest.json", "state.json", "tensors.safetensors")


# Round trips


@pytest.mark.parametrize("number", range(len(PRECISIONS)))
def test_goes_on_to_the_bit_elsewhere(prepared: Prepared, tmp_path: Path, number: int) -> None:
    precision = PRECISIONS[number]
    (device, place), (other, elsewhere) = SETTINGS[number % 5], SETTINGS[(2 * number + 3) % 5]
    model, optimizer = trained(prepared, 3, place, device, precision=precision)
    offload.save(tmp_path / "at", model, optimizer, {"step": 3})
    twin = prepared(net(seed=5), elsewhere, other, precision=precision)
    resumed = adam(twin, lr=9.0)
    steps(twin, resumed, 7, 8)
    assert offload.load(tmp_path / "at", twin, resumed) == {"step": 3}
    assert digest(twin) == digest(model)
    assert steps(twin, resumed, 3, 6) == steps(model, optimizer, 3, 6) and digest(twin) == digest(model)


@pytest.mark.parametrize(("was", "now"), [("fp32", "split"), ("split", "fp32")])
def test_a_master_changes_its_form_to_the_bit(prepared: Prepared, tmp_path: Path, was: str, now: str) -> None:
    make = lambda master: offload.Precision("bf16", "bf16", master, "int8")  # noqa: E731
    model, optimizer = trained(prepared, precision=make(was))
    offload.save(tmp_path / "at", model, optimizer)
    twin = prepared(net(seed=5), "nvme", precision=make(now))
    resumed = adam(twin)
    assert offload.load(tmp_path / "at", twin, resumed) is None
    assert digest(twin) == digest(model)
    for (name, p), (_, q) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        same(p, q, name)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    number=st.integers(0, len(PRECISIONS) - 1), places=st.lists(st.sampled_from(SETTINGS), min_size=2, max_size=2),
    frozen=st.sets(st.sampled_from(sorted(FEW)), max_size=2), skipped=st.sets(st.sampled_from(sorted(FEW)), max_size=2), taken=st.integers(0, 2),
)  # fmt: skip
def test_any_parameters_and_steps(
    tmp_path_factory: pytest.TempPathFactory, number: int, places: list[tuple[str, str]], frozen: set[str], skipped: set[str], taken: int
) -> None:
    where = tmp_path_factory.mktemp("any")

    def make(seed: int) -> Bag:
        model = bag(seed=seed, shapes=FEW)
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        return model

    with Prepared(where) as prepared:
        (model, optimizer), (twin, resumed) = ((m, adam(m)) for m in (
            prepared(make(seed), place, device, precision=PRECISIONS[number]) for seed, (device, place) in enumerate(places)))  # fmt: skip
        for i in range(taken):
            give(model, i, tuple(skipped))
            optimizer.step()
        offload.save(where / "at", model, optimizer)
        give(twin, 9)
        resumed.step()
        offload.load(where / "at", twin, resumed)
        assert digest(twin) == digest(model)
        assert {n for n, p in twin.named_parameters() if p in resumed.state} == {n for n, p in model.named_parameters() if p in optimizer.state}
        for m, o in ((model, optimizer), (twin, resumed)):
            give(m, 5)
            o.step()
        assert digest(twin) == digest(model)


class Normed(nn.Module):
    """Persistent and other buffers, of every kind of shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 2)
        self.register_buffer("mask", torch.tensor([True, False]).repeat(3).view(3, 2).t())
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)


def test_what_goes_with_a_model(prepared: Prepared, tmp_path: Path) -> None:
    """Buffers, param groups with schedulers, and extra of all kinds."""

    def make(seed: int) -> tuple[Any, offload.optim.AdamW, Any]:
        torch.manual_seed(seed)
        model = prepared(Normed())
        groups = [{"params": model.norm.parameters()}, {"params": model.out.parameters(), "lr": torch.tensor(0.25), "betas": (0.5, 0.75)}]
        optimizer = offload.optim.AdamW(groups, lr=1.0)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    deep: Any = 10**400
    for i in range(62):
        deep = {i: (deep,)} if i % 2 else [deep]
    model, optimizer, scheduler = make(1)
    model.norm(noise((4, 5)))
    give(model, 1)
    optimizer.step()
    scheduler.step()
    optimizer.state[model.out.bias]["mine"] = [1, (2.5, None)]
    with torch.no_grad():
        model.mask[0, 0] = False
        model.passing += 1
    extra = {"a": [1, 2.5, None, True, "é\ud800"], "deep": deep,
             3: (b"\0\xff", float("-inf")), "t": {"bf": noise((2, 3), dtype=torch.bfloat16), "none": torch.empty(0)},
             "scheduler": scheduler.state_dict(), "p": model.out.weight}  # fmt: skip
    offload.save(tmp_path / "at", model, optimizer, extra)

    twin, resumed, follower = make(2)
    back = offload.load(tmp_path / "at", twin, resumed)
    follower.load_state_dict(back["scheduler"])
    assert digest(twin) == digest(model)
    same(back["p"], model.out.weight.clone().detach())
    same(back["t"]["bf"], extra["t"]["bf"])
    assert back["a"] == extra["a"] and back["deep"] == deep and back[3] == extra[3] and back["t"]["none"].shape == (0,)
    assert resumed.state[twin.out.bias]["mine"] == [1, (2.5, None)]
    for name, buffer in twin.named_buffers():
        assert (name == "passing") != torch.equal(buffer, dict(model.named_buffers())[name]), name
    assert [{k: v for k, v in g.items() if k != "params"} for g in resumed.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    for each in (scheduler, follower):
        each.step()
    assert [float(g["lr"]) for g in resumed.param_groups] == [float(g["lr"]) for g in optimizer.param_groups] == [0.25, 0.0625]


def test_a_model_without_values_takes_them(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer = trained(prepared, precision=BF16)
    offload.save(tmp_path / "at", model, optimizer)
    with torch.device("meta"):
        empty = net()
    twin = prepared(empty, "nvme", precision=BF16, keep=True)
    resumed = adam(twin)
    offload.load(tmp_path / "at", twin, resumed)
    assert digest(twin) == digest(model)


def test_pieces_are_small_and_written_once(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = disk.write
    monkeypatch.setattr(disk, "write", lambda file, data: (sizes.append(memoryview(data).nbytes), write(file, data)))
    model = prepared(bag(shapes={"large": (1100, 1000)}), "nvme")
    optimizer = adam(model)
    give(model, 1)
    optimizer.step()
    offload.save(tmp_path / "at", model, optimizer, torch.zeros(1 << 21))
    assert max(sizes) <= 4 << 20
    assert sum(sizes) == sum((tmp_path / "at" / f).stat().st_size for f in FILES)


# Damage


@pytest.fixture
def saved(prepared: Prepared, tmp_path: Path) -> tuple[Path, Any, offload.optim.AdamW]:
    model, optimizer = trained(prepared, precision=BF16)
    offload.save(tmp_path / "at", model, optimizer, {"t": torch.arange(3), "n": 1})
    steps(model, optimizer, 5, 6)
    return tmp_path / "at", model, optimizer


def refused(saved: tuple[Path, Any, offload.optim.AdamW], says: str) -> None:
    """By `verify` and by `load`, which changes nothing."""
    at, model, optimizer = saved
    before = digest(model)
    with pytest.raises(CheckpointError, match=says) as found:
        verify(at)
    with pytest.raises(CheckpointError, match=says):
        offload.load(at, model, optimizer)
    assert digest(model) == before and "\n" not in str(found.value)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found_and_named(saved: tuple[Path, Any, offload.optim.AdamW], name: str) -> None:
    path = saved[0] / name
    good, rng = path.read_bytes(), random.Random(name)
    for place in [*range(40), *(rng.randrange(len(good)) for _ in range(200)), len(good) - 1]:
        place = min(place, len(good) - 1)
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << rng.randrange(8)]) + good[place + 1 :])
        with pytest.raises(CheckpointError):
            verify(saved[0])
    path.write_bytes(good[:30] + bytes([good[30] ^ 1]) + good[31:])
    refused(saved, name)
    for cut in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        refused(saved, name)
    path.write_bytes(good + b"\0")
    refused(saved, name)
    path.unlink()
    refused(saved, name)
    for make in (lambda: path.symlink_to("/etc/passwd"), lambda: os.mkfifo(path), path.mkdir):
        make()
        refused(saved, name)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(good)
    verify(saved[0])


def rewrite(at: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, its checksum right."""
    content = json.loads((at / "manifest.json").read_text())
    del content["xxh3_128"]
    change(content)
    own = xxhash.xxh3_128_hexdigest((json.dumps(content, indent=1) + "\n").encode())
    (at / "manifest.json").write_text(json.dumps(content | {"xxh3_128": own}, indent=1) + "\n")


def forge(at: Path, name: str, data: bytes) -> None:
    """Replaces a file, its checksum right."""
    (at / name).write_bytes(data)
    rewrite(at, lambda c: c["files"].update({name: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}}))


def test_a_newer_version_is_refused_in_plain_words(saved: tuple[Path, Any, offload.optim.AdamW]) -> None:
    rewrite(saved[0], lambda c: c.update(version=2))
    refused(saved, "version 2; this release reads up to 1: update offload")


@pytest.mark.parametrize("name", ["../at2/state.json", "/etc/passwd.json", "..", "sub/x.json", ".lock.json", "manifest.json", "A.json", ""])
def test_no_name_leads_out_of_the_directory(saved: tuple[Path, Any, offload.optim.AdamW], name: str) -> None:
    shutil.copytree(saved[0], saved[0].parent / "at2")
    rewrite(saved[0], lambda c: c["files"].update({name: c["files"].pop("state.json")}))
    refused(saved, "manifest.json names")


KEYS = ["format", "version", "files", "xxh3_128", "bytes", "dtype", "shape", "data_offsets", "$tuple", "$dict", "$tensor", "$float", "$bytes"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "$tensor"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(KEYS), inner, max_size=4),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(content=JSON | st.binary(max_size=30), kept=st.sampled_from(["", "format", "all"]))
def test_anything_for_a_manifest_a_header_or_a_value(tmp_path_factory: pytest.TempPathFactory, content: Any, kept: str) -> None:
    """No other error than ours."""
    at = tmp_path_factory.mktemp("fuzz")
    manifest = {"format": "offload checkpoint"} | ({"version": 1, "files": content} if kept == "all" else {})
    whole = content if not kept or not isinstance(content, dict) else content | manifest
    (at / "manifest.json").write_bytes(content if isinstance(content, bytes) else json.dumps(whole).encode())
    with pytest.raises(CheckpointError):
        verify(at)
    text = content if isinstance(content, bytes) else json.dumps({"x": content} if kept else content).encode()
    for length in (len(text), len(text) + 1, 1 << 63):
        (at / "x.safetensors").write_bytes(length.to_bytes(8, "little") + text)
        try:
            assert all(e.nbytes == 0 for e in read_header(at / "x.safetensors").values())
        except CheckpointError:
            continue
    try:
        decode(content, {})
    except CheckpointError:
        return


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": [1 << 61, 1 << 61], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_headers_that_lie(saved: tuple[Path, Any, offload.optim.AdamW], entry: dict[str, Any]) -> None:
    at, model, optimizer = saved
    text = json.dumps({"value/x": entry}).encode()
    forge(at, "tensors.safetensors", len(text).to_bytes(8, "little") + text + bytes(8))
    verify(at)
    before = digest(model)
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors"):
        offload.load(at, model, optimizer)
    assert digest(model) == before


def test_states_that_lie(saved: tuple[Path, Any, offload.optim.AdamW]) -> None:
    at, model, optimizer = saved
    good, before = json.loads((at / "state.json").read_bytes()), digest(model)
    name = next(iter(good["parameters"]))
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda s: s.pop("groups"),
        lambda s: s["parameters"][name].update(step=-1),
        lambda s: s["parameters"][name].update(step=None),
        lambda s: s["parameters"][name].update(shape=["1"]),
        lambda s: s["extra"].update(t={"$tensor": 99}),
        lambda s: s["extra"].update(t={"$tensor": []}),
        lambda s: s["extra"].update(t={"$new": 1}),
        lambda s: s["extra"].update(t={"$dict": [[[], 1]]}),
        lambda s: s["groups"][0]["parameters"].pop(),
        lambda s: s["more"].update(strange={"a": 1}),
        lambda s: s.update(more=7),
    ]
    for change in changes:
        state = json.loads(json.dumps(good))
        change(state)
        forge(at, "state.json", json.dumps(state).encode())
        with pytest.raises(CheckpointError):
            offload.load(at, model, optimizer)
        assert digest(model) == before
    forge(at, "state.json", b"[" * 100_000)
    with pytest.raises(CheckpointError):
        offload.load(at, model, optimizer)


# Other models, optimizers and precisions


class _Other:
    depth = staticmethod(lambda: net(depth=3))
    width = staticmethod(lambda: net(width=8))
    untied = staticmethod(lambda: net(tied=False))
    half = staticmethod(lambda: net().bfloat16())

    @staticmethod
    def frozen() -> nn.Module:
        model = net()
        model.embed.weight.requires_grad_(False)
        return model

    @staticmethod
    def buffered() -> nn.Module:
        model = net()
        model.register_buffer("more", torch.zeros(2))
        return model


@pytest.mark.parametrize(
    ("other", "says"),
    [("depth", "lacks 5 of the model's parameters"), ("width", "has shape"), ("untied", "head.weight"), ("half", "convert the model"),
     ("frozen", "was trained .* is frozen"), ("buffered", "lacks 1 of the model's buffers")],
)  # fmt: skip
def test_another_model(saved: tuple[Path, Any, offload.optim.AdamW], prepared: Prepared, other: str, says: str) -> None:
    model = prepared(getattr(_Other, other)(), precision=BF16)
    before = digest(model)
    with pytest.raises(CheckpointError, match=says):
        offload.load(saved[0], model, adam(model))
    assert digest(model) == before


@pytest.mark.parametrize(
    ("precision", "says"), [(FP32, "compute = 'bf16'"), (offload.Precision(moments="int8"), r"moments = 'fp32'.*Precision\(moments='fp32'\)")]
)
def test_another_precision(saved: tuple[Path, Any, offload.optim.AdamW], prepared: Prepared, precision: offload.Precision, says: str) -> None:
    model = prepared(net(), precision=precision)
    with pytest.raises(CheckpointError, match=says):
        offload.load(saved[0], model, adam(model))


def test_another_seed(prepared: Prepared, tmp_path: Path) -> None:
    """Matters where moments are rounded at random."""
    for moments in ("fp32", "int8"):
        precision = offload.Precision(moments=moments)  # type: ignore[arg-type]
        model, optimizer = trained(prepared, precision=precision, seed=1)
        offload.save(tmp_path / "at", model, optimizer)
        twin = prepared(net(), precision=precision)
        if moments == "fp32":
            offload.load(tmp_path / "at", twin, adam(twin))
        else:
            with pytest.raises(CheckpointError, match="seed=1"):
                offload.load(tmp_path / "at", twin, adam(twin))


def test_another_optimizer(saved: tuple[Path, Any, offload.optim.AdamW], prepared: Prepared, tmp_path: Path) -> None:
    model = prepared(net(), precision=BF16)
    some = [p for p in model.parameters() if p.ndim > 1]
    with pytest.raises(CheckpointError, match="param group 0"):
        offload.load(saved[0], model, offload.optim.AdamW(some))
    with pytest.raises(CheckpointError, match="has 1 param groups, the optimizer 2"):
        offload.load(saved[0], model, offload.optim.AdamW([{"params": some}, {"params": [p for p in model.parameters() if p.ndim == 1]}]))
    for wrong in (torch.optim.SGD(some, lr=1.0), saved[2], offload.optim.AdamW([*some, nn.Parameter(torch.zeros(2))])):
        with pytest.raises(ConfigError):
            offload.load(saved[0], model, wrong)
        with pytest.raises(ConfigError):
            offload.save(tmp_path / "no", model, wrong)
    with pytest.raises(ConfigError, match=r"types\.SimpleNamespace; give the one that it wraps, its \.optimizer"):  # as accelerate's
        offload.save(tmp_path / "no", model, SimpleNamespace(optimizer=offload.optim.AdamW(some)))  # type: ignore[arg-type]
    for write in (lambda: offload.save("", model, offload.optim.AdamW(some)), lambda: offload.save_pretrained(model, "")):
        with pytest.raises(ConfigError, match="has no name"):
            write()
    with pytest.raises(CheckpointError, match="is no directory"):
        offload.load(tmp_path / "no", model, offload.optim.AdamW(some))


def test_what_cannot_be_kept_is_refused_before_anything_is_written(saved: tuple[Path, Any, offload.optim.AdamW]) -> None:
    at, model, optimizer = saved
    loop: list[Any] = []
    loop.append(loop)
    for extra in (object(), {"a": [set()]}, loop, noise((2, 2)).to_sparse(), torch.zeros(2, dtype=torch.complex64)):
        with pytest.raises(ConfigError):
            offload.save(at, model, optimizer, extra)
    assert offload.load(at, model, optimizer)["n"] == 1


def test_between_a_backward_and_its_step(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer = trained(prepared, 2, precision=BF16, updates="backward")
    offload.save(tmp_path / "at", model, optimizer)
    before = digest(model)
    model(ids(2)).backward()
    for act in (offload.save, offload.load):
        with pytest.raises(OffloadError, match="between backward and step"):
            act(tmp_path / "at", model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    offload.load(tmp_path / "at", model, optimizer)
    assert digest(model) == before


def test_gradients_that_a_checkpoint_does_not_have_are_told_of(prepared: Prepared, tmp_path: Path) -> None:
    """In the middle of accumulation; not after a step, done or skipped, nor of what no optimizer is to step."""
    model, optimizer = trained(prepared, 1, precision=BF16, accumulate=2)

    def told() -> bool:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            offload.save(tmp_path / "at", model, optimizer)
        wanted = re.compile(r"gradients of \d+ parameters \(\S+, \.\.\.\) have come since .* Save after step")
        assert all(wanted.match(str(w.message)) for w in said) and len(said) < 2
        return len(said) == 1

    assert not told()
    model(ids(2)).backward()
    assert told()
    optimizer.step()
    assert not told()  # they are still there
    optimizer.zero_grad(set_to_none=False)
    assert not told()
    model(ids(3)).backward()
    assert told()
    optimizer.zero_grad()
    assert not told()
    model(ids(4)).backward()
    optimizer.param_groups[0]["params"][0].grad.fill_(float("inf"))
    with pytest.warns(RuntimeWarning, match="step skipped"):
        optimizer.step()
    assert not told()
    optimizer.zero_grad()
    del optimizer.param_groups[0]["params"][1:]
    model(ids(5)).backward()
    optimizer.zero_grad()
    assert not told()


def test_a_graph_does_not_survive_a_load(saved: tuple[Path, Any, offload.optim.AdamW]) -> None:
    at, model, optimizer = saved
    loss = model(ids(1))
    offload.load(at, model, optimizer)
    with pytest.raises(OffloadError, match="was changed since its forward"):
        loss.backward()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner),
)


@given(value=VALUES)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert repr(decode(json.loads(json.dumps(Encoder().encode(value, "x"), allow_nan=False)), {})) == repr(value)


def test_a_manifest_is_checked_without_torch(tmp_path: Path) -> None:
    manifest = Manifest()
    manifest.add(tmp_path, "state.json", [b"{}"])
    manifest.write(tmp_path)
    code = f"import sys\nfrom offload.checkpoint.manifest import verify\nverify({str(tmp_path)!r})\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


BOUNDED = """
import threading, torch, offload
from pathlib import Path
from offload.memory.limits import resident_bytes
base = Path({where!r})

def made():
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(24)])
    tiers = offload.Tiers(device="48MiB", host="96MiB", nvme=[(str(base / "swap"), "3GiB")])
    place = dict.fromkeys(("parameter", "gradient", "optimizer"), "nvme")
    offload.prepare(model, tiers, device="cpu", place=place)
    return model, offload.optim.AdamW(model.parameters())

most, done = [0], threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], resident_bytes())
thread = threading.Thread(target=watch)
thread.start()
grown = []
for act in (offload.save, offload.load):
    model, optimizer = made()
    most[0] = before = resident_bytes()
    act(base / "out", model, optimizer)
    grown.append(most[0] - before)
    offload.runtime(model).close()
done.set(); thread.join()
print(sum(p.stat().st_size for p in (base / "out").iterdir()), *grown)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """384 MiB of masters, within the budgets and little more."""
    done = subprocess.run([sys.executable, "-c", BOUNDED.format(where=str(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written, saving, loading = map(int, done.stdout.split())
    assert written > 380 << 20
    assert saving < 112 << 20 and loading < 48 << 20, (saving >> 20, loading >> 20)
