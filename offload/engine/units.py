"""Which parameters move together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from offload.errors import ConfigError
from offload.planner.layout import CHUNK_ALIGN

Units = Any  # "auto", a list of module classes, or a callable: module -> bool


@dataclass(frozen=True)
class Part:
    """A unit's module; `riders` are modules inside it that are bound with it and may be called by themselves."""

    name: str
    module: nn.Module
    repeated: bool = False
    riders: tuple[nn.Module, ...] = ()


def find_units(model: nn.Module, units: Units = "auto") -> list[Part]:
    """Each unit's module, in the order of registration.

    `"auto"`: the model's repeated blocks (several modules of one class in one ModuleList or Sequential), then every other module that has
    parameters of its own. A list of classes, or a callable that says yes to a module, names the blocks instead.

    Two kinds of module are no units, because who encloses them reads their parameters without calling them: those that cannot be called
    (nn.ParameterList) belong to the nearest one that can; and those without children ride with a parent that has parameters of its own, if
    they are no larger than these or than a chunk's alignment (nn.MultiheadAttention never calls its out_proj).
    """
    chosen = {id(b) for b in _blocks(model, units)}
    inside = {id(m) for b in model.modules() if id(b) in chosen for m in b.modules() if m is not b}
    outside = {n: m for n, m in model.named_modules() if id(m) not in inside}
    blocks = {n for n, m in outside.items() if id(m) in chosen}
    homes: dict[str, list[str]] = {n: [n] for n in blocks}  # of each unit, the modules whose own parameters it has
    for name, module in outside.items():
        if name not in blocks and any(p is not None for p in module._parameters.values()):
            homes.setdefault(_caller(name, outside), []).append(name)
    riders: dict[str, list[nn.Module]] = {}
    for name in [n for n in homes if n and n not in blocks]:
        parent = _caller(name.rpartition(".")[0], outside)
        leaf = homes[name] == [name] and not any(True for _ in outside[name].children())
        if (
            leaf
            and parent in homes
            and parent not in blocks
            and _own_numel(name, homes, outside) <= max(_own_numel(parent, homes, outside), CHUNK_ALIGN)
        ):
            riders.setdefault(parent, []).append(outside[name])
            del homes[name]
    return [Part(n or type(model).__name__, m, n in blocks, tuple(riders.get(n, ()))) for n, m in outside.items() if n in homes]


def _caller(name: str, modules: dict[str, nn.Module]) -> str:
    """The nearest module, itself or around it, that has a forward; itself where none has."""
    at = name
    while type(modules[at]).forward is nn.Module.forward:
        if not at:
            return name
        at = at.rpartition(".")[0]
    return at


def _own_numel(unit: str, homes: dict[str, list[str]], modules: dict[str, nn.Module]) -> int:
    return sum(p.numel() for n in homes[unit] for p in modules[n]._parameters.values() if p is not None)


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
    """In the outermost containers, the children of a class that occurs there several times and has modules and parameters inside."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module.children())
        for kind in {type(c): None for c in children}:
            alike = [c for c in children if type(c) is kind]
            if len(alike) > 1 and all(any(True for _ in c.children()) and any(True for _ in c.parameters()) for c in alike):
                blocks += alike
                inside.update(id(m) for c in alike for m in c.modules())
    return blocks


def depths(found: list[Part]) -> list[int]:
    """For each unit, how many other units' modules enclose its own."""
    below = [{id(m) for m in part.module.modules()} - {id(part.module)} for part in found]
    return [sum(id(part.module) in others for others in below) for part in found]
