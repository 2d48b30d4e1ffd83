"""Models as directories that transformers loads, written from tensors that are read in pieces."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from offload import ops
from offload.checkpoint.content import BUFFER, MASTER, VALUE, read_state
from offload.checkpoint.dtypes import STORED
from offload.checkpoint.manifest import STATE, TENSORS
from offload.checkpoint.modules import is_extra_state
from offload.checkpoint.names import Place, hub_model, stored_places
from offload.checkpoint.save import own_elements
from offload.checkpoint.shared import Runs, Values, write_shared
from offload.checkpoint.tensorfile import read_header
from offload.checkpoint.weights import Stored, records_by_name, values
from offload.checkpoint.writer import Output, write_directory
from offload.config import parse_size
from offload.dist.divided import Place as Part
from offload.dist.divided import is_divided
from offload.engine.engine import Engine
from offload.engine.record import DTYPES, Record
from offload.engine.registry import engine_of
from offload.engine.state import State
from offload.errors import CheckpointError, ConfigError, named

log = logging.getLogger("offload")
PIECE = 1 << 20  # elements read at once


class Lazy(Protocol):
    """A tensor whose values are read when they are wanted."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, first: int, stop: int) -> Iterable[torch.Tensor]:
        """Elements [first, stop), flat and in order, in its dtype, in pieces."""
        ...


