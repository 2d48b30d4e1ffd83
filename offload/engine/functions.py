"""Custom autograd functions that are under way, by the calls of Python on the stack: torch says of none that it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, cast

import torch


def in_backward() -> int:
    """How many custom functions are running their backward, one inside another."""
    return _on_stack({torch.autograd.function.BackwardCFunction.apply.__code__})


def in_forward() -> bool:
    """Whether a custom function is running its forward: what computes without gradients there may compute with them in its backward."""
    codes = (getattr(kind.forward, "__code__", None) for kind in _kinds_of(torch.autograd.Function))
    return _on_stack({code for code in codes if code is not None}) > 0


def _kinds_of(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds_of(kind)


def _on_stack(codes: set[CodeType]) -> int:
    """How many calls of these functions of Python's are under way."""
    count, at = 0, cast("FrameType | None", sys._getframe(1))
    while at is not None:
        count += at.f_code in codes
        at = at.f_back
    return count
