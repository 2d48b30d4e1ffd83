"""Which engine a model or a parameter belongs to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from offload.engine.atrest import AtRest
from offload.engine.record import Record
from offload.engine.sources import ValueSource
from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.engine.engine import Engine

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def register(model: nn.Module, engine: Engine) -> None:
    _engines[model] = engine


def forget(model: nn.Module) -> None:
    _engines.pop(model, None)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model; ConfigError if it is not prepared or was closed."""
    engine = _engines.get(model)
    if engine is None:
        raise ConfigError(f"this {type(model).__name__} is not prepared; call offload.prepare(model, tiers) first")
    return engine


def is_prepared(model: nn.Module) -> bool:
    return model in _engines


def record_of(parameter: torch.Tensor) -> tuple[Engine, Record] | None:
    """The engine and record of a parameter at rest; None for any other tensor."""
    if isinstance(parameter, AtRest) and not parameter.chain and isinstance(parameter.source, ValueSource):
        return parameter.source.engine, parameter.source.record
    return None