@dataclass(frozen=True)
class _OfRecord:
    """A prepared model's parameter, wherever it rests; a master's value where it has one of its dtype."""

    record: Record
    state: State

    @property
    def shape(self) -> torch.Size:
        return self.record.whole_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.record.dtype

    def read(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        return self.state.read_parts(self.record, first, stop, PIECE)

    def own(self, first: int, stop: int, low: int, high: int) -> Iterator[Values]:
        """Of elements [first, stop) of the whole those that are among elements [low, high) of this rank's part, counted from `first` on."""
        place = self.record.divided.place if self.record.divided is not None else None
        begin, end = place.within(first, stop) if place is not None else (first, stop)
        at, end = max(begin, low), min(end, high)
        if at >= end:
            return
        for piece in self.state.read_parts(self.record, at, end, PIECE, own=True):
            yield Values(piece, partial(_runs, place, at, at + piece.numel(), first))
            at += piece.numel()


@dataclass(frozen=True)
class OfTensor:
    """A tensor in memory."""

    value: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def read(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        yield self.value.detach().reshape(-1)[first:stop].cpu()


@dataclass(frozen=True)
class OfFile:
    """A tensor in a safetensors file, in the dtype that a parameter has it in; `split`: as the upper half of a split master reads."""

    stored: Stored
    dtype: torch.dtype
    split: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape

    def read(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        for part in values([self.stored.cut(first, stop - first)], "so nothing was written"):
            if self.split:
                high, low = torch.empty(part.numel(), dtype=self.dtype, device="cpu"), torch.empty(part.numel(), dtype=torch.int16, device="cpu")
                ops.split_(high, low, part)
                yield high
            else:
                yield part.to(self.dtype)


def save_pretrained(model: nn.Module, directory: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Writes a prepared model as a directory that transformers loads, holding no more than a few MiB beside the budgets.

    Parameters have their own dtypes (one in fp32 is written from its master), tied ones are there once, names and form are those of transformers.
    Weights are one file, or shards of at most `max_shard_size` (bytes, or as "5GB") with an index; a transformers model has its configuration
    beside them. All of it is written aside, synchronised and read back before it is put in place; other files in the directory stay.
    Of several ranks all call it, with the same arguments, a directory that all see: each writes what rests on it, and reads that back.
    CheckpointError: it could not be written or reads back wrong, and what was there is as it was, unless the message says otherwise.
    """
    engine = engine_of(model)
    if not os.fspath(directory):
        raise ConfigError("the directory to save to has no name; give '.' for the working directory")
    names = records_by_name(model, engine)
    tensors: dict[str, Lazy] = {}
    for name, value in model.state_dict().items():
        if name in names:
            tensors[name] = _OfRecord(names[name], engine.state)
        elif isinstance(value, torch.Tensor):
            if is_divided(value):
                raise ConfigError(f"{name} is a DTensor and no parameter, which save_pretrained() does not know: make it a plain tensor")
            tensors[name] = OfTensor(value)
        else:  # a module's extra state
            log.warning("%s of the model is %s: files of weights hold tensors alone, and lack it", name, type(value).__name__)
    tied: dict[int, list[str]] = {}
    for name, record in names.items():
        tied.setdefault(record.number, []).append(name)
    _write(model, tensors, tied.values(), Path(directory), max_shard_size, engine=engine)


def export(
    model: nn.Module, tensors: Mapping[str, Lazy], directory: str | Path, max_shard_size: int | str = "5GB", beside: Sequence[Path] = ()
) -> list[str]:
    """`save_pretrained` of tensors that are elsewhere, by the model's names, tied ones under any of theirs; `model` may be on `meta`.

    Copies of the files `beside` are in the directory too; extra state of modules is not. Returns the names of the files with weights.
    CheckpointError where one of the model's tensors is not among those given, or has another shape.
    """
    tied: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    given: dict[str, Lazy] = {}
    of = {name: names for names in tied.values() for name in names}
    for name, value in model.state_dict().items():
        if is_extra_state(name):
            continue
        found = next((n for n in (name, *of.get(name, ())) if n in tensors), None)
        if found is None:
            raise CheckpointError(f"the weights lack {name}; are they of this architecture?")
        if tensors[found].shape != value.shape:
            raise CheckpointError(f"{found} has shape {tuple(tensors[found].shape)}; the model's is {tuple(value.shape)}")
        given[name] = tensors[found]
    return _write(model, given, tied.values(), Path(directory), max_shard_size, beside)


def saved_tensors(directory: Path) -> dict[str, Lazy]:
    """The weights of a checkpoint that has been verified, by the names that the model had, tied ones included; CheckpointError."""
    state, path = read_state(directory), directory / TENSORS
    found: dict[str, Lazy] = {}
    for held, entry in read_header(path).items():
        role, _, name = held.partition("/")
        stored = Stored(name, path, entry.start, torch.Size(entry.shape), entry.dtype)
        if role == BUFFER:
            found[name] = OfFile(stored, stored.torch_dtype)
        elif role in (VALUE, MASTER):
            parameter = state.parameters.get(name)
            dtype = DTYPES.get(parameter.dtype) if parameter is not None else None
            if parameter is None or dtype is None or (role == MASTER and entry.dtype != "F32"):
                raise CheckpointError(f"{path} has {named(held)}, which is not as {directory / STATE} tells; take another checkpoint")
            rounds_away = state.precision.master == "split" and role == MASTER and dtype == torch.bfloat16
            found |= dict.fromkeys([name, *parameter.also], OfFile(stored, dtype, rounds_away))
    return found


def _write(
    model: nn.Module, tensors: dict[str, Lazy], tied: Iterable[list[str]], directory: Path, max_shard_size: int | str, beside: Sequence[Path] = (),
    engine: Engine | None = None,
) -> list[str]:  # fmt: skip
    most = parse_size(max_shard_size)
    if most < 1:
        raise ConfigError(f"max_shard_size={max_shard_size!r}: give a size above 0")
    for names in tied:
        for name in set(names) - {_kept(model, names)}:
            tensors.pop(name, None)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(name, None)
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED:
            raise ConfigError(f"{name} is {tensor.dtype}, which safetensors files do not hold; convert it first")
    places = stored_places(model, {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()})
    outputs = [Output(name, place.shape, place.dtype, partial(_parts, tensors, place)) for name, place in places.items()]
    parameters = sum(tensors[n].shape.numel() for n, _ in model.named_parameters() if n in tensors)

    def others(path: Path) -> None:
        _configuration(model, tensors, path)
        for file in beside:
            shutil.copyfile(file, path / file.name)

    if engine is None or engine.job is None:
        return write_directory(directory, outputs, most, parameters, others)
    engine.synchronize()
    return write_shared(engine.job, directory, outputs, most, parameters, others, partial(_own, engine, tensors, places))


def _own(engine: Engine, tensors: Mapping[str, Lazy], places: Mapping[str, Place], number: int, output: Output) -> Iterator[Values]:
    """What this rank writes of a stored tensor; the first rank all that is no parameter."""
    at = 0
    for run in places[output.name].runs:
        tensor = tensors[run.name]
        if isinstance(tensor, _OfRecord):
            for piece, runs in tensor.own(run.start, run.start + run.numel, *own_elements(engine, tensor.record, number)):
                yield Values(piece, partial(_shifted, runs, at))
        elif engine.job is not None and engine.job.rank == 0:
            (piece,) = tensor.read(run.start, run.start + run.numel)
            yield Values(piece, partial(_runs, None, 0, piece.numel(), -at))
        at += run.numel


def _runs(place: Part | None, first: int, stop: int, base: int) -> Iterator[tuple[int, int, int]]:
    """Those of elements [first, stop) of a part, counted from the first, and from element `base` of the whole."""
    for begin, end, there in place.runs(first, stop) if place is not None else [(first, stop, first)]:
        yield begin - first, end - first, there - base


def _shifted(runs: Runs, by: int) -> Iterator[tuple[int, int, int]]:
    return ((first, stop, at + by) for first, stop, at in runs())


def _kept(model: nn.Module, names: list[str]) -> str:
    """Which of a tied parameter's names the files have: one that transformers does not fill from another."""
    filled = getattr(model, "all_tied_weights_keys", None) or {}
    return next((n for n in names if n not in filled), names[0])


def _parts(tensors: Mapping[str, Lazy], place: Place) -> Iterator[torch.Tensor]:
    for run in place.runs:
        yield from tensors[run.name].read(run.start, run.start + run.numel)


def _configuration(model: nn.Module, tensors: Mapping[str, Lazy], directory: Path) -> None:
    """What transformers writes beside weights."""
    hub: Any = hub_model(model)
    if hub is None:
        return
    config = copy.deepcopy(hub.config)
    floating = next((t.dtype for t in tensors.values() if t.dtype.is_floating_point), torch.float32)
    config.dtype = str(floating).removeprefix("torch.")
    config.architectures = [type(hub).__name__]
    if hub.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(hub, directory, config=config)
    config.save_pretrained(directory)
    if hub.can_generate() and hub.generation_config is not None:
        hub.generation_config.save_pretrained(directory)
