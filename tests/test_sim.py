"""The simulated device: transfers as late as a stream may run them, by seed, must change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models as M
import offload
from offload.engine.registry import engine_of
from offload.transfer.device import Landing, SimDevice
from offload.transfer.queue import SwapQueue, Transfer

X = torch.linspace(-1, 1, 64).view(4, 16)
IDS = torch.arange(24).view(2, 12) * 101 % 701
CASES: dict[str, tuple[M.Make, M.Loss]] = {
    "stack": (lambda: M.Stack(2, False, depth=4, width=16, dropout=0.1), M.mean_square),
    "reentrant": (lambda: M.Stack(4, True, depth=4, width=16), M.mean_square),
    "tied": (lambda: M.Language(701), lambda m: M.mean_square(m, IDS)),
    "twice": (M.Twice, lambda m: M.mean_square(m, X)),
    "nested": (M.Nested, lambda m: M.mean_square(m, X)),
    "branches": (M.Branches, lambda m: M.mean_square(m, X)),
}


def _run(
    case: str, path: Path, device: Any, activations: str, place: dict[str, str] | None, slots: int | None, accumulate: int
) -> tuple[list[float], str]:
    make, loss = CASES[case]
    with M.prepared(
        M.seeded(make), M.tiers(path), device=device, activations=activations, place=place, slots=slots, accumulate=accumulate, precision=M.FP32
    ) as model:
        losses = M.train(model, loss, 2, clip=0.01, accumulate=accumulate)
        return losses, offload.runtime(model).digest()


@pytest.mark.parametrize("seed", range(36))
def test_adversarial_delays(tmp_path: Path, seed: int) -> None:
    """Any seed, model, placement, number of slots: the same bits as transfers that are done at once."""
    case = list(CASES)[seed % len(CASES)]
    activations = ("keep", "recompute", "host", "nvme")[seed // 2 % 4]
    places = [M.placed("nvme"), M.placed("host"), {"parameter": "nvme", "gradient": "host", "optimizer": "nvme"}, None]
    slots = None if case == "nested" or seed % 3 == 0 else 3
    accumulate = (1, 2)[seed // 3 % 2]
    late = _run(case, tmp_path, SimDevice(seed=seed), activations, places[seed % 4], slots, accumulate)
    assert late == _run(case, tmp_path, "cpu", "keep", None, None, accumulate)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_gradients_in_flight_stay_within_the_plan(tmp_path: Path, seed: int | None) -> None:
    """Gradients not yet landed are device memory: never more than the plan counted for them."""

    class Counting(SimDevice):
        held, most = 0, 0

        def send(self, source: torch.Tensor, land: Landing) -> Transfer:
            nbytes = source.numel() * source.element_size()
            self.held += nbytes
            self.most = max(self.most, self.held)

            def landed(host: torch.Tensor) -> None:
                land(host)
                self.held -= nbytes

            return super().send(source, landed)

    device = Counting(seed=seed)
    where = M.tiers(tmp_path, device="2MiB")
    with M.prepared(
        M.seeded(lambda: M.Stack(depth=8, width=64)), where, device=device, precision=M.FP32, place={"parameter": "host"}, batch=(1, 4)
    ) as model:
        M.mean_square(model, torch.ones(4, 64)).backward()
        engine_of(model).synchronize()
        working = offload.runtime(model).plan.working
    assert device.held == 0
    assert device.most <= working.gradients + working.slack


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_gradients_are_waited_for_where_a_backward_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    """What was sent is known before anything is waited for: it lands before zeros are written, not after."""
    device = SimDevice(seed=seed)
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=device, place=M.placed("host"), precision=M.FP32, slots=2) as model:
        M.mean_square(model, X).backward()
        engine_of(model).synchronize()
        model.zero_grad(set_to_none=False)

        def interrupted(*given: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SwapQueue, "until", interrupted)
            M.mean_square(model, X).backward()
        model.zero_grad(set_to_none=False)
        device.settle()
        assert not any(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())


def test_stale_slots_are_poisoned(tmp_path: Path) -> None:
    """Computing before a copy has arrived gives NaN, so that a missing wait shows; with the waits it gives none."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=SimDevice(seed=1), place={"parameter": "host"}, slots=2) as model:
        slots = engine_of(model).slots
        M.mean_square(model, X)
        number = next(i for i in range(len(engine_of(model).units)) if not slots.at_hand(i))
        assert slots.prefetch(number) or slots.where
        assert not any(bool(torch.isnan(f).any()) for f in slots.resident(number))


