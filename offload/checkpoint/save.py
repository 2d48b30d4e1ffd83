"""Writing a checkpoint: a model, its optimizer and whatever goes with them, in pieces, each byte once."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.checkpoint import disk
from offload.checkpoint.blocks import FILE_LEAST, Part, given
from offload.checkpoint.codec import Encoder
from offload.checkpoint.content import BUFFER, MASTER, OTHER, VALUE, SavedGroup, SavedParameter, SavedPrecision, SavedState
from offload.checkpoint.dtypes import STORED
from offload.checkpoint.manifest import STATE, TENSORS, Manifest, may_replace
from offload.checkpoint.modules import extra_states, persistent_buffers
from offload.checkpoint.tensorfile import Entry, arrange, header
from offload.checkpoint.together import Piece, save_together
from offload.dist.collectives import alike, assemble
from offload.dist.divided import Place, is_divided
from offload.engine.engine import Engine
from offload.engine.record import DTYPE_NAMES, DTYPES, Record
from offload.engine.registry import engine_of, record_of
from offload.engine.state import Source
from offload.errors import CheckpointError, ConfigError, SwapError
from offload.optim.adam import Adam

PIECE = 1 << 20  # elements moved at once
ROOM = 64 << 20  # bytes of pieces and blocks that are in memory at once, at most


class Held(NamedTuple):
    """A tensor to write. `stretches(first, stop)`: its values in order, of those elements of the parameter that it is of, or of all. `record`: that
    parameter, of which each of several ranks has its own; else the first has all. `role`: of moments that are stored in an array of their own."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stretches: Callable[..., Iterable[Source]]
    record: Record | None = None
    role: str | None = None

    def parts(self, first: int = 0, stop: int | None = None) -> Iterator[Part]:
        """What it is in a file."""
        for source in self.stretches(first, stop):
            size = self.dtype.itemsize
            yield Part(source.numel * size, partial(_fill, source, self.dtype), partial(_there, source, size))


def _fill(source: Source, dtype: torch.dtype, at: int, out: memoryview, beside: memoryview) -> Callable[[], object]:
    return source.fill(at // dtype.itemsize, torch.frombuffer(out, dtype=dtype), torch.frombuffer(beside, dtype=torch.uint8))


def _there(source: Source, size: int, at: int, nbytes: int) -> memoryview | None:
    found = source.there(at // size, nbytes // size)
    return found.view(torch.uint8).numpy().data if found is not None else None


def save(directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any = None) -> None:
    """Writes a checkpoint from which `load` goes on to the bit: parameters, masters, moments, steps, param groups, persistent buffers, the extra
    state of modules, `extra`.

    `extra`, like the extra state, has None, bool, int, float, str, bytes, list, tuple, dict and tensors; so have the state dicts of schedulers and
    scalers. Gradients are not kept: save after `step()`, or be warned. The directory is whole or absent, whatever happens; one that was there before
    stays until it is replaced at once. Of several ranks all call it, with the same arguments, and each writes its part; any number of ranks, under
    any stage, loads it. Memory for a few pieces of at most 8 MiB is taken beside the budgets. Raises `CheckpointError` where it cannot be written,
    `ConfigError` for a value that cannot be kept and for an optimizer that is not offload.optim's, `SwapError`.
    """
    save_through(None, directory, model, optimizer, extra)


def save_through(
    saving: Path | None, directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any,
    take: Callable[[Path], bool] = lambda path: False,
) -> None:  # fmt: skip
    """As `save`; what is being written lies in `saving` until it is whole, or beside `directory`. `take` as in `disk.create_large`."""
    engine, adam = checked(model, optimizer, "save()")
    _warn_of_gradients(engine, adam)
    target = Path(os.path.abspath(directory))
    if not os.fspath(directory):
        raise ConfigError("the directory to save to has no name; give one")
    if "\0" in str(target):
        raise ConfigError(f"{str(target)!r} can be no directory, as it has a zero byte; save to another")
    with alike(engine.job, "saving"):
        state, tensors = _gather(engine, adam, extra)
    engine.device.make_room(ROOM)
    entries, of = arrange((t.name, STORED[t.dtype], t.shape) for t in tensors), {t.name: t for t in tensors}
    first, ordered = header(entries), [(of[name], entry) for name, entry in entries.items()]
    nbytes = sum(entry.nbytes for entry in entries.values())
    if engine.job is not None:
        engine.job.agree_on_machines(os.path.realpath(target), "the directory to save to")
        save_together(engine.job, target, saving, state.render(), len(first) + nbytes, _pieces(ordered, first, engine), _room(engine), take)
        return
    try:
        with disk.replacing(target, may_replace, saving) as where:
            manifest = Manifest()
            parts = chain([given(first)], (part for tensor, _ in ordered for part in tensor.parts()))
            if len(first) + nbytes >= FILE_LEAST:
                manifest.add_large(where, TENSORS, parts, len(first) + nbytes, _room(engine), take)
            else:
                manifest.add(where, TENSORS, (part.read() for part in parts))
            manifest.add(where, STATE, [state.render()])
            manifest.write(where)
    except SwapError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {target}: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}; what was there before is "
            f"{disk.aside(target, saving) or 'as it was'}. Make room or mend the drive and save again, or save elsewhere"
        ) from error


