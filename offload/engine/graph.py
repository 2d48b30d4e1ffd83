"""What autograd is about to do in the backward that runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import get_gradient_edge

from offload.engine.record import Record


def expected(records: Iterable[Record]) -> list[int] | None:
    """The numbers of the trained parameters into which the backward that runs accumulates; None: into none ever, it is autograd.grad."""
    try:
        held = [r for r in records if r.trained and r.parameter.requires_grad]
        return [r.number for r in held if torch._C._will_engine_execute_node(get_gradient_edge(r.parameter).node)]
    except RuntimeError:
        return None


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs accumulates into the parameter (and not `autograd.grad`, which only returns)."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # it is autograd.grad: torch answers that by raising
        return False
