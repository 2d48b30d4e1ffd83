"""Fetches that fail: whoever needs the unit is told, and what comes after computes with the right values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models as M
from offload.errors import SwapError
from offload.memory.shard import Shard
from offload.transfer.device import _Several

X = torch.linspace(-1, 1, 128).view(8, 16)


def _half_frozen() -> nn.Module:
    """Units of which a part is frozen in fp32: in bf16 compute it goes through staging buffers, the rest straight to its place."""
    model = M.Stack(depth=4, width=16)
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model.bfloat16().apply(lambda m: m.float() if isinstance(m, nn.Linear) and not m.weight.requires_grad else m)


class _Fails:
    done = True

    def wait(self) -> None:
        raise SwapError("the drive is broken")


def _failing(at: int, real: Callable[..., Any], early: bool) -> Callable[..., Any]:
    calls = iter(range(1000))

    def read_async(shard: Shard, start: int, out: torch.Tensor) -> Any:
        if next(calls) != at:
            return real(shard, start, out)
        if early:
            raise SwapError("the drive is broken")
        return _Fails()

    return read_async


@pytest.mark.parametrize("early", [False, True], ids=["at its wait", "at once"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("make", [_half_frozen, lambda: M.Stack(depth=4, width=16).bfloat16()], ids=["half frozen", "trained"])
def test_a_fetch_that_failed_is_done_again(
    tmp_path: Path, make: Callable[[], nn.Module], device: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Shard.read_async
    with (
        M.prepared(M.seeded(make), M.tiers(tmp_path), slots=2, precision=M.BF16, place=M.placed("nvme"), device=device) as model,
        torch.no_grad(),
    ):
        want, raised = model(X), 0
        for at in range(12):
            with monkeypatch.context() as patch:
                patch.setattr(Shard, "read_async", _failing(at, real, early))
                try:
                    assert torch.equal(model(X), want)
                except SwapError:
                    raised += 1
            assert M.at_rest(model)
            for _ in range(2):  # what was being fetched ahead says so when it is needed
                with suppress(SwapError):
                    assert torch.equal(model(X), want)
            assert torch.equal(model(X), want)
        assert raised > 3


def test_a_fetch_of_several_parts_is_over_when_it_fails() -> None:
    class Late:
        done = False

        def wait(self) -> None:
            self.done = True

    parts: list[Any] = [Late(), _Fails(), Late()]
    with pytest.raises(SwapError, match="broken"):
        _Several(parts).wait()
    assert _Several(parts).done
