"""Values for what was made on the meta device, by the architecture's own rules.

[Note: rules]
A module's rule is the nearest enclosing model's `_init_weights`, given the module; without one, its own `reset_parameters`. What
`_init_weights` leaves is filled by `reset_parameters`. One module's parameters are filled at a time: by its rule, then by those of the modules
around it from inside out, as at construction and as transformers applies them, because a rule may reach into children. Only that
module's parameters are in memory meanwhile, large ones not whole ([Note: recipes]); all others are stand-ins on the meta device, which rules
write to in vain and cannot read.

[Note: seeded by name]
Each random operation of a rule has a seed of its own, made of the run's seed, the name of the parameter it fills (where it draws into
anything else, the name of the module whose rule it is) and the operation's number. With [Note: rules], a parameter's values so depend on
nothing else: not on units, placement, or what was initialised before.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.recipes import LARGE, Recipe, Unmade
from offload.engine.record import Record
from offload.errors import ConfigError

_OWN_RULES = ("reset_parameters", "_reset_parameters", "_init_weights")
Rule = Callable[[], Any]
RuleOf = Callable[[nn.Module, str], Rule | None]
_Slot = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class _Wanted:
    """A parameter or buffer to be filled, by its key in its module."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    kind: str = "parameter"

    @property
    def inexact(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def blank(self, ones: bool) -> torch.Tensor:
        """What no rule leaves as it is: NaN; for integers and bool nothing is, so two blanks differ in every bit."""
        if self.inexact:
            return torch.full(self.shape, float("nan"), dtype=self.dtype, device="cpu")
        zeros = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        return zeros.bitwise_not_() if ones else zeros


class _Seeding(TorchDispatchMode):
    """See [Note: seeded by name]. `names` has the names of parameters and buffers by their storages' addresses; see also [Note: recipes]."""

    def __init__(self, seed: int, names: Mapping[int, str]) -> None:
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
        kwargs, number = kwargs or {}, 0
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = self._module
            info = func._schema.arguments[0].alias_info if func._schema.arguments else None
            if info is not None and info.is_write:
                name = args[0].recipe.name if isinstance(args[0], Unmade) else self._names.get(args[0].untyped_storage()._cdata, name)
            number = self._count[name] = self._count.get(name, 0) + 1
            torch.default_generator.manual_seed(derived_seed(self._seed, name, number))
        unmade = next((a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, Unmade)), None)
        return func(*args, **kwargs) if unmade is None else unmade.recipe.note(func, args, kwargs, number)


def derived_seed(seed: int, name: str, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=7).digest(), "little")


def initial_values(model: nn.Module, records: Sequence[Record], seed: int) -> dict[str, Iterable[torch.Tensor]]:
    """Whole values of these parameters by the rules, by name, in the declared dtypes, flat and in parts; large ones are made as they are
    iterated over.

    ConfigError naming a parameter that no rule fills.
    """
    groups: dict[str, list[_Wanted]] = {}
    for r in records:
        module, key = _split(r.name)
        groups.setdefault(module, []).append(_Wanted(key, r.whole_shape, r.dtype))
    values: dict[str, Iterable[torch.Tensor]] = {}
    with _Stage(model, seed) as stage:
        for module, wanted in groups.items():
            for key, value in _fill(stage, module, wanted, recipes=True).items():
                name = _join(module, key)
                values[name] = value.parts(partial(_piece_seed, seed, name)) if isinstance(value, Recipe) else [value.reshape(-1)]
    return values


def _piece_seed(seed: int, name: str, piece: int, number: int) -> int:
    return derived_seed(seed, f"{name}[{piece}]", number)


def fill_buffers(model: nn.Module, seed: int) -> None:
    """Makes every buffer that is on meta by the rules. Rules find the module's own parameters filled too."""
    groups = {
        name: [_Wanted(k, b.shape, b.dtype, "buffer") for k, b in module._buffers.items() if b is not None and b.is_meta]
        for name, module in model.named_modules()
    }
    values: dict[str, dict[str, torch.Tensor]] = {}
    with _Stage(model, seed) as stage:
        for name, wanted in groups.items():
            if wanted:
                values[name] = {k: v for k, v in _fill(stage, name, wanted).items() if isinstance(v, torch.Tensor)}
    for name, made in values.items():
        model.get_submodule(name)._buffers.update(made)


def _split(name: str) -> tuple[str, str]:
    module, _, key = name.rpartition(".")
    return module, key


