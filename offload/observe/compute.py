"""How long a model computes, from one unit of each kind.

Nothing of the model is allocated: its forward runs on fake tensors to see what each unit is given, then one unit of each kind runs alone, in
plain torch, with random weights and inputs of those shapes. Times of units of the same kind and inputs are taken once and counted as often as
there are such units.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from offload.planner.cost import Compute

ROUNDS = 3
_TRACED_ONLY = ("attention_mask",)  # made where tensors are traced; where they are not, a causal mask is implied


@dataclass
class Call:
    """One call of a unit's module, and what it was given: fake tensors."""

    module: nn.Module
    repeated: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def kind(self) -> Any:
        """Equal for calls that take the same time."""
        leaves, tree = tree_flatten((self.args, self.kwargs))
        shapes = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        own = [(n, tuple(p.shape), p.requires_grad) for n, p in self.module.named_parameters()]
        return type(self.module), repr(own), repr(shapes), str(tree)


def calls_of(modules: Sequence[tuple[nn.Module, bool]], forward: Callable[[], object]) -> list[Call]:
    """The calls of `modules` (each with whether it is a repeated block) during `forward` of fake tensors, in order."""
    calls: list[Call] = []

    def noted(module: nn.Module, repeated: bool) -> Callable[..., Any]:
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(Call(module, repeated, args, {k: v for k, v in kwargs.items() if k not in _TRACED_ONLY}))
            return run(*args, **kwargs)

        return forward

    with ExitStack() as stack, torch.no_grad():
        for module, repeated in modules:
            module.__dict__["forward"] = noted(module, repeated)
            stack.callback(module.__dict__.pop, "forward")
        forward()
    return calls


def unit_seconds(call: Call, dtype: torch.dtype, device: torch.device, until: float) -> tuple[float, float]:
    """(forward, backward) seconds of one call in plain torch; rounds end at `until` (monotonic)."""
    module = _real(call.module, dtype, device)
    vocabulary = min((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=0)
    args, kwargs = tree_map(lambda x: _input(x, dtype, device, vocabulary), (call.args, call.kwargs))
    leaf = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    if leaf is not None:
        leaf.requires_grad_()
    taken: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        start = _now(device)
        out = next(x for x in tree_flatten(module(*args, **kwargs))[0] if isinstance(x, torch.Tensor) and x.is_floating_point())
        middle = _now(device)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        taken.append((middle - start, _now(device) - middle))
        module.zero_grad(set_to_none=True)
        if leaf is not None:
            leaf.grad = None
        del out
        if time.monotonic() > until:
            break
    kept = taken[1:] or taken  # the first is a warm-up
    return statistics.median(f for f, _ in kept), statistics.median(b for _, b in kept)


def compute_seconds(calls: Sequence[Call], dtype: torch.dtype, device: torch.device, seconds: float = 5.0) -> list[Compute]:
    """Seconds of one forward and backward of each call; measuring takes about `seconds` at the most."""
    kinds = [call.kind for call in calls]
    found: dict[Any, Compute] = {}
    end = time.monotonic() + seconds
    count = len({repr(kind) for kind in kinds})
    for call, kind in zip(calls, kinds, strict=True):
        if kind not in found:
            until = time.monotonic() + max(0.0, end - time.monotonic()) / max(1, count - len(found))
            f, b = unit_seconds(call, dtype, device, until)
            found[kind] = Compute(f, b, f if call.repeated else 0.0)
    return [found[kind] for kind in kinds]


def timed(call: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median seconds of a call, after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        start = _now(device)
        call()
        taken.append(_now(device) - start)
    return statistics.median(taken[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _real(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of a fake module with random weights of the compute dtype."""
    held: dict[int, Any] = {id(p): nn.Parameter(_random(p, dtype, device, 0.02), requires_grad=p.requires_grad) for p in module.parameters()}
    held |= {id(b): torch.ones(b.shape, dtype=b.dtype, device=device) for b in module.buffers()}
    return copy.deepcopy(module, held)


def _random(like: torch.Tensor, dtype: torch.dtype, device: torch.device, std: float) -> torch.Tensor:
    kind = dtype if like.is_floating_point() else like.dtype
    out = torch.empty(like.shape, dtype=kind, device=device)
    return out.normal_(std=std) if kind.is_floating_point else out.zero_()


def _input(leaf: Any, dtype: torch.dtype, device: torch.device, vocabulary: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        return _random(leaf, dtype, device, 1.0)
    if leaf.dtype == torch.bool:
        return torch.ones(leaf.shape, dtype=torch.bool, device=device)
    return torch.randint(0, max(1, vocabulary), leaf.shape, device=device).to(leaf.dtype)
