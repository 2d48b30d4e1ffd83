"""What boundary activations take: reservations, peaks, refusals, the choice of a treatment, and their place in the schedule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models as M
import offload
from offload.config import Precision
from offload.engine import activations
from offload.engine.registry import engine_of
from offload.errors import BudgetError, ConfigError, PlanError
from offload.memory.spans import Spans
from offload.planner.boundaries import STAGING_BUFFERS, modes, width
from offload.planner.demand import Batch
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.placement import plan_units
from offload.planner.request import Capacities
from offload.planner.schedule import Speeds, Work, schedule
from test_activations import AWAY, free_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 1)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", AWAY)
@pytest.mark.parametrize("known", [True, False])
def test_reservations_are_the_plan(tmp_path: Path, mode: str, device: str, known: bool) -> None:
    where = M.tiers(tmp_path, "24MiB", "24MiB", "64MiB")
    batch = (1, 512) if known else None
    with M.prepared(M.seeded(lambda: M.Stack(depth=6, width=128)), where, device=device, activations=mode, batch=batch) as model:
        x = torch.ones(512, 128)
        M.train(model, lambda m: M.mean_square(m, x), 1)
        engine = engine_of(model)
        held, threads = {t: b.used for t, b in engine.budgets.items()}, [a.nbytes for a in engine._further]
        M.train(model, lambda m: M.mean_square(m, x), 2)
        assert {t: b.used for t, b in engine.budgets.items()} == held  # nothing is taken a step
        assert [a.nbytes for a in engine._further] == threads
        plan, stats = offload.runtime(model).plan, offload.runtime(model).stats()
        assert plan.boundaries.nbytes == free_bytes(model) == 6 * 512 * 128 * 2
        assert plan.peak_bytes["host"] == held["host"] == engine.host.nbytes + sum(threads)
        on_disk = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        assert plan.peak_bytes["nvme"] == held["nvme"] == on_disk
        assert stats["activation_bytes"][mode] == plan.boundaries.by_tier[mode] > 0
        assert stats["stall_seconds"]["activation"] > 0
        assert plan.boundaries.buffers == (STAGING_BUFFERS if mode == "nvme" else 0)
        assert bool(engine._further) is not known
    assert all(b.used == 0 for b in engine.budgets.values())


def test_memory_of_a_run_stays_within(tmp_path: Path) -> None:
    """Boundaries of 48 MiB under a device budget of 24: resident memory stays under the budgets."""
    script = """
import sys, torch, offload, gc
sys.path.insert(0, sys.argv[2])
import models as M
from offload.memory.limits import resident_bytes
from pathlib import Path
with M.prepared(M.seeded(lambda: M.Stack(depth=2, width=64)), M.tiers(Path(sys.argv[1])), activations=sys.argv[4]) as toy:
    M.train(toy, M.mean_square, 2, clip=0.1)
model, x = M.seeded(lambda: M.Stack(depth=96, width=32)), torch.ones(8192, 32)
gc.collect()
base = resident_bytes()
where = offload.Tiers("24MiB", sys.argv[5], [(sys.argv[1] + "/swap", "1GiB")])
model = offload.prepare(model, where, device=sys.argv[3], batch=(1, 8192), activations=sys.argv[4])
plan = offload.runtime(model).plan
M.train(model, lambda m: m(x).mean(), 1, clip=0.1)
peak = next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmHWM"))
print(plan.boundaries.nbytes, peak - base)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent), "cpu", "nvme", "12MiB"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    away, grown = map(int, done.stdout.split())
    assert away == 96 * 8192 * 32 * 2
    assert grown <= (36 + 24) * MIB, f"{grown / MIB:.0f} MiB above the base"