def _room(engine: Engine) -> int:
    """Bytes of memory that the budgets leave while nothing is computed."""
    return engine.plan.free_bytes if engine.device.compute.type == "cpu" else engine.budgets["host"].free


def _pieces(tensors: Iterable[tuple[Held, Entry]], first: bytes, engine: Engine) -> list[Piece]:
    """What this rank writes of a file that begins with the bytes `first`, in order. Of groups that hold the same each writes some of the tensors."""
    job = engine.job
    assert job is not None
    pieces = [Piece(0, len(first), lambda: [given(first)])] if job.rank == 0 else []
    for i, (tensor, entry) in enumerate(tensors):
        start = len(first) + entry.start
        if tensor.record is None:
            if job.rank == 0:
                pieces.append(Piece(start, start + entry.nbytes, tensor.parts))
            continue
        place, (low, high) = place_of(engine, tensor.record, tensor.role), own_elements(engine, tensor.record, i)
        if place is not None and math.prod(tensor.shape) > place.stride:  # of rows that ranks share
            stop = start + entry.nbytes if i % job.size == job.rank else start
            pieces.append(Piece(start, stop, partial(_assembled, engine, tensor, place, low, high, stop > start), joint=True))
            continue
        per = engine.state.form.part(tensor.role).group if tensor.role is not None else 1
        begin, end = low // per, -(-high // per)
        if begin < end:
            size, at = tensor.dtype.itemsize, start if place is None else start + place.first * tensor.dtype.itemsize
            pieces.append(Piece(at + begin * size, at + end * size, partial(tensor.parts, low, high)))
    return pieces


def own_elements(engine: Engine, record: Record, number: int) -> tuple[int, int]:
    """The elements of a parameter, or of this rank's part of it, that this rank writes of the tensor of that number, first and behind the last."""
    across = engine.world.across if engine.world is not None else None
    elsewhere = across is not None and number % across.size != across.rank
    alike = engine.beside is not None and engine.beside.rank > 0 and (record.divided is None or record.divided.place is None)
    return (0, 0) if elsewhere or alike else engine.state.own(record)


def _assembled(engine: Engine, tensor: Held, place: Place, low: int, high: int, here: bool) -> Iterator[Part]:
    """A tensor of which ranks have every row a part, put together some rows at a time: nothing, unless it is to be written `here`. Of the parameter's
    elements this rank gives those from `low` to `high`. What fails is raised at the end, as other ranks wait."""
    job, trouble = engine.job, None
    assert job is not None
    for at in range(0, math.prod(tensor.shape), PIECE):
        block = torch.zeros(min(PIECE, math.prod(tensor.shape) - at), dtype=tensor.dtype, device="cpu")
        begin, end = place.within(at, at + block.numel())
        try:
            if trouble is None:
                _put_own(tensor, place, max(begin, low), min(end, high), block, at)
        except Exception as error:
            trouble = error
        assemble(job, block, f"{tensor.name}, to be saved")
        if here:
            yield given(block.view(torch.uint8).numpy().data)
    if trouble is not None:
        raise trouble


