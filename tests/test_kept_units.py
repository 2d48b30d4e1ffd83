"""Activations by unit: what the device has left keeps those of the last units, to the same bits, within budgets, and counted as such."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models as M
import offload
from offload.config import Precision
from offload.engine import activations
from offload.engine.registry import engine_of
from offload.planner import demand
from offload.planner.cost import Compute, Rates, traffic_of
from offload.planner.demand import Batch
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.placement import Plan, keeping, plan_units
from offload.planner.request import Capacities
from offload.train.estimate import Estimate
from offload.transfer.device import SimDevice

MIB = 1 << 20
DEPTH = 5
HOST = M.placed("host")
BATCH = Batch(1, 1024)


def _stack() -> nn.Module:
    return M.Stack(depth=DEPTH, width=16, dropout=0.1)


def _run(path: Path, mode: str, kept: int, device: Any, **options: Any) -> tuple[list[float], str, list[int]]:
    """Losses, digest, and how often each block was computed in a step."""
    model, where = M.seeded(_stack), M.tiers(path)
    plan = offload.plan(model, where, device=device, precision=M.FP32, activations=mode, batch=(1, 16))
    made = keeping(plan, kept) if kept else plan
    with M.prepared(model, where, device=device, precision=M.FP32, plan=made, **options) as model:
        calls = [0] * DEPTH
        for i, block in enumerate(model.blocks):
            block.norm.register_forward_hook(lambda *a, i=i: calls.__setitem__(i, calls[i] + 1))
        losses = M.train(model, M.mean_square, 2, clip=1e-3)
        return losses, offload.runtime(model).digest(), [n // 2 for n in calls]


@pytest.mark.parametrize("mode", ["recompute", "host", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_any_number_of_units_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, device: str) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 1)
    want = _run(tmp_path, "keep", 0, "cpu")
    assert want[2] == [1] * DEPTH
    for kept in range(DEPTH + 1):
        made: Any = SimDevice(seed=kept) if device == "sim" else device
        got = _run(tmp_path, mode, kept, made)
        assert got[:2] == want[:2], kept
        assert got[2] == [2] * (DEPTH - kept) + [1] * kept


def _blocks(count: int = 12) -> list[UnitSpec]:
    return [UnitSpec(f"b{i}", (ParameterSpec("w", 1 << 18, "fp32", True, 1, 512),), 0, True) for i in range(count)]


def _plan(device: int, batch: Batch | None = BATCH, host: int = 256, place: dict[str, str] | None = HOST, mode: str = "auto") -> Plan:
    return plan_units(_blocks(), Capacities(device * MIB, host * MIB, 256 * MIB, True, True), Precision(), place=place, batch=batch, activations=mode)


def test_as_many_are_kept_as_fit() -> None:
    """Under one treatment more room never keeps fewer; none is overdrawn, and one more unit would not have fitted."""
    before: dict[str, int] = {}
    for device in range(8, 64):
        try:
            plan = _plan(device)
        except offload.PlanError:
            assert not before
            continue
        kept, mode = 12 - len(plan.recomputed), plan.activations
        assert kept >= before.get(mode, 0) and plan.peak_bytes["device"] <= device * MIB
        assert plan.recomputed == frozenset(range(12 - kept)) and (mode == "keep") == (kept == 12)
        if kept < 11:
            now, more = (demand.activation_bytes(_blocks(), plan.batch, "bf16", mode, n) for n in (plan.kept, plan.kept + 1))
            assert plan.working.activations == now and plan.peak_bytes["device"] - now + more > device * MIB
        before[mode] = kept
    assert list(before) == ["host", "recompute", "keep"] and before["recompute"] > 2


def test_only_where_the_planner_chooses() -> None:
    assert _plan(32).kept > 0 == _plan(32, mode="recompute").kept == _plan(32, mode="keep", batch=Batch(1, 64)).kept
    assert len(_plan(32, mode="recompute").recomputed) == 12
    assert not _plan(32, batch=None).kept
    closed = _plan(32, batch=None).closed(BATCH)
    assert 0 < closed.kept <= 11 and closed.peak_bytes["device"] <= 32 * MIB


@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_kept_units_have_no_boundary_elsewhere(mode: str) -> None:
    plan = _plan(40, mode=mode)
    some = keeping(plan, 5)
    assert [n > 0 for n in some.boundaries.sizes] == [True] * 7 + [False] * 5
    assert some.boundaries.nbytes * 12 == plan.boundaries.nbytes * 7
    assert some.activations == mode and some.peak_bytes["device"] <= 40 * MIB


def test_asking_for_more_takes_room_from_state() -> None:
    """Each unit that is kept leaves more on nvme; all of them are `keep`; what does not fit is refused."""
    plan = _plan(64, host=4, place=None)
    assert plan.activations == "recompute" and plan.resting["nvme"]
    resting = [plan.resting["nvme"]]
    for kept in range(plan.kept + 1, 12):
        more = keeping(plan, kept)
        assert more.kept >= kept and all(more.peak_bytes[t] <= more.budgets[t] for t in more.budgets)
        resting.append(more.resting["nvme"])
    assert resting == sorted(resting) and resting[-1] > resting[0]
    assert keeping(plan, 12).activations == "keep"
    with pytest.raises(offload.PlanError, match="device tier is short"):
        keeping(_plan(16, host=16, place=None), 11)


def _estimate(nvme: float) -> Estimate:
    return Estimate((Compute(0.1, 0.2, again=0.1),) * 12, tuple(range(12)), Rates(nvme, nvme, nvme, None, None, 1e12, shared_cores=True))


@pytest.mark.parametrize("early", [True, False])
def test_a_run_keeps_as_many_as_make_its_step_shortest(early: bool) -> None:
    """With a fast drive all that can be kept are; with one that is as slow as compute none that would move state; the figures follow."""
    plan = _plan(64, host=4, place=None)

    def seconds(made: Plan, found: Estimate) -> float:
        units = found.early(made, direct=True, accumulate=1) if early else 0
        return found.predicted(made, direct=True, accumulate=1, early=units)

    fast, slow = _estimate(1e12), _estimate(1e6)
    made = fast.fastest(plan, direct=True, accumulate=1, early=early)
    assert made.activations == "keep"
    assert seconds(made, fast) == pytest.approx(12 * 0.3, rel=1e-3)
    assert seconds(plan, fast) == pytest.approx(12 * 0.3 + 0.1 * len(plan.recomputed), rel=1e-3)
    for found, which in ((fast, made), (fast, plan), (slow, plan)):
        figures = found.bound(traffic_of(which, direct=True), recomputed=which.recomputed, accumulate=1)
        assert figures["bound_step_seconds"] <= seconds(which, found) * 1.001
    kept = slow.fastest(plan, direct=True, accumulate=1, early=early)
    assert kept == plan and seconds(plan, slow) < seconds(keeping(plan, 12), slow)
    fixed = _plan(64, host=4, place=None, mode="recompute")
    assert fast.fastest(fixed, direct=True, accumulate=1, early=early) is fixed


SCRIPT = """
import sys, torch, offload, gc
sys.path.insert(0, sys.argv[2])
import models as M
from offload.memory.limits import resident_bytes
from pathlib import Path
with M.prepared(M.seeded(lambda: M.Stack(depth=2, width=64)), M.tiers(Path(sys.argv[1]))) as toy:
    M.train(toy, M.mean_square, 2, clip=0.1)