def test_bandwidth_changes_nothing(tmp_path: Path) -> None:
    want = _run("tied", tmp_path, "cpu", "keep", None, None, 1)
    assert _run("tied", tmp_path, SimDevice(h2d=1e9, d2h=1e9), "keep", M.placed("nvme"), None, 1) == want


def test_failed_read_is_raised_where_it_is_needed(tmp_path: Path) -> None:
    """A read that fails in the queue is raised by the forward that needs it; a later one, that works, computes right."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=SimDevice(seed=2), place={"parameter": "nvme"}, slots=2, precision=M.FP32) as model:
        unit = engine_of(model).units[3]
        shard = unit.parameters[0]

        class Failing:
            tier, nbytes, memory = "nvme", shard.nbytes, None

            def read_async(self, start: int, out: torch.Tensor) -> Any:
                raise offload.SwapError("state.swap, bytes 0 to 1: bad sector")

        unit.parameters[0] = Failing()  # type: ignore[call-overload]
        for _ in range(2):
            with pytest.raises(offload.SwapError, match="bad sector"):
                M.mean_square(model, X)
        unit.parameters[0] = shard
        M.mean_square(model, X).backward()
        assert not M.differing(M.gradients(model), M.plain_gradients(M.Order, lambda m: M.mean_square(m, X))[1])
        assert M.at_rest(model)


def test_failed_landing_is_raised_before_the_step(tmp_path: Path) -> None:
    """A gradient that could not be stored stops the step before any parameter changes."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=SimDevice(seed=3), place=M.placed("nvme"), precision=M.FP32) as model:
        optimizer = offload.optim.AdamW(model.parameters())
        engine = engine_of(model)
        before = offload.runtime(model).digest()
        shard = engine.units[1].gradients[0]

        class Failing:
            tier, nbytes, memory, failing = "nvme", shard.nbytes, None, True

            def write_async(self, start: int, data: torch.Tensor) -> Any:
                if self.failing:
                    raise offload.SwapError("state.swap, bytes 0 to 1: disk full")
                return shard.write_async(start, data)

            def read(self, start: int, out: torch.Tensor) -> None:
                shard.read(start, out)

        failing = engine.units[1].gradients[0] = Failing()  # type: ignore[call-overload]
        with pytest.raises(offload.SwapError, match="disk full"):
            M.mean_square(model, X).backward()
            optimizer.step()
        assert offload.runtime(model).digest() == before
        failing.failing = False
        model.zero_grad()
        M.mean_square(model, X).backward()
        optimizer.step()
        got = offload.runtime(model).digest()
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32) as model:
        optimizer = offload.optim.AdamW(model.parameters())
        M.mean_square(model, X).backward()
        optimizer.step()
        assert offload.runtime(model).digest() == got


def test_sim_threads_end_with_the_model(tmp_path: Path) -> None:
    import threading

    before = set(threading.enumerate())
    for _ in range(3):
        with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device="sim") as model:
            M.mean_square(model, X).backward()
            assert len(set(threading.enumerate()) - before) == 3  # h2d, d2h, and work on what rests on the device
        assert set(threading.enumerate()) == before
    bad = nn.Linear(2, 2)
    with pytest.raises(offload.PlanError):
        offload.prepare(bad, offload.Tiers(1, 1), device="sim")
    assert set(threading.enumerate()) == before
