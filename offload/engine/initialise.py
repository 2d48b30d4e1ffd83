"""Values for what was made on the meta device, by the architecture's own rules.

[Note: rules]
A module's rule is the nearest enclosing model's `_init_weights`, given the module; without one, its own `reset_parameters`. Rules run as
at construction and as transformers applies them: a module's children first, then the module, up to the root, because a rule may reach
into children. What `_init_weights` leaves is filled by `reset_parameters`. While rules run, only what is wanted is in memory; every other
parameter and buffer is a stand-in on the meta device, which rules may write to in vain and cannot read.

[Note: seeded by name]
Each random operation of a rule has a seed of its own, made of the run's seed, the name of the parameter it fills (where it draws into
anything else, the name of the module whose rule it is) and the operation's number. So a parameter's values depend on nothing else: not
on units, placement, or what was initialised before.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.record import Record
from offload.errors import ConfigError

_OWN_RULES = ("reset_parameters", "_reset_parameters", "_init_weights")
Rule = Callable[[], Any]
RuleOf = Callable[[nn.Module, str], Rule | None]


@dataclass(frozen=True)
class _Wanted:
    """A parameter or buffer to be filled: the module that holds it and its key there."""

    module: str
    key: str
    shape: torch.Size
    dtype: torch.dtype
    kind: str = "parameter"

    @property
    def name(self) -> str:
        return f"{self.module}.{self.key}" if self.module else self.key

    @property
    def inexact(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def blank(self, ones: bool) -> torch.Tensor:
        """What no rule leaves as it is: NaN; for integers and bool nothing is, so two blanks differ in every bit."""
        if self.inexact:
            return torch.full(self.shape, float("nan"), dtype=self.dtype)
        zeros = torch.zeros(self.shape, dtype=self.dtype)
        return zeros.bitwise_not_() if ones else zeros


class _Seeding(TorchDispatchMode):
    """See [Note: seeded by name]. `names` has the parameters' and buffers' storages; `module` is the one whose rule runs."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._names = seed, names
        self._count: dict[str, int] = {}
        self._module = ""

    def enter(self, module: str) -> None:
        """A rule begins: generators that torch does not dispatch start from the module's name."""
        self._module = f"{module}?"  # no parameter's name
        random.seed(derived_seed(self._seed, self._module, 0))
        np.random.seed(derived_seed(self._seed, self._module, 0) % 2**32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = self._module
            info = func._schema.arguments[0].alias_info if func._schema.arguments else None
            if info is not None and info.is_write:
                name = self._names.get(args[0].untyped_storage()._cdata, name)
            self._count[name] = self._count.get(name, 0) + 1
            torch.default_generator.manual_seed(derived_seed(self._seed, name, self._count[name]))
        return func(*args, **(kwargs or {}))


def derived_seed(seed: int, name: str, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=7).digest(), "little")


def initial_values(model: nn.Module, records: Sequence[Record], seed: int) -> dict[str, torch.Tensor]:
    """Values of these parameters by the rules, by name, in the declared dtypes. ConfigError naming a parameter that no rule fills."""
    wanted = [_Wanted(*_split(r.name), r.shape, r.dtype) for r in records]
    return _fill(model, wanted, (), seed)


def fill_buffers(model: nn.Module, seed: int) -> None:
    """Makes every buffer that is on meta by the rules, module by module. Rules find the module's own parameters filled too."""
    for name, module in model.named_modules():
        missing = [_Wanted(name, k, b.shape, b.dtype, "buffer") for k, b in module._buffers.items() if b is not None and b.is_meta]
        if missing:
            own = [_Wanted(name, k, p.shape, p.dtype) for k, p in module._parameters.items() if p is not None]
            values = _fill(model, missing, own, seed)
            for w in missing:
                module._buffers[w.key] = values[w.name]


def _split(name: str) -> tuple[str, str]:
    module, _, key = name.rpartition(".")
    return module, key


def _fill(model: nn.Module, wanted: Sequence[_Wanted], beside: Sequence[_Wanted], seed: int) -> dict[str, torch.Tensor]:
    """Values of what is wanted; what is `beside` it is in memory meanwhile."""
    values: dict[str, torch.Tensor] = {}
    for rule_of in (_architecture_rule, _own_rule):
        left = [w for w in wanted if w.name not in values]
        if left:
            values |= _filled(model, left, beside, seed, rule_of)
    for w in wanted:
        if w.name not in values:
            module = model.get_submodule(w.module)
            raise ConfigError(
                f"{w.kind} {w.name} of {type(module).__name__} was made on the meta device, and no reset_parameters() or _init_weights() fills "
                f"it; give {type(module).__name__} a reset_parameters(), load weights before the first use, or make the module with real values"
            )
    return values


