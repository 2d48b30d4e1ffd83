"""Sums of gradients that stay on a device of its own between micro-batches: the host's bits, within budgets, moved once a step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import models as M
import offload
from helpers import PRECISIONS
from offload.engine.registry import engine_of
from offload.planner.cost import traffic_of
from offload.planner.demand import Batch
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.leftover import Leftover, spend
from offload.planner.placement import Plan, chunks_of, plan_units
from offload.planner.request import Capacities
from offload.planner.share import Share
from offload.planner.sums import Gain, gain, link_bytes
from offload.transfer.device import SimDevice
from offload.transfer.kernels import Arrays, HostKernels

MIB = 1 << 20
IDS = torch.arange(24).view(2, 12) * 101 % 701
BATCH = (2, 12)
HOST = {"parameter": "host", "optimizer": "host"}  # gradients may go where they fit
MAKE: M.Make = lambda: M.Language(701, depth=4)  # noqa: E731
UNTIED: M.Make = lambda: M.Language(701, depth=4, tied=False)  # noqa: E731


def loss(model: nn.Module) -> torch.Tensor:
    return M.mean_square(model, IDS)


def fp32_bytes(model: nn.Module, summed: bool) -> int:
    """Of the gradients of units whose sums are on the device, or of all others."""
    engine = engine_of(model)
    return 4 * sum(r.numel for r in engine.records if r.trained and (r.unit in engine.plan.summed) == summed)


# Policy

BLOCKS = [UnitSpec(f"blocks.{i}", (ParameterSpec("w", 1 << 18, "fp32", True, 1, 512),), 0, True) for i in range(8)]


def _plan(device: int, accumulate: int = 4, host: int = 256, **options: Any) -> Plan:
    options = {"place": HOST, "batch": Batch(1, 64)} | options
    capacities = Capacities(device * MIB, host * MIB, 256 * MIB, options.pop("rests", True), options.pop("direct", False))
    return plan_units(BLOCKS, capacities, offload.Precision(), accumulate=accumulate, **options)


def test_what_a_sum_saves() -> None:
    """k micro-batches' gradients come to one sum in fp32; where it rests on nvme, k - 1 of its readings and writings fall away too."""
    assert [gain(["host"], [1000], "fp32", k) for k in (1, 2, 4)] == [Gain(0, 0), Gain(0, 4000), Gain(0, 12000)]
    assert [gain(["host"], [1000], "bf16", k) for k in (2, 3, 4)] == [Gain(0, 0), Gain(0, 2000), Gain(0, 4000)]
    assert gain(["host", "nvme", "device"], [1000, 500, 7], "bf16", 3) == Gain(2 * 2 * 4 * 500, 3000)
    assert link_bytes(10, "bf16", 8, summed=False) == 160 and link_bytes(10, "bf16", 8, summed=True) == 40


