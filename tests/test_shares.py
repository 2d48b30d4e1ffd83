"""Layouts and plans for several ranks: what is whose, and that every rank has the same plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.config import Precision
from offload.errors import ConfigError, PlanError
from offload.planner.demand import Batch
from offload.planner.layout import ALIGN, CHUNK_ALIGN, Flat, ParameterSpec, UnitSpec, lay_out, pack, pack_shares
from offload.planner.placement import Plan, chunks_of, keeping, plan_units
from offload.planner.request import Capacities
from offload.planner.share import ABSENT, Share

MIB = 1 << 20
NUMELS = st.lists(st.one_of(st.integers(0, 9000), st.sampled_from([1, 255, 256, 4095, 4096, 4097, 65536, 200_001])), min_size=1, max_size=12)
CHUNKS = st.sampled_from([4096, 16384, 65536, MIB])
RANKS = st.integers(2, 9)


@given(NUMELS, CHUNKS, RANKS)
def test_every_element_has_one_owner(numels: list[int], chunk: int, ranks: int) -> None:
    flat = pack_shares(list(enumerate(numels)), "fp32", True, chunk, ranks)
    assert flat.numel == ranks * flat.share and flat.share % CHUNK_ALIGN == 0
    assert [c.start for c in flat.chunks] == [0, *(c.stop for c in flat.chunks)][:-1] and flat.chunks[-1].stop == flat.numel
    sizes = [c.numel for c in flat.chunks]
    each = len(sizes) // ranks
    assert sizes == sizes[:each] * ranks and sum(sizes[:each]) == flat.share  # the same for every rank
    assert max(sizes) <= chunk and all(c.start % CHUNK_ALIGN == 0 for c in flat.chunks)
    taken = 0
    for index, numel in enumerate(numels):
        offset = flat.offsets[index]
        assert offset >= taken and offset % ALIGN == 0
        taken = offset + max(numel, 1)
        pieces = [(c, s) for c in flat.chunks for s in c.slices if s.parameter == index]
        assert [s.start for _, s in pieces] == [0, *(s.stop for _, s in pieces)][:-1] and pieces[-1][1].stop == numel
        for c, s in pieces:
            assert s.offset == offset + s.start and c.start <= s.offset and s.offset + s.stop - s.start <= c.stop
            assert s.start % CHUNK_ALIGN == 0  # no block of a norm is parted
    assert taken <= flat.numel


@given(NUMELS, CHUNKS, RANKS)
def test_shares_are_the_smallest_that_fit(numels: list[int], chunk: int, ranks: int) -> None:
    members = list(enumerate(numels))
    flat = pack_shares(members, "fp32", True, chunk, ranks)
    packed = pack(members, "fp32", True, chunk).numel
    assert flat.numel >= sum(numels)
    cuts = ranks * -(-flat.share // chunk)
    assert flat.numel <= packed + 2 * CHUNK_ALIGN * (cuts + 1) + ranks * CHUNK_ALIGN


@given(NUMELS, CHUNKS)
def test_one_rank_is_as_ever(numels: list[int], chunk: int) -> None:
    spec = UnitSpec("u", tuple(ParameterSpec(f"p{i}", n, "fp32", i % 3 > 0) for i, n in enumerate(numels)))
    assert lay_out(spec, "bf16", chunk, 1) == lay_out(spec, "bf16", chunk)
    for flat in lay_out(spec, "bf16", chunk).flats:
        assert flat.ranks == 1 and flat == pack([(i, numels[i]) for i in flat.parameters], flat.dtype, flat.trained, chunk)


def test_a_small_parameter_goes_behind_the_cut_and_a_large_one_starts_on_a_block() -> None:
    flat: Flat = pack_shares([(0, 4000), (1, 200), (2, 9000), (3, 300)], "fp32", True, CHUNK_ALIGN, 2)
    assert flat.offsets == (0, CHUNK_ALIGN, 2 * CHUNK_ALIGN, 2 * CHUNK_ALIGN + 9216)


def block(i: int, width: int = 96) -> UnitSpec:
    return UnitSpec(f"block{i}", (ParameterSpec("norm", width, "fp32", True), ParameterSpec("up", 3 * width * width, "fp32", True, inner=width),
                                  ParameterSpec("down", 3 * width * width, "fp32", True, inner=3 * width)), 0, True)  # fmt: skip


UNITS = [UnitSpec("embed", (ParameterSpec("e", 3000 * 96, "fp32", True, inner=96),)), *(block(i) for i in range(4)),
         UnitSpec("kept", (ParameterSpec("k", 5000, "bf16", False),))]  # fmt: skip


def planned(ranks: int, rank: int, stage: int, device: int = 8 * MIB, host: int = 64 * MIB, nvme: int = 64 * MIB) -> Plan:
    capacities = Capacities(device, host, nvme, True, True, (nvme,))
    return plan_units(UNITS, capacities, Precision("fp32", "fp32"), share=Share(ranks, rank, stage))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("host", [64 * MIB, 3 * MIB])
def test_all_ranks_have_one_plan(ranks: int, stage: int, host: int) -> None:
    plans = [planned(ranks, r, stage, host=host) for r in range(ranks)]
    for made in plans:
        assert dataclasses.replace(made, share=plans[0].share, gradient=plans[0].gradient, state=plans[0].state) == plans[0]
        assert made.peak_bytes == plans[0].peak_bytes and made.state_bytes == plans[0].state_bytes
        assert all(made.peak_bytes[t] <= made.budgets[t] for t in made.budgets)
        assert {t: sum(role[t] for role in made.describe().values()) for t in made.budgets} == made.resting
    for role, tiers in (("gradient", [p.gradient for p in plans]), ("optimizer", [p.state for p in plans])):
        for u, unit in enumerate(plans[0].layouts):
            for c in range(len(chunks_of(unit))):
                owners = [r for r in range(ranks) if tiers[r][u][c] != ABSENT]
                assert len(owners) == (1 if Share(ranks, 0, stage).divides(role) else ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_of_a_rank(stage: int) -> None:
    """ZeRO's arithmetic, to an element: fp32 parameter 4, gradient 4, moments 8; frozen bf16 2."""
    ranks = 4
    plans = [planned(ranks, r, stage) for r in range(ranks)]
    trained, frozen = sum(p.numel for u in UNITS[:-1] for p in u.parameters), 5000
    copies = {0: (4, 4, 4), 1: (4, 4, 1), 2: (4, 1, 1), 3: (1, 1, 1)}[stage]
    parameter, gradient, optimizer = copies
    want = trained * (4 * parameter + 4 * gradient + 8 * optimizer) + 2 * frozen * parameter
    assert sum(p.state_bytes_per_rank for p in plans) == want
    assert plans[0].state_bytes == trained * 16 + 2 * frozen


