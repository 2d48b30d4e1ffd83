"""Gradients that would rest on NVMe and that updates take from where they landed, during the backward: bytes, bits, and who may read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models as M
import offload
from late import late
from offload.engine.registry import engine_of
from offload.planner.cost import traffic_of
from offload.planner.placement import chunks_of, gradient_chunk_bytes
from offload.planner.schedule import Speeds, Work, schedule, taken
from offload.transfer.device import SimDevice

X = torch.linspace(-1, 1, 64).view(4, 16)
PLACES = {"all": M.placed("nvme"), "gradients": {"parameter": "host", "gradient": "nvme", "optimizer": "host"}}


class Line(nn.Module):
    """A unit of one parameter, whose chunk holds nothing else that would have to be read before it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh()


def _lines() -> nn.Module:
    return nn.Sequential(*(Line() for _ in range(5)))


@contextmanager
def _model(path: Path, keep: bool = True, updates: str = "backward", **over: Any) -> Iterator[tuple[nn.Module, Any]]:
    over = {"place": PLACES["all"]} | over
    where = M.tiers(path, host=over.pop("host", "64MiB"))
    with M.prepared(M.seeded(over.pop("make", M.Order)), where, updates=updates, **over) as model:
        runtime = offload.runtime(model)
        runtime.start_early(len(engine_of(model).units), keep_gradients=keep)
        yield model, runtime


def _step(model: nn.Module, optimizer: Any, accumulate: int = 1, x: torch.Tensor = X) -> None:
    for _ in range(accumulate):
        (M.mean_square(model, x) / accumulate).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _read_ahead(model: nn.Module) -> Iterator[None]:
    """A gated batch has all the buffers that there are before the first gradient comes."""
    background, engine = engine_of(model).background, engine_of(model)
    gate = background.gate

    def gated(hypers: Any, order: Any) -> None:
        gate(hypers, order)
        assert background.gated is not None and engine.space is not None
        for place in list(background.gated.at)[: engine.plan.staging.updates]:
            while not background.gated.has_frame(*place):
                engine.space.drain()

    background.gate = gated  # type: ignore[method-assign]
    try:
        yield
    finally:
        background.gate = gate  # type: ignore[method-assign]


