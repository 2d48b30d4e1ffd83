"""Units that rest whole on a device of its own: updated there, to the same bits, as late as a stream may, and without traffic."""

from __future__ import annotations

from collections.abc import Callable
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
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.placement import plan_units
from offload.planner.request import Capacities
from offload.transfer.device import SimDevice
from offload.transfer.kernels import Arrays, HostKernels
from offload.transfer.queue import Transfer

MIB = 1 << 20
IDS = torch.arange(24).view(2, 12) * 101 % 701
MAKE: M.Make = lambda: M.Language(701, depth=4)  # noqa: E731


def loss(model: nn.Module) -> torch.Tensor:
    return M.mean_square(model, IDS)


class Latest(SimDevice):
    """Work on the device runs when somebody waits for it, or the device is read or settled, and never before. `order` has what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[_Late] = []
        self.order: list[str] = []

    def work(self, run: Callable[[], None], nbytes: int, what: str = "") -> Transfer:
        self.pending.append(_Late(self, run, what))
        return self.pending[-1]

    def settle(self) -> None:
        if self.pending:
            self.pending[-1].wait()
        super().settle()


class _Late:
    def __init__(self, device: Latest, run: Callable[[], None], what: str) -> None:
        self._device, self._run, self._what, self.done = device, run, what, False

    def wait(self) -> None:
        while not self.done:
            first = self._device.pending.pop(0)
            first._run()
            first.done = True
            self._device.order.append(first._what)


def run(path: Path, device: Any, place: dict[str, str] | None, *, budget: str = "64MiB", **options: Any) -> tuple[list[float], str]:
    where = M.tiers(path, device=budget)
    return M.run_and_digest(MAKE, loss, where, device=device, place=place, **options)


@pytest.mark.parametrize("precision", [M.FP32, *PRECISIONS, offload.Precision("bf16", "fp16")], ids=str)
def test_same_bits(tmp_path: Path, precision: offload.Precision) -> None:
    """Every form of state, with clipping and sums over micro-batches: as on the host, however late the device works."""
    for clip, accumulate in ((None, 1), (1e-3, 3)):
        want = run(tmp_path, "cpu", M.placed("host"), precision=precision, clip=clip, accumulate=accumulate)
        for device in (Latest(), SimDevice(seed=accumulate), "sim"):
            assert run(tmp_path, device, M.placed("device"), precision=precision, clip=clip, accumulate=accumulate) == want


@pytest.mark.parametrize("seed", range(8))
def test_some_units(tmp_path: Path, seed: int) -> None:
    """Some units on the device, the others streamed through it."""
    options: dict[str, Any] = {"precision": (M.FP32, M.BF16)[seed % 2], "clip": (None, 1e-3)[seed // 2 % 2], "accumulate": (1, 3)[seed // 4]}
    want = run(tmp_path, "cpu", M.placed("host"), **options)
    budget = ("1MiB", "768KiB")[seed % 2]
    planned = {k: options[k] for k in ("precision", "accumulate")}
    plan = offload.plan(M.seeded(MAKE), M.tiers(tmp_path, device=budget), device="sim", **planned)
    assert {"device", "host"} <= set(plan.parameter)
    assert run(tmp_path, SimDevice(seed=seed), None, budget=budget, **options) == want


def _resident_bytes(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of the gradients of units that rest on the device, of those that are summed there, and of all others."""
    engine = engine_of(model)
    sizes = [sum(r.numel for r in u.records if r.trained) * engine.places.dtype.itemsize for u in engine.units]
    inside = sum(n for u, n in enumerate(sizes) if engine.resident.has(u))
    summed = sum(sizes[u] for u in engine.plan.summed)
    return inside, summed, sum(sizes) - inside - summed


