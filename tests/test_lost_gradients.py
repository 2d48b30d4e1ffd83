"""A gradient that did not come to rest is told of, and no step goes on without it; one that is still there is not lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models as M
import offload
from offload import _core
from offload.engine.registry import engine_of
from offload.memory import swap
from offload.transfer.device import SimDevice

X = torch.linspace(-1, 1, 64).view(4, 16)


def _step(model: nn.Module, optimizer: Any) -> None:
    M.mean_square(model, X).backward()
    optimizer.step()
    optimizer.zero_grad()


def _digest(path: Path, place: dict[str, str], steps: int) -> str:
    with M.prepared(M.seeded(M.Order), M.tiers(path), place=place) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            _step(model, optimizer)
        return offload.runtime(model).digest()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_step_whose_gradients_could_not_be_written_can_be_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    place = {"parameter": "host", "gradient": "nvme", "optimizer": "host"}
    want, engines = _digest(tmp_path, place, 2), []

    def open_engine(*_: Any) -> Any:
        engines.append(_core.Engine("faults", 2, 4096))
        return engines[-1]

    monkeypatch.setattr(swap, "open_engine", open_engine)
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=place, device=device) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        engines[0].fail(0, errno.ENOSPC)
        M.mean_square(model, X).backward()
        for _ in range(3):
            with pytest.raises(offload.SwapError, match="ENOSPC"):
                optimizer.step()
        engines[0].fail(0, 0)
        optimizer.step()
        optimizer.zero_grad()
        _step(model, optimizer)
        assert offload.runtime(model).digest() == want


class _Fails:
    """Landings of one parameter raise while it is told to."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name, self.kept, self.on = name, engine_of(model).places._memory, True
        engine_of(model).places._memory = self  # type: ignore[method-assign, assignment]

    def __call__(self, record: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if self.on and record.name == self.name:
            raise offload.SwapError("it cannot be read")
        return self.kept(record, *rest, **options)


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_gradient_that_did_not_land_is_missed_until_there_is_another(tmp_path: Path, place: str) -> None:
    want = _digest(tmp_path, M.placed(place), 3)
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed(place), device=SimDevice(seed=1)) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        _step(model, optimizer)
        runtime, fails = offload.runtime(model), _Fails(model, "blocks.2.up.weight")
        M.mean_square(model, X).backward()
        uses = [
            optimizer.step, lambda: model.blocks[2].up.weight.grad.sum(), lambda: offload.clip_grad_norm_(model, 1.0), optimizer.step,
            runtime.synchronize,
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(offload.SwapError, match="it cannot be read"):
                use()
            fails.on = False
        optimizer.zero_grad()
        runtime.synchronize()
        _step(model, optimizer)
        _step(model, optimizer)
        assert runtime.digest() == want


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_gradient_that_did_not_land_may_be_written(tmp_path: Path, place: str) -> None:
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed(place), device=SimDevice(seed=1)) as model:
        optimizer, weight = offload.optim.AdamW(model.parameters(), lr=1e-2), model.blocks[2].up.weight
        fails = _Fails(model, "blocks.2.up.weight")
        M.mean_square(model, X).backward()
        with pytest.raises(offload.SwapError, match="it cannot be read"):
            optimizer.step()
        fails.on = False
        with torch.no_grad():
            weight.grad.copy_(torch.ones(weight.shape))
        optimizer.step()
        assert weight.grad.eq(1).all()


@pytest.mark.parametrize("updates", ["forward", "backward"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_what_comes_after_close_says_so(tmp_path: Path, device: str, updates: str) -> None:
    """A step whose gradients went with the runtime, and the backward of a graph that is still held."""
    for before in (lambda value: value.backward(), lambda value: None):
        model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("nvme"), device=device, updates=updates)
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            _step(model, optimizer)
        value = M.mean_square(model, X)
        before(value)
        offload.runtime(model).close()
        for act in (optimizer.step, lambda value=value: value.backward(retain_graph=True)):
            with pytest.raises((offload.OffloadError, RuntimeError), match=r"closed|a second time"):
                act()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("place", ["device", "host"])
def test_close_tells_it_once(tmp_path: Path, place: str, told: bool) -> None:
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed(place), device=SimDevice(seed=1))
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
    _Fails(model, "blocks.2.up.weight")
    M.mean_square(model, X).backward()
    close = offload.runtime(model).close
    for act in (optimizer.step, close) if told else (close,):
        if act is close and told:
            close()
        else:
            with pytest.raises(offload.SwapError, match="it cannot be read"):
                act()
