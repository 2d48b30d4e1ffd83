"""Caches of keys and values, to which the layers of transformers' models add at each forward, by default in training too."""

from __future__ import annotations

import copy
import logging
from typing import Any

log = logging.getLogger("offload")
_said: set[str] = set()


def as_they_are(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies of their caches, which hold the same keys and values and are added to by themselves: a unit that is computed again
    finds in them what its first forward found."""
    if not any(_is_cache(x) for x in (*args, *kwargs.values())):
        return args, kwargs
    if not _said:
        _said.add("caches")
        log.warning("a forward with gradients caches keys and values, which stay in memory that no budget counts: use_cache=False spares it")
    return tuple(_copied(x) if _is_cache(x) else x for x in args), {k: _copied(v) if _is_cache(v) else v for k, v in kwargs.items()}


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _copied(cache: Any) -> Any:
    """With its parts, but for tensors, which a cache replaces and does not write to."""
    made = copy.copy(cache)
    vars(made).update({name: _parts_copied(value) for name, value in vars(cache).items()})
    return made


def _parts_copied(value: Any) -> Any:
    if _is_cache(value):
        return _copied(value)
    if isinstance(value, list):
        return [copy.copy(x) if hasattr(x, "update") else x for x in value]
    return dict(value) if isinstance(value, dict) else value