@pytest.mark.parametrize("accumulate", [1, 3])
def test_nothing_moves(tmp_path: Path, accumulate: int) -> None:
    """Whole on the device: a run moves nothing, whatever it accumulates. In part: gradients of the others move once a micro-batch, or, where they are
    summed on the device, once a step, and no more."""
    for budget, everything in (("64MiB", True), ("1MiB", False), ("896KiB", False)):
        where, make = M.tiers(tmp_path, device=budget), lambda: M.Language(701, depth=4, tied=False)
        with M.prepared(M.seeded(make), where, device="sim", precision=M.FP32, accumulate=accumulate) as model:
            M.train(model, loss, 2, clip=0.1, accumulate=accumulate)
            moved = offload.runtime(model).stats()["moved_bytes"]
            inside, summed, outside = _resident_bytes(model)
            assert inside
            assert bool(summed + outside) != everything
            assert moved["d2h"] == 2 * (summed + accumulate * outside)
            assert bool(moved["h2d"]) != everything
            assert everything or engine_of(model).slots.counters.fetches > 0


def test_sums_stay_on_the_device(tmp_path: Path) -> None:
    """Micro-batches are summed where they land, in fp32 and in their order; only the sums of squares are read, once a step."""

    class Counting(SimDevice):
        reads = 0

        def read(self, source: torch.Tensor, after: Any) -> torch.Tensor:
            self.reads += 1
            return super().read(source, after)

    device = Counting()
    plain = M.seeded(MAKE)
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, precision=M.FP32, place=M.placed("device"), accumulate=4) as model:
        optimizer = offload.optim.AdamW(model.parameters())
        for _ in range(4):
            for m in (plain, model):
                (loss(m) / 4).backward()
        assert device.reads == 0
        want = [p.grad for p in plain.parameters() if p.grad is not None]
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        optimizer.step()
        assert device.reads == 1


def test_sums_of_squares_are_those_of_what_landed_last(tmp_path: Path) -> None:
    """Whatever is asked first, and whatever has landed since: a unit that is used again, and gradients that were zeroed."""
    x = torch.linspace(-1, 1, 64).view(4, 16)
    plain = M.seeded(M.Order)
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=Latest(), precision=M.FP32, place=M.placed("device"), accumulate=2) as model:
        for m in (plain, model):
            M.mean_square(m, x).backward()
            m.blocks[4](x).sum().backward()  # of all units the one that landed first
        engine = engine_of(model)
        gradients, records = engine.gradients, sorted((r for r in engine.records if r.trained), key=lambda r: "blocks.4" in r.name)
        for record in records:
            want = plain.get_parameter(record.name).grad
            assert want is not None
            assert gradients.norm_squared(record) == pytest.approx(float(want.double().square().sum()), rel=1e-12), record.name
        M.mean_square(model, x).backward()
        model.zero_grad(set_to_none=False)
        assert float(offload.clip_grad_norm_(model, 1.0)) == 0.0


def test_hyperparameters_are_those_of_the_step(tmp_path: Path) -> None:
    """Whatever is done to the table that they were given in, while the update is still to run."""

    def stepped(spoil: bool) -> str:
        with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=Latest(), precision=M.FP32, place=M.placed("device")) as model:
            resident, background = engine_of(model).resident, engine_of(model).background
            loss(model).backward()
            table = background.hyper()
            for name, value in {"lr": 0.1, "beta2": 0.9, "step": 1, "active": 1, "grad_scale": 1.0}.items():
                table[name] = value
            for unit in resident.numbers:
                resident.update(unit, table)
            if spoil:
                table["lr"] = 7.0
            return offload.runtime(model).digest()

    assert stepped(True) == stepped(False)


def test_order_of_work(tmp_path: Path) -> None:
    """An update waits for no landing and a landing for no update: they have one order. A forward waits for the update of each unit it uses."""
    device = Latest()
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, precision=M.FP32, place=M.placed("device")) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        units = engine_of(model).units
        loss(model).backward()
        optimizer.step()
        expected = [f"update {units[u].name}" for u in engine_of(model).streamer.order.forward() if units[u].layout.trained]
        assert [late._what for late in device.pending] == expected
        optimizer.zero_grad()
        first = next(iter(engine_of(model).streamer.order.forward()))
        before = len(device.order)
        engine_of(model).slots.resident(first)
        assert device.order[before:] == expected[:1]
        with torch.no_grad():
            loss(model)
        assert device.order[before:] == expected


