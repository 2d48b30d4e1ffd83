"""Custom autograd functions that are under way are seen, however they are written."""

from __future__ import annotations

from typing import Any

import torch

from offload.engine.functions import in_backward, in_forward

seen: list[tuple[bool, int]] = []


def look(x: torch.Tensor) -> torch.Tensor:
    seen.append((in_forward(), in_backward()))
    return x * 2


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return look(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return look(grad)


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return look(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return look(grad)


def test_functions_under_way_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    look(x)
    assert seen.pop() == (False, 0)
    for kind in (WithContext, WithoutContext):
        out = kind.apply(x)
        assert seen.pop() == (True, 0)
        out.sum().backward()
        assert seen.pop() == (False, 1) and not seen
