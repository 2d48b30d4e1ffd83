"""Python values as JSON and tensors, so that nothing is ever unpickled.

None, bool, int, float, str, list and dict with names for keys stand for themselves. What JSON does not know is a dict of one key that starts
with `$`: tuples, other dicts, bytes, numbers that are not finite, and tensors, whose values are kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import CheckpointError, ConfigError

DEEPEST = 100
BITS_MOST = 10_000  # of a whole number: Python reads no more than 4300 digits


class Encoder:
    """Encodes values; `tensors` are those met so far, by the number that stands for them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        """ConfigError, with `where` it is, for what cannot be kept so that it reads as it was."""
        if depth > DEEPEST:
            raise ConfigError(f"{where:.80}... is nested more than {DEEPEST} deep, or in itself; flatten it to save it")
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= BITS_MOST):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if kind in (list, tuple):
            items = [self.encode(x, f"{where}[{i}]", depth + 1) for i, x in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if isinstance(value, dict):
            pairs = [(k, self.encode(k, f"a key of {where}", depth + 1), self.encode(v, f"{where}[{k!r}]", depth + 1)) for k, v in value.items()]
            if all(type(k) is str and not k.startswith("$") for k in value):
                return {k: v for k, _, v in pairs}
            return {"$dict": [[k, v] for _, k, v in pairs]}
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return {"$tensor": len(self.tensors) - 1}
        if kind is int:
            raise ConfigError(f"{where} is a whole number of more than {BITS_MOST} bits; save it as bytes")
        raise ConfigError(
            f"{where} is {kind.__module__}.{kind.__qualname__}, which a checkpoint does not hold: give None, bool, int, float, str, bytes, list, "
            "tuple, dict or tensors (of an array .tolist() or torch.from_numpy, of an object its state_dict())"
        )


def decode(value: Any, tensors: Mapping[int, torch.Tensor], depth: int = 0) -> Any:
    """What `Encoder.encode` was given. CheckpointError for what it never makes."""
    if depth > DEEPEST:
        raise CheckpointError(f"the checkpoint has a value that is nested more than {DEEPEST} deep, which cannot be; take another")
    if isinstance(value, list):
        return [decode(x, tensors, depth + 1) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {k: decode(v, tensors, depth + 1) for k, v in value.items()}
    ((kind, inner),) = value.items()
    try:
        if kind == "$tuple":
            return tuple(decode(x, tensors, depth + 1) for x in inner)
        if kind == "$dict":
            return {decode(k, tensors, depth + 1): decode(v, tensors, depth + 1) for k, v in inner}
        if kind == "$float":
            return float(inner)
        if kind == "$bytes":
            return bytes.fromhex(inner)
        if kind == "$tensor":
            return tensors[inner]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint has a value of the kind {kind} that cannot be: {type(error).__name__}; take another") from None
    raise CheckpointError(f"the checkpoint has a value of the kind {kind!r:.40}, which this release does not know; take another")