def test_reading_waits(tmp_path: Path) -> None:
    """Whoever reads or writes a parameter, a moment or a gradient right after step() sees, and changes, the finished value."""

    def act(model: nn.Module) -> list[torch.Tensor]:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(4):
            loss(model).backward()
            weight = model.get_parameter("blocks.1.up.weight")
            seen += [weight.grad.clone()]
            if step == 1:
                with torch.no_grad():
                    weight.grad.mul_(0.5)
                    weight.grad[0] = 3.0
            optimizer.step()
            seen += [optimizer.state[weight]["exp_avg"].clone(), weight.detach().clone()]
            with torch.no_grad():
                weight[1] = 0.25
                optimizer.state[weight]["exp_avg_sq"].mul_(2.0)
            optimizer.zero_grad(set_to_none=step != 2)
        return seen

    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device="cpu", precision=M.FP32, place=M.placed("host")) as model:
        want = act(model)
    for device in (Latest(), SimDevice(seed=1)):
        with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=device, precision=M.FP32, place=M.placed("device")) as model:
            got = act(model)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_updates_during_backward(tmp_path: Path) -> None:
    for accumulate in (1, 2):
        want = run(tmp_path, "cpu", M.placed("host"), precision=M.BF16, accumulate=accumulate)
        for seed in (3, None):
            for budget in ("64MiB", "768KiB"):
                assert run(tmp_path, SimDevice(seed=seed), None, budget=budget, precision=M.BF16, accumulate=accumulate, updates="backward") == want


def test_steps_are_skipped_whole(tmp_path: Path) -> None:
    """A gradient that is not finite, in a unit on the device or in another, changes nothing anywhere."""
    where = M.tiers(tmp_path, device="1MiB")
    with M.prepared(M.seeded(MAKE), where, device=SimDevice(seed=5), precision=M.FP32) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        digest = offload.runtime(model).digest()
        inside = [engine_of(model).resident.has(r.unit) for r in engine_of(model).records]
        assert len(set(inside)) == 2
        for which in (inside.index(True), inside.index(False)):
            loss(model).backward()
            parameter = engine_of(model).records[which].parameter
            with torch.no_grad():
                parameter.grad.view(-1)[0] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
            assert offload.runtime(model).digest() == digest
        assert optimizer.skipped == 2


