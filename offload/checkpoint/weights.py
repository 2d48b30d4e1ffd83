"""Weights in Hugging Face's safetensors layout, streamed in pieces: checked whole first, then written.

Values are read with plain reads, not through a map of the file: mapped pages would count as the run's memory.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from offload.checkpoint import disk
from offload.checkpoint.dtypes import OF_STORED
from offload.checkpoint.modules import extra_state_keys, persistent_buffers, set_extra_states
from offload.checkpoint.names import Place, renaming, stored_places, whole
from offload.checkpoint.writer import INDEX, SINGLE
from offload.dist.collectives import alike
from offload.dist.divided import is_divided
from offload.engine.engine import Engine
from offload.engine.record import Record
from offload.engine.registry import engine_of
from offload.errors import CheckpointError, ConfigError, named

log = logging.getLogger("offload")
_PARTIAL = "so the model is loaded in part only; load again"
MOST_INDEX = 100_000_000  # bytes; safetensors allows a header as many
PIECE = 1 << 22  # elements read at once


@dataclass
class Loaded:
    """What `load_pretrained` found: names missing from the files, and names in the files that the model has no place for."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, or a flat part of one: its first byte there, its shape, and its dtype as safetensors names it."""

    name: str
    path: Path
    start: int
    shape: torch.Size
    dtype: str

    def parts(self, file: FileIO) -> Iterator[torch.Tensor]:
        """The values in order, flat, in the stored dtype, at most PIECE at a time."""
        file.seek(self.start)
        for at in range(0, max(self.shape.numel(), 1), PIECE):
            part = torch.empty(min(PIECE, self.shape.numel() - at), dtype=self.torch_dtype, device="cpu")
            disk.read(file, part.view(torch.uint8).numpy().data)
            yield part

    def picked(self, file: FileIO, runs: Iterable[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """As `parts`, of runs of elements alone: the first of each, and how many."""
        part, filled = torch.empty(PIECE, dtype=self.torch_dtype, device="cpu"), 0  # of which as much as is written to takes memory
        for first, left in runs:
            while left:
                n = min(left, PIECE - filled)
                file.seek(self.start + first * part.itemsize)
                disk.read(file, part[filled : filled + n].view(torch.uint8).numpy().data)
                first, left, filled = first + n, left - n, filled + n
                if filled == PIECE:
                    yield part
                    filled = 0
        if filled:
            yield part[:filled]

    @property
    def torch_dtype(self) -> torch.dtype:
        return OF_STORED[self.dtype]

    def cut(self, first: int, numel: int) -> Stored:
        """Elements [first, first + numel)."""
        return replace(self, start=self.start + first * self.torch_dtype.itemsize, shape=torch.Size((numel,)))


@dataclass
class _Target:
    """One of the model's tensors, and the stored parts that it is made of, by its first element of each."""

    name: str
    held: Record | torch.Tensor
    parts: dict[int, Stored] = field(default_factory=dict)

    @property
    def filled(self) -> bool:
        return bool(self.parts) and sum(p.shape.numel() for p in self.parts.values()) >= shape_of(self.held).numel()

    @property
    def in_order(self) -> list[Stored]:
        return [self.parts[at] for at in sorted(self.parts)]

    def within(self, record: Record, first: int, stop: int) -> Iterator[tuple[Stored, int, int]]:
        """Where elements [first, stop) of a parameter, or of this rank's part of it, are stored: in which, from its element on, and how many."""
        starts, place = sorted(self.parts), record.divided.place if record.divided is not None else None
        for begin, end, there in place.runs(first, stop) if place is not None else [(first, stop, first)]:
            left = end - begin
            while left:
                at = starts[bisect_right(starts, there) - 1]
                n = min(left, self.parts[at].shape.numel() - (there - at))
                yield self.parts[at], there - at, n
                there, left = there + n, left - n


def load_pretrained(model: nn.Module, directory: str | Path, *, strict: bool = True) -> Loaded:
    """Streams the weights of a safetensors directory (one file, or shards with an index) into a prepared model; masters follow.

    Never holds more than a piece of a tensor beyond the budgets. Dtypes are converted to the parameters', by value. Names are transformers', older
    ones included; tensors that it splits or merges are. Names that the model ties may be missing. Any other missing name, a wrong shape or a damaged
    file is a `CheckpointError`, found before anything is written; with `strict=False` missing parameters keep the values they have, and are logged.
    So do missing buffers in any case. Names that the model has no place for, those of buffers that are not persistent among them, are logged and
    returned, but for those that the architecture says to ignore. Extra state that is a tensor goes to its module's `set_extra_state`.

    Of several ranks all call it, and each reads what rests on it: its share, and of parameters that are DTensors that of its part. What fails on one
    fails on all.
    """
    engine = engine_of(model)
    directory = Path(directory)
    with alike(engine.job, "reading weights"):
        targets, extra, loaded = _checked(model, engine, directory, strict)
    if loaded.missing:
        log.warning("%s lacks %d tensors, which keep the values they have: %s", directory, len(loaded.missing), _few(loaded.missing))
    if loaded.unexpected:
        log.warning("%s has %d tensors that the model has no place for: %s", directory, len(loaded.unexpected), _few(loaded.unexpected))
    with alike(engine.job, "reading weights"):
        for target in sorted((t for t in targets if t.filled), key=lambda t: (t.in_order[0].path, t.in_order[0].start)):
            _fill(engine, target)
        set_extra_states(model, {key: torch.cat(list(values([entry], _PARTIAL))).view(entry.shape) for key, entry in extra.items()})
    return loaded


def _checked(model: nn.Module, engine: Engine, directory: Path, strict: bool) -> tuple[list[_Target], dict[str, Stored], Loaded]:
    """As `_assign`. OffloadError for what cannot be loaded."""
    stored = weights_in(directory)
    targets, extra, loaded = _assign(model, engine, stored)
    lacking = sorted(t.name for t in targets if isinstance(t.held, Record) and not t.filled)
    if lacking and strict:
        raise CheckpointError(
            f"{directory} lacks {len(lacking)} of the model's parameters: {_few(lacking)}; is it a directory of this architecture? "
            "With strict=False they keep the values they have"
        )
    loaded.missing = sorted(t.name for t in targets if not t.filled)
    divided = next((t.name for t in targets if t.filled and isinstance(t.held, torch.Tensor) and is_divided(t.held)), None)
    if divided is not None:
        raise ConfigError(f"buffer {divided} is a DTensor, which load_pretrained() does not know: make it a plain tensor, the same on all ranks")
    return targets, extra, loaded


def _fill(engine: Engine, target: _Target) -> None:
    record = target.held
    if isinstance(record, torch.Tensor):
        record.copy_(torch.cat(list(values(target.in_order, _PARTIAL))).view(record.shape))
        return
    first, stop = engine.state.kept(record)
    if record.divided is None and stop - first == record.numel:
        engine.state.write_parts(record, values(target.in_order, _PARTIAL))
    else:
        engine.state.write_parts(record, _picked(target.within(record, first, stop)), first)


def _picked(runs: Iterable[tuple[Stored, int, int]]) -> Iterator[torch.Tensor]:
    for part, of_part in groupby(runs, key=lambda run: run[0]):
        with _reading(part, _PARTIAL) as file:
            yield from part.picked(file, ((first, n) for _, first, n in of_part))


def _few(names: list[str]) -> str:
    return ", ".join(map(named, names[:5])) + (", ..." if len(names) > 5 else "")


def _assign(model: nn.Module, engine: Engine, stored: dict[str, Stored]) -> tuple[list[_Target], dict[str, Stored], Loaded]:
    """Which stored tensors make up each of the model's, and which are extra state of its modules; CheckpointError for a shape or a dtype that does
    not fit."""
    records, buffers, keys = records_by_name(model, engine), persistent_buffers(model), set(extra_state_keys(model))
    own = {r.name: meta(r) for r in engine.records} | {n: meta(b) for n, b in buffers.items()}
    places = {n: whole(r.name, own[r.name]) for n, r in records.items()} | {n: whole(n, own[n]) for n in buffers} | stored_places(model, own)
    name_of = _naming(model, stored, set(places) | keys)
    targets = {r.name: _Target(r.name, r) for r in engine.records} | {n: _Target(n, b) for n, b in buffers.items()}
    loaded, extra = Loaded(), dict[str, Stored]()
    found: list[tuple[bool, Place, Stored]] = []
    for entry in stored.values():
        name = name_of(entry.name)
        place = places.get(name)
        if name in keys and entry.dtype in OF_STORED:
            extra[name] = entry
            continue
        if place is None:
            loaded.unexpected.append(entry.name)
            continue
        _check(place.shape, place.dtype, entry)
        found.append((name not in own, place, entry))
    for _, place, entry in sorted(found, key=lambda f: f[0]):  # a tied parameter's own name counts before its others
        at = 0
        for run in place.runs:
            if not targets[run.name].filled:
                targets[run.name].parts[run.start] = entry.cut(at, run.numel)
            at += run.numel
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    loaded.unexpected = [n for n in loaded.unexpected if not any(re.search(pattern, n) for pattern in ignored)]
    return list(targets.values()), extra, loaded


def shape_of(held: Record | torch.Tensor) -> torch.Size:
    """That of the whole."""
    return held.whole_shape if isinstance(held, Record) else held.shape


def meta(held: Record | torch.Tensor) -> torch.Tensor:
    """A stand-in without values."""
    return torch.empty(shape_of(held), dtype=held.dtype, device="meta")


def values(parts: Iterable[Stored], so: str) -> Iterator[torch.Tensor]:
    """What parts of files hold, in pieces. CheckpointError, with what follows from it, where one cannot be read."""
    for part in parts:
        with _reading(part, so) as file:
            yield from part.parts(file)


@contextmanager
def _reading(part: Stored, so: str) -> Iterator[FileIO]:
    try:
        with FileIO(part.path) as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{part.path} could not be read to its end, {so}: {error}") from error


def weights_in(directory: Path) -> dict[str, Stored]:
    """Every stored tensor by name. Opens every file: CheckpointError for a directory without safetensors, for a damaged file, and for an
    index that names what is not there."""
    index, single = directory / INDEX, directory / SINGLE
    if os.path.isfile(index):
        where = _index(index)
        files = {path: header(path) for path in sorted(set(where.values()))}
        for name, path in where.items():
            if name not in files[path]:
                raise CheckpointError(f"{index} has {named(name)} in {path.name}, which lacks it")
        return {n: entry for path, header in files.items() for n, entry in header.items() if where.get(n, path) == path}
    if os.path.isfile(single):
        return header(single)
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; give a Hugging Face directory with safetensors weights")


def _index(index: Path) -> dict[str, Path]:
    try:
        if index.stat().st_size > MOST_INDEX:
            raise ValueError(f"it has {index.stat().st_size} bytes")
        names: dict[str, Any] = json.loads(index.read_bytes())["weight_map"]
        files = {str(k): str(v) for k, v in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {type(error).__name__}: {error!s:.200}") from None
    for name in set(files.values()):
        if Path(name).name != name or not os.path.isfile(index.parent / name):  # Path's own raises where a name is too long
            raise CheckpointError(f"{index} names {named(name)}, which is not in {index.parent}")
    return {k: index.parent / v for k, v in files.items()}


def header(path: Path) -> dict[str, Stored]:
    """What a file holds. safetensors itself checks that the header agrees with the file's length."""
    try:
        with path.open("rb") as file, safe_open(path, framework="pt", device="cpu"):
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        return {name: _stored(name, path, 8 + length, entry) for name, entry in sorted(header.items()) if name != "__metadata__"}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {named(getattr(error, 'strerror', None) or str(error))}") from None


def _stored(name: str, path: Path, data: int, entry: dict[str, Any]) -> Stored:
    if math.prod(n or 1 for n in entry["shape"]) >= 1 << 62:  # torch computes with the others even where one is 0
        raise ValueError(f"{named(name)} has a shape that no tensor has")
    return Stored(name, path, data + entry["data_offsets"][0], torch.Size(entry["shape"]), entry["dtype"])


def records_by_name(model: nn.Module, engine: Engine) -> dict[str, Record]:
    """Every name of every parameter, tied names included."""
    record_of = {id(r.parameter): r for r in engine.records}
    return {name: record_of[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def _naming(model: nn.Module, stored: Iterable[str], known: set[str]) -> Callable[[str], str]:
    """Maps stored names to `known` ones: some directories hold a base model without its prefix or with one more, and some have older names."""
    base = getattr(model, "base_model_prefix", "")
    today = renaming(model)
    ways: list[Callable[[str], str]] = [lambda name: name]
    if base:
        ways += [lambda name: f"{base}.{name}", lambda name: name.removeprefix(f"{base}.")]
    best = max(ways, key=lambda way: sum(way(s) in known for s in stored))

    def find(name: str) -> str:
        return next((n for n in (best(name), best(today(name))) if n in known), name)

    return find


def _check(shape: torch.Size, dtype: torch.dtype, entry: Stored) -> None:
    if shape != entry.shape:
        raise CheckpointError(f"{named(entry.name)} in {entry.path} has shape {tuple(entry.shape)}; the model's is {tuple(shape)}")
    stored = OF_STORED.get(entry.dtype)
    if stored is None or stored.is_floating_point != dtype.is_floating_point:
        raise CheckpointError(
            f"{named(entry.name)} in {entry.path} is stored as {entry.dtype} and the model's is {dtype}: is it quantized? "
            "Give weights in F32, BF16 or F16"
        )