def test_which_units_are_chosen() -> None:
    """Those whose sums would rest on nvme, then those whose gradients come first in a backward; none without a gain, nor beyond the room."""
    gains, nbytes = [Gain(0, 8), Gain(4, 0), Gain(0, 0), Gain(0, 8), Gain(0, 8)], [10, 10, 1, 30, 10]
    for room, chosen in ((100, {0, 1, 3, 4}), (10, {1}), (25, {1, 4}), (35, {0, 1, 4}), (9, set())):
        assert spend(room, [], gains, nbytes) == Leftover((), frozenset(chosen))


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_what_is_left_over_and_no_more(accumulate: int) -> None:
    """More of a budget sums more units there, never at the cost of anything else, and never beyond it; the traffic falls as said."""
    before, offered = 0, 0
    for device in range(8, 40):
        try:
            plan = _plan(device, accumulate)
        except offload.PlanError:
            continue
        bare = dataclasses.replace(plan, summed=frozenset())
        assert plan.summed == frozenset(range(8 - len(plan.summed), 8)) and len(plan.summed) >= before
        assert plan.peak_bytes["device"] <= device * MIB
        assert plan.sum_bytes == len(plan.summed) * MIB == plan.peak_bytes["device"] - bare.peak_bytes["device"]
        room = device * MIB - bare.peak_bytes["device"]
        assert len(plan.summed) == (min(8, room // MIB) if accumulate > 2 else 0)  # two bf16 gradients are as many bytes as a sum
        moved, would = (traffic_of(p, direct=False, accumulate=accumulate) for p in (plan, bare))
        assert would.d2h - moved.d2h == len(plan.summed) * (1 << 18) * (2 * accumulate - 4)
        assert moved.h2d == would.h2d and moved.updated == would.updated
        before, offered = len(plan.summed), max(offered, len(plan.summed))
    assert offered == (8 if accumulate > 2 else 0)


def test_sums_on_nvme() -> None:
    """Two micro-batches of bf16 gain nothing on the link, but spare the drive a writing and a reading."""
    place = {"parameter": "host", "optimizer": "nvme"}
    plan = next(p for host in range(4, 64) if (p := _plan_or_none(16, 2, host, place=place)) is not None)
    assert plan.summed and all("nvme" in plan.gradient[u] for u in plan.summed)
    moved, would = (traffic_of(p, direct=False, accumulate=2) for p in (plan, dataclasses.replace(plan, summed=frozenset())))
    there = sum(c.numel for u in plan.summed for c, t in zip(chunks_of(plan.layouts[u]), plan.gradient[u], strict=True) if t == "nvme")
    assert would.nvme_read - moved.nvme_read == would.nvme_write - moved.nvme_write == 4 * there > 0
    assert would.d2h == moved.d2h


def _plan_or_none(*given: Any, **options: Any) -> Plan | None:
    try:
        return _plan(*given, **options)
    except offload.PlanError:
        return None


def test_where_none_stay() -> None:
    """One micro-batch, gradients with a place, one memory, no kernels, several ranks, a batch that is not known yet."""
    assert _plan(32).summed
    assert not _plan(32, 1).summed
    assert not _plan(32, place=HOST | {"gradient": "host"}).summed
    assert not _plan(32, direct=True).summed and not _plan(32, rests=False).summed
    assert not _plan(32, share=Share.of(2, 0, 3, 1)).summed
    late = _plan(32, batch=None)
    assert not late.summed and late.closed(Batch(1, 64)).summed


def test_units_that_rest_whole_come_first() -> None:
    """What is summed is beside them, and in what they leave."""
    for device in range(12, 64):
        plan = _plan(device, place=None)
        whole = {u for u, tier in enumerate(plan.parameter) if tier == "device"}
        assert not whole & plan.summed and plan.peak_bytes["device"] <= device * MIB
    assert whole == set(range(8)) or plan.summed


# The same bits


def run(path: Path, device: Any, *, budget: str = "64MiB", host: str = "64MiB", **options: Any) -> tuple[list[float], str]:
    return M.run_and_digest(MAKE, loss, M.tiers(path, device=budget, host=host), device=device, **options)


@pytest.mark.parametrize("precision", [M.FP32, *PRECISIONS, offload.Precision("bf16", "fp16")], ids=str)
@pytest.mark.parametrize("batch", [None, BATCH])
def test_same_bits(tmp_path: Path, precision: offload.Precision, batch: tuple[int, int] | None) -> None:
    """Every form of state, with clipping, however late the device works."""
    for clip in (None, 1e-3):
        want = run(tmp_path, "cpu", place=M.placed("host"), precision=precision, clip=clip, accumulate=3)
        for device in (SimDevice(seed=1), "sim"):
            assert run(tmp_path, device, place=HOST, precision=precision, clip=clip, accumulate=3, batch=batch) == want


@pytest.mark.parametrize("seed", range(12))
def test_some_units_and_delays(tmp_path: Path, seed: int) -> None:
    """Some sums on the device, the others on the host, some units whole there or state on nvme, both kinds of update."""
    precision, accumulate = (M.FP32, M.BF16)[seed % 2], (3, 5)[seed // 2 % 2]
    updates, place = ("forward", "backward")[seed // 4 % 2], (HOST, {"parameter": "host", "optimizer": "nvme"}, None)[seed % 3]
    options: dict[str, Any] = {"precision": precision, "accumulate": accumulate, "clip": 1e-3 if updates == "forward" else None}
    want = run(tmp_path, "cpu", place=M.placed("host"), **options)
    asked = {"precision": precision, "accumulate": accumulate, "place": place, "batch": BATCH, "device": "sim"}
    plan = next(p for kib in range(600, 2048, 8) if (p := _planned(tmp_path, f"{kib}KiB", asked)) is not None and len(set(p.slots)) == 2)
    there = [u for u, tier in enumerate(plan.parameter) if tier != "device"]
    assert len(there) < 5 or place is not None
    for units in (there, random.Random(seed).sample(there, 1 + len(there) // 2)):
        made = dataclasses.replace(plan, summed=frozenset(units))
        assert run(tmp_path, SimDevice(seed=seed), place=place, plan=made, updates=updates, **options) == want


def _with_sums(plan: Plan, units: Iterable[int]) -> Plan:
    """The plan, which has room for more, with the sums of no more than these units on the device."""
    return dataclasses.replace(plan, summed=plan.summed & set(units))


def _planned(path: Path, budget: str, asked: dict[str, Any], host: str = "64MiB") -> Plan | None:
    try:
        return offload.plan(M.seeded(MAKE), M.tiers(path, device=budget, host=host), **asked)
    except offload.PlanError:
        return None


@pytest.mark.parametrize("updates", ["forward", "backward"])
def test_sums_whose_copies_go_to_nvme(tmp_path: Path, updates: str) -> None:
    """The same bits, and each gradient is written and read once a step at the most."""
    options: dict[str, Any] = {"precision": M.BF16, "accumulate": 4}
    want = run(tmp_path, "cpu", place=M.placed("host"), steps=2, **options)
    asked = options | {"place": {"parameter": "nvme", "optimizer": "nvme"}, "batch": BATCH, "device": "sim"}
    host = next(h for h in (f"{kib}KiB" for kib in range(512, 8192, 32)) if _planned(tmp_path, "8MiB", asked, h) is not None)
    for seed in range(3):
        model = M.seeded(MAKE)
        with M.prepared(model, M.tiers(tmp_path, device="8MiB", host=host), **asked | {"device": SimDevice(seed=seed)}, updates=updates) as model:
            offload.runtime(model).reset_counters()
            plan = offload.runtime(model).plan
            there = {u for u, tiers in enumerate(plan.gradient) if "nvme" in tiers}
            assert there and there <= plan.summed
            losses = M.train(model, loss, 2, accumulate=4)
            assert (losses, offload.runtime(model).digest()) == want
            offload.runtime(model).synchronize()
            moved = offload.runtime(model).stats()["moved_bytes"]
            assert moved["nvme_write"] <= 2 * traffic_of(plan, direct=False, accumulate=4).nvme_write


ACTIONS = ["backward", "backward", "backward", "none", "zero", "half", "clip", "replace", "some", "read", "write", "step", "part", "norm"]


def _act(model: nn.Module, optimizer: Any, action: str, seed: int) -> Any:
    present = [p for p in model.parameters() if p.grad is not None]
    if action == "backward":
        (loss(model) / 3).backward()
    elif action == "part":  # not every parameter gets one
        x = torch.linspace(-1, 1, 32, dtype=engine_of(model).slots.compute).view(2, 16)
        model.blocks[seed % 4](x).float().sum().backward()
    elif action in ("none", "zero"):
        optimizer.zero_grad(set_to_none=action == "none")
    elif action == "half":
        torch._foreach_mul_([p.grad for p in present], 0.5) if present else None
    elif action == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif action == "norm":
        return offload.clip_grad_norm_(model, 1e9)
    elif action == "some":
        for p in list(model.parameters())[::2]:
            p.grad = None
    elif action == "replace":
        for p in list(model.parameters())[::3]:
            p.grad = torch.full(p.shape, 0.01 * (seed + 1))
    elif action == "write":
        with torch.no_grad():
            for p in present[1::2]:
                p.grad.view(-1)[:: seed + 2] = 0.125
    elif action == "step":
        optimizer.step()
    return [p.grad.clone() for p in present] if action == "read" else None


@pytest.mark.parametrize("seed", range(16))
def test_whatever_is_done_between(tmp_path: Path, seed: int) -> None:
    """Reads, writes, scalings, norms, replacements, zeros, steps and more or fewer backwards than were declared: as on the host, to the bit."""
    chance = random.Random(seed)
    actions = ["backward", *chance.choices(ACTIONS, k=14), "read", "step"]
    seen: list[list[Any]] = []
    for device, place in (("cpu", M.placed("host")), (SimDevice(seed=seed), HOST)):
        options: dict[str, Any] = {"precision": (M.FP32, M.BF16)[seed % 2], "accumulate": (2, 3, 4)[seed % 3] + seed % 2, "batch": BATCH}
        with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, place=place, **options) as model:
            assert bool(offload.runtime(model).plan.summed) == (device != "cpu")
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            seen.append([_act(model, optimizer, action, i) for i, action in enumerate(actions)])
            seen[-1].append(offload.runtime(model).digest())
    want, got = seen
    assert want[-1] == got[-1], actions
    for action, a, b in zip(actions, want, got, strict=False):
        pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)] if a is not None else []
        assert all(torch.equal(x, y) for x, y in pairs), (action, actions)


def test_hooks_and_steps_that_are_not_finite(tmp_path: Path) -> None:
    """A step with an infinite gradient is skipped whole, and the next one is as on the host; hooks see each micro-batch's sum."""
    seen: list[Any] = []
    for device, place in (("cpu", M.placed("host")), (SimDevice(seed=4), HOST)):
        with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, place=place, precision=M.FP32, accumulate=3, batch=BATCH) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            weight, sums = model.get_parameter("blocks.1.up.weight"), []
            weight.register_post_accumulate_grad_hook(lambda p, sums=sums: sums.append(p.grad.clone()))
            for step in range(4):
                for micro in range(3):
                    (loss(model) * (float("inf") if (step, micro) == (1, 1) else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.skipped == 1
            seen.append((sums, offload.runtime(model).digest()))
    assert seen[0][1] == seen[1][1]
    assert all(torch.equal(a, b) or not a.isfinite().all() for a, b in zip(seen[0][0], seen[1][0], strict=True))


def test_a_forward_only_after_a_penalty(tmp_path: Path) -> None:
    """A plan that is closed by the first forward leaves sums where some have begun to rest."""
    seen = []
    for device, place in (("cpu", M.placed("host")), ("sim", HOST)):
        with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, place=place, precision=M.FP32, accumulate=3) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            model.embed.weight.square().sum().backward()
            for _ in range(2):
                loss(model).backward()
            assert not offload.runtime(model).plan.summed
            optimizer.step()
            seen.append(offload.runtime(model).digest())
    assert seen[0] == seen[1]


# Traffic and budgets


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize(("clip", "precision", "size"), [(None, M.FP32, 4), (1e-3, M.FP32, 4), (1e-3, M.BF16, 2)])
def test_a_sum_moves_once_a_step(tmp_path: Path, batch: Any, clip: float | None, precision: offload.Precision, size: int) -> None:
    """Of k micro-batches' gradients, one sum in fp32; those of other units move k times; reads in between move nothing for the step."""
    options: dict[str, Any] = {"device": "sim", "place": HOST, "precision": precision, "accumulate": 3, "batch": batch}
    for everything in (True, False) if batch is not None else (True,):
        plan = _with_sums(offload.plan(M.seeded(UNTIED), M.tiers(tmp_path), **options), range(6) if everything else (1, 3, 5))
        with M.prepared(M.seeded(UNTIED), M.tiers(tmp_path), plan=plan, **options) as model:
            M.train(model, loss, 2, clip=clip, accumulate=3)
            moved = offload.runtime(model).stats()["moved_bytes"]["d2h"]
            inside, outside = fp32_bytes(model, True), fp32_bytes(model, False)
            assert inside and bool(outside) != everything
            assert moved == 2 * (inside + 3 * outside * size // 4)
            assert offload.runtime(model).stats()["summed_units"] == len(engine_of(model).plan.summed)
            for _ in range(3):
                loss(model).backward()
                assert model.get_parameter("blocks.3.up.weight").grad is not None
                model.get_parameter("blocks.3.up.weight").grad.sum().item()
            offload.runtime(model).synchronize()
            assert offload.runtime(model).stats()["moved_bytes"]["d2h"] == moved // 2 * 3


def test_the_last_micro_batch_moves_it(tmp_path: Path) -> None:
    """Under its backward, and not at the step; fewer backwards than declared leave it to the step."""
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device="sim", place=HOST, precision=M.FP32, accumulate=3, batch=BATCH) as model:
        optimizer = offload.optim.AdamW(model.parameters())
        device, whole = engine_of(model).device, fp32_bytes(model, True)
        for backwards, moved in ((3, [0, 0, whole]), (2, [0, 0])):
            before, seen = device.moved["d2h"], []
            for _ in range(backwards):
                loss(model).backward()
                seen.append(device.moved["d2h"] - before)
            assert seen == moved
            optimizer.step()
            optimizer.zero_grad()
            assert device.moved["d2h"] - before == whole


@pytest.mark.parametrize("batch", [None, BATCH])
def test_sums_are_within_the_budget(tmp_path: Path, batch: Any) -> None:
    """They are counted to the byte, also where the plan is closed late; undeclared sums find what they leave."""
    some = 0
    for kib in range(640, 1600, 96):
        where = M.tiers(tmp_path, device=f"{kib}KiB")
        try:
            model = offload.prepare(M.seeded(MAKE), where, device="sim", place=HOST, precision=M.BF16, accumulate=3, batch=batch)
            loss(model).backward()
        except offload.PlanError:
            continue
        engine, plan = engine_of(model), offload.runtime(model).plan
        assert sum(u.sums.nbytes for u in engine.units if u.sums is not None) == plan.sum_bytes
        assert engine.budgets["device"].used == plan.resting["device"] + sum(plan.slots) + plan.sum_bytes
        assert plan.peak_bytes["device"] <= engine.budgets["device"].capacity
        assert engine.budgets["device"].peak == engine.budgets["device"].used
        some += bool(plan.summed)
        offload.runtime(model).close()
        assert engine.budgets["device"].used == 0
    assert some > 2


# Errors


def test_plan_of_another_device_is_refused(tmp_path: Path) -> None:
    plan = offload.plan(M.seeded(MAKE), M.tiers(tmp_path), device="sim", place=HOST, accumulate=3, batch=BATCH)
    assert plan.summed
    with pytest.raises(offload.ConfigError, match="summed on the device"):
        offload.prepare(M.seeded(MAKE), M.tiers(tmp_path), device="cpu", plan=plan)


class _Failing(SimDevice):
    """Work that adds to a gradient fails once when `on`."""

    def __init__(self) -> None:
        super().__init__(seed=2)
        self.kernels, self.on = self, False  # type: ignore[assignment]

    def land(self, dst: torch.Tensor, src: torch.Tensor, accumulate: bool, scale: float, sums: torch.Tensor | None) -> None:
        if self.on and accumulate:
            self.on = False
            raise RuntimeError("the kernel failed")
        HostKernels().land(dst, src, accumulate, scale, sums)

    def update(self, arrays: Arrays, first: int, hyper: np.ndarray[Any, Any]) -> None:
        raise AssertionError("nothing rests whole on the device here")


def test_a_sum_that_failed_is_missed_until_there_is_another(tmp_path: Path) -> None:
    """By the step, each time, and by whoever reads; a fresh start makes it good."""
    device = _Failing()
    want = run(tmp_path, "cpu", place=M.placed("host"), precision=M.FP32, accumulate=3, steps=1)[1]
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, place=HOST, precision=M.FP32, accumulate=3, batch=BATCH) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        device.on = True
        for _ in range(3):
            (loss(model) / 3).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the kernel failed"):
                optimizer.step()
        engine = engine_of(model)
        failed = next(r for r in engine.records if engine.gradients.entries[r.number].failed is not None)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            failed.parameter.grad.sum().item()
        optimizer.zero_grad()
        for _ in range(3):
            (loss(model) / 3).backward()
        optimizer.step()
        assert offload.runtime(model).digest() == want


def test_a_copy_that_failed_is_missed_until_there_is_another(tmp_path: Path) -> None:
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=SimDevice(seed=3), place=HOST, precision=M.FP32, accumulate=3, batch=BATCH) as model:
        optimizer, places = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), engine_of(model).places
        kept = places._memory

        def memory(record: Any, *rest: Any, **options: Any) -> torch.Tensor:
            if record.name == "blocks.2.up.weight":
                raise offload.SwapError("it cannot be written")
            return kept(record, *rest, **options)

        places._memory = memory  # type: ignore[method-assign]
        digest = offload.runtime(model).digest()
        for _ in range(3):
            (loss(model) / 3).backward()
        for _ in range(2):
            with pytest.raises(offload.SwapError, match="cannot be written"):
                optimizer.step()
        places._memory = kept  # type: ignore[method-assign]
        assert offload.runtime(model).digest() == digest
        optimizer.zero_grad()
        for _ in range(3):
            (loss(model) / 3).backward()
        optimizer.step()
        assert offload.runtime(model).digest() == run(tmp_path, "cpu", place=M.placed("host"), precision=M.FP32, accumulate=3, steps=1)[1]
