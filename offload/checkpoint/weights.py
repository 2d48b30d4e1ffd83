"""Weights in Hugging Face's safetensors layout, streamed: one tensor at a time, in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from offload.engine.engine import Engine
from offload.engine.record import Record
from offload.engine.registry import engine_of
from offload.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class Loaded:
    """What `load_pretrained` found: names missing from the files, and names in the files that the model has no place for."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load_pretrained(model: nn.Module, directory: str | Path) -> Loaded:
    """Streams the weights of a safetensors directory (one file, or shards with an index) into a prepared model; masters follow.

    Never holds more than one tensor beyond the budgets. Dtypes are converted to the parameters'. Names that the model ties may be missing. Any
    other missing name, a wrong shape or a damaged file is a `CheckpointError`; names the model has no place for are returned.
    """
    engine = engine_of(model)
    where = weight_files(Path(directory))
    records = _by_name(model, engine)
    buffers = dict(model.named_buffers())
    prefix = _prefix(model, where, {*records, *buffers})
    loaded = Loaded()
    seen: set[int] = set()
    for unit in engine.units:
        if unit.records and all(any(n in where for n in _names(records, r, prefix)) for r in unit.records):
            engine.written_whole(unit.number)
    for path in sorted(set(where.values())):
        with _open(path) as file:
            for stored in sorted(file.keys()):
                name = prefix(stored)
                record = records.get(name)
                if record is not None:
                    if record.number not in seen:
                        _fill(engine, record, file.get_tensor(stored), path, stored)
                        seen.add(record.number)
                elif name in buffers:
                    _same_shape(buffers[name].shape, file.get_tensor(stored).shape, path, stored)
                    buffers[name].copy_(file.get_tensor(stored))
                else:
                    loaded.unexpected.append(stored)
    loaded.missing = sorted(r.name for r in engine.records if r.number not in seen)
    if loaded.missing:
        raise CheckpointError(
            f"{directory} lacks {len(loaded.missing)} of the model's parameters: {', '.join(loaded.missing[:5])}; "
            "is it a directory of this architecture?"
        )
    return loaded


def weight_files(directory: Path) -> dict[str, Path]:
    """The file of each stored name. CheckpointError for a directory without safetensors, or with an index that names what is not there."""
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        try:
            names: dict[str, Any] = json.loads(index.read_text())["weight_map"]
            files = {str(k): str(v) for k, v in names.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is no safetensors index: {error!r}") from None
        for name in set(files.values()):
            if Path(name).name != name or not (directory / name).is_file():
                raise CheckpointError(f"{index} names {name}, which is not in {directory}")
        return {k: directory / v for k, v in files.items()}
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; give a Hugging Face directory with safetensors weights")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None


def _by_name(model: nn.Module, engine: Engine) -> dict[str, Record]:
    """Every name of every parameter, tied names included."""
    record_of = {id(r.parameter): r for r in engine.records}
    return {name: record_of[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


class _Prefix:
    """Maps stored names to the model's: some directories hold a base model without its prefix, or with one more."""

    def __init__(self, strip: str, add: str) -> None:
        self.strip, self.add = strip, add

    def __call__(self, stored: str) -> str:
        return self.add + stored.removeprefix(self.strip)


def _prefix(model: nn.Module, stored: Iterable[str], known: set[str]) -> _Prefix:
    base = getattr(model, "base_model_prefix", "")
    candidates = [_Prefix("", ""), *([_Prefix("", f"{base}."), _Prefix(f"{base}.", "")] if base else [])]
    return max(candidates, key=lambda p: sum(p(s) in known for s in stored))


def _names(records: dict[str, Record], record: Record, prefix: _Prefix) -> Iterator[str]:
    for name, other in records.items():
        if other is record:
            yield prefix.strip + name.removeprefix(prefix.add)


def _fill(engine: Engine, record: Record, value: torch.Tensor, path: Path, stored: str) -> None:
    _same_shape(record.shape, value.shape, path, stored)
    engine.state.write_value(record, value.to(record.dtype))


def _same_shape(want: torch.Size, got: torch.Size, path: Path, stored: str) -> None:
    if want != got:
        raise CheckpointError(f"{stored} in {path} has shape {tuple(got)}; the model's is {tuple(want)}")
