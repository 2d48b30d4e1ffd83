"""A small model that was trained a little: what the tests of checkpoints save."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import offload
from helpers import Prepared, ids, net


def adam(model: nn.Module, **over: Any) -> offload.optim.AdamW:
    return offload.optim.AdamW(model.parameters(), lr=over.pop("lr", 1e-2), **over)


def digest(model: nn.Module) -> str:
    return offload.runtime(model).digest()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for i in range(first, last):
        loss = model(ids(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained(prepared: Prepared, n: int = 2, place: str = "host", device: str = "cpu", **over: Any) -> tuple[Any, offload.optim.AdamW]:
    model = prepared(net(), place, device, **over)
    optimizer = adam(model)
    steps(model, optimizer, 0, n)
    return model, optimizer
