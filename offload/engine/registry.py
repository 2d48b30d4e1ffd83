"""Which engine a model or a parameter belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from offload.dist.divided import part_of
from offload.engine.atrest import AtRest
from offload.engine.record import Record
from offload.engine.sources import ValueSource
from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.engine.engine import Engine


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model; ConfigError if it is not prepared or was closed."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__} is no prepared model; give the model that offload.prepare() returned, not its parameters")
    owner = next((o for o in map(record_of, model.parameters()) if o is not None), None)
    if owner is None or owner[0].model is not model:
        raise ConfigError(f"this {type(model).__name__} is not prepared; call offload.prepare(model, tiers) first")
    if owner[0].closed:
        raise ConfigError(f"the runtime of this {type(model).__name__} was closed, and its values with it; build and prepare the model again")
    return owner[0]


_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def check_unprepared(model: nn.Module) -> None:
    """ConfigError if any parameter of the model is at rest already, or others divide its work among ranks."""
    for name, p in model.named_parameters():
        home = record_of(p)
        if home is not None and home[0].closed:
            raise ConfigError(f"the runtime that holds parameter {name} was closed, and its value with it; build the model again and prepare it")
        if home is not None:
            raise ConfigError(f"parameter {name} is prepared already, by itself or within another model; prepare the whole model once")
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")} & _WRAPPERS
        if kinds:
            raise ConfigError(
                f"the model is wrapped by torch's {kinds.pop()} already: give prepare() the model itself, which then does what the wrapper does, "
                "by its stage= and mesh="
            )


def record_of(parameter: torch.Tensor) -> tuple[Engine, Record] | None:
    """The engine and record of a parameter at rest; None for any other tensor."""
    parameter = part_of(parameter)
    if isinstance(parameter, AtRest) and not parameter.chain and isinstance(parameter.source, ValueSource):
        return parameter.source.engine, parameter.source.record
    return None
