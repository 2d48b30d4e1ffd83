"""Every form of state: split masters, moments in bf16 and int8. Where bytes are, what is read and written, and what training makes of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import offload
from helpers import (
    BF16,
    FEW,
    FP32,
    PRECISIONS,
    SETTINGS,
    Bag,
    Prepared,
    bag,
    give,
    ids,
    net,
    noise,
    pairs,
    plain,
    same,
    same_models,
)
from offload import _core, ops
from offload.checkpoint import weights
from offload.cli import main
from offload.config import Precision
from offload.engine.initialise import derived_seed
from offload.engine.registry import engine_of
from offload.planner import placement
from offload.planner.form import GROUP, MOMENTS, StateForm, scale_of
from offload.planner.layout import DTYPE_BYTES
from runs import SMALL, sizes

SPLIT = Precision("bf16", "bf16", "split")
COMPACT = [p for p in PRECISIONS if p.moments != "fp32"]
NAMES = [f"{p.compute}-{p.master}-{p.moments}" for p in PRECISIONS]
every = pytest.mark.parametrize("precision", PRECISIONS, ids=NAMES)
compact = pytest.mark.parametrize("precision", COMPACT, ids=[n for p, n in zip(PRECISIONS, NAMES, strict=True) if p in COMPACT])
SHAPES = {"scalar": (), "empty": (0,), "vector": (7,), "group": (256,), "odd": (4097,), "wide": (3, 3001)}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "CHUNKS", (4096,))


def stepped(model: nn.Module, steps: int = 3, **over: Any) -> offload.optim.AdamW:
    opt = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **over)
    for step in range(steps):
        give(model, step)
        opt.step()
    return opt


# Where bytes are


@every
def test_bytes_of_a_form(precision: Precision) -> None:
    form = StateForm.of(precision)
    master = {"own": 0, "fp32": 4, "split": 2}[form.master]
    moment, scales = {"fp32": (4, 0), "bf16": (2, 0), "int8": (1, 8)}[precision.moments]
    for n in (0, 1, 255, 256, 257, 4096, 1 << 20, (1 << 40) + 1):
        assert form.nbytes(n) == n * (master + 2 * moment) + -(-n // 256) * scales
    assert form.nbytes(256) / 256 == master + 2 * moment + scales / 256
    assert form.compute == precision.compute and (form.master == "own") == (precision.compute == "fp32")


@every
@given(st.integers(1, 300), st.data())
def test_parts_of_a_record_are_aligned_and_apart(precision: Precision, pages: int, data: st.DataObject) -> None:
    form, n = StateForm.of(precision), pages * 4096
    end = 0
    for part in form.parts:
        start = form.at(part.role, n, 0)
        assert start == end and start % 64 == 0
        end = start + part.nbytes(n)
        element = data.draw(st.integers(0, n // GROUP - 1)) * GROUP
        assert form.at(part.role, n, element) == start + element // part.group * DTYPE_BYTES[part.dtype] < end
    assert end == form.nbytes(n) <= form.record_bytes(n) < end + 4096
    assert form.record_bytes(n) % 4096 == 0
    with pytest.raises(KeyError):
        form.at("momentum", n, 0)


@every
def test_the_form_is_what_the_kernels_have(precision: Precision) -> None:
    form = StateForm.of(precision)
    assert GROUP == ops.GROUP
    want = ops.moments(1000, precision.moments)
    assert {p.role for p in form.parts} - {"master", "low"} == set(want)
    for name, tensor in want.items():
        assert form.part(name).nbytes(1000) == tensor.nbytes and form.part(name).numel(1000) == tensor.numel()


@every
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_state_is_counted_and_held_to_the_byte(prepared: Prepared, small_chunks: None, precision: Precision, place: str) -> None:
    twin = prepared(net(), place, precision=precision)
    stepped(twin, 1)
    engine, stats = engine_of(twin), offload.runtime(twin).stats()
    form, size = StateForm.of(precision), DTYPE_BYTES[precision.compute]
    assert stats["state_bytes"] == sum(p.numel() * (size + 2) + form.nbytes(p.numel()) for p in twin.parameters())
    held = sum(-(-s.nbytes // 4096) * 4096 for u in engine.units for part in (u.parameters, u.gradients, u.states) for s in part)
    assert held == engine.plan.resting[place] <= stats["peak_bytes"][place] <= stats["budget_bytes"][place]
    assert stats["placement"]["optimizer"][place] == sum(form.record_bytes(c.numel) for u in engine.units for c in placement.chunks_of(u.layout))


def test_compact_state_fits_where_full_state_does_not(prepared: Prepared) -> None:
    with torch.device("meta"):
        model = nn.Linear(2048, 2048, bias=False)
    tiers = offload.Tiers("20MiB", "30MiB")
    for precision, need in ((BF16, "64.0"), (Precision(), "64.0"), (SPLIT, "56.0"), (Precision(moments="bf16"), "48.0")):
        with pytest.raises(offload.PlanError, match=rf"whole state is {need} MiB"):
            offload.plan(model, tiers, device="sim", precision=precision, place={"parameter": "host", "gradient": "host"})
    made = offload.plan(model, tiers, device="cpu", precision=Precision(master="split", moments="int8"), batch=(1, 1))
    assert made.state_bytes == 2048 * 2048 * 8 + 2048 * 2048 // 32 and made.resting["nvme"] == 0


# One update


def expected(precision: Precision, value: torch.Tensor, name: str, steps: int, number: int) -> dict[str, torch.Tensor]:
    """What `stepped` makes of a parameter, by the kernels alone: fp32 master and moments, and the copy that is computed with."""
    n = value.numel()
    state = ops.moments(n, precision.moments)
    split = precision.master == "split"
    master = value.float().reshape(-1).clone()
    high, low = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    if split:
        ops.split_(high, low, master)
    for step in range(steps):
        grad = (noise(value.shape, 1000 * step + number) * 1.0).to(value.dtype).reshape(-1).bfloat16()
        hyper = ops.hyper_record(step=step + 1, lr=1e-2, weight_decay=0.1, seed=derived_seed(0, name, 0) & 0xFFFFFFFF)
        ops.update_(high if split else master, grad, hyper, low=low if split else None, **state)
    out = {"master": ops.join_(master, high, low) if split else master, "copy": high if split else master.to(torch.bfloat16)}
    for role in MOMENTS:
        if precision.moments == "int8":
            out[role] = ops.decode_moment_(torch.empty(n), state[role], state[scale_of(role)])
        else:
            out[role] = state[role].float()
    return out


@every
@pytest.mark.parametrize(("device", "place"), [("cpu", "host"), ("sim", "nvme")])
def test_updates_are_the_kernels_own(prepared: Prepared, small_chunks: None, precision: Precision, device: str, place: str) -> None:
    """Cut in chunks, packed in records and streamed, each parameter is what one call for the whole of it makes."""
    for dtype in (torch.float32, torch.bfloat16):
        model = bag(dtype, shapes=SHAPES)
        twin = prepared(model, place, device, precision=precision)
        opt, engine = stepped(twin), engine_of(twin)
        for number, (name, p) in enumerate(model.named_parameters()):
            want = expected(precision, p.detach(), name, 3, number)
            record = next(r for r in engine.records if r.name == name)
            same(engine.state.read_state(record, "master"), want["master"], name)
            at_rest = want["copy"] if dtype == torch.bfloat16 and precision.compute == "bf16" else want["master"].to(dtype)
            same(plain(twin.get_parameter(name)), at_rest.view(p.shape), name)
            for role in MOMENTS:
                got = opt.state[twin.get_parameter(name)][role]
                assert got.dtype == torch.float32
                same(plain(got), want[role].view(p.shape), f"{role} of {name}")


@every
def test_every_place_gives_the_same_bits(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    seen = set()
    cuts = [(1 << 20,), (4096,), (8192, 4096), (65536, 4096), (4096,), (8192,)]
    levels = _core.simd_levels()
    for i, (device, place) in enumerate(SETTINGS):
        with monkeypatch.context() as patch:
            patch.setattr(placement, "CHUNKS", cuts[i])
            patch.setenv("OFFLOAD_SIMD", levels[i % len(levels)])
            patch.setenv("OFFLOAD_THREADS", str(1 + i % 3))
            twin = prepared(net(vocab=701), place, device, precision=precision)
            opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
            losses = []
            for step in range(3):
                value = twin(ids(step, vocab=701))
                losses.append(float(value.detach()))
                value.backward()
                offload.clip_grad_norm_(twin, 0.5)
                opt.step()
                opt.zero_grad()
            seen.add((*losses, offload.runtime(twin).digest()))
    assert len(seen) == 1


# Split masters


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_the_same_bits_split_or_whole(prepared: Prepared, dtype: torch.dtype, moments: Any) -> None:
    """Of the same gradients. The copies that are computed with are the same masters, rounded differently where they tie."""
    one = prepared(bag(dtype), precision=Precision(moments=moments))
    two = prepared(bag(dtype), precision=Precision(master="split", moments=moments))
    for twin in (one, two):
        stepped(twin, 4)
    assert offload.runtime(one).digest() == offload.runtime(two).digest()
    for name, a, b in pairs(one, two):
        if dtype == torch.float32:
            same(plain(a), plain(b), name)
            continue
        master = engine_of(two).state.read_state(next(r for r in engine_of(two).records if r.name == name), "master").view(a.shape)
        tied = master.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(plain(a)[~tied], plain(b)[~tied]), name
        same(plain(a), master.bfloat16(), name)


def test_ties_round_away_from_zero_in_the_computed_copy(prepared: Prepared) -> None:
    tie = 1 + 2.0**-8  # half way from 1 to the next bf16 value
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[tie, -tie]]))
    got = {}
    for name, precision in (("whole", BF16), ("split", SPLIT)):
        twin = prepared(model, precision=precision)
        got[name] = twin(torch.eye(2)).flatten().tolist()
        same(plain(twin.weight), plain(model.weight))
    assert got == {"whole": [1.0, -1.0], "split": [1 + 2.0**-7, -1 - 2.0**-7]}


@pytest.mark.parametrize(("device", "place"), SETTINGS)
def test_split_parameters_are_read_and_written_to_the_bit(prepared: Prepared, small_chunks: None, device: str, place: str) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (9003,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    value = bits.view(torch.float32)
    value[:4] = torch.tensor([math.inf, -0.0, 3.4e38, 1e-45])
    value = torch.where(value.isnan(), 0.0, value)
    model = Bag(before=nn.Parameter(torch.ones(300)), it=nn.Parameter(value.clone()), after=nn.Parameter(torch.ones(5)))
    twin = prepared(model, place, device, precision=SPLIT)
    same(plain(twin.it), value)
    with torch.no_grad():
        for m in (twin, model):
            m.it[4000:4200] = 1 / 3
            m.it.view(-1)[::7].mul_(-1)
            m.it[-1:] += 2.0
            torch._foreach_add_([m.before, m.after], 0.1)
    same_models(twin, model)
    with torch.no_grad():
        twin.it.copy_(value)
    same(plain(twin.it), value)


def test_a_write_reaches_the_copy_in_a_slot(prepared: Prepared) -> None:
    twin, want = prepared(nn.Linear(8, 8), "host", "sim", precision=SPLIT), None
    x = torch.ones(1, 8)
    for factor in (1.0, 1.5, -2.0):
        with torch.no_grad():
            twin.weight.fill_(factor)
            twin.bias.zero_()
        want = torch.full((1, 8), 8 * factor)
        same(twin(x).detach().float().cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stream_into_halves(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(placement, "CHUNKS", (4096,))
    monkeypatch.setattr(weights, "PIECE", 1001)  # pieces cross groups and chunks
    source = bag(dtype, shapes=SHAPES)
    save_file({k: v.detach().clone() for k, v in source.named_parameters()}, str(tmp_path / weights.SINGLE))
    digests = set()
    for precision in (BF16, SPLIT):
        twin = prepared(bag(torch.float32, seed=77, shapes=SHAPES), "nvme", precision=precision)
        offload.load_pretrained(twin, tmp_path)
        same_models(twin, source.float())
        digests.add(offload.runtime(twin).digest())
    assert len(digests) == 1


# Moments


def stored(values: torch.Tensor, role: str, moments: str) -> torch.Tensor:
    """What a moment reads as once it is stored."""
    flat = values.float().reshape(-1).contiguous()
    if moments == "int8":
        codes = torch.empty(flat.numel(), dtype=torch.int8 if role == "exp_avg" else torch.uint8)
        scale = torch.empty(-(-flat.numel() // GROUP), dtype=torch.float32)
        ops.encode_moment_(codes, scale, flat)
        flat = ops.decode_moment_(torch.empty_like(flat), codes, scale)
    return flat.to(torch.bfloat16).float().view(values.shape) if moments == "bf16" else flat.view(values.shape)


@compact
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_moments_are_written_as_they_are_stored(prepared: Prepared, small_chunks: None, precision: Precision, place: str) -> None:
    twin = prepared(bag(shapes=SHAPES), place, precision=precision)
    opt = stepped(twin)
    for name, p in twin.named_parameters():
        for role in MOMENTS:
            moment, before = opt.state[p][role], plain(opt.state[p][role])
            with torch.no_grad():
                moment.mul_(0.3)
            same(plain(moment), stored(before * 0.3, role, precision.moments), name)
            before = plain(moment)
            if before.numel() > 5:
                with torch.no_grad():
                    moment.view(-1)[5] = 0.25
                before.view(-1)[5] = 0.25
                same(plain(moment), stored(before, role, precision.moments), name)
            with torch.no_grad():
                moment.zero_()
            same(plain(moment), torch.zeros(p.shape), name)


forms, places = st.sampled_from(["fp32", "bf16", "int8"]), st.sampled_from(["host", "nvme"])


@given(st.integers(0, 9002), st.integers(1, 9003), st.sampled_from(MOMENTS), forms, places)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_part_of_a_moment_leaves_other_groups_alone(tmp_path: Path, first: int, count: int, role: str, moments: Any, place: str) -> None:
    values = noise((min(count, 9003 - first),), first).abs()
    with pytest.MonkeyPatch.context() as patch, Prepared(tmp_path) as prepared:
        patch.setattr(placement, "CHUNKS", (4096,))
        twin = prepared(Bag(pad=nn.Parameter(torch.ones(300)), it=nn.Parameter(noise((9003,)))), place, precision=Precision(moments=moments))
        opt = stepped(twin, 1)
        before, others = plain(opt.state[twin.it][role]), plain(opt.state[twin.pad][role])
        engine = engine_of(twin)
        engine.state.write_moment(next(r for r in engine.records if r.name == "it"), role, values, first)
        got, want = plain(opt.state[twin.it][role]), before.clone()
        want[first : first + values.numel()] = values
        low, high = first // GROUP * GROUP, -(-(first + values.numel()) // GROUP) * GROUP
        same(got[:low], before[:low])
        same(got[high:], before[high:])
        same(got[low:high], stored(want[low:high], role, moments))
        same(plain(opt.state[twin.pad][role]), others)


@every
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_state_dict_goes_round(prepared: Prepared, precision: Precision, place: str) -> None:
    """Loaded elsewhere, moments are what storing what was read makes of them; where storing is exact, training goes on with the same bits."""
    one, two = prepared(bag(shapes=SHAPES), place, precision=precision), prepared(bag(seed=50, shapes=SHAPES), "host", "sim", precision=precision)
    opt, other = stepped(one), offload.optim.AdamW(two.parameters(), lr=1.0)
    two.load_state_dict(one.state_dict())
    other.load_state_dict(opt.state_dict())
    exact = True
    for name, p, q in pairs(one, two):
        same(plain(q), plain(p), name)
        assert float(opt.state[p]["step"]) == float(other.state[q]["step"]) == 3
        for role in MOMENTS:
            want = plain(opt.state[p][role])
            again = stored(want, role, precision.moments)
            same(plain(other.state[q][role]), again, f"{role} of {name}")
            exact = exact and torch.equal(want, again)
    assert exact or precision.moments == "int8"
    for twin, optimizer in ((one, opt), (two, other)):
        give(twin, 9)
        optimizer.step()
    assert not exact or offload.runtime(one).digest() == offload.runtime(two).digest()


@compact
def test_another_optimizer_starts_from_zero(prepared: Prepared, precision: Precision) -> None:
    one, two = prepared(bag(shapes=SHAPES), precision=precision), prepared(bag(shapes=SHAPES), precision=precision)
    stepped(one)
    with torch.no_grad():
        for p, q in zip(one.parameters(), bag(shapes=SHAPES).parameters(), strict=True):
            p.copy_(q)
    for twin in (one, two):
        stepped(twin, 2)
    assert offload.runtime(one).digest() == offload.runtime(two).digest()


@compact
def test_seeds_differ_by_run_name_and_step(prepared: Prepared, precision: Precision) -> None:
    def moments(seed: int) -> dict[str, torch.Tensor]:
        twin = prepared(Bag(a=nn.Parameter(torch.zeros(4096)), b=nn.Parameter(torch.zeros(4096))), precision=precision, seed=seed)
        opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(2):
            twin.a.grad = twin.b.grad = noise((4096,), step)
            opt.step()
        return {k: plain(opt.state[p]["exp_avg_sq"]) for k, p in twin.named_parameters()}

    one, again, other = moments(0), moments(0), moments(1)
    same(one["a"], again["a"])
    assert not torch.equal(one["a"], one["b"]) and not torch.equal(one["a"], other["a"])


# Training


@pytest.mark.parametrize("precision", [SPLIT, *COMPACT], ids=lambda p: f"{p.compute}-{p.master}-{p.moments}")
def test_training_stays_near_full_state(prepared: Prepared, precision: Precision) -> None:
    losses: dict[str, list[float]] = {}
    for name, chosen in (("full", FP32 if precision.compute == "fp32" else BF16), ("compact", precision)):
        twin = prepared(net(), precision=chosen)
        opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(40):
            value = twin(ids())
            losses[name].append(float(value.detach()))
            value.backward()
            opt.step()
            opt.zero_grad()
    full, got = losses["full"], losses["compact"]
    assert full[-1] < 0.25 * full[0]
    assert max(abs(a - b) for a, b in zip(full, got, strict=True)) < 0.05 * full[0]


@pytest.mark.parametrize("precision", [SPLIT, Precision(master="split", moments="int8"), Precision("fp32", "bf16", moments="int8")])
def test_a_gradient_that_is_not_finite_leaves_every_byte(prepared: Prepared, precision: Precision) -> None:
    twin = prepared(bag(shapes=FEW), "nvme", precision=precision)
    opt = stepped(twin, 2)
    offload.runtime(twin).synchronize()  # bytes are read past whatever waits for updates
    before = [np.array(_bytes(s)) for u in engine_of(twin).units for s in (*u.parameters, *u.states)]
    give(twin, 5)
    twin.odd.grad[4096] = math.nan
    with pytest.warns(RuntimeWarning, match="odd"):
        opt.step()
    after = [np.array(_bytes(s)) for u in engine_of(twin).units for s in (*u.parameters, *u.states)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)) and opt.skipped == 1


def _bytes(shard: Any) -> np.ndarray[Any, Any]:
    out = torch.empty(shard.nbytes, dtype=torch.uint8)
    shard.read(0, out)
    return out.numpy()


@pytest.mark.parametrize("precision", [SPLIT, *COMPACT[-4:]], ids=lambda p: f"{p.compute}-{p.master}-{p.moments}")
def test_sums_of_micro_batches(prepared: Prepared, precision: Precision) -> None:
    """Declared or not, in parts that have a gradient or not."""
    digests = set()
    for declared, place in ((1, "host"), (3, "nvme"), (1, "nvme")):
        twin = prepared(net(), place, precision=dataclasses.replace(precision, grad=precision.compute), accumulate=declared)
        opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(2):
            for micro in range(3):
                (twin(ids(3 * step + micro)) / 3).backward()
            if step:
                twin.blocks[1].norm.weight.grad = None
            opt.step()
            opt.zero_grad()
        digests.add(offload.runtime(twin).digest())
    assert len(digests) == 1


def test_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SMALL.but(
        model={"config": sizes(128, 64, 128, layers=1)},
        tiers={"device": "48MiB", "place": {"optimizer": "nvme"}},
        precision={"master": "split", "moments": "int8"},
        train={"steps": 2},
    ).write(tmp_path)
    assert main(["plan", str(run), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["train", str(run), "--out", str(tmp_path / "out"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    n = summary["parameters"]
    assert made["state_bytes"] == summary["state_bytes"] and 8 * n < summary["state_bytes"] < 8.05 * n
    assert 'moments = "int8"' in (tmp_path / "out/config.toml").read_text() and summary["moved_bytes"]["nvme_write"] > 0


@pytest.mark.parametrize(
    ("overrides", "state", "written"),
    [
        ((), 16, 14),
        (("precision.master=split",), 14, 12),
        (("precision.moments=bf16",), 12, 10),
        (("precision.master=split", "precision.moments=int8"), 8 + 1 / 32, 6 + 1 / 32),
        (("precision.compute=fp32", "precision.grad=fp32", "precision.moments=int8"), 10 + 1 / 32, 6 + 1 / 32),
    ],
)
def test_arithmetic_of_forms(capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], state: float, written: float) -> None:
    assert main(["plan", "--params", "1048576", "--json", *(["--set"] if overrides else []), *overrides]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["state_bytes"] == made["state_bytes_per_rank"] == state * 1048576
    assert made["written_bytes_per_step"] == written * 1048576
