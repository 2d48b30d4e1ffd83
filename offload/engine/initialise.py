"""Values for models made on the meta device, unit by unit, by the architecture's own rules.

[Note: seeded by name]
Each random operation of a rule that fills a parameter is preceded by a seed of its own, made of the run's seed, the parameter's name and the
operation's number, so a parameter's values depend on nothing else: not on units, placement, or what was initialised before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload.errors import ConfigError

_RANDOM = {f"aten::{name}" for name in ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")}


class _Seeding(TorchDispatchMode):
    def __init__(self, seed: int, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._names = seed, names
        self._count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _RANDOM:
            name = self._names.get(args[0].untyped_storage().data_ptr(), "")
            self._count[name] = self._count.get(name, 0) + 1
            torch.default_generator.manual_seed(derived_seed(self._seed, name, self._count[name]))
        return func(*args, **(kwargs or {}))


def derived_seed(seed: int, name: str, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=7).digest(), "little")


def rule_for(model: nn.Module, name: str, module: nn.Module) -> Callable[[], Any] | None:
    """What fills a module's own parameters and buffers: the nearest enclosing model's `_init_weights`, else the module's `reset_parameters`."""
    owner = model
    nearest = model if hasattr(model, "_init_weights") else None
    for part in name.split(".") if name else ():
        owner = getattr(owner, part)
        if hasattr(owner, "_init_weights"):
            nearest = owner
    if nearest is not None:
        return lambda: nearest._init_weights(module)  # type: ignore[operator]
    for attribute in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, attribute):
            return getattr(module, attribute)  # type: ignore[no-any-return]
    return None


@contextmanager
def _real(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """The module with fresh parameters in memory for a while; what it had comes back."""
    before = {k: p for k, p in module._parameters.items() if p is not None}
    fresh = {k: nn.Parameter(_blank(p.shape, p.dtype), requires_grad=False) for k, p in before.items()}
    module._parameters.update(fresh)
    try:
        yield fresh
    finally:
        module._parameters.update(before)


def _blank(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def initial_values(model: nn.Module, name: str, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Values of the module's own parameters by its rule; buffers on meta are filled as a side effect. ConfigError without a rule."""
    rule = rule_for(model, name, module)
    prefix = f"{name}." if name else ""
    with _real(module) as fresh:
        names = {p.untyped_storage().data_ptr(): prefix + k for k, p in fresh.items() if p.numel()}
        if rule is None:
            raise ConfigError(
                f"{name or type(model).__name__} ({type(module).__name__}) is on the meta device and has no reset_parameters(); "
                "give it one, or build it with real values"
            )
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _Seeding(seed, names):
            torch.default_generator.manual_seed(derived_seed(seed, prefix, 0))
            rule()
        for key, p in fresh.items():
            if p.dtype.is_floating_point and p.numel() and bool(p.isnan().any()):
                raise ConfigError(f"parameter {prefix}{key} was not filled by the rule of {type(module).__name__}; give it a value before prepare()")
        return {key: p.detach() for key, p in fresh.items()}


def fill_buffers(model: nn.Module, seed: int) -> None:
    """Makes every buffer that is on meta by its module's own rule."""
    for name, module in model.named_modules():
        missing = [k for k, b in module._buffers.items() if b is not None and b.is_meta]
        if not missing:
            continue
        for key in missing:
            buffer = module._buffers[key]
            assert buffer is not None
            module._buffers[key] = _blank(buffer.shape, buffer.dtype)
        initial_values(model, name, module, seed)
        for key in missing:
            buffer = module._buffers[key]
            assert buffer is not None
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise ConfigError(
                    f"buffer {name}.{key} is on the meta device and the rule of {type(module).__name__} does not fill it; "
                    "give it a value before prepare()"
                )