def _put_own(tensor: Held, place: Place, first: int, stop: int, block: torch.Tensor, at: int) -> None:
    """Elements [first, stop) of a part go to where they lie in `block`, which has the whole's from `at` on."""
    for source in tensor.stretches(first, stop) if first < stop else ():
        values = torch.empty(source.numel, dtype=tensor.dtype, device="cpu")
        source.fill(0, values, torch.empty(values.nbytes, dtype=torch.uint8, device="cpu"))()
        for begin, end, there in place.runs(first, first + source.numel):
            block[there - at : there - at + end - begin] = values[begin - first : end - first]
        first += source.numel


def checked(model: nn.Module, optimizer: torch.optim.Optimizer, doing: str) -> tuple[Engine, Adam]:
    """The engine, with nothing under way, and the optimizer, which holds parameters of this model alone. OffloadError."""
    engine = engine_of(model)
    if not isinstance(optimizer, Adam):
        inside = "; give the one that it wraps, its .optimizer" if isinstance(getattr(optimizer, "optimizer", None), Adam) else ""
        raise ConfigError(f"{doing} takes an optimizer of offload.optim, not {type(optimizer).__module__}.{type(optimizer).__qualname__}{inside}")
    for group in optimizer.param_groups:
        for p in group["params"]:
            home = record_of(p)
            if home is None or home[0] is not engine:
                raise ConfigError(f"the optimizer holds a parameter of shape {tuple(p.shape)} that is not of this model; give each model its own")
    engine.early.refuse(doing)
    engine.synchronize()
    return engine, optimizer


def _warn_of_gradients(engine: Engine, adam: Adam) -> None:
    """Those of micro-batches that no step has had yet are not kept."""
    homes = (record_of(p) for group in adam.param_groups for p in group["params"])
    waiting = engine.gradients.entries.waiting(home[1] for home in homes if home is not None)
    if waiting:
        warnings.warn(
            f"gradients of {len(waiting)} parameters ({waiting[0].name}, ...) have come since the last step, and a checkpoint does not keep them: "
            "what goes on from it lacks their micro-batches. Save after step()",
            RuntimeWarning,
            stacklevel=4,
        )


def tied_names(model: nn.Module, engine: Engine) -> dict[int, list[str]]:
    """By number of parameter, every name that it has."""
    numbers = {id(r.parameter): r.number for r in engine.records}
    names: dict[int, list[str]] = {r.number: [] for r in engine.records}
    for name, p in model.named_parameters(remove_duplicate=False):
        names[numbers[id(p)]].append(name)
    return names


def group_names(engine: Engine, adam: Adam) -> list[list[str]]:
    """The parameters of each param group."""
    names = {id(r.parameter): r.name for r in engine.records}
    return [[names[id(p)] for p in group["params"]] for group in adam.param_groups]