def _join(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _fill(stage: _Stage, module: str, wanted: Sequence[_Wanted], recipes: bool = False) -> dict[str, torch.Tensor | Recipe]:
    """Values of what is wanted of one module, by key; or, if `recipes` will do, how they are made. See [Note: recipes]."""
    values: dict[str, torch.Tensor | Recipe] = {}
    for rule_of in (_architecture_rule, _own_rule):
        left = [w for w in wanted if w.key not in values]
        if left:
            values |= _filled(stage, module, left, rule_of, recipes)
    for w in wanted:
        if w.key not in values:
            kind = type(stage.model.get_submodule(module)).__name__
            raise ConfigError(
                f"{w.kind} {_join(module, w.key)} of {kind} was made on the meta device, and no reset_parameters() or _init_weights() fills it; "
                f"give {kind} a reset_parameters(), load weights before the first use, or make the module with real values"
            )
    return values


def _filled(stage: _Stage, module: str, wanted: Sequence[_Wanted], rule_of: RuleOf, recipes: bool) -> dict[str, torch.Tensor | Recipe]:
    """Values of those that rules fill whole, or their recipes. Integers are made twice over different blanks."""
    exact = [w for w in wanted if not w.inexact]
    other = stage.apply(module, exact, rule_of, ones=True) if exact else {}
    large = [w for w in wanted if recipes and w.inexact and w.shape.numel() > LARGE]
    made = {w.key: Recipe(_join(module, w.key), w.shape, w.dtype) for w in large}
    if made:
        try:
            values = stage.apply(module, wanted, rule_of, ones=False, recipes=made)
        except ConfigError:
            made = {}  # the rule must see the value, or fails again
    if not made or not all(recipe.whole for recipe in made.values()):
        made, values = {}, stage.apply(module, wanted, rule_of, ones=False)
    out: dict[str, torch.Tensor | Recipe] = dict(made)
    for w in wanted:
        if w.key not in made and not (bool(values[w.key].isnan().any()) if w.inexact else not torch.equal(values[w.key], other[w.key])):
            out[w.key] = values[w.key]
    return out


class _Stage(AbstractContextManager["_Stage"]):
    """A model with stand-ins in place of all parameters and buffers, for a while; what it had comes back."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self._before: dict[tuple[int, str], tuple[_Slot, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, as the address of one that is freed may come again

    def __enter__(self) -> _Stage:
        for name, module in self.model.named_modules():
            for kind, slot in _slots(module).items():
                for key, value in slot.items():
                    if value is not None:
                        self._before[id(slot), key] = slot, value
                        new = torch.empty(value.shape, dtype=value.dtype, device="meta")
                        self._names[new.untyped_storage()._cdata] = _join(name, key)
                        self._storages.append(new.untyped_storage())
                        slot[key] = _as(kind, new, value.requires_grad)
        return self

    def __exit__(self, *exception: object) -> None:
        for (_, key), (slot, value) in self._before.items():
            slot[key] = value

    def apply(
        self, name: str, wanted: Sequence[_Wanted], rule_of: RuleOf, *, ones: bool, recipes: Mapping[str, Recipe] | None = None
    ) -> dict[str, torch.Tensor]:
        """What the rules of a module and of those around it make of `wanted`, by key. Of those with a recipe, by key, that is noted there."""
        module, recipes = self.model.get_submodule(name), recipes or {}
        with self._in_memory(name, module, wanted, ones, recipes) as names, _isolated(), _Seeding(self.seed, names) as seeding:
            for around in _inside_out(name):
                rule = rule_of(self.model, around)
                if rule is None:
                    continue
                seeding.enter(around)
                try:
                    rule()
                except Exception as error:
                    raise ConfigError(
                        f"the rule of {around or 'the root'} ({type(self.model.get_submodule(around)).__name__}) failed while it filled "
                        f"{_join(name, wanted[0].key)}: {error}. Rules fill one module at a time and cannot read other modules' parameters: "
                        "load weights before the first use, or make the model with real values"
                    ) from error
            return {w.key: _slots(module)[w.kind][w.key].detach() for w in wanted if w.key not in recipes}  # type: ignore[union-attr]

    @contextmanager
    def _in_memory(
        self, name: str, module: nn.Module, wanted: Sequence[_Wanted], ones: bool, recipes: Mapping[str, Recipe]
    ) -> Iterator[Mapping[int, str]]:  # fmt: skip
        """A module's own parameters as blanks, or unmade, and its buffers as copies. Gives the names of all storages."""
        blanks = {(w.kind, w.key): w for w in wanted}
        stand_ins = {kind: dict(slot) for kind, slot in _slots(module).items()}
        names: dict[int, str] = {}
        storages: list[torch.UntypedStorage] = []
        try:
            for kind, slot in _slots(module).items():
                for key in [k for k, v in slot.items() if v is not None]:
                    value = self._before[id(slot), key][1]
                    if kind == "parameter" and key in recipes:
                        slot[key] = _as(kind, Unmade(recipes[key]), value.requires_grad)
                        continue
                    if kind == "buffer" and not value.is_meta:
                        new = value.to("cpu", copy=True)
                    else:
                        new = blanks.get((kind, key), _Wanted(key, value.shape, value.dtype)).blank(ones)
                    names[new.untyped_storage()._cdata] = _join(name, key)
                    storages.append(new.untyped_storage())
                    slot[key] = _as(kind, new, value.requires_grad)
            yield ChainMap(names, self._names)
        finally:
            for kind, slot in _slots(module).items():
                slot.update(stand_ins[kind])


def _inside_out(name: str) -> Iterator[str]:
    """The module and those around it, the root last."""
    yield name
    while name:
        name = _split(name)[0]
        yield name


def _slots(module: nn.Module) -> dict[str, _Slot]:
    return {"parameter": module._parameters, "buffer": module._buffers}  # type: ignore[dict-item]


def _as(kind: str, value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return nn.Parameter(value, requires_grad) if kind == "parameter" else value


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
