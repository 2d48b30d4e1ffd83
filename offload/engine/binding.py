"""A unit's parameters bound to device memory while its modules compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from offload.engine.atrest import AtRest
from offload.engine.gradients import Gradients
from offload.engine.record import Record

# A backward takes, of what is ready, the node with the greatest number, so that each gradient lands as soon as it is whole. By the numbers that a
# forward gives, those of a unit would all be held until the rest of its backward is done, as they are bound before anything is computed.
SOON = 1 << 63


class Bind(torch.autograd.Function):
    """Forward: the parameter's value on the device. Backward: its gradient goes on to the parameter at rest, through AccumulateGrad."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, view: torch.Tensor, record: Record, gradients: Gradients) -> torch.Tensor:
        ctx.record, ctx.gradients = record, gradients
        return record.whole(view.view_as(view))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        record: Record = ctx.record
        part = grad if record.divided is None else record.divided.part(grad, "the gradient")
        return record.whole(AtRest(ctx.gradients.contribution(record, part))), None, None, None


@dataclass(frozen=True)
class Entry:
    """One module's attribute that holds a parameter."""

    module: nn.Module
    name: str
    record: Record


def bind(entries: list[Entry], flats: dict[int, list[torch.Tensor]], gradients: Gradients) -> list[torch.Tensor | None]:
    """Puts each entry's value on the device in its module, and returns what was there. `flats` has the flats of each unit concerned."""
    grad = torch.is_grad_enabled()
    bound: dict[int, torch.Tensor] = {}
    before: list[torch.Tensor | None] = []
    for entry in entries:
        record = entry.record
        value = bound.get(record.number)
        if value is None:
            value = flats[record.unit][record.flat][record.offset : record.offset + record.numel].view(record.shape)
            trains = grad and record.parameter.requires_grad
            value = _trained(record, value, gradients) if trains else record.whole(value)
            bound[record.number] = value
        before.append(entry.module._parameters[entry.name])
        _put(entry, value)
    return before


def _trained(record: Record, value: torch.Tensor, gradients: Gradients) -> torch.Tensor:
    bound: torch.Tensor = Bind.apply(record.parameter, value, record, gradients)  # type: ignore[no-untyped-call]
    node: Any = bound.grad_fn
    node._set_sequence_nr(SOON)
    return bound


def unbind(entries: list[Entry], before: list[torch.Tensor | None]) -> None:
    """Puts back what was there; an attribute entered twice ends with what it had first."""
    for entry, value in zip(reversed(entries), reversed(before), strict=True):
        _put(entry, value)


class Watch:
    """Notices what a forward writes to parameters on the device, but through `.data`. What is written at rest meanwhile may go there too."""

    def __init__(self, entries: list[Entry], flats: dict[int, list[torch.Tensor]]) -> None:
        self._entries, self._flats = entries, [flat for parts in flats.values() for flat in parts]
        self._device, self._at_rest = self._versions()

    def _versions(self) -> tuple[list[int], list[int]]:
        return [flat._version for flat in self._flats], [entry.record.version for entry in self._entries]

    def wrote(self) -> bool:
        """Whether something has been written since this was made."""
        device, at_rest = self._versions()
        return device != self._device and at_rest == self._at_rest


def _put(entry: Entry, value: torch.Tensor | None) -> None:
    module = entry.module
    module._parameters[entry.name] = value  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase) and entry.name in module._flat_weights_names:  # its forward computes with a list of its own
        module._flat_weights[module._flat_weights_names.index(entry.name)] = value
        let_go(module)


def let_go(module: nn.Module) -> None:
    """Drops a recurrent module's weak references to its parameters, by which it would notice new ones and have cuDNN move them."""
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = [None] * len(module._flat_weights_names)
