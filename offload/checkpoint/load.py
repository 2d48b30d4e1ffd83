"""Reading a checkpoint: every byte is verified and everything compared with the model before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from offload.checkpoint import disk
from offload.checkpoint.codec import decode
from offload.checkpoint.content import BUFFER, MASTER, OTHER, VALUE, SavedState, read_state
from offload.checkpoint.dtypes import OF_STORED, STORED
from offload.checkpoint.manifest import STATE, TENSORS, Manifest, read_manifest, verify
from offload.checkpoint.modules import extra_state_keys, persistent_buffers, set_extra_states
from offload.checkpoint.save import PIECE, checked, group_names, place_of, stored_moments
from offload.checkpoint.tensorfile import Entry, read_header
from offload.dist.collectives import alike
from offload.dist.divided import Place
from offload.dist.world import World
from offload.engine.engine import Engine
from offload.engine.record import DTYPE_NAMES, Record
from offload.engine.registry import engine_of
from offload.errors import CheckpointError, SwapError, named
from offload.optim.adam import Adam, check_group
from offload.planner.form import MOMENTS

_Want = tuple[str, tuple[int, ...]]  # dtype and shape of a tensor that is to be there


def load(directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Puts a checkpoint into a prepared model and its optimizer, under whatever tiers, budgets and device they have; returns its `extra`.

    Training goes on as it would have, to the bit. The model has the same parameters, frozen or not, and the precision the same compute and
    moments; see [Note: what is exact]. Raises `CheckpointError`, and nothing is changed, for a checkpoint that is damaged, newer than this
    release or of another model, optimizer or precision; `ConfigError`, `SwapError`. Of several ranks all call it; the first verifies.
    """
    world = engine_of(model).job
    if world is None:
        verify(Path(directory))
    else:
        _verify_for_all(Path(directory), world)
    return restore(Path(directory), model, optimizer)


def _verify_for_all(directory: Path, world: World) -> None:
    trouble: CheckpointError | None = None
    if world.rank == 0:
        try:
            verify(directory)
        except CheckpointError as error:
            trouble = error
    told = world.broadcast(str(trouble) if trouble is not None else None, what="the checksums of the checkpoint")
    if told is not None:
        raise trouble or CheckpointError(told)


def restore(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """`load` of a checkpoint that has been verified."""
    engine, adam = checked(model, optimizer, "load()")
    with alike(engine.job, "loading the checkpoint"):
        manifest = read_manifest(directory)
    if engine.job is not None:
        engine.job.agree(xxhash.xxh3_128_hexdigest(manifest.render()), "the checkpoint (its manifest)")
    with alike(engine.job, "loading the checkpoint"):
        state, settings, more, modules, extra = _restore(directory, manifest, model, engine, adam)
    _install(engine, adam, state, settings, more)
    with alike(engine.job, "loading the checkpoint"):
        set_extra_states(model, modules)
    return extra


def _restore(
    directory: Path, manifest: Manifest, model: nn.Module, engine: Engine, adam: Adam
) -> tuple[SavedState, list[Any], dict[str, Any], dict[str, Any], Any]:  # fmt: skip
    """Compares everything, then reads values. What it gives is for `_install`, then the extra state of modules, and `extra`."""
    if manifest.files.keys() != {STATE, TENSORS}:
        raise CheckpointError(f"{directory} has other files than {STATE} and {TENSORS}; take another checkpoint")
    state, entries = read_state(directory), read_header(directory / TENSORS)
    check_parameters(directory, state, engine)
    _check_precision(directory, state, engine)
    _check_optimizer(directory, state, engine, adam)
    buffers = persistent_buffers(model)
    _check_names(directory, "buffers", state.buffers, buffers)
    _check_names(directory, "extra states", state.modules, extra_state_keys(model))
    others = {f"{OTHER}/{i}" for i in range(len(entries))} & entries.keys()
    wanted = _wanted(engine, state) | {f"{BUFFER}/{n}": (STORED.get(b.dtype, str(b.dtype)), tuple(b.shape)) for n, b in buffers.items()}
    _check_entries(directory / TENSORS, entries, wanted, others)
    try:
        with disk.opened(directory / TENSORS) as file:
            tensors = {int(name.partition("/")[2]): _whole(file, entries[name]) for name in others}
            settings = [decode(group.settings, tensors) for group in state.groups]
            more = {name: decode(values, tensors) for name, values in state.more.items()}
            modules = {key: decode(value, tensors) for key, value in state.modules.items()}
            extra = decode(state.extra, tensors)
            _check_settings(directory, adam, settings, more)
            _fill(engine, file, entries, buffers)
    except SwapError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{directory / TENSORS} could not be read to its end, so the model is loaded in part only: {error.strerror or error}; load again"
        ) from error
    return state, settings, more, modules, extra


