"""The planner: pure numbers, checked on random units."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models as M
import offload
from helpers import PRECISIONS
from offload.config import Precision, parse_size
from offload.errors import ConfigError, PlanError
from offload.planner import demand
from offload.planner.form import StateForm
from offload.planner.freed import freed
from offload.planner.layout import ALIGN, CHUNK_ALIGN, DTYPE_BYTES, ParameterSpec, UnitSpec, lay_out, slot_bytes
from offload.planner.placement import Plan, chunks_of, gradient_chunk_bytes, nvme_extents, plan_units
from offload.planner.request import Capacities

SETTINGS = settings(max_examples=60, deadline=None)
PAGE = 4096
MIB = 1 << 20


@st.composite
def parameters(draw: st.DrawFn, index: int = 0) -> ParameterSpec:
    inner = draw(st.sampled_from([0, 0, 8, 64]))
    numel = draw(st.one_of(st.integers(0, 300), st.integers(1, 70_000), st.sampled_from([255, 256, 257, 4095, 4096, 4097, 16384, 200_000])))
    if inner:
        numel = max(1, numel // inner) * inner
    trained = draw(st.booleans())
    dtype = draw(st.sampled_from(["fp32", "bf16", "fp16"] if trained else ["fp32", "bf16", "fp16", "fp64", "int8", "int64", "bool"]))
    return ParameterSpec(f"p{index}", numel, dtype, trained, draw(st.integers(1, 2)), inner)


@st.composite
def unit_specs(draw: st.DrawFn) -> list[UnitSpec]:
    units = []
    for i in range(draw(st.integers(1, 6))):
        own = tuple(draw(parameters(j)) for j in range(draw(st.integers(0, 5))))
        units.append(UnitSpec(f"u{i}", own, draw(st.integers(0, 2)), draw(st.booleans())))
    return units


capacities = st.builds(
    Capacities, st.integers(0, 8 * MIB), st.integers(0, 8 * MIB), st.sampled_from([0, MIB, 64 * MIB]), st.booleans(), st.booleans()
)
batches = st.one_of(st.none(), st.builds(demand.Batch, st.integers(1, 4), st.integers(1, 64)))
computes = st.sampled_from(["fp32", "bf16"])


precisions = st.sampled_from(PRECISIONS)


def attempt(units: list[UnitSpec], cap: Capacities, precision: str | Precision = "bf16", **options: Any) -> Plan | None:
    try:
        return plan_units(units, cap, Precision(precision) if isinstance(precision, str) else precision, **options)
    except PlanError:
        return None


@given(st.lists(parameters(), max_size=8), computes, st.sampled_from([4096, 8192, 65536, MIB]))
@SETTINGS
def test_layout(own: list[ParameterSpec], compute: str, chunk: int) -> None:
    """Every element lies in exactly one slice, nothing overlaps, and every offset is aligned."""
    layout = lay_out(UnitSpec("u", tuple(own)), compute, chunk)
    placed: set[int] = set()
    for flat in layout.flats:
        assert flat.trained == own[flat.parameters[0]].trained
        assert flat.dtype == (compute if flat.trained else own[flat.parameters[0]].dtype)
        ranges = sorted((o, o + own[i].numel) for i, o in zip(flat.parameters, flat.offsets, strict=True))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        assert not ranges or ranges[-1][1] <= flat.numel
        assert all(o % ALIGN == 0 for o in flat.offsets)
        at, covered = 0, dict.fromkeys(flat.parameters, 0)
        for c in flat.chunks:
            assert c.start == at
            assert c.start % CHUNK_ALIGN == 0
            assert c.slices
            at = c.stop
            inside = c.start
            for s in c.slices:
                assert s.offset >= inside
                assert s.start == covered[s.parameter]
                assert s.offset == flat.offsets[flat.parameters.index(s.parameter)] + s.start
                covered[s.parameter] = s.stop
                inside = s.offset + s.stop - s.start
            assert inside <= c.stop
            assert c.numel <= chunk
            assert c.numel * DTYPE_BYTES[flat.dtype] % PAGE == 0 or DTYPE_BYTES[flat.dtype] < 4
        assert at == flat.numel
        assert covered == {i: own[i].numel for i in flat.parameters}
        assert not placed & set(flat.parameters)
        placed |= set(flat.parameters)
    assert placed == set(range(len(own)))
    assert all(f.trained == (i == 0) for i, f in enumerate(layout.flats) if layout.trained)


def _pages(n: int) -> int:
    return -(-n // PAGE) * PAGE


def _resting(plan: Plan) -> dict[str, int]:
    """What rests on each tier, counted again from the plan's tiers."""
    out = dict.fromkeys(("device", "host", "nvme"), 0)
    for u, layout in enumerate(plan.layouts):
        out[plan.parameter[u]] += _pages(sum(f.nbytes for f in layout.flats))
        chunks = chunks_of(layout)
        assert len(plan.gradient[u]) == len(plan.state[u]) == len(chunks)
        for i, chunk in enumerate(chunks):
            out[plan.gradient[u][i]] += _pages(gradient_chunk_bytes(chunk, plan.grad))
            out[plan.state[u][i]] += plan.form.record_bytes(chunk.numel)
    return out