@pytest.mark.parametrize(
    ("budgets", "mode"),
    [(("128MiB", "24MiB"), "keep"), (("36MiB", "24MiB"), "recompute"), (("15MiB", "24MiB"), "host"), (("15MiB", "6MiB"), "nvme")],
)
@pytest.mark.parametrize("known", [True, False])
def test_auto_takes_the_least_costly_that_fits(tmp_path: Path, budgets: tuple[str, str], mode: str, known: bool) -> None:
    """With the batch known at prepare() or seen at the first forward; and it computes."""
    make = lambda: M.Stack(depth=24, width=64)  # noqa: E731
    x = torch.ones(2048, 64)
    where = M.tiers(tmp_path, *budgets)
    with M.prepared(M.seeded(make), where, device="sim", batch=(1, 2048) if known else None, place={"optimizer": "nvme"}) as model:
        value = M.mean_square(model, x)
        plan = offload.runtime(model).plan
        assert plan.activations == mode
        assert all(plan.peak_bytes[t] <= n for t, n in where.budget_bytes().items())
        value.backward()


def test_refusals_name_what_is_short(tmp_path: Path) -> None:
    model = M.seeded(lambda: M.Stack(depth=24, width=64))
    small = offload.Tiers("48MiB", "16MiB", [(str(tmp_path), "64MiB")])
    for options, says in (
        ({"activations": "host", "batch": (1, 8192)}, r"the host tier is short: need .*boundary activations 24\.0 MiB.*; have 16\.0 MiB.*Ways out"),
        ({"activations": "nvme", "batch": (4, 8192)}, r"the (nvme|device) tier is short: need"),
        ({"activations": "recompute", "batch": (1, 8192)}, r"the device tier is short: need .*activations"),
    ):
        with pytest.raises(PlanError, match=says):
            offload.plan(model, small, device="sim", **options)
    with pytest.raises(ConfigError, match="names no directory"):
        offload.plan(model, offload.Tiers("24MiB", "64MiB"), activations="nvme")
    with pytest.raises(ConfigError, match="activations = 'disk'"):
        offload.plan(model, small, activations="disk")
    assert modes("auto", 0) == ("keep", "recompute", "host")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_batch_that_does_not_fit_is_refused_before_it_computes(tmp_path: Path, device: str) -> None:
    where = offload.Tiers("64MiB", "8MiB", [(str(tmp_path / "swap"), "16MiB")])
    with M.prepared(M.seeded(lambda: M.Stack(depth=24, width=64)), where, device=device, activations="host") as model:
        held, seen = {t: b.used for t, b in engine_of(model).budgets.items()}, []
        handle = model.first.register_forward_pre_hook(lambda *a: seen.append(1))
        with pytest.raises(PlanError, match=r"the host tier is short for this batch of 16384 x 1: need 48\.0 MiB"):
            M.mean_square(model, torch.ones(16384, 64))
        handle.remove()
        assert not seen
        assert {t: b.used for t, b in engine_of(model).budgets.items()} == held
        M.mean_square(model, torch.ones(64, 64)).backward()


@pytest.mark.parametrize("mode", AWAY)
def test_more_forwards_than_planned(tmp_path: Path, mode: str) -> None:
    """The budget holds them, or the one that does not fit is refused; the others' backwards are right."""
    where = offload.Tiers("64MiB", "5MiB", [(str(tmp_path / "swap"), "4MiB")])
    x = torch.linspace(-1, 1, 1024 * 64).view(1024, 64)
    make = lambda: M.Stack(depth=4, width=64)  # noqa: E731
    loss = lambda m: M.mean_square(m, x)  # noqa: E731
    want = M.plain_gradients(make, loss)[1]
    with M.prepared(M.seeded(make), where, precision=M.FP32, activations=mode, batch=(1, 1024), place=M.placed("device")) as model:
        first = [loss(model)]
        with pytest.raises(BudgetError, match=rf"boundary activation.*of the {mode} tier.*raise the {mode} budget"):
            for _ in range(8):
                first.append(loss(model))
        assert M.at_rest(model)
        value = first.pop()
        first.clear()
        value.backward()
        assert not M.differing(M.gradients(model), want)
        assert len(first) == 0
        budgets = engine_of(model).budgets
        assert all(b.peak <= b.capacity for b in budgets.values())
        model.zero_grad()
        loss(model).backward()
        assert not M.differing(M.gradients(model), want)