def _gather(engine: Engine, adam: Adam, extra: Any) -> tuple[SavedState, list[Held]]:
    """What to write. Nothing is read yet but what moments are to be brought to their place."""
    moved, encoder = adam.settle(engine), Encoder()
    names, form = tied_names(engine.model, engine), engine.plan.form
    buffers = persistent_buffers(engine.model)
    groups = [
        SavedGroup(parameters=held, settings=_encoded(encoder, {k: v for k, v in group.items() if k != "params"}, f"param_groups[{i}]"))
        for i, (held, group) in enumerate(zip(group_names(engine, adam), adam.param_groups, strict=True))
    ]
    more = {}
    for record in engine.records:
        rest = {k: v for k, v in moved.get(record.number, {}).items() if k not in ("step", "exp_avg", "exp_avg_sq")}
        if rest:
            more[record.name] = _encoded(encoder, rest, f"the optimizer's state of {record.name}")
    state = SavedState(
        precision=SavedPrecision(compute=form.compute, master=form.master, moments=form.moments),
        seed=engine.seed,
        parameters={
            r.name: SavedParameter(
                dtype=DTYPE_NAMES[r.dtype],
                shape=list(r.parameter.shape),
                trained=r.trained,
                step=int(moved[r.number]["step"]) if r.number in moved else None,
                also=[n for n in names[r.number] if n != r.name],
            )
            for r in engine.records
        },
        buffers=list(buffers),
        modules={key: encoder.encode(value, key) for key, value in extra_states(engine.model).items()},
        groups=groups,
        more=more,
        skipped=adam.skipped,
        extra=encoder.encode(extra, "extra"),
    )
    tensors = [held for r in engine.records for held in _of_parameter(engine, r, r.number in moved)]
    tensors += [_plain(f"{BUFFER}/{name}", b, f"buffer {name}") for name, b in buffers.items()]
    tensors += [_plain(f"{OTHER}/{i}", t, "a tensor in extra or in the optimizer") for i, t in enumerate(encoder.tensors)]
    return state, tensors


def _encoded(encoder: Encoder, value: dict[str, Any], where: str) -> dict[str, Any]:
    encoded: dict[str, Any] = encoder.encode(value, where)
    return encoded


def _of_parameter(engine: Engine, record: Record, moved: bool) -> Iterator[Held]:
    state = engine.state

    def held(prefix: str, role: str, dtype: torch.dtype, shape: tuple[int, ...], *, stored: bool = False) -> Held:
        return Held(f"{prefix}/{record.name}", dtype, shape, partial(state.sources, record, role, stored), record, role if stored else None)

    if not record.trained:
        yield held(VALUE, "value", record.dtype, tuple(record.parameter.shape))
        return
    yield held(MASTER, "master", torch.float32, tuple(record.parameter.shape))
    for role, dtype, shape in stored_moments(engine, record) if moved else ():
        yield held(role, role, dtype, shape, stored=True)


def place_of(engine: Engine, record: Record, role: str | None) -> Place | None:
    """Where a parameter's part lies in the whole, or the array that holds a role of its moments; None where it is the whole. ConfigError, on all
    ranks, where that array is no part of the whole's."""
    place = record.divided.place if record.divided is not None else None
    if place is None or role is None:
        return place
    grouped = place.grouped(engine.state.form.part(role).group)
    if grouped is None:
        raise ConfigError(
            f"{record.name} is divided over ranks where groups of its int8 moments are not, so these cannot be saved: give Precision(moments='bf16')"
        )
    return grouped


def stored_moments(engine: Engine, record: Record) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Role, dtype and shape of each array that holds a parameter's moments; of scales there is one a group."""
    shape = record.parameter.shape
    for part in engine.state.kept_moments():
        place_of(engine, record, part.role)
        yield part.role, DTYPES[part.dtype], tuple(shape) if part.group == 1 else (part.numel(shape.numel()),)


def _plain(name: str, tensor: torch.Tensor, what: str) -> Held:
    if tensor.dtype not in STORED or tensor.layout != torch.strided or tensor.is_meta or is_divided(tensor):
        kind = type(tensor).__name__
        said = f"a {kind}, {tensor.dtype}, {tensor.layout} on {tensor.device}"
        raise ConfigError(f"{what} is {said}, which a checkpoint does not hold; convert it first")

    def stretches(first: int = 0, stop: int | None = None) -> Iterator[Source]:
        flat = tensor.detach().reshape(-1)
        for at in range(0, flat.numel(), PIECE):
            piece = flat[at : at + PIECE]
            yield Source(piece.numel(), partial(_copy, piece))

    return Held(name, tensor.dtype, tuple(tensor.shape), stretches)


def _copy(values: torch.Tensor, first: int, out: torch.Tensor, beside: torch.Tensor) -> Callable[[], object]:
    out.copy_(values[first : first + out.numel()])
    return lambda: None
