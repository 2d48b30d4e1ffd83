"""Values of large parameters that rules fill one element like another: made in pieces, by several threads.

[Note: recipes]
A parameter of more than LARGE elements stays without memory while its rules run, and what they do to it is noted. If that is nothing but operations
that treat all elements alike, they are done later, to PIECE elements at a time. Each random operation on a piece has a seed of its own, as in
[Note: seeded by name], so a value depends on no budget and no number of threads. Whatever else a rule wants of it, a value above all, is refused,
and the rules run again on the whole in memory. It is no tensor on the meta device, as there are rules that do nothing on that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload import _core

LARGE = 1 << 22  # elements
PIECE = 1 << 20
THREADS_MOST = 4  # each has a piece in memory
_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}
_FILLING = {_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar}  # whatever was there before
_CHANGING = {
    _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.add_.Tensor, _aten.add_.Scalar, _aten.erfinv_.default, _aten.clamp_.default,
}  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """An operation on the whole, with the number that it has among the random ones of its parameter; 0: it is not random."""

    act: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    number: int

    def do(self, piece: torch.Tensor, seed: Callable[[int], int]) -> None:
        named = dict(self.named)
        if self.number:
            named["generator"] = torch.Generator().manual_seed(seed(self.number))
        self.act(piece, *self.args, **named)


class Unmakeable(Exception):
    """A rule does more to a parameter than can be done in pieces."""


@dataclass
class Recipe:
    """What rules do to a large parameter; `spoilt` if that is more than can be done in pieces."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    steps: list[_Step] = field(default_factory=list)
    spoilt: bool = False

    def note(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], number: int) -> Unmade:
        """An operation that has the parameter among its arguments: what it returns. Unmakeable."""
        target, rest = args[0], tuple(_number(a) for a in args[1:])
        if func in _SAME:
            return Unmade(self)
        known = (func in _FILLING or func in _CHANGING) and isinstance(target, Unmade)
        if not known or any(isinstance(a, torch.Tensor) for a in (*rest, *named.values())) or named.get("generator") is not None:
            self.spoilt = True
            raise Unmakeable(f"{func} of {self.name}")
        if func in _FILLING:
            self.steps.clear()
        self.steps.append(_Step(func, rest, named, number))
        return target  # type: ignore[no-any-return]

    @property
    def whole(self) -> bool:
        """Whether it makes the values that the rules do."""
        return not self.spoilt and bool(self.steps) and self.steps[0].act in _FILLING

    def parts(self, seed: Callable[[int, int], int]) -> Iterator[torch.Tensor]:
        """The values, flat and in order, PIECE at a time. `seed(piece, number)`: of the random operation `number` on a piece."""

        def make(piece: int) -> torch.Tensor:
            values = torch.empty(min(PIECE, numel - piece * PIECE), dtype=self.dtype, device="cpu")
            for step in self.steps:
                step.do(values, lambda number: seed(piece, number))
            return values

        numel, threads = self.shape.numel(), max(1, min(THREADS_MOST, _core.default_threads()))
        with ThreadPoolExecutor(threads, "offload-initialise") as pool:
            making: deque[Future[torch.Tensor]] = deque()
            for piece in range(-(-numel // PIECE)):
                making.append(pool.submit(make, piece))
                if len(making) > threads:
                    yield making.popleft().result()
            while making:
                yield making.popleft().result()


class Unmade(torch.Tensor):
    """A large parameter while its rules run: of its shape and dtype, on the CPU, without memory."""

    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe) -> Unmade:
        made: Unmade = torch.Tensor._make_wrapper_subclass(cls, recipe.shape, dtype=recipe.dtype, device=torch.device("cpu"))
        made.recipe = recipe
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Outside of rules: nothing random."""
        recipe = next(a.recipe for a in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(a, Unmade))
        return recipe.note(func, args, kwargs or {}, 0)


def _number(value: Any) -> Any:
    """Python's own number for a scalar that was wrapped in a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu" else value