def test_undeclared_sums(tmp_path: Path) -> None:
    """A second backward in bf16 widens sums on the device, within its budget, or is refused."""

    def act(model: nn.Module) -> str:
        optimizer = offload.optim.AdamW(model.parameters())
        for _ in range(2):
            for _ in range(3):
                loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return offload.runtime(model).digest()

    options: dict[str, Any] = {"precision": M.BF16, "place": M.placed("device")}
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device="cpu", **options, accumulate=3) as model:
        want = act(model)
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device=SimDevice(seed=2), **options) as model:
        assert act(model) == want
        assert offload.runtime(model).stats()["moved_bytes"]["d2h"] == 0
        sums = sum(s.nbytes for unit in engine_of(model).units for s in unit.gradients)
    options["batch"] = (2, 12)
    plan = offload.plan(M.seeded(MAKE), M.tiers(tmp_path), device="sim", **options)
    tight = str((plan.peak_bytes["device"] - plan.working.slack - plan.working.in_flight * 3 // 4) * 8 // 7 + 8192)
    with (
        M.prepared(M.seeded(MAKE), M.tiers(tmp_path, device=tight), device="sim", **options) as model,
        pytest.raises(offload.BudgetError, match="on the device"),
    ):
        act(model)
    most = plan.working.in_flight - plan.working.largest
    tight = str((plan.peak_bytes["device"] - plan.working.slack - most + most // 4 + sums) * 8 // 7 + 64)  # the least, and a little in flight
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path, device=tight), device=SimDevice(seed=4), **options) as model:
        before = engine_of(model).plan.working
        assert act(model) == want
        working = engine_of(model).plan.working
        assert working.largest <= working.in_flight == engine_of(model).device.in_flight_bytes_most < before.in_flight


def test_failed_work_is_raised(tmp_path: Path) -> None:
    """By whoever next needs what it was to do, without a hang."""

    class Failing(SimDevice):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = self  # type: ignore[assignment]

        def land(self, *given: Any) -> None:
            HostKernels().land(*given)

        def update(self, arrays: Arrays, first: int, hyper: np.ndarray[Any, Any]) -> None:
            raise RuntimeError("the kernel failed")

    model = M.seeded(MAKE)
    offload.prepare(model, M.tiers(tmp_path), device=Failing(), precision=M.FP32, place=M.placed("device"))
    optimizer = offload.optim.AdamW(model.parameters())
    loss(model).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the kernel failed"):
        optimizer.step()  # nothing has waited for the first one's
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the kernel failed"):
            loss(model)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        offload.runtime(model).digest()
    offload.runtime(model).close()  # it was told


def test_an_update_that_starts_while_one_is_waited_for_is_waited_for_too(tmp_path: Path) -> None:
    """As where the queue of fetches waits for one step's and the next step() starts."""
    with M.prepared(M.seeded(MAKE), M.tiers(tmp_path), device="sim", precision=M.FP32, place=M.placed("device")) as model:
        resident = engine_of(model).resident

        class Ended:
            done = True

            def __init__(self, then: Any = None) -> None:
                self._then = then

            def wait(self) -> None:
                if self._then is not None:
                    resident._updated[0] = self._then

        later: Any = Ended()
        resident._updated[0] = Ended(later)  # type: ignore[assignment]
        resident.wait(0)
        assert resident._updated[0] is later
        resident.wait(0)
        assert 0 not in resident._updated


def test_plan_of_another_device_is_refused(tmp_path: Path) -> None:
    """What `cpu` may have in part on the device, a device of its own may not."""
    place = {"parameter": "device", "gradient": "host", "optimizer": "host"}
    plan = offload.plan(M.seeded(MAKE), M.tiers(tmp_path), device="cpu", place=place)
    with pytest.raises(offload.ConfigError, match="made for this device"):
        offload.prepare(M.seeded(MAKE), M.tiers(tmp_path), device="sim", plan=plan)


BLOCKS = [UnitSpec(f"blocks.{i}", (ParameterSpec("w", 1 << 18, "fp32", True, 1, 512),), 0, True) for i in range(8)]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_whole_units_and_the_first_of_equal_ones(accumulate: int) -> None:
    """More of the device's budget takes more units, those that a backward needs last first, and each with all its roles."""
    before: list[int] = []
    for size in range(3, 96):
        plan = plan_units(BLOCKS, Capacities(size * MIB, 256 * MIB, 0, True, False), offload.Precision(), accumulate=accumulate)
        there = [u for u, tier in enumerate(plan.parameter) if tier == "device"]
        assert there == list(range(len(there)))
        assert len(there) >= len(before) - 2  # further slots may take a place
        for u in range(len(BLOCKS)):
            assert {*plan.gradient[u], *plan.state[u]} == ({"device"} if u in there else {"host"})
        before = there
    assert len(before) == len(BLOCKS)


def test_place_on_a_device_of_its_own() -> None:
    cap = Capacities(96 * MIB, 64 * MIB, 64 * MIB, True, False)
    plan = plan_units(BLOCKS, cap, offload.Precision(), place={"optimizer": "device"})
    assert set(plan.parameter) == {"device"}
    assert {t for unit in (*plan.gradient, *plan.state) for t in unit} == {"device"}
    for role, tier in (("gradient", "host"), ("parameter", "nvme")):
        with pytest.raises(offload.ConfigError, match="all of a unit's roles"):
            plan_units(BLOCKS, cap, offload.Precision(), place={"optimizer": "device", role: tier})
    plan = plan_units(BLOCKS, cap, offload.Precision(), place={"optimizer": "nvme"})
    assert not plan.resting["device"]