model, x = M.seeded(lambda: M.Stack(depth=24, width=64)), torch.ones(8192, 64)
gc.collect()
base = resident_bytes()
where = offload.Tiers("192MiB", "24MiB", [(sys.argv[1] + "/swap", "1GiB")])
model = offload.prepare(model, where, device="cpu", batch=(1, 8192))
plan = offload.runtime(model).plan
M.train(model, lambda m: m(x).mean(), 2, clip=0.1)
peak = next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmHWM"))
print(plan.activations, len(plan.recomputed), peak - base)
"""


def test_memory_stays_within(tmp_path: Path) -> None:
    """A device budget that is filled with kept activations is not exceeded by resident memory."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    mode, again, grown = done.stdout.split()
    assert mode == "recompute" and 0 < int(again) < 23
    assert int(grown) <= (192 + 24) * MIB, f"{int(grown) / MIB:.0f} MiB above the base"


def test_engine_follows_a_plan_closed_late(tmp_path: Path) -> None:
    x = torch.ones(2048, 64)
    where = M.tiers(tmp_path, "36MiB", "24MiB")
    with M.prepared(M.seeded(lambda: M.Stack(depth=24, width=64)), where, device="sim", place={"optimizer": "nvme"}) as model:
        assert not offload.runtime(model).plan.kept
        M.mean_square(model, x).backward()
        plan = offload.runtime(model).plan
        assert plan.activations == "recompute" and plan.kept > 0
        assert engine_of(model).streamer.recomputed == plan.recomputed
        assert offload.runtime(model).stats()["recomputed_units"] == len(plan.recomputed) == 24 - plan.kept
