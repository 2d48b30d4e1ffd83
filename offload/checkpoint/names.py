"""Which part of which of a model's tensors each tensor of a Hugging Face file is.

[Note: stored form]
Between files and models transformers renames tensors, and splits and merges them: the experts of a mixture are matrices of their own in files, and
one parameter of three dimensions in the model. Its own code, which knows every architecture, is run here on tensors without values: their views
keep storage and offset, copies are left out and concatenations noted, so what comes out tells where every element lies. Saving follows that table
forwards and loading backwards, both in pieces. What it cannot tell (arithmetic on values, rows scattered one by one) leaves the model's own
names, which transformers reads as well.
"""

from __future__ import annotations

import logging
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger("offload")
aten = torch.ops.aten
MOST_RUNS = 1 << 16  # of one tensor; beyond, its elements are scattered


@dataclass(frozen=True)
class Run:
    """Elements [start, start + numel) of the model's tensor `name`."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Place:
    """What a stored tensor is: its shape and dtype, and where its elements lie in the model, in order."""

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[Run, ...]


def whole(name: str, tensor: torch.Tensor) -> Place:
    """The place of a tensor that files have as the model has it."""
    return Place(tensor.shape, tensor.dtype, (Run(name, 0, tensor.numel()),))


def hub_model(model: nn.Module) -> Any | None:
    """The model if it is transformers' own, else None."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return model if modeling is not None and isinstance(model, modeling.PreTrainedModel) else None


def stored_places(model: nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """What each tensor of a file is, by its stored name; `own` has the model's tensors by name, each once, on `meta`. See [Note: stored form]."""
    as_they_are = {name: whole(name, tensor) for name, tensor in own.items()}
    hub = hub_model(model)
    if hub is None:
        return as_they_are
    from transformers.core_model_loading import revert_weight_conversion

    trace = _Trace(own)
    try:
        with trace:
            stored = revert_weight_conversion(hub, dict(own))
        places = {name: trace.place(tensor) for name, tensor in stored.items()}
        if sum(p.shape.numel() for p in places.values()) != sum(t.numel() for t in own.values()):
            raise ValueError("it has not every element once")
        return places
    except Exception as error:  # conversions are of many kinds, and fail in as many ways
        log.warning("%s: files have the model's own names, as the stored form cannot be followed: %s", type(model).__name__, error)
        return as_they_are


def renaming(model: nn.Module) -> Callable[[str], str]:
    """Older names of tensors to those of today, as transformers knows them."""
    hub = hub_model(model)
    if hub is None:
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    renamings = [t for t in get_model_conversion_mapping(hub) if isinstance(t, WeightRenaming)]
    return lambda name: str(apply_renamings(name, renamings))


class _Trace(TorchDispatchMode):
    """Follows elements through views, copies and concatenations of tensors on `meta`."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage(t): name for name, t in sources.items()}
        self._joined: dict[int, list[tuple[int, Run]]] = {}  # by storage: the first element of each run in it, and the run
        self._alive: list[torch.Tensor] = list(sources.values())  # a storage's identity must not be given out twice

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is aten.clone.default:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is aten.cat.default:
            dim = args[1] if len(args) > 1 else 0
            sizes = [t.shape[dim] for t in args[0]]
            self._join(out, args[0], [out.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes)])
        elif func is aten.stack.default:
            dim = args[1] if len(args) > 1 else 0
            self._join(out, args[0], [out.select(dim, i) for i in range(len(args[0]))])
        return out

    def _join(self, out: torch.Tensor, pieces: Iterable[torch.Tensor], views: Iterable[torch.Tensor]) -> None:
        self._alive.append(out)
        runs = [
            (at + run_at, run)
            for piece, view in zip(pieces, views, strict=True)
            for at, source, numel in _blocks(view, piece)
            for run_at, run in self._runs(piece, source, numel)
        ]
        self._joined[_storage(out)] = sorted(runs, key=lambda r: r[0])

    def place(self, tensor: torch.Tensor) -> Place:
        if not tensor.numel() and _storage(tensor) in self._sources:
            return whole(self._sources[_storage(tensor)], tensor)
        flat = torch.empty(tensor.shape, device="meta")
        runs = [run for _, source, numel in _blocks(flat, tensor) for _, run in self._runs(tensor, source, numel)]
        return Place(tensor.shape, tensor.dtype, tuple(runs))

    def _runs(self, tensor: torch.Tensor, start: int, numel: int) -> Iterator[tuple[int, Run]]:
        """Elements [start, start + numel) of a tensor's storage, with where each run begins among them."""
        storage = _storage(tensor)
        if storage in self._sources:
            yield 0, Run(self._sources[storage], start, numel)
            return
        if storage not in self._joined:
            raise ValueError("its values are computed")
        joined = self._joined[storage]
        at = bisect_right(joined, start, key=lambda r: r[0]) - 1
        stop = start + numel
        while at < len(joined) and joined[at][0] < stop:
            first, run = joined[at]
            begin, end = max(first, start), min(first + run.numel, stop)
            yield begin - start, Run(run.name, run.start + begin - first, end - begin)
            at += 1


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _blocks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Two tensors of one shape in stretches that are contiguous in both: where each starts in either storage, and its elements."""
    if not a.numel():
        return
    outer, block = a.ndim, 1
    while outer and (a.shape[outer - 1] == 1 or a.stride(outer - 1) == b.stride(outer - 1) == block):
        outer -= 1
        block *= a.shape[outer]
    if math.prod(a.shape[:outer]) > MOST_RUNS:
        raise ValueError("its elements are scattered")
    for index in product(*map(range, a.shape[:outer])):
        yield (
            int(a.storage_offset()) + sum(i * s for i, s in zip(index, a.stride(), strict=False)),
            int(b.storage_offset()) + sum(i * s for i, s in zip(index, b.stride(), strict=False)),
            block,
        )
