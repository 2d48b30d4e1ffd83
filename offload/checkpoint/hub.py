"""transformers' own `save_pretrained`, as its Trainer calls it.

[Note: transformers' saves]
PreTrainedModel.save_pretrained writes from the memory of parameters, which one at rest has not. So it is watched, once for all models: of a prepared
model it is offload's, which writes the same files. What that cannot do is refused; of any other model, and of other tensors than the model's own, it
is transformers'.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.checkpoint.names import hub_model
from offload.engine.registry import engine_of, record_of
from offload.errors import ConfigError

_WHOLE: dict[str, Any] = {"push_to_hub": False, "variant": None, "save_original_format": True, "distributed_checkpoint": False}
_theirs: list[Callable[..., Any]] = []


def watch_saves(model: nn.Module) -> None:
    """From here on transformers' own `save_pretrained` knows prepared models, if this is one of transformers'. See [Note: transformers' saves]."""
    if hub_model(model) is None or _theirs:
        return
    kind: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel
    theirs = kind.save_pretrained
    _theirs.append(theirs)
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def save(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        return _save(self, given) if _is_own(self, given.get("state_dict")) else theirs(self, *args, **kwargs)

    kind.save_pretrained = save


def _is_own(model: nn.Module, state: dict[str, Any] | None) -> bool:
    """Whether a prepared model, and no other tensors than its own, are to be saved."""
    home = next((found for found in map(record_of, model.parameters()) if found is not None), None)
    if home is None or home[0].model is not model:
        return False
    if state is None:
        return True
    own = model.state_dict()
    return state.keys() == own.keys() and all(_same(state[name], value) for name, value in own.items())


def _same(given: Any, own: Any) -> bool:
    """Whether what was given for a tensor of the model's is that one. Anything but a tensor is in no file of weights."""
    if not isinstance(own, torch.Tensor) or given is own:
        return True
    if not isinstance(given, torch.Tensor) or (given.shape, given.dtype, given.device) != (own.shape, own.dtype, own.device):
        return False
    (home, place), (theirs, there) = (record_of(own) or (None, None)), (record_of(given) or (None, None))
    if home is not None or theirs is not None:
        return home is theirs and place is there
    return (given.data_ptr(), given.stride()) == (own.data_ptr(), own.stride()) or torch.equal(given, own)


def _save(model: nn.Module, given: dict[str, Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "save_pretrained() of a prepared model does not know adapters, whose files are others than a model's: call "
            "copy.deepcopy(model).save_pretrained(directory), which memory has to hold, or offload.save() for a checkpoint to go on from"
        )
    for name, only in _WHOLE.items():
        if given.get(name, only) != only:
            raise ConfigError(
                f"save_pretrained({name}={given[name]!r}) is not there for a prepared model: leave it out, or go on from what is written without it"
            )
    if engine_of(model).job is not None:
        raise ConfigError("transformers' save_pretrained() is one process's: let all ranks call offload.save_pretrained(model, directory)")
    if given.get("is_main_process", True):
        from offload.checkpoint.export import save_pretrained

        save_pretrained(model, given["save_directory"], given.get("max_shard_size", "50GB"))