@given(unit_specs(), capacities, batches, precisions, st.sampled_from(["auto", "keep", "recompute", "host", "nvme"]), st.sampled_from([1, 4]))
@SETTINGS
def test_plan_keeps_capacities(
    units: list[UnitSpec], cap: Capacities, batch: demand.Batch | None, precision: Precision, activations: str, accumulate: int
) -> None:
    if activations == "nvme" and not cap.nvme:
        with pytest.raises(ConfigError, match="names no directory"):
            attempt(units, cap, precision, batch=batch, activations=activations)
        return
    plan = attempt(units, cap, precision, batch=batch, activations=activations, accumulate=accumulate)
    if plan is None:
        return
    away = plan.boundaries.by_tier
    assert plan.activations in ("host", "nvme") or not sum(away.values())
    assert plan.peak_bytes["host"] == plan.resting["host"] + plan.frames * plan.frame_bytes + away["host"]
    assert plan.peak_bytes["nvme"] == plan.resting["nvme"] + away["nvme"] == sum(_pages(n) for n in nvme_extents(plan))
    assert [u.spec for u in plan.layouts] == units
    assert plan.resting == _resting(plan)
    assert plan.peak_bytes["device"] <= cap.device
    assert plan.peak_bytes["host"] <= cap.host
    assert plan.peak_bytes["nvme"] <= cap.nvme
    assert plan.grad == ("fp32" if accumulate > 1 else "bf16")
    assert plan.form == StateForm.of(precision)
    if not cap.rests:
        assert not plan.resting["device"]
    if plan.resting["nvme"]:
        assert plan.frames >= 3
        largest = max((c.numel for u in plan.layouts for c in chunks_of(u)), default=0)
        assert plan.frame_bytes >= plan.form.record_bytes(largest) + largest * (4 + DTYPE_BYTES[plan.compute])
    _check_slots(plan, cap)
    total = sum(b for roles in plan.describe().values() for b in roles.values())
    assert total <= sum(plan.resting.values())
    assert plan.state_bytes <= total


def _check_slots(plan: Plan, cap: Capacities) -> None:
    """Whatever does not compute where it rests has a slot that fits, and as many as may be open at once have one each."""
    moved = []
    for layout, tier in zip(plan.layouts, plan.parameter, strict=True):
        in_place = all(f.dtype == plan.compute or f.dtype not in ("fp32", "bf16", "fp16", "fp64") for f in layout.flats)
        reach = tier == "device" or (tier == "host" and cap.direct)
        if layout.flats and not (in_place and reach):
            moved.append((M.slot_bytes(layout, plan.compute), layout.spec.depth))
    slots = sorted(plan.slots, reverse=True)
    open_at_once = [max((s for s, d in moved if d == depth), default=0) for depth in sorted({d for _, d in moved})]
    for slot, size in zip(slots, sorted((s for s in open_at_once if s), reverse=True), strict=False):
        assert slot >= size
    assert len(slots) >= min(len([s for s in open_at_once if s]), len(moved))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("numel", [9 * 4096 + 1, 49_152, 100_001])
