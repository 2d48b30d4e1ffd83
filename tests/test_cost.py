"""The bound of a step: bytes by link, the slowest link, and the time of a model's compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.observe import profile
from offload.observe.compute import calls_of, compute_seconds
from offload.planner.cost import Compute, Rates, Traffic, bound, nvme_seconds, parts, traffic_of
from offload.train import estimate, model
from runs import SMALL, sizes

GB = 10**9
DISK = Rates(2.0 * GB, 4.0 * GB, 3.0 * GB, None, None, 1.0 * GB, shared_cores=True)
CARD = Rates(2.0 * GB, 4.0 * GB, 3.0 * GB, 20.0 * GB, 10.0 * GB, 1.0 * GB, shared_cores=False)


def test_the_slowest_link_is_the_bound() -> None:
    compute = Compute(1.0, 2.0, again=0.5)
    none = Traffic(0, 0, 0, 0, 0)
    assert bound(compute.of_step(recompute=False), none, DISK) == (3.0, "compute")
    assert bound(compute.of_step(recompute=True, accumulate=2), none, DISK) == (7.0, "compute")
    busy = Traffic(nvme_read=4 * GB, nvme_write=8 * GB, h2d=100 * GB, d2h=60 * GB, updated=GB // 2)
    assert parts(compute, busy, DISK) == {"compute": 3.5, "nvme": 4.0}
    assert parts(compute, busy, CARD) == {"compute": 3.0, "nvme": 4.0, "update": 0.5, "h2d": 5.0, "d2h": 6.0}
    assert bound(compute, busy, CARD) == (6.0, "d2h")


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_drive_is_never_faster_than_any_of_its_limits(read: int, write: int) -> None:
    seconds = nvme_seconds(read, write, DISK)
    assert seconds * 2 * GB >= read * 0.999 and seconds * 4 * GB >= write * 0.999 and seconds * 3 * GB >= (read + write) * 0.999
    assert nvme_seconds(read, write, Rates(None, None, None, None, None, 1.0, shared_cores=True)) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_traffic_by_placement(tmp_path: Path, accumulate: int) -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2)))
    tiers = offload.Tiers("64MiB", "64MiB", [(tmp_path, "64MiB")])
    n = 2 * 256 * 256
    for tier, moved in (("host", 0), ("nvme", 1)):
        place = {"parameter": tier, "gradient": tier, "optimizer": tier}
        plan = offload.plan(net, tiers, device="sim", place=place, batch=(1, 8), accumulate=accumulate)
        assert len(plan.slots) == 2
        grad = 2 if accumulate == 1 else 4  # at rest; a micro-batch's leaves the device as it was computed
        for slots, fetches in ((2, 2), (1, 4 * accumulate - (2 * accumulate - 1))):  # where both units have one, the first forward alone
            some = dataclasses.replace(plan, slots=plan.slots[:slots])
            got = traffic_of(some, direct=False, accumulate=accumulate)
            assert got.updated == n and got.h2d == fetches * n and got.d2h == accumulate * 2 * n
            assert got.nvme_read == moved * n * (fetches + accumulate * grad + 12)
            assert got.nvme_write == moved * n * (2 + accumulate * grad + 12)
            assert traffic_of(some, direct=True, accumulate=accumulate).h2d == 0
    plan = offload.plan(net, tiers, device="sim", place={"optimizer": "device"}, batch=(1, 8), accumulate=accumulate)
    assert set(vars(traffic_of(plan, direct=False, accumulate=accumulate)).values()) == {0}  # whole on the device, and updated there


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_a_model_is_measured_by_its_kinds_of_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, in_chunks: bool) -> None:
    """Every block counts, though only one of them runs; nothing is left behind on the drive."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(estimate, "PROBE_BYTES", 4 << 20)
    monkeypatch.setattr(estimate, "PARAMETERS", 1 << 16)
    run = SMALL.but(model={"type": kind, "config": sizes(96, 32, 48, layers=3, heads=2)}, tiers={"device": "48MiB"}, train={"steps": 1})
    config = run.load(tmp_path)
    planned = model.plan(model.load_config(config.model), config, "cpu", in_chunks)
    found = estimate.estimate(model.load_config(config.model), config, planned, in_chunks, torch.device("cpu"))
    blocks = [u for u in found.units if u.again]
    assert len(blocks) == 3 and len(set(blocks)) == 1 and blocks[0].backward > 0
    assert sorted(found.order) == list(range(len(found.units)))
    assert all(found.units[number].forward > 0 for number in (found.order[0], found.order[-1]))
    assert min(found.rates.read or 0, found.rates.write or 0, found.rates.mixed or 0, found.rates.updates) > 0
    assert not (tmp_path / "swap").exists()
    figures = found.bound(Traffic(0, 0, 0, 0, 1), recomputed=(), accumulate=1)
    assert figures["bound_step_seconds"] > 0 and figures["limiting_link"] == "compute"
    assert found.predicted(planned, direct=True, accumulate=1) >= figures["bound_step_seconds"] * 0.999
    profile.save("swap", {"gb_per_second": {"SwapFile": {"read": 1.0, "write": 2.0, "mixed": 3.0}}}, where=tmp_path)
    rates = estimate.machine_rates(config.tiers_value(), config.precision_value(), torch.device("cpu"), 64 << 20)
    assert (rates.read, rates.write, rates.mixed) == (1e9, 2e9, 3e9)


def test_calls_of_one_kind_are_taken_once() -> None:
    class Block(torch.nn.Module):
        runs = 0

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            Block.runs += 1
            return self.inner(x) if scale is None else self.inner(x) * scale

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        blocks = [Block() for _ in range(5)]
        x = torch.zeros(2, 8)
        calls = calls_of([(b, True) for b in blocks], lambda: [b(x) for b in blocks[:4]] + [blocks[4](x, scale=x)])
    assert [len({repr(c.kind) for c in part}) for part in (calls[:4], calls)] == [1, 2]
    Block.runs = 0
    took = compute_seconds(calls, torch.float32, torch.device("cpu"))
    assert Block.runs == 8 and len(took) == 5 and len(set(took)) == 2 and all(t.again == t.forward > 0 for t in took)
