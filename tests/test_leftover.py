"""What a device of its own does with what is left of its budget: parameters that stay from pass to pass, as said and to the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import models as M
import offload
from offload.engine.registry import engine_of
from offload.planner.cost import Compute, Rates, traffic_of
from offload.planner.demand import Batch
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.leftover import Leftover, fetches, further_slots, slots_of, spend
from offload.planner.placement import Plan, holding, plan_units
from offload.planner.request import Capacities
from offload.planner.sums import Gain
from offload.train.estimate import Estimate
from offload.transfer.device import SimDevice

MIB = 1 << 20
STATE = {"optimizer": "host"}  # parameters and gradients may go where they fit
BATCH = (1, 16)


def _plan(device: int, accumulate: int = 1, count: int = 8, **options: Any) -> Plan:
    blocks = [UnitSpec(f"blocks.{i}", (ParameterSpec("w", 1 << 18, "fp32", True, 1, 512),), 0, True) for i in range(count)]
    options = {"place": STATE, "batch": Batch(1, 64)} | options
    capacities = Capacities(device * MIB, 512 * MIB, 256 * MIB, options.pop("rests", True), options.pop("direct", False))
    return plan_units(blocks, capacities, offload.Precision(), accumulate=accumulate, **options)


def test_what_takes_room_first() -> None:
    """Sums that spare a drive, then slots, then other sums, those of the last units; what has no room gives way to what has."""
    gains, nbytes = [Gain(0, 8), Gain(1, 0), Gain(0, 0), Gain(0, 8)], [10, 10, 10, 10]
    assert spend(12, [5] * 2, gains, nbytes) == Leftover((), frozenset({1}))
    assert spend(19, [5] * 2, gains, nbytes) == Leftover((5,), frozenset({1}))
    assert spend(33, [5] * 2, gains, nbytes) == Leftover((5, 5), frozenset({1, 3}))
    assert spend(99, [5, 6], gains, nbytes) == Leftover((5, 6), frozenset({0, 1, 3}))
    assert spend(9, [5, 6], gains, nbytes) == Leftover((5,), frozenset())
    assert spend(19, [20], gains[::-1], nbytes) == Leftover((), frozenset({2}))


def test_fetches_by_slots() -> None:
    """2k passes; at each turn between them as many units stay as there are slots of their size. With one for each the first forward alone fetches."""
    assert fetches((4, 4, 4, 0, 4), (4,), 1) == ((1, 1), (1, 1), (1, 1), (0, 0), (1, 0))
    assert fetches((4, 4, 4, 0, 4), (4, 4), 3) == ((1, 3), (1, 3), (3, 0), (0, 0), (3, 0))
    assert fetches((4, 4, 64, 64), (64, 4, 4), 2) == ((1, 0), (1, 0), (1, 2), (2, 0))
    assert fetches((4, 64, 64), (64, 64), 2) == ((1, 2), (1, 0), (2, 0))  # a small one takes a large slot where there is no other
    for k in range(1, 5):
        for slots in range(1, 9):
            assert sum(map(sum, fetches((4,) * 8, (4,) * slots, k))) == 2 * k * 8 - (2 * k - 1) * slots
    assert further_slots([4, 4, 5, 0, 64, 64, 4], [64, 5, 4, 4]) == [5, 64]
    assert further_slots([4] * 6, [4, 4]) == [4] * 4 and further_slots([4, 4, 64], [64, 64]) == []


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("place", [STATE, None])
def test_what_is_left_over_and_no_more(accumulate: int, place: dict[str, str] | None) -> None:
    """More of a budget never fetches more, and the plan is within it; with enough units are fetched once a step, or rest there."""
    before = 1 << 62
    for device in range(6, 128):
        try:
            plan = _plan(device, accumulate, place=place)
        except offload.PlanError:
            continue
        assert plan.peak_bytes["device"] <= device * MIB
        there = [size for size in slots_of(plan, False) if size]
        assert len(plan.slots) <= len(there) and set(plan.slots) <= {MIB // 2}
        bare = plan.budgets["device"] - plan.peak_bytes["device"]
        assert bare < MIB // 2 or len(plan.slots) == len(there)
        moved = traffic_of(plan, direct=False, accumulate=accumulate)
        times = 2 * accumulate * len(there) - (2 * accumulate - 1) * len(plan.slots) if plan.slots else 0
        assert moved.h2d == times * MIB // 2
        if place is not None:
            assert moved.h2d <= before
            before = moved.h2d
    assert moved.h2d == (8 * MIB // 2 if place is not None else 0)


def test_where_none_stay() -> None:
    """Parameters with a place, one memory, and a batch that is not known; with several ranks as many slots as ever."""
    assert len(_plan(32).slots) == 8
    for options in ({"place": {"parameter": "host", "optimizer": "host"}}, {"batch": None}):
        plan = _plan(32, **options)
        assert len(plan.slots) == 3
        assert plan.batch is not None or len(plan.closed(Batch(1, 64)).slots) == 3
    assert not _plan(32, direct=True, place={"parameter": "host"}).slots


def make() -> nn.Module:
    return M.Stack(depth=8, width=64)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("seed", [None, 1])
def test_fetches_and_traffic_are_as_planned(tmp_path: Path, accumulate: int, seed: int | None) -> None:
    """From the second step on, when the order of units is known: fetches, and bytes over both links."""
    counts = set()
    for kib in (1024, 1536, 2048, 3072, 6144):
        where, device = M.tiers(tmp_path, device=f"{kib}KiB"), SimDevice(seed=seed)
        options: dict[str, Any] = {"precision": M.FP32, "accumulate": accumulate, "place": STATE, "batch": BATCH, "activations": "keep"}
        with M.prepared(M.seeded(make), where, device=device, **options) as model:
            runtime, slots = offload.runtime(model), engine_of(model).slots
            plan, seen = runtime.plan, []
            counts.add((len(plan.slots), len(plan.summed)))
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                for _ in range(accumulate):
                    (M.mean_square(model) / accumulate).backward()
                optimizer.step()
                optimizer.zero_grad()
                runtime.synchronize()
                moved = runtime.stats()["moved_bytes"]
                seen.append((slots.counters.fetches, moved["h2d"], moved["d2h"]))
            planned = traffic_of(plan, direct=False, accumulate=accumulate)
            fetched = sum(map(sum, fetches(slots_of(plan, False), plan.slots, accumulate)))
            for before, after in itertools.pairwise(seen):
                assert [b - a for a, b in zip(before, after, strict=True)][:2] == [fetched, planned.h2d], kib
                assert 0 <= planned.d2h - (after[2] - before[2]) < planned.d2h // 4  # padding does not move
    assert len(counts) > 2


@pytest.mark.parametrize("seed", range(8))
def test_same_bits(tmp_path: Path, seed: int) -> None:
    precision, accumulate = (M.FP32, M.BF16)[seed % 2], (1, 2, 4)[seed % 3]
    updates = ("forward", "backward")[seed // 4]
    options: dict[str, Any] = {"precision": precision, "accumulate": accumulate, "clip": 1e-3 if updates == "forward" else None}
    want = M.run_and_digest(make, M.mean_square, M.tiers(tmp_path), device="cpu", place=M.placed("host"), **options)
    for kib in (1024, 2048, 4096):
        for place in (STATE, {"optimizer": "nvme"}, None):
            where = M.tiers(tmp_path, device=f"{kib}KiB")
            got = M.run_and_digest(make, M.mean_square, where, device=SimDevice(seed=seed), place=place, batch=BATCH, updates=updates, **options)
            assert got == want, (kib, place)


# Speeds


def _estimate(link: float, updates: float) -> Estimate:
    return Estimate((Compute(0.01, 0.02),) * 32, tuple(range(32)), Rates(None, None, None, link, link, updates, shared_cores=False))


@pytest.mark.parametrize("accumulate", [1, 8])
def test_a_run_rests_as_many_whole_as_make_its_step_shortest(accumulate: int) -> None:
    """Where updates take longest, as many as fit; where links do, fewer, for parameters and sums to stay; none the longer for it."""
    plan = _plan(40, accumulate, 32, place=None)
    whole = sum(tier == "device" for tier in plan.parameter)
    assert 4 < whole < 16

    def fastest(found: Estimate, given: Plan = plan) -> Plan:
        return found.fastest(given, direct=False, accumulate=accumulate, early=False)

    slow_updates, slow_links = _estimate(1e12, 1e6), _estimate(1e7, 1e12)
    assert fastest(slow_updates) == plan
    made = fastest(slow_links)
    rest = sum(tier == "device" for tier in made.parameter)
    assert (rest, len(made.slots) > len(plan.slots)) == ((whole, False) if accumulate == 1 else (0, True))
    assert all(made.peak_bytes[tier] <= made.budgets[tier] for tier in made.budgets)
    seconds = [slow_links.predicted(p, direct=False, accumulate=accumulate) for p in (made, plan)]
    assert seconds[0] < seconds[1] or accumulate == 1  # whose fetches before the first forward none can spare
    figures = slow_links.bound(traffic_of(made, direct=False, accumulate=accumulate), recomputed=made.recomputed, accumulate=accumulate)
    assert figures["bound_step_seconds"] <= seconds[0] * 1.001
    assert holding(plan, whole) == plan and not any(t == "device" for t in holding(plan, 0).parameter)
    placed = _plan(40, accumulate, 32)
    assert fastest(slow_links, placed) is placed
