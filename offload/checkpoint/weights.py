"""Weights in Hugging Face's safetensors layout, streamed in pieces: checked whole first, then written.

Values are read with plain reads, not through a map of the file: mapped pages would count as the run's memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from offload.engine.engine import Engine
from offload.engine.record import DTYPES, Record
from offload.engine.registry import engine_of
from offload.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 22  # elements read at once
_STORED_DTYPES = {
    "F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


@dataclass
class Loaded:
    """What `load_pretrained` found: names missing from the files, and names in the files that the model has no place for."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its first byte there, its shape, and its dtype as safetensors names it."""

    name: str
    path: Path
    start: int
    shape: torch.Size
    dtype: str

    def parts(self, file: FileIO) -> Iterator[torch.Tensor]:
        """The values in order, flat, in the stored dtype, at most PIECE at a time."""
        dtype = DTYPES[_STORED_DTYPES[self.dtype]]
        file.seek(self.start)
        for at in range(0, max(self.shape.numel(), 1), PIECE):
            part = torch.empty(min(PIECE, self.shape.numel() - at), dtype=dtype)
            raw = part.view(torch.uint8).numpy()
            if file.readinto(raw.data) != raw.nbytes:
                raise OSError(f"it ends within {self.name}")
            yield part


def load_pretrained(model: nn.Module, directory: str | Path) -> Loaded:
    """Streams the weights of a safetensors directory (one file, or shards with an index) into a prepared model; masters follow.

    Never holds more than a piece of a tensor beyond the budgets. Dtypes are converted to the parameters'. Names that the model ties may be
    missing. Any other missing name, a wrong shape or a damaged file is a `CheckpointError`, found before anything is written; names the
    model has no place for are returned.
    """
    engine = engine_of(model)
    directory = Path(directory)
    stored = weights_in(directory)
    records = _by_name(model, engine)
    buffers = dict(model.named_buffers())
    name_of = _prefix(model, stored, {*records, *buffers})
    targets: dict[int | str, tuple[Stored, Record | torch.Tensor]] = {}
    loaded = Loaded()
    for entry in stored.values():
        name = name_of(entry.name)
        if name in records:
            record = records[name]
            _check(record.shape, record.dtype, entry)
            if name == record.name or record.number not in targets:
                targets[record.number] = entry, record
        elif name in buffers:
            _check(buffers[name].shape, buffers[name].dtype, entry)
            targets[name] = entry, buffers[name]
        else:
            loaded.unexpected.append(entry.name)
    loaded.missing = sorted(r.name for r in engine.records if r.number not in targets)
    if loaded.missing:
        raise CheckpointError(
            f"{directory} lacks {len(loaded.missing)} of the model's parameters: {', '.join(loaded.missing[:5])}; "
            "is it a directory of this architecture?"
        )
    _write(engine, sorted(targets.values(), key=lambda t: (t[0].path, t[0].start)))
    return loaded


def _write(engine: Engine, targets: Iterable[tuple[Stored, Record | torch.Tensor]]) -> None:
    """Fills parameters and buffers, given in the order of the files."""
    for path, entries in groupby(targets, key=lambda t: t[0].path):
        try:
            with path.open("rb", buffering=0) as file:
                for entry, target in entries:
                    if isinstance(target, Record):
                        engine.state.write_parts(target, entry.parts(file))
                    else:
                        target.copy_(torch.cat(list(entry.parts(file))).view(entry.shape))
        except OSError as error:
            raise CheckpointError(f"{path} could not be read to its end, so the model is loaded in part only: {error}; load again") from error


def weights_in(directory: Path) -> dict[str, Stored]:
    """Every stored tensor by name. Opens every file: CheckpointError for a directory without safetensors, for a damaged file, and for an
    index that names what is not there."""
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        where = _index(index)
        files = {path: _header(path) for path in sorted(set(where.values()))}
        for name, path in where.items():
            if name not in files[path]:
                raise CheckpointError(f"{index} has {name} in {path.name}, which lacks it")
        return {n: entry for path, header in files.items() for n, entry in header.items() if where.get(n, path) == path}
    if single.is_file():
        return _header(single)
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; give a Hugging Face directory with safetensors weights")


def _index(index: Path) -> dict[str, Path]:
    try:
        names: dict[str, Any] = json.loads(index.read_text())["weight_map"]
        files = {str(k): str(v) for k, v in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {error!r}") from None
    for name in set(files.values()):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not in {index.parent}")
    return {k: index.parent / v for k, v in files.items()}


def _header(path: Path) -> dict[str, Stored]:
    """What a file holds. safetensors itself checks that the header agrees with the file's length."""
    try:
        with safe_open(path, framework="pt", device="cpu"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
    return {
        name: Stored(name, path, 8 + length + entry["data_offsets"][0], torch.Size(entry["shape"]), entry["dtype"])
        for name, entry in sorted(header.items())
        if name != "__metadata__"
    }


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


def _check(shape: torch.Size, dtype: torch.dtype, entry: Stored) -> None:
    if shape != entry.shape:
        raise CheckpointError(f"{entry.name} in {entry.path} has shape {tuple(entry.shape)}; the model's is {tuple(shape)}")
    stored = DTYPES.get(_STORED_DTYPES.get(entry.dtype, ""))
    if stored is None or stored.is_floating_point != dtype.is_floating_point:
        raise CheckpointError(
            f"{entry.name} in {entry.path} is stored as {entry.dtype} and the model's is {dtype}: is it quantized? Give weights in F32, BF16 or F16"
        )
