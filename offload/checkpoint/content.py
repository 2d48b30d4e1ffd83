"""What a checkpoint says of itself beside its tensors: `state.json`. Without torch.

[Note: what is exact]
Masters are kept in fp32 whatever their form, so a checkpoint goes from one form of master to another to the bit: the digest is the same. What
is computed afterwards is the same too, but for a split master's parameter, which rounds ties away from zero where the others round to even.
Moments are kept as they are stored, codes and scales, as decoding and encoding again would change them: they can only go on in the same form.
Other bits follow another compute dtype from the first step, and another seed where moments are rounded at random: that is refused as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.checkpoint.manifest import STATE, parse, read_json_bytes
from offload.errors import CheckpointError, named

# Names of tensors are ROLE/NAME: a frozen parameter has a value, a trained one a master and, once stepped, what `moments` says.
VALUE, MASTER, BUFFER, OTHER = "value", "master", "buffer", "tensor"

Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SavedParameter(_Part):
    """A parameter: `step` where it has moments, `also` the further names that it is tied to."""

    dtype: str
    shape: list[Count]
    trained: bool
    step: Count | None = None
    also: list[str] = []


class SavedGroup(_Part):
    """A param group: the names of its parameters, in order, and its settings, encoded."""

    parameters: list[str]
    settings: dict[str, Any]


class SavedPrecision(_Part):
    """What state was made by; as `offload.Precision`."""

    compute: str
    master: str
    moments: str


class SavedState(_Part):
    """`state.json`. `more` is what else the optimizer's state has of a parameter, `modules` what modules gave as their extra state, by its key in a
    state dict; these, `settings` and `extra` are encoded (codec.py)."""

    precision: SavedPrecision
    seed: int
    parameters: dict[str, SavedParameter]
    buffers: list[str]
    modules: dict[str, Any] = {}
    groups: list[SavedGroup]
    more: dict[str, dict[str, Any]]
    skipped: Count
    extra: Any

    def render(self) -> bytes:
        return (json.dumps(self.model_dump(), indent=1, allow_nan=False) + "\n").encode()


def read_state(directory: Path) -> SavedState:
    """CheckpointError for what cannot be one."""
    path = directory / STATE
    try:
        return SavedState.model_validate(parse(path, read_json_bytes(path)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(named(str(at)) for at in first["loc"])
        raise CheckpointError(f"{path} is not what a checkpoint says of its state: {where}: {first['msg']}; take another checkpoint") from None