def _filled(model: nn.Module, wanted: Sequence[_Wanted], beside: Sequence[_Wanted], seed: int, rule_of: RuleOf) -> dict[str, torch.Tensor]:
    """Values of those that rules fill whole. Integers are made twice over different blanks."""
    exact = [w for w in wanted if not w.inexact]
    other = _apply(model, exact, [*wanted, *beside], seed, rule_of, ones=True) if exact else {}
    values = _apply(model, wanted, [*wanted, *beside], seed, rule_of, ones=False)
    for w in wanted:
        value = values[w.name]
        if bool(value.isnan().any()) if w.inexact else not torch.equal(value, other[w.name]):
            del values[w.name]
    return values


def _apply(model: nn.Module, kept: Iterable[_Wanted], real: Sequence[_Wanted], seed: int, rule_of: RuleOf, *, ones: bool) -> dict[str, torch.Tensor]:
    """Runs the rules over what is `real` and returns what is `kept` of it."""
    with _standing_in(model, real, ones) as names, _isolated(), _Seeding(seed, names) as seeding:
        for name in _innermost_first(real):
            rule = rule_of(model, name)
            if rule is None:
                continue
            seeding.enter(name)
            try:
                rule()
            except Exception as error:
                raise ConfigError(
                    f"the rule of {name or 'the root'} ({type(model.get_submodule(name)).__name__}) failed while it filled {real[0].name}: {error}. "
                    "Rules are run unit by unit, when parameters of other units have no values: name a larger unit with units=[...], load "
                    "weights before the first use, or make the model with real values"
                ) from error
        return {w.name: _slot(model.get_submodule(w.module), w.kind)[w.key].detach() for w in kept}  # type: ignore[union-attr]


def _innermost_first(wanted: Iterable[_Wanted]) -> list[str]:
    """The modules that hold what is wanted and all that enclose them, each after those inside it."""
    names = dict.fromkeys(w.module for w in wanted)
    for name in list(names):
        while name:
            name = _split(name)[0]
            names[name] = None
    return sorted(names, key=lambda n: n.count(".") + bool(n), reverse=True)


def _slot(module: nn.Module, kind: str) -> dict[str, torch.Tensor | None]:
    return module._parameters if kind == "parameter" else module._buffers  # type: ignore[return-value]


@contextmanager
def _standing_in(model: nn.Module, real: Sequence[_Wanted], ones: bool) -> Iterator[dict[int, str]]:
    """Blanks in place of what is `real`, stand-ins in place of the rest, for a while. Gives the names of their storages."""
    wanted = {(w.module, w.kind, w.key): w for w in real}
    holders = {w.module for w in real}
    before: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    names: dict[int, str] = {}
    try:
        for name, module in model.named_modules():
            for kind in ("parameter", "buffer"):
                slot = _slot(module, kind)
                for key, value in list(slot.items()):
                    if value is None:
                        continue
                    place = wanted.get((name, kind, key))
                    if place is not None:
                        new = place.blank(ones)
                    elif kind == "buffer" and name in holders and not value.is_meta:
                        new = value.to("cpu", copy=True)  # a rule may read its module's buffers, and writes to them are not meant
                    else:
                        new = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    names[new.untyped_storage()._cdata] = f"{name}.{key}" if name else key
                    before.append((slot, key, value))
                    slot[key] = nn.Parameter(new, value.requires_grad) if kind == "parameter" else new
        yield names
    finally:
        for slot, key, value in before:
            slot[key] = value


@contextmanager
def _isolated() -> Iterator[None]:
    """Rules neither see nor disturb the caller's generators and contexts."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _architecture_rule(model: nn.Module, name: str) -> Rule | None:
    """The nearest enclosing model's `_init_weights`, given the module; without one, the module's own rule."""
    module = model.get_submodule(name)
    at: str | None = name
    while at is not None:
        nearest = getattr(model.get_submodule(at), "_init_weights", None)
        if nearest is not None and _takes(nearest, module):
            return lambda: nearest(module)
        at = _split(at)[0] if at else None
    return _own_rule(model, name)


def _own_rule(model: nn.Module, name: str) -> Rule | None:
    module = model.get_submodule(name)
    rules = (getattr(module, attribute, None) for attribute in _OWN_RULES)
    return next((rule for rule in rules if rule is not None and _takes(rule)), None)


def _takes(function: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
