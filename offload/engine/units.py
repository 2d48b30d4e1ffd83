"""Which parameters move together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from offload.errors import ConfigError

Units = Any  # "auto", a list of module classes, or a callable: module -> bool


def find_units(model: nn.Module, units: Units = "auto") -> list[tuple[str, nn.Module, bool]]:
    """(name, module, repeated) of each unit's module, in the order of registration.

    `"auto"`: the model's repeated blocks (several modules of one class in one ModuleList or Sequential), then every other module that has
    parameters of its own. A list of classes, or a callable that says yes to a module, names the blocks instead.
    """
    chosen = _blocks(model, units)
    inside: set[int] = set()
    for block in chosen:
        inside.update(id(m) for m in block.modules() if m is not block)
    found: list[tuple[str, nn.Module, bool]] = []
    for name, module in model.named_modules():
        if id(module) in {id(b) for b in chosen} and id(module) not in inside:
            found.append((name, module, True))
        elif id(module) not in inside and any(p is not None for p in module._parameters.values()):
            found.append((name or type(model).__name__, module, False))
    return found


def _blocks(model: nn.Module, units: Units) -> list[nn.Module]:
    accept: Callable[[nn.Module], bool]
    if units == "auto":
        return _repeated(model)
    if callable(units):
        accept = units
    elif isinstance(units, Sequence) and not isinstance(units, str) and all(isinstance(u, type) for u in units):
        classes = tuple(units)
        accept = lambda m: isinstance(m, classes)  # noqa: E731
    else:
        raise ConfigError('units: give "auto", a list of module classes, or a callable that takes a module')
    blocks = [m for m in model.modules() if accept(m)]
    if not blocks:
        raise ConfigError(f"units: no module of {type(model).__name__} matches")
    return blocks


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The outermost containers whose children are several modules of one class with parameters."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module.children())
        kinds = {type(c) for c in children}
        heavy = all(any(True for _ in c.parameters()) for c in children)
        deep = all(any(True for _ in c.children()) for c in children)
        if len(children) > 1 and len(kinds) == 1 and heavy and deep:
            blocks += children
            for child in children:
                inside.update(id(m) for m in child.modules())
    return blocks


def depths(found: list[tuple[str, nn.Module, bool]], model: nn.Module) -> list[int]:
    """For each unit, how many other units' modules enclose its own."""
    below = [{id(m) for m in module.modules()} - {id(module)} for _, module, _ in found]
    return [sum(id(module) in others for others in below) for _, module, _ in found]