# What is compared


def check_parameters(directory: Path, state: SavedState, engine: Engine) -> None:
    """CheckpointError unless the model has the checkpoint's parameters."""
    _check_names(directory, "parameters", state.parameters, [r.name for r in engine.records])
    for record in engine.records:
        saved = state.parameters[record.name]
        shape = tuple(record.parameter.shape)
        if tuple(saved.shape) != shape:
            raise CheckpointError(f"{record.name} in {directory} has shape {tuple(saved.shape)}, the model's {shape}: build the model that was saved")
        if saved.trained != record.trained:
            was, now = ("trained", "frozen") if saved.trained else ("frozen", "trained")
            raise CheckpointError(f"{record.name} was {was} in {directory} and is {now} in the model: set its requires_grad before prepare()")
        if saved.dtype != DTYPE_NAMES[record.dtype]:
            raise CheckpointError(
                f"{record.name} is {named(saved.dtype)} in {directory} and {DTYPE_NAMES[record.dtype]} in the model: "
                "convert the model before prepare()"
            )


def _check_names(directory: Path, what: str, saved: Iterable[str], present: Iterable[str]) -> None:
    missing, unexpected = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
    if missing or unexpected:
        lacks = f"lacks {len(missing)} of the model's {what} ({_some(missing)})" if missing else ""
        has = f"has {len(unexpected)} {what} that the model lacks ({_some(unexpected)})" if unexpected else ""
        raise CheckpointError(f"{directory} {' and '.join(filter(None, (lacks, has)))}: build the model that was saved")


def _some(names: list[str]) -> str:
    return ", ".join(map(named, names[:3])) + (", ..." if len(names) > 3 else "")


def _check_precision(directory: Path, state: SavedState, engine: Engine) -> None:
    saved, form = state.precision, engine.plan.form
    for key, was, now in (("compute", saved.compute, form.compute), ("moments", saved.moments, form.moments)):
        if was != now:
            raise CheckpointError(
                f"{directory} was trained with {key} = {was!r} and the model is prepared with {now!r}, so it could not go on to the bit: "
                f"give Precision({key}={was!r}), or take its weights alone"
            )
    if form.moments != "fp32" and state.seed != engine.seed:
        raise CheckpointError(
            f"{directory} was trained with moments rounded at random by seed {state.seed}, and the model is prepared with seed {engine.seed}, so it "
            f"could not go on to the bit: give prepare(..., seed={state.seed})"
        )


def _check_optimizer(directory: Path, state: SavedState, engine: Engine, adam: Adam) -> None:
    saved, present = [g.parameters for g in state.groups], group_names(engine, adam)
    if len(saved) != len(present):
        raise CheckpointError(f"{directory} has {len(saved)} param groups, the optimizer {len(present)}: make it with the groups that were saved")
    for i, (was, now) in enumerate(zip(saved, present, strict=True)):
        if was != now:
            raise CheckpointError(
                f"param group {i} of {directory} has {len(was)} parameters ({_some(was)}), the optimizer's {len(now)} ({_some(now)}), "
                "or in another order: make it with the groups that were saved"
            )
    strays = {n for n, p in state.parameters.items() if p.step is not None or n in state.more} - {n for group in saved for n in group}
    if strays or not state.more.keys() <= state.parameters.keys():
        raise CheckpointError(f"{directory} has optimizer state of parameters that no group has ({_some(sorted(strays))}); take another checkpoint")


def _check_settings(directory: Path, adam: Adam, settings: list[Any], more: dict[str, Any]) -> None:
    """CheckpointError for what no optimizer of ours has saved."""
    for i, (group, saved) in enumerate(zip(adam.param_groups, settings, strict=True)):
        try:
            if "params" in saved or not all(isinstance(key, str) for key in saved):
                raise ValueError("it has other keys than settings")
            check_group(group | saved)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the settings of param group {i} of {directory} cannot be: {error}; take another checkpoint") from None
    for name, values in more.items():
        if not isinstance(values, dict) or not values.keys().isdisjoint(("step", *MOMENTS)):
            raise CheckpointError(f"what {directory} has of the optimizer's state of {name} cannot be; take another checkpoint")