@pytest.mark.parametrize("host", [1, 4, 16])
def test_slots_hold_units_as_they_are_cut(numel: int, host: int, compute: str) -> None:
    """Cutting a unit in chunks pads it: its slot must hold the padding too."""
    units = [UnitSpec(f"u{i}", tuple(ParameterSpec(f"p{j}", numel >> (j % 3 * 4), "fp32", True, 1, 0) for j in range(6)), 0, True) for i in range(4)]
    cap = Capacities(64 * MIB, host * MIB, 64 * MIB, True, True)
    _check_slots(plan_units(units, cap, Precision(compute), place={"parameter": "nvme", "gradient": "nvme", "optimizer": "nvme"}), cap)


@given(unit_specs(), capacities, st.sampled_from(["parameter", "gradient", "optimizer"]), st.sampled_from(["device", "host", "nvme"]))
@SETTINGS
def test_place_is_honoured(units: list[UnitSpec], cap: Capacities, role: str, tier: str) -> None:
    try:
        plan = plan_units(units, cap, Precision(), place={role: tier})
    except ConfigError:
        assert (tier == "nvme" and not cap.nvme) or (tier == "device" and not cap.rests)
        return
    except PlanError:
        return
    tiers = {t for t, n in plan.describe()[role].items() if n}
    assert tiers <= {tier}


@pytest.mark.parametrize("place", [{"weights": "host"}, {"parameter": "disk"}, {"optimizer": "nvme"}, {"parameter": "device"}])
def test_bad_place(place: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"place"):
        plan_units([UnitSpec("u", (ParameterSpec("p", 10, "fp32", True),))], Capacities(MIB, MIB, 0, False, False), Precision(), place=place)


@given(unit_specs(), capacities, st.sampled_from(["device", "host"]), st.integers(1, 8 * MIB), precisions)
@settings(max_examples=150, deadline=None)
def test_more_budget_never_puts_more_on_nvme(units: list[UnitSpec], cap: Capacities, tier: str, more: int, precision: Precision) -> None:
    """Nor does what fitted stop to fit."""
    before = attempt(units, cap, precision)
    larger = Capacities(cap.device + more * (tier == "device"), cap.host + more * (tier == "host"), cap.nvme, cap.rests, cap.direct)
    after = attempt(units, larger, precision)
    if before is not None:
        assert after is not None
        assert after.resting["nvme"] <= before.resting["nvme"]


