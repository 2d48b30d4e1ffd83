"""Plans in which gradients pass, as numbers: what they save, that they fit, and when they are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.config import Precision
from offload.errors import PlanError
from offload.planner import demand
from offload.planner.cost import Compute, Rates, traffic_of
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.passing import KEPT, SETS, kinds, places
from offload.planner.placement import Plan, chunks_of, gradient_chunk_bytes, keeping, keeping_gradients, nvme_extents, plan_units
from offload.planner.request import Capacities
from offload.planner.schedule import Speeds, Work, choose_early, least_early, schedule, taken
from offload.train.estimate import Estimate
from offload.train.model import passes
from runs import SMALL
from test_planner import attempt

GIB, MIB = 1 << 30, 1 << 20
COMPACT = Precision(master="split", moments="int8")
EXACT = Precision(master="split")


def _unit(name: str, *shapes: tuple[int, int], repeated: bool = True, uses: int = 1) -> UnitSpec:
    return UnitSpec(name, tuple(ParameterSpec(f"{name}.{i}", a * b, "fp32", True, uses, b) for i, (a, b) in enumerate(shapes)), repeated=repeated)


def llama(layers: int, width: int = 4096, inner: int = 11008, vocabulary: int = 32000) -> list[UnitSpec]:
    block = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(1, width)] * 2
    return [
        _unit("embed", (vocabulary, width), repeated=False), *(_unit(f"layers.{i}", *block) for i in range(layers)),
        _unit("norm", (1, width), repeated=False), _unit("head", (vocabulary, width), repeated=False),
    ]  # fmt: skip


def test_kinds_and_places() -> None:
    two, three = ((8, 8), (8, 8)), ((8, 8), (8, 8), (8, 8))
    units = [_unit(f"a{i}", *two) for i in range(3)] + [_unit("b", *three)] + [_unit(f"c{i}", *two, uses=2) for i in range(3)]
    units += [_unit(f"d{i}", *two, repeated=False) for i in range(3)] + [_unit(f"e{i}", *three) for i in range(2)] + [_unit("a3", *two)]
    frozen = UnitSpec("f", tuple(dataclasses.replace(p, trained=False) for p in units[0].parameters), repeated=True)
    units += [frozen] * 3
    assert kinds(units) == (0, 0, 0, 3, *[KEPT] * 6, 3, 3, 0, *[KEPT] * 3)
    assert places(kinds(units)) == (0, 1, 0, 3, *range(4, 10), 10, 3, 1, *range(13, 16))
    assert kinds(units[:2]) == (KEPT, KEPT)


@st.composite
def _units(draw: st.DrawFn) -> list[UnitSpec]:
    shapes = draw(st.lists(st.lists(st.sampled_from([(16, 16), (64, 128), (300, 64)]), min_size=1, max_size=3), min_size=1, max_size=2))
    units = []
    for i in range(draw(st.integers(1, 12))):
        units.append(_unit(f"u{i}", *draw(st.sampled_from(shapes)), repeated=draw(st.integers(0, 4)) > 0, uses=draw(st.sampled_from([1, 1, 1, 2]))))
    return units


def _resting(plan: Plan) -> dict[str, int]:
    out = dict.fromkeys(("device", "host", "nvme"), 0)
    for u, layout in enumerate(plan.layouts):
        out[plan.parameter[u]] += sum(f.nbytes for f in layout.flats)
        for c, chunk in enumerate(chunks_of(layout)):
            out[plan.state[u][c]] += plan.form.record_bytes(chunk.numel)
            if not plan.borrows(u):
                out[plan.gradient[u][c]] += gradient_chunk_bytes(chunk, plan.grad)
    return out


@settings(max_examples=150, deadline=None)
@given(
    units=_units(),
    cap=st.builds(Capacities, st.integers(MIB, 4 * MIB), st.integers(0, 4 * MIB), st.sampled_from([0, MIB, 64 * MIB]), st.booleans(), st.booleans()),
    precision=st.sampled_from([Precision(), COMPACT, EXACT, Precision("fp32", "fp32")]),
    batch=st.one_of(st.none(), st.builds(demand.Batch, st.integers(1, 2), st.integers(1, 16))),
    place=st.sampled_from([None, {"parameter": "nvme", "optimizer": "nvme"}, {"optimizer": "nvme"}, {"gradient": "nvme"}, {"gradient": "host"}]),
    accumulate=st.sampled_from([1, 1, 2]),
)
def test_a_plan_whose_gradients_pass_leaves_less_on_nvme(
    units: list[UnitSpec], cap: Capacities, precision: Precision, place: dict[str, str] | None, **options: Any
) -> None:
    place = None if place is not None and "nvme" in place.values() and not cap.nvme else place
    kept, plan = (attempt(units, cap, precision, place=place, keep_gradients=keep, **options) for keep in (True, False))
    if plan is None:
        assert kept is None
        return
    assert plan.resting == _resting(plan)
    assert all(plan.peak_bytes[tier] <= cap.by_tier[tier] for tier in cap.by_tier)
    assert plan.peak_bytes["nvme"] == sum(-(-n // 4096) * 4096 for n in nvme_extents(plan))
    if not plan.passing:
        assert kept is None or plan == kept or plan.places
        return
    assert "gradient" not in (place or {}) and options["accumulate"] == 1
    assert kept is None or plan.resting["nvme"] < kept.resting["nvme"]
    for u in plan.passing:
        assert set(plan.gradient[u]) == {"host"} and plan.layouts[u].trained is plan.layouts[plan.places[u]].trained
        assert plan.parameter[u] != "device" or cap.direct
    assert all(plan.places[u] == u for u in range(len(units)) if u not in plan.passing)
    of, moving = kinds(units), [u for u in range(len(units)) if plan.parameter[u] != "device" or cap.direct]
    for kind in {of[u] for u in plan.passing}:  # of three units alike, two share one of their places, and the other one has it alone
        assert kind != KEPT and len({plan.places[u] for u in moving if of[u] == kind}) == SETS
    again = keeping_gradients(plan) if kept is not None else None
    assert again == kept


def test_everything_in_memory_stays_as_it_is() -> None:
    cap = Capacities(GIB, GIB, GIB, False, False)
    plans = [plan_units(llama(6, 256, 704, 1000), cap, Precision(), batch=demand.Batch(1, 64), keep_gradients=keep) for keep in (True, False)]
    assert plans[0] == plans[1] and not plans[1].passing and not plans[1].places


@pytest.mark.parametrize(("precision", "layers", "bytes_each"), [(COMPACT, 50, 6.2), (EXACT, 28, 12.3)])
def test_ten_billion_parameters_on_a_workstation_with_little_disk(precision: Precision, layers: int, bytes_each: float) -> None:
    """3 GiB and 12 GiB of memory, and 56 GiB of drive."""
    cap = Capacities(3 * GIB, 12 * GIB - 64 * MIB, 56 * GIB, True, True)
    options: dict[str, Any] = {"batch": demand.Batch(1, 256, 64), "activations": "recompute"}
    units = llama(layers)
    plan = plan_units(units, cap, precision, keep_gradients=False, **options)
    assert plan.passing == set(range(1, layers + 1)) and plan.state_bytes / plan.parameters < bytes_each
    assert keeping(plan, 2).passing == plan.passing
    with pytest.raises(PlanError, match="nvme tier is short"):
        plan_units(units, cap, precision, **options)
    with pytest.raises(PlanError, match="nvme tier is short"):
        keeping_gradients(plan)


def _tight() -> tuple[Plan, Plan]:
    """Two plans of one model, of which the second has its gradients pass."""
    cap = Capacities(512 * MIB, 256 * MIB, 8 * GIB, False, False)
    made = [plan_units(llama(12, 1024, 2816, 8000), cap, COMPACT, batch=demand.Batch(1, 64), keep_gradients=keep) for keep in (True, False)]
    assert not made[0].passing and len(made[1].passing) == 12
    return made[0], made[1]


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_wait_for_updates_of_the_unit_that_had_their_places(direct: bool) -> None:
    _, plan = _tight()
    count = len(plan.layouts)
    forward = [*range(count)]
    assert least_early(plan, forward) == count - 1 and least_early(plan, [*reversed(forward)]) == count - 2
    speeds, work = Speeds(2e10, 2e10, 1e9, 1e9, 1e9), [Work(0.001, 0.003)] * count
    made = schedule(plan, forward, speeds, work, direct)
    assert made == schedule(plan, forward, speeds, work, direct, count - 1)
    ends: dict[int, float] = {}
    for event in made.of("update"):
        ends[event.unit] = max(ends.get(event.unit, event.end), event.end)
    for event in made.of("gradient"):
        if event.unit in plan.passing and event.unit + SETS < count - 2:
            assert event.start >= ends[event.unit + SETS]
    assert choose_early(plan, forward, speeds, work, direct) >= count - 1


def test_a_run_has_gradients_pass_where_that_is_no_slower() -> None:
    kept, plan = _tight()
    count = len(plan.layouts)
    units = tuple(Compute(0.01, 0.02) for _ in range(count))
    slow, fast = (Rates(r, r, r, 2e10, 2e10, 5e9, False) for r in (0.5e9, 5e10))
    assert Estimate(units, tuple(range(count)), slow).fastest(plan, direct=False, accumulate=1, early=True).passing
    assert Estimate(units, tuple(range(count)), fast).fastest(plan, direct=False, accumulate=1, early=True).passing
    updates = Rates(5e10, 5e10, 5e10, 2e10, 2e10, 3e8, False)  # takes all of a step, and more than a backward
    assert Estimate(units, tuple(range(count)), updates).fastest(plan, direct=False, accumulate=1, early=True) == kept
    moved = [traffic_of(p, direct=False, taken=taken(p, range(count), count)) for p in (kept, plan)]
    assert moved[1].nvme_write < moved[0].nvme_write and moved[1].nvme_read < moved[0].nvme_read and moved[1].d2h == moved[0].d2h


@pytest.mark.parametrize(
    ("changes", "pass_"),
    [
        ([], True), (["optimizer.clip=1.0"], False), (["data.accumulate=2"], False), (["train.updates=forward"], False),
        (["precision.compute=fp16"], False), (["train.updates=backward", "data.accumulate=2"], False),
    ],
)  # fmt: skip
def test_which_runs_may(tmp_path: Any, changes: list[str], pass_: bool) -> None:
    config = SMALL.load(tmp_path, *changes)
    assert passes(config, 1) is pass_ and not passes(config, 2)