def test_divided_parameters_are_never_computed_from_where_they_rest() -> None:
    alone, divided, whole = planned(1, 0, 3, device=32 * MIB), planned(2, 0, 3, device=32 * MIB), planned(2, 0, 2, device=32 * MIB)
    assert len(alone.slots) == len(whole.slots) == 1  # for the one unit whose dtype is not the compute dtype
    assert len(divided.slots) > 3


def test_budgets_are_one_ranks() -> None:
    """What does not fit one rank does at a stage that divides it."""
    with pytest.raises(PlanError):
        planned(2, 0, 0, device=6 * MIB, host=5 * MIB, nvme=0)
    assert planned(2, 1, 3, device=6 * MIB, host=7 * MIB, nvme=0).resting["nvme"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_rests_in_the_memory_of_a_device_of_its_own(stage: int) -> None:
    apart = Capacities(64 * MIB, 64 * MIB, 0, True, False)
    alone, of_two = (plan_units(UNITS, apart, Precision("fp32", "fp32"), share=Share(ranks, 0, stage)) for ranks in (1, 2))
    assert alone.resting["device"] == sum(sum(role.values()) for role in alone.describe().values())
    assert of_two.resting["device"] == 0 and not any("device" in tiers for tiers in (of_two.parameter, *of_two.gradient, *of_two.state))
    with pytest.raises(ConfigError, match="several ranks"):
        plan_units(UNITS, apart, Precision("fp32", "fp32"), place={"optimizer": "device"}, share=Share(2, 0, stage))


@pytest.mark.parametrize(("device", "kept"), [(68, 1), (104, 3), (104, 4)])
def test_ranks_keep_the_units_that_one_of_them_chose(device: int, kept: int) -> None:
    capacities, precision = Capacities(device * MIB, 64 * MIB, 64 * MIB, True, True, (64 * MIB,)), Precision("fp32", "fp32")
    plans = [plan_units(UNITS, capacities, precision, batch=Batch(4, 700, 16), share=Share(3, rank, 3)) for rank in range(3)]
    chosen = keeping(plans[0], kept)
    others = [keeping(made, chosen.kept_least) for made in plans[1:]]
    assert chosen.kept_least == kept != plans[0].kept_least and [made.share.rank for made in others] == [1, 2]
    assert all((made.kept, made.recomputed, made.activations) == (chosen.kept, chosen.recomputed, chosen.activations) for made in others)


def test_what_is_no_rank_or_stage_is_refused() -> None:
    import torch

    import offload

    tiers = offload.Tiers("8MiB", "64MiB")
    with pytest.raises(ConfigError, match="stage"):
        offload.plan(torch.nn.Linear(3, 3), tiers, device="cpu", stage=4)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        offload.plan(torch.nn.Linear(3, 3), tiers, device="cpu", ranks=2, rank=2)


settings.register_profile("shares", deadline=None)
settings.load_profile("shares")