def test_sequences_of_many_lengths(tmp_path: Path) -> None:
    """Shorter ones need no more than the longest."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, activations="host", batch=(1, 64)) as model:
        whole = free_bytes(model)
        for n in (64, 7, 33, 64, 1, 50):
            M.mean_square(model, torch.ones(n, 16)).backward()
            assert free_bytes(model) == whole
        assert not engine_of(model)._further


# Parts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_spans(blocks: list[int], steps: list[tuple[bool, int]]) -> None:
    """Nothing is handed out twice, and a block is whole again once everything has come back."""
    spans, taken = Spans(), []
    for n in blocks:
        spans.add(n)
    for take, n in steps:
        if take:
            got = spans.take(n)
            if got is not None:
                assert all(b != got[0] or s + m <= got[1] or got[1] + n <= s for b, s, m in taken)
                assert got[1] + n <= blocks[got[0]]
                taken.append((*got, n))
            else:
                assert spans.free_bytes < sum(blocks) or n > max(blocks)
        elif taken:
            spans.give(*taken.pop(n % len(taken)))
        assert spans.free_bytes == sum(blocks) - sum(m for _, _, m in taken)
    for part in taken:
        spans.give(*part)
    assert spans.take(max(blocks)) is not None


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ([(64, 64), (16, 64), (64, 64), (160, 64), (64, 160)], 64),  # attention and a gated MLP
        ([(192, 64), (64, 192)], 64),
        ([(64, 192), (64, 64), (256, 64), (64, 256)], 64),  # transposed, as GPT-2 has them
        ([(96, 64), (64, 96), (8, 64), (64, 8)], 64),  # adapters
        ([(3, 5)], 5),
        ([(3, 5), (7, 9)], 9),  # nothing in common: the widest
        ([], 0),
    ],
)
def test_width_of_a_boundary(shapes: list[tuple[int, int]], want: int) -> None:
    own = tuple(ParameterSpec(f"w{i}", a * b, "fp32", True, 1, b) for i, (a, b) in enumerate(shapes))
    assert width(UnitSpec("u", (*own, ParameterSpec("norm", 64, "fp32", True)), 0, True)) == want


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "host", "nvme"])
def test_boundaries_in_the_schedule(mode: str, direct: bool) -> None:
    """Out after the unit before, back before the unit's backward; a link that is slow for them makes the step longer."""
    units = [UnitSpec(f"b{i}", (ParameterSpec("w", 1 << 12, "fp32", True, 1, 64),), 0, True) for i in range(6)]
    plan = plan_units(units, Capacities(64 * MIB, 64 * MIB, 64 * MIB, True, direct), Precision(), batch=Batch(1, 1024), activations=mode)
    work = [Work(0.01, 0.02)] * 6
    fast, slow = (schedule(plan, range(6), Speeds(rate, rate, rate, rate, 1e9), work, direct) for rate in (1e10, 1e6))
    moves = fast.of("boundary")
    ways = {"recompute": 0, "host": 0 if direct else 2, "nvme": 2 if direct else 4}[mode]
    assert len(moves) == 6 * ways
    assert (slow.seconds > 1.5 * fast.seconds) == bool(ways)
    computed = {(e.kind, e.unit): e for e in fast.of("forward") + fast.of("backward")}
    for unit in range(6 if ways else 0):
        own = sorted((e for e in moves if e.unit == unit), key=lambda e: e.start)
        out, back = own[: ways // 2], own[ways // 2 :]
        assert unit == 0 or out[0].start >= computed["forward", unit - 1].end
        assert out[-1].end <= back[0].start
        assert back[-1].end <= computed["backward", unit].start
        assert unit >= 4 or back[0].start >= computed["backward", unit + 2].end
