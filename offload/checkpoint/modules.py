"""What a model has beside its parameters that a state dict keeps: persistent buffers, and the extra state that modules give of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.errors import CheckpointError

_SUFFIX = "_extra_state"  # of a key of a state dict, as torch has it


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state dict has, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), (_join(prefix, name), buffer))
    return dict(found.values())


def is_extra_state(key: str) -> bool:
    """Whether a key of a state dict stands for a module's extra state."""
    return key.rpartition(".")[2] == _SUFFIX


def extra_states(model: nn.Module) -> dict[str, Any]:
    """By the key that a state dict has for it, what each module's `get_extra_state` gives."""
    return {key: module.get_extra_state() for key, module in _with(model, "get_extra_state")}


def extra_state_keys(model: nn.Module) -> list[str]:
    """Those of what the model's modules take with `set_extra_state`."""
    return [key for key, _ in _with(model, "set_extra_state")]


def set_extra_states(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Gives modules what is there for them. CheckpointError where one of them does not take it."""
    for key, module in _with(model, "set_extra_state"):
        if key in values:
            try:
                module.set_extra_state(values[key])
            except Exception as error:  # of any kind: the module is the user's
                kind = type(module).__name__
                raise CheckpointError(f"{kind}.set_extra_state refused {key}, so the model is loaded in part only: {error!r}") from error


def _with(model: nn.Module, method: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose class has a method that nn.Module only stands for."""
    for prefix, module in model.named_modules():
        if getattr(type(module), method) is not getattr(nn.Module, method):
            yield _join(prefix, _SUFFIX), module


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
