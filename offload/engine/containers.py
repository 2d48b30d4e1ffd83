"""Tensors in what modules take and return, in whatever holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from offload.errors import OffloadError


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Those in nested mappings, lists, tuples and data classes."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)
    elif _is_data(tree):
        for value in _attributes(tree).values():
            yield from tensors(value)


def replaced(tree: Any, wanted: Callable[[torch.Tensor], bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with `change(x)` for each tensor x that is `wanted`, in containers that are copies.

    What torch's pytree knows is made anew by its rule. Of what it takes for a leaf, as a data class or a subclass of dict that nobody registered, the
    copy has the same attributes but those replaced; OffloadError where a copy cannot be written to.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value) if wanted(value) else value
        return _copied(value, lambda part: tree_map(leaf, part)) if any(wanted(x) for x in tensors(value)) else value

    return tree_map(leaf, tree)


def _copied(value: Any, part: Callable[[Any], Any]) -> Any:
    made = copy.copy(value)
    if isinstance(made, MutableMapping):
        for key in list(made):
            made[key] = part(value[key])
    elif isinstance(made, list):
        made[:] = [part(x) for x in value]
    elif _is_data(made):
        for name, held in _attributes(value).items():
            object.__setattr__(made, name, part(held))
    else:
        raise OffloadError(
            f"a module returned a view of its parameters in a {type(value).__name__}, where no copy that outlives the call can take "
            "its place: return it in a tuple, list, dict or data class, or .clone() it"
        )
    return made


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _attributes(value: Any) -> dict[str, Any]:
    """Of a data class, with slots too: its fields that are set, and what else it has."""
    named = (f.name for f in fields(value))
    return getattr(value, "__dict__", {}) | {name: getattr(value, name) for name in named if hasattr(value, name)}