MIXED = [
    UnitSpec("embed", (ParameterSpec("e", 1 << 19, "fp32", True, 2, 256),)),
    *(UnitSpec(f"blocks.{i}", (ParameterSpec("w", 1 << 18, "fp32", True, 1, 512),), 0, True) for i in range(6)),
    UnitSpec("head", (ParameterSpec("h", 1000, "fp32", True),)),
]


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("rests", "direct"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("other", [3, 8])
def test_nvme_falls_as_budgets_grow(tier: str, rests: bool, direct: bool, other: int) -> None:
    before: int | None = None
    for size in range(1, 40):
        device, host = (size, other) if tier == "device" else (other, size)
        plan = attempt(MIXED, Capacities(device * MIB, host * MIB, 512 * MIB, rests, direct))
        if before is not None:
            assert plan is not None, f"{size} MiB of {tier} do not do what {size - 1} did"
            assert plan.resting["nvme"] <= before, f"{size} MiB of {tier} put more on nvme than {size - 1}"
        before = plan.resting["nvme"] if plan else None


@given(unit_specs(), capacities, computes)
@SETTINGS
def test_plans_are_deterministic(units: list[UnitSpec], cap: Capacities, compute: str) -> None:
    assert attempt(units, cap, compute) == attempt(units, cap, compute)


def test_hottest_roles_are_nearest() -> None:
    """Parameters before gradients before states, nearest tier first."""
    units = [UnitSpec(f"u{i}", (ParameterSpec("p", 64 * 1024, "fp32", True, 1, 256),), 0, True) for i in range(8)]
    plan = plan_units(units, Capacities(4 * MIB, 4 * MIB, 64 * MIB, True, True), Precision())
    near = {"device": 0, "host": 1, "nvme": 2}
    assert max(near[t] for t in plan.parameter) <= min(near[t] for u in plan.state for t in u)
    assert plan.resting["nvme"] > 0
    assert plan.describe()["parameter"]["nvme"] == 0


@given(unit_specs(), st.integers(1, 48), st.integers(1, 48), computes)
@SETTINGS
def test_one_memory_leaves_the_device_what_the_host_has_room_for(units: list[UnitSpec], device: int, host: int, compute: str) -> None:
    """On `cpu` nothing need rest on the device that fits on the host, and no more rests on nvme for it than if the device were filled first."""
    plan = attempt(units, Capacities(device * MIB, host * MIB, 512 * MIB, True, True), compute)
    if plan is None:
        return
    shard = max((sum(f.nbytes for f in u.flats) for u in plan.layouts), default=0)
    records = [max(gradient_chunk_bytes(c, plan.grad), plan.form.record_bytes(c.numel)) for u in plan.layouts for c in chunks_of(u)]
    left = plan.budgets["host"] - plan.peak_bytes["host"]
    assert plan.resting["device"] == 0 or left <= shard + max(records, default=0)


@pytest.mark.parametrize(("width", "reused"), [(1024, True), (8192, False)])
def test_freed_memory_counts_as_room_where_it_can_be(width: int, reused: bool) -> None:
    """Not where a block's gradients are too large for the C library to keep: beside what it kept of others they would be over the budget."""
    units = [UnitSpec(f"u{i}", (ParameterSpec("w", width * 2048, "fp32", True, 1, 2048),), 0, True) for i in range(4)]
    plan = plan_units(units, Capacities(1024 * MIB, 4096 * MIB, 0, True, True), Precision(), batch=demand.Batch(1, 64))
    assert freed(plan).kept and freed(plan).margin_bytes < plan.free_bytes // 2
    assert freed(plan).reused == reused


def test_one_memory_with_room_on_the_host_leaves_the_device_alone() -> None:
    cap = Capacities(24 * MIB, 128 * MIB, 0, True, True)
    plan = plan_units(BLOCKS, cap, Precision(), batch=demand.Batch(1, 64))
    assert plan.resting["device"] == 0
    assert plan.resting["nvme"] == 0


@given(unit_specs(), capacities, computes)
@SETTINGS
def test_what_comes_later_never_rests_nearer(units: list[UnitSpec], cap: Capacities, compute: str) -> None:
    plan = attempt(units, cap, compute)
    if plan is not None:
        near = {"device": 0, "host": 1, "nvme": 2}
        small_first = sorted(range(len(units)), key=lambda u: sum(f.nbytes for f in plan.layouts[u].flats))
        there = sum(t == "device" for t in plan.parameter) if cap.rests and not cap.direct else 0
        assert all(plan.parameter[u] == "device" for u in small_first[:there])
        assert all({*plan.gradient[u], *plan.state[u]} <= {"device"} for u in small_first[:there])
        left = [u for u in range(len(units)) if u not in small_first[:there]]
        tiers = [near[plan.parameter[u]] for u in small_first[there:]]
        tiers += [near[t] for role in (plan.gradient, plan.state) for u in left for t in role[u]]
        assert tiers == sorted(tiers)
        assert cap.direct or not cap.rests or 0 not in tiers


@given(unit_specs(), st.lists(st.integers(0, 800 << 10), min_size=2, max_size=5), precisions)
@SETTINGS
def test_drives_hold_what_is_planned(units: list[UnitSpec], drives: list[int], precision: Precision) -> None:
    """Shards allocated whole, as a swap space does, find room; a plan that is refused would have found none."""
    cap = Capacities(8 * MIB, 2 * MIB, sum(drives), False, False, tuple(drives))
    plan, whole = attempt(units, cap, precision), attempt(units, replace(cap, nvme=64 * MIB, drives=()), precision)
    made = plan or whole
    if made is None or not sum(drives):
        return
    left, turn = list(drives), 0
    for nbytes in nvme_extents(made):
        fits = [d % len(left) for d in range(turn, turn + len(left)) if left[d % len(left)] >= nbytes]
        if not fits:
            assert plan is None
            return
        left[fits[0]] -= nbytes
        turn = fits[0] + 1
    assert plan is not None


@pytest.mark.parametrize("borrows", [0, 1, 3])
@pytest.mark.parametrize("device", [40, 64])
def test_units_bound_at_once_have_slots(borrows: int, device: int) -> None:
    """A unit that binds parameters of several others finds a slot for each, and one is left to fill ahead."""
    units = [UnitSpec(f"u{i}", (ParameterSpec("w", 1 << 20, "fp32", True, 1, 1024),), 0, True, borrows if i == 7 else 0) for i in range(8)]
    plan = plan_units(units, Capacities(device * MIB, 256 * MIB, 0, False, False), Precision(), place={"parameter": "host"})
    assert len(plan.slots) >= borrows + 2
    assert min(plan.slots) == 2 * MIB


@pytest.mark.parametrize(("device", "direct", "flight"), [(64, False, 4), (13, False, 2), (64, True, 1)])
def test_gradients_in_flight(device: int, direct: bool, flight: int) -> None:
    """One at the least; more where the device has room and they are moved while others are computed."""
    cap = Capacities(device * MIB, 256 * MIB, 0, False, direct)
    plan = plan_units(BLOCKS, cap, Precision(), batch=demand.Batch(1, 1), place={"parameter": "host"}, activations="recompute")
    assert 2 * MIB * flight <= plan.working.in_flight <= plan.working.gradients
    assert plan.working.in_flight < 2 * MIB * (flight + 1)
    assert plan.peak_bytes["device"] <= cap.device


def test_gradients_in_flight_give_way() -> None:
    """To what has to be there, but for one, and only as many bytes as that lacks."""
    work = demand.Working(activations=5, logits=0, gradients=40, slack=5, in_flight=40, largest=10)
    assert work.room(50) == 30 and work.room(70) == 50 and work.room(15) == -5
    assert work.beside(0, work.room(10)) == work.beside(20, work.room(70)) == work
    less = work.beside(20, work.room(55))
    assert (less.gradients, less.in_flight, less.total) == (25, 25, 35) and less.room(35) == 15
    assert work.beside(30, work.room(50)).in_flight == 10


def test_sums_of_shared_gradients_are_counted_beside_those_in_flight() -> None:
    shared = UnitSpec("embed", (ParameterSpec("e", 1 << 20, "fp32", True, 2, 256),))
    other = UnitSpec("block", (ParameterSpec("w", 1 << 18, "fp32", True, 1, 512),))
    assert demand.gradient_bytes([shared, other], "bf16", "bf16") == (2 << 20, 2 << 20)
    assert demand.gradient_bytes([shared, other], "bf16", "fp32") == ((6 << 20) + (1 << 19), 1 << 19)


# Refusals

_SIZE = r"([0-9.]+ [KMG]iB)"


def _refusal(units: list[UnitSpec], cap: Capacities, **options: Any) -> tuple[str, int, int]:
    """(tier, need, have) that the error names; it also has three ways out."""
    with pytest.raises(PlanError) as caught:
        plan_units(units, cap, Precision(), **options)
    text = str(caught.value)
    match = re.search(rf"the (device|host|nvme) tier is short: need {_SIZE}.*?; have {_SIZE}", text)
    assert match, text
    ways = text.split("Ways out: ")[1].rstrip(".").split("; ")
    assert len(ways) == 3
    assert len(set(ways)) == 3
    return match[1], parse_size(match[2]), parse_size(match[3])


BLOCKS = [
    UnitSpec(f"blocks.{i}", (ParameterSpec("w", 1 << 20, "fp32", True, 1, 1024),), 0, True) for i in range(8)
]  # 8 Mi parameters, 128 MiB of state


@pytest.mark.parametrize(
    ("tier", "cap", "options"),
    [
        ("device", Capacities(2 * MIB, 256 * MIB, 256 * MIB, True, False), {}),
        ("device", Capacities(64 * MIB, 256 * MIB, 256 * MIB, True, True), {"batch": demand.Batch(16, 4096)}),
        ("device", Capacities(14 * MIB, 256 * MIB, 256 * MIB, True, True), {"place": {"parameter": "device"}}),
        ("device", Capacities(30 * MIB, 256 * MIB, 256 * MIB, True, True), {"place": {"optimizer": "device"}}),
        ("host", Capacities(64 * MIB, 8 * MIB, 256 * MIB, True, True), {"place": {"optimizer": "host"}}),
        ("host", Capacities(64 * MIB, 8 * MIB, 256 * MIB, False, False), {"place": {"parameter": "host"}}),
        ("host", Capacities(32 * MIB, 100 << 10, 1024 * MIB, True, True), {}),  # no room for staging
        ("nvme", Capacities(32 * MIB, 16 * MIB, 32 * MIB, True, True), {}),
        ("nvme", Capacities(128 * MIB, 128 * MIB, 32 * MIB, True, True), {"place": {"optimizer": "nvme"}}),
    ],
)
def test_refusal_names_the_tier(tier: str, cap: Capacities, options: dict[str, Any]) -> None:
    named, need, have = _refusal(BLOCKS, cap, **options)
    assert named == tier
    assert need > have
    assert have == pytest.approx({"device": cap.device, "host": cap.host, "nvme": cap.nvme}[tier], abs=MIB // 10)


@pytest.mark.parametrize(
    ("tier", "cap", "options"),
    [
        ("device", Capacities(2 * MIB, 256 * MIB, 256 * MIB, True, False), {}),
        ("device", Capacities(14 * MIB, 256 * MIB, 256 * MIB, True, True), {"place": {"parameter": "device"}}),
        ("host", Capacities(64 * MIB, 8 * MIB, 256 * MIB, True, True), {"place": {"optimizer": "host"}}),
        ("host", Capacities(32 * MIB, 100 << 10, 1024 * MIB, True, True), {}),
        ("nvme", Capacities(32 * MIB, 16 * MIB, 32 * MIB, True, True), {}),
        ("nvme", Capacities(128 * MIB, 128 * MIB, 32 * MIB, True, True), {"place": {"optimizer": "nvme"}}),
    ],
)
def test_what_a_refusal_asks_for_is_near_what_suffices(tier: str, cap: Capacities, options: dict[str, Any]) -> None:
    """Raising the named tier to what is asked, again and again, ends soon: the numbers lead out."""
    for _ in range(8):
        named, need, _ = _refusal(BLOCKS, cap, **options)
        cap = Capacities(**{**cap.__dict__, named: max(int(need * 1.05), {"device": cap.device, "host": cap.host, "nvme": cap.nvme}[named] + 1)})
        if attempt(BLOCKS, cap, **options) is not None:
            return
    raise AssertionError(f"still refused at {cap}")


def test_nothing_to_swap_to() -> None:
    """Without a directory for nvme, one is proposed."""
    with pytest.raises(PlanError, match=r"tiers\.nvme"):
        plan_units(BLOCKS, Capacities(32 * MIB, 32 * MIB, 0, True, True), Precision())


def test_public_plan_needs_no_memory() -> None:
    """A model on meta is enough, and nothing is allocated: a model far larger than this machine can be planned."""
    import torch
    from torch import nn

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16384, 16384), nn.ReLU()) for _ in range(60)))
    plan = offload.plan(model, offload.Tiers("20GiB", "96GiB", [("/nowhere", "400GiB")]), batch=(1, 2048), device="sim")
    assert plan.parameters == 60 * (16384 * 16384 + 16384)
    assert plan.state_bytes == plan.parameters * 16
    assert plan.peak_bytes["device"] <= 20 << 30
    assert plan.peak_bytes["host"] <= 96 << 30


@given(unit_specs(), st.integers(1, 4), st.integers(1, 64), computes)
@SETTINGS
def test_demand(units: list[UnitSpec], sequences: int, tokens: int, compute: str) -> None:
    """More tokens never need less; recomputing never needs more than keeping where several units repeat."""
    small, large = demand.Batch(sequences, tokens), demand.Batch(sequences, tokens * 2)
    assert demand.activation_bytes(units, large, compute, "host") <= demand.activation_bytes(units, large, compute, "recompute")
    for mode in ("keep", "recompute", "host", "nvme"):
        assert demand.activation_bytes(units, small, compute, mode) <= demand.activation_bytes(units, large, compute, mode)
    assert demand.logits_bytes(units, small) <= demand.logits_bytes(units, large)
    assert demand.activation_bytes(units, None, compute, "keep") == 0
    sizes = [slot_bytes(lay_out(u, compute, MIB), compute) for u in units]
    depth = 1 + max(u.depth for u in units)
    fewest, ample = demand.fewest_slots(sizes, depth), demand.slot_sizes(sizes, depth, 3)
    if any(sizes):
        assert max(fewest) == max(ample) == max(sizes)
