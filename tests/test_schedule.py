"""The schedule of a step: pure numbers, on random plans."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models as M
import offload
from offload.config import Precision
from offload.engine.registry import engine_of
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.placement import Plan, chunks_of, gradient_chunk_bytes, plan_units
from offload.planner.request import Capacities
from offload.planner.schedule import KINDS, LEAST_GAIN, Event, Schedule, Speeds, Work, choose_early, read_early, schedule, unit_order, update_order
from offload.planner.timeline import Timeline
from test_background import STATE_ON_NVME, X

MIB = 1 << 20
SETTINGS = settings(max_examples=40, deadline=None)
HOST = {"parameter": "host", "gradient": "host", "optimizer": "host"}
PLACES = [None, HOST, HOST | {"optimizer": "nvme"}, HOST | {"parameter": "nvme", "optimizer": "nvme"}, dict.fromkeys(HOST, "nvme")]


def plan_of(sizes: list[int], place: dict[str, str] | None, host: int = 512, trained: bool = True) -> Plan:
    units = [UnitSpec(f"u{i}", (ParameterSpec("w", n, "fp32", trained or i % 2 == 0, 1, 64),), 0, True) for i, n in enumerate(sizes)]
    return plan_units(units, Capacities(64 * MIB, host * MIB, 1 << 32, False, False), Precision(), place=place)


def attempt(sizes: list[int], place: dict[str, str] | None, host: int, trained: bool) -> Plan | None:
    try:
        return plan_of(sizes, place, host, trained)
    except offload.PlanError:
        return None


plans = st.builds(
    attempt, st.lists(st.sampled_from([64, 4096, 300_032, 1 << 21]), min_size=1, max_size=7), st.sampled_from(PLACES),
    st.sampled_from([64, 512]), st.booleans(),
).filter(bool)  # fmt: skip
rates = st.sampled_from([1e6, 1e8, 1e9, math.inf])
speeds = st.builds(Speeds, rates, rates, rates, rates, st.sampled_from([1e7, 1e9, math.inf]))


def lane_of(plan: Plan, e: Event) -> str:
    if e.kind == "fetch":
        return "nvme_read" if plan.parameter[e.unit] == "nvme" else "h2d"
    return {"forward": "compute", "backward": "compute", "read": "nvme_read", "write": "nvme_write", "update": "update"}.get(e.kind, "")


def made(plan: Plan, speed: Speeds, order: list[int], direct: bool = False, early: int = 0) -> Schedule:
    return schedule(plan, order, speed, [Work(0.01 * (1 + i % 3), 0.02) for i in range(len(plan.layouts))], direct, early)


@given(plans, speeds, st.randoms(use_true_random=False), st.booleans(), st.integers(0, 7))
@SETTINGS
def test_a_step_keeps_its_order(plan: Plan, speed: Speeds, random: object, direct: bool, early: int) -> None:
    order = list(range(len(plan.layouts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    s = made(plan, speed, order, direct, early)
    first = set(order[::-1][:early])
    assert {e.kind for e in s.events} <= set(KINDS)
    assert all(e.earliest <= e.start <= e.end for e in s.events)
    assert s.updates == update_order([len(chunks_of(u)) for u in plan.layouts], unit_order(order, early))
    assert unit_order(order, 0) == order
    assert [e.unit for e in s.of("forward")] == order and [e.unit for e in s.of("backward")] == order[::-1]
    forward = {e.unit: e for e in s.of("forward")}
    updates = {(e.unit, e.chunk): e for e in s.of("update")}
    assert set(updates) == set(s.updates) and len(s.of("update")) == len(s.updates)
    reads, writes = defaultdict(list), {(e.unit, e.chunk): e for e in s.of("write")}
    for e in s.of("read"):
        reads[e.unit, e.chunk].append(e)
    for place, update in updates.items():
        assert (update.start >= 0 or place[0] in first) and update.end <= forward[place[0]].start
        assert all(r.end <= update.start for r in reads[place])
        assert place not in writes or update.end <= writes[place].start
        assert (place in writes) == bool(reads[place])
        assert first or place in s.early or all(r.start >= 0 for r in reads[place])
    for e in s.of("gradient"):
        assert e.end <= s.seconds + 1e-9 and updates[e.unit, e.chunk].end <= e.end
    for e in s.of("fetch"):
        assert plan.parameter[e.unit] != "nvme" or all(w.end <= e.start for p, w in writes.items() if p[0] == e.unit)


@given(plans, speeds, st.integers(0, 7))
@SETTINGS
def test_links_and_buffers_are_never_overdrawn(plan: Plan, speed: Speeds, early: int) -> None:
    s = made(plan, speed, list(range(len(plan.layouts))), early=early)
    assert s.staging_peak() <= plan.staging.updates * plan.staging.frame_bytes
    lanes = defaultdict(list)
    for e in s.events:
        if e.end > e.start:
            lanes[lane_of(plan, e)].append(e)
    for lane, events in lanes.items():
        if lane:
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(events)), lane


@given(plans, speeds, st.integers(0, 7))
@SETTINGS
def test_a_step_is_no_shorter_than_its_links_and_no_longer_than_their_sum(plan: Plan, speed: Speeds, early: int) -> None:
    s = made(plan, speed, list(range(len(plan.layouts))), early=early)
    compute = sum(e.end - e.start for e in s.events if e.kind in ("forward", "backward"))
    assert s.seconds >= compute - 1e-9
    busy = defaultdict(float)
    for e in s.events:
        busy[lane_of(plan, e) or e.kind] += e.end - e.start
    assert s.seconds <= sum(busy.values()) + 1e-9
    assert all(s.seconds >= seconds - 1e-6 for lane, seconds in busy.items() if lane in ("h2d", "update"))
    free = made(plan, Speeds(), list(range(len(plan.layouts))))
    assert free.seconds == pytest.approx(compute)


def test_updates_hide_under_the_forward() -> None:
    """A step is a backward, and the longer of the forward and of what its links cannot do during the backward."""
    plan = plan_of([1 << 20] * 16, HOST | {"optimizer": "nvme"})
    state, chunks = (16 << 20) * 12, 32
    for seconds in (0.5, 1.0, 2.0):  # of reading all state; of writing it as well
        speed = Speeds(1e10, 1e10, state / seconds, state / seconds, (16 << 20) / 0.2)
        s = schedule(plan, range(16), speed, [Work(1 / 16, 2 / 16)] * 16)
        assert len(s.early) == plan.staging.updates and len(s.updates) == chunks
        least = 2 + max(1.0, seconds * (1 - len(s.early) / chunks))
        assert least <= s.seconds <= 1.05 * least


def test_updates_are_split_between_backward_and_forward() -> None:
    """Where moving state takes about as long as all compute, neither a forward nor a backward alone can hide it: the split is better than both."""
    plan = plan_of([1 << 20] * 16, HOST | {"optimizer": "nvme"})
    state, work = (16 << 20) * 12, [Work(1 / 16, 2 / 16)] * 16
    for seconds in (1.5, 2.5, 3.0):
        speed = Speeds(1e10, 1e10, state / seconds, state / seconds, (16 << 20) / 0.2)
        split = choose_early(plan, range(16), speed, work)
        took = {n: schedule(plan, range(16), speed, work, early=n).seconds for n in (0, split, 16)}
        assert split > 0 and took[split] < took[0] and took[split] <= (1 + LEAST_GAIN) * took[16] and took[split] <= 1.2 * max(3.0, seconds)
        s = schedule(plan, range(16), speed, work, early=split)
        landed = {(e.unit, e.chunk): e.end - s.seconds for e in s.of("gradient")}  # a step earlier, as all steps are alike
        for e in s.of("update"):
            assert e.start >= (landed[e.unit, e.chunk] if e.unit >= 16 - split else 0.0) - 1e-6
    assert choose_early(plan, range(16), Speeds(), work) == 0  # nothing to hide


def test_the_runtime_keeps_the_schedule_of_updates_in_the_backward(tmp_path: Path) -> None:
    with M.prepared(M.seeded(lambda: M.Order(depth=9)), M.tiers(tmp_path), place=STATE_ON_NVME, updates="backward") as model:
        engine, optimizer = engine_of(model), offload.optim.AdamW(model.parameters())
        offload.runtime(model).start_early(4)
        model.order = [3, 1, 4, 0, 5, 2, 6, 8, 7]
        for _ in range(2):
            M.mean_square(model, X).backward()
            s = made(engine.plan, Speeds(), model.order, direct=True, early=4)
            assert engine.background.gated is not None and tuple(engine.background.gated.at) == s.updates
            assert list(engine.early._started) == model.order[:4:-1]
            optimizer.step()


def test_the_runtime_keeps_the_schedule(tmp_path: Path) -> None:
    """Order of updates, and what is read before step()."""
    with M.prepared(M.seeded(lambda: M.Order(depth=9)), M.tiers(tmp_path), place=STATE_ON_NVME) as model:
        engine, optimizer = engine_of(model), offload.optim.AdamW(model.parameters())
        model.order = [3, 1, 4, 0, 5, 2, 6, 8, 7]
        M.mean_square(model, X).backward()
        s = made(engine.plan, Speeds(), model.order, direct=True)
        assert engine.background._prepared is not None
        assert tuple(engine.background._prepared[1]) == s.updates
        assert s.early == read_early(s.updates, engine.plan) == s.updates[: engine.plan.staging.updates]
        assert engine.space is not None
        early = sum(engine.units[u].states[c].nbytes for u, c in s.early)
        while engine.space.counters()["nvme_read"] < early:
            engine.space.drain()
        assert engine.space.counters()["nvme_read"] == early == sum(gradient_chunk_bytes(_chunk(engine.plan, p), "fp32") * 3 for p in s.early)
        optimizer.step()


def _chunk(plan: Plan, place: tuple[int, int]) -> object:
    return chunks_of(plan.layouts[place[0]])[place[1]]


def test_timeline_refuses_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="was not added before it"):
        Timeline().add("a", 1.0, [0])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.lists(st.integers(0, 30), max_size=3)), max_size=30))
def test_timeline_of_any_graph(tasks: list[tuple[str, float, list[int]]]) -> None:
    t = Timeline()
    befores = []
    for i, (lane, seconds, after) in enumerate(tasks):
        befores.append([a % i for a in after] if i else [])
        t.add(lane, seconds, befores[-1])
    t.run()
    for i, before in enumerate(befores):
        assert all(t.end[b] <= t.start[i] for b in before) and t.end[i] == t.start[i] + tasks[i][1]
    for lane in "abc":
        own = sorted((t.start[i], t.end[i]) for i, task in enumerate(tasks) if task[0] == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