def _wanted(engine: Engine, state: SavedState) -> dict[str, _Want]:
    """The tensors that the checkpoint is to have of parameters."""
    wanted: dict[str, _Want] = {}
    for record in engine.records:
        if not record.trained:
            wanted[f"{VALUE}/{record.name}"] = STORED[record.dtype], tuple(record.parameter.shape)
            continue
        wanted[f"{MASTER}/{record.name}"] = "F32", tuple(record.parameter.shape)
        if state.parameters[record.name].step is not None:
            for role, dtype, shape in stored_moments(engine, record):
                wanted[f"{role}/{record.name}"] = STORED[dtype], shape
    return wanted


def _check_entries(path: Path, entries: dict[str, Entry], wanted: dict[str, _Want], others: set[str]) -> None:
    if entries.keys() != wanted.keys() | others:
        odd = sorted(entries.keys() ^ (wanted.keys() | others))
        raise CheckpointError(f"{path} does not have the tensors that its checkpoint tells of ({_some(odd)}); take another checkpoint")
    for name, (dtype, shape) in wanted.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(f"{name} in {path} is {entry.dtype} of {entry.shape}, the model's {dtype} of {shape}: build the one that was saved")


# What is moved


def _read(file: FileIO, out: torch.Tensor) -> None:
    """Fills a flat tensor."""
    disk.read(file, out.view(torch.uint8).numpy().data)


def _whole(file: FileIO, entry: Entry) -> torch.Tensor:
    value = torch.empty(entry.numel, dtype=OF_STORED[entry.dtype], device="cpu")
    file.seek(entry.start)
    _read(file, value)
    return value.view(entry.shape)


def _reader(file: FileIO, entry: Entry, place: Place | None) -> Callable[[int, torch.Tensor], None]:
    """Fills a flat tensor with what the file has of `entry`, or of this rank's part of it, from element `at` on."""

    def read(at: int, out: torch.Tensor) -> None:
        stop = at + out.numel()
        for first, end, there in place.runs(at, stop) if place is not None else [(at, stop, at)]:
            file.seek(entry.start + there * out.itemsize)
            _read(file, out[first - at : end - at])

    return read


def _pieces(read: Callable[[int, torch.Tensor], None], first: int, stop: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for at in range(first, stop, PIECE):
        part = torch.empty(min(PIECE, stop - at), dtype=dtype, device="cpu")
        read(at, part)
        yield part


def _fill(engine: Engine, file: FileIO, entries: dict[str, Entry], buffers: dict[str, torch.Tensor]) -> None:
    """Reads what belongs to the model and rests on this rank, once through the file."""
    records = {r.name: r for r in engine.records}
    for name, entry in sorted(entries.items(), key=lambda e: e[1].start):
        role, _, of = name.partition("/")
        file.seek(entry.start)
        if role == BUFFER:
            with torch.no_grad():
                buffers[of].copy_(_whole(file, entry))
        elif role != OTHER:
            _fill_parameter(engine, records[of], role, file, entry)


def _fill_parameter(engine: Engine, record: Record, role: str, file: FileIO, entry: Entry) -> None:
    whole = role in (VALUE, MASTER)
    read = _reader(file, entry, place_of(engine, record, None if whole else role))
    if whole:
        first, stop = engine.state.kept(record)
        engine.state.write_parts(record, _pieces(read, first, stop, OF_STORED[entry.dtype]), first, exact=True)
    else:
        engine.state.write_stored(record, role, read)


def _install(engine: Engine, adam: Adam, state: SavedState, settings: list[dict[str, Any]], more: dict[str, dict[str, Any]]) -> None:
    held = {id(p) for group in adam.param_groups for p in group["params"]}
    for record in engine.records:
        if record.trained and id(record.parameter) in held:
            step = state.parameters[record.name].step
            adam.replace(engine, record, None if step is None else {"step": step} | more.get(record.name, {}))
    for group, saved in zip(adam.param_groups, settings, strict=True):
        group.update(saved)
    adam.skipped = engine.skipped = state.skipped