def _moved(path: Path, updates: str, keep: bool, accumulate: int, **over: Any) -> tuple[dict[str, int], str]:
    """Bytes that a step moves, and the digest."""
    with _model(path, keep, updates, accumulate=accumulate, **over) as (model, runtime):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        with _read_ahead(model) if updates == "backward" else nullcontext():
            _step(model, optimizer, accumulate)
            runtime.synchronize()
            runtime.reset_counters()
            for _ in range(3):
                _step(model, optimizer, accumulate)
                runtime.synchronize()
        return {k: n // 3 for k, n in runtime.stats()["moved_bytes"].items()}, runtime.digest()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_neither_written_nor_read(tmp_path: Path, place: str, accumulate: int) -> None:
    """What the schedule counts is what does not move; gradients that are kept for whoever may read them are written all the same."""
    over: dict[str, Any] = {"place": PLACES[place], "precision": M.BF16, "make": _lines, "units": [Line]}
    with _model(tmp_path, accumulate=accumulate, **over) as (model, runtime):
        plan, units = runtime.plan, len(engine_of(model).units)
    places = taken(plan, range(units), units)
    nbytes = sum(gradient_chunk_bytes(chunks_of(plan.layouts[u])[c], plan.grad) for u, c in places)
    assert len(places) == units == 5 and not taken(plan, range(units), 0)
    forward, digest = _moved(tmp_path, "forward", True, accumulate, **over)
    for keep in (True, False):
        moved, same = _moved(tmp_path, "backward", keep, accumulate, **over)
        assert same == digest
        assert forward["nvme_read"] - moved["nvme_read"] == nbytes
        assert forward["nvme_write"] - moved["nvme_write"] == (0 if keep else nbytes)
    counted = [traffic_of(plan, direct=True, accumulate=accumulate, taken=t) for t in ((), places)]
    assert counted[0].nvme_write - counted[1].nvme_write == counted[0].nvme_read - counted[1].nvme_read == nbytes
    speeds, work = Speeds(1e9, 1e9, 1e6, 1e6, 1e9), [Work(1e-6, 1e-6)] * units
    sums = accumulate - 1  # that are written, and read again, before the last one
    for early, last in ((0, 1), (units, 0)):
        made = schedule(plan, range(units), speeds, work, True, early)
        assert len(made.of("gradient")) == (1 + bool(sums) + bool(sums + last)) * units and len(made.of("read")) == (1 + last) * units
        assert sum(e.end - e.start for e in made.of("gradient")) == pytest.approx((2 * sums + last) * nbytes / 1e6)


def _bits(path: Path, x: torch.Tensor, device: Any, seed: int, keep: bool, updates: str = "backward", **over: Any) -> str:
    with _model(path, keep, updates, device=device, **over) as (model, runtime):
        with late(model, seed) if seed % 2 else nullcontext():
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(4):
                _step(model, optimizer, x=x)
        return str(runtime.digest())


@pytest.mark.parametrize(("make", "width", "host"), [(M.Order, 16, "64MiB"), (M.Branches, 16, "64MiB"), (lambda: M.Order(112, 4), 112, "2MiB")])
@pytest.mark.parametrize("place", PLACES)
def test_the_bits_stay_whatever_is_late(tmp_path: Path, make: M.Make, width: int, host: str, place: str) -> None:
    """Units of one chunk, and of more than there are staging buffers of either kind."""
    x, over = torch.linspace(-1, 1, 4 * width).view(4, width), {"make": make, "host": host, "place": PLACES[place if width == 16 else "all"]}
    want = _bits(tmp_path, x, "cpu", 0, True, "forward", **over)
    for seed in range(6):
        device: Any = "cpu" if seed < 2 else SimDevice(seed=seed)
        assert _bits(tmp_path, x, device, seed, seed % 3 == 0, **over) == want, seed


def _reads(model: nn.Module) -> None:
    model.blocks[1].up.weight.grad.sum()


def _adds(model: nn.Module) -> None:
    M.mean_square(model, X).backward()


@pytest.mark.parametrize("act", [_reads, _adds])
def test_a_gradient_that_is_gone_is_refused_and_not_invented(tmp_path: Path, act: Callable[[nn.Module], None]) -> None:
    with _model(tmp_path, keep=False) as (model, runtime):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        with _read_ahead(model):
            _step(model, optimizer)
            M.mean_square(model, X).backward()
            with pytest.raises(offload.OffloadError, match=r"gradient of blocks\.1\.up\.weight went into its update"):
                _reads(model)
            optimizer.step()
            with pytest.raises(offload.OffloadError, match=r"went into its update .* zero_grad"):
                act(model)
            optimizer.zero_grad()
            _step(model, optimizer)
            M.mean_square(model, X).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert float(model.blocks[1].up.weight.grad.abs().sum()) == 0
            _step(model, optimizer)
        runtime.digest()


def test_a_second_step_of_a_gradient_that_is_gone_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with _model(tmp_path, keep=False) as (model, runtime):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        with _read_ahead(model):
            _step(model, optimizer)
            M.mean_square(model, X).backward()
            optimizer.step()
            digest = runtime.digest()
            for _ in range(2):
                with pytest.raises(offload.OffloadError, match=r"went into its update .* zero_grad"):
                    optimizer.step()
            assert runtime.digest() == digest
            optimizer.zero_grad()
            _step(model, optimizer)
            assert runtime.digest() != digest


def test_gradients_that_are_kept_read_as_always(tmp_path: Path) -> None:
    seen = []
    for updates in ("forward", "backward"):
        with _model(tmp_path, updates=updates) as (model, _):
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                M.mean_square(model, X).backward()
                seen.append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
                seen.append([p.grad.clone() for p in model.parameters()])
                optimizer.zero_grad()
    half = len(seen) // 2
    assert all(torch.equal(a, b) for x, y in zip(seen[:half], seen[half:], strict=True) for a, b in zip(x, y, strict=True))
