"""Units that rest whole in the memory of a device of its own, and are updated there.

[Note: resident units]
The host does not touch such a device's memory while a step runs, so a unit rests there with its parameters, gradients and state, or not at all.
Its gradients land there (and are summed there, over uses and micro-batches), and its updates run there, all in the one order of `Device.work`: so
an update waits for no landing and a landing for no update, and neither for the host. Only the sums of squares come to the host, as step() looks at
them. Whoever computes with the parameters, or reads or writes state from the host, waits for the unit's update first.
Of units whose gradients alone are summed on the device these land in the same way; see [Note: copies of sums] in engine/gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.engine.record import DTYPES, NORM_BLOCK, Record, Unit
from offload.errors import ConfigError
from offload.memory.shard import Shard
from offload.planner.form import MOMENTS, StateForm, scale_of
from offload.planner.layout import Slice
from offload.transfer.device import Device
from offload.transfer.kernels import Arrays
from offload.transfer.queue import Transfer


class _Landed:
    """A landing: whoever needs the gradient is told its error, and nobody else."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    @property
    def done(self) -> bool:
        return self._transfer.done

    def wait(self) -> None:
        with suppress(Exception):
            self._transfer.wait()


class _Piece(NamedTuple):
    """What one job updates: a slice of a parameter, from its element `first` on."""

    record: int
    first: int
    arrays: Arrays


class Resident:
    """The units of one runtime that rest whole on the device; none where the host's pipeline updates what rests there. And where gradients land
    there, of these and of units that are summed there."""

    def __init__(self, units: Sequence[Unit], form: StateForm, grad: torch.dtype, device: Device) -> None:
        self._units, self._form, self._device = units, form, device
        self.numbers = frozenset(u.number for u in units if not device.direct and u.layout.trained and _rests_whole(u))
        self._landed: dict[int, Transfer] = {}  # by parameter, in order: what the sums in the host's memory do not know of yet
        self._updated: dict[int, Transfer] = {}
        self._error: BaseException | None = None
        self.replace(grad)

    def replace(self, grad: torch.dtype) -> None:
        """Gradients land in other memory, in `grad`. Nothing is under way."""
        self._grad = grad
        self._pieces = {n: list(self._pieces_of(self._units[n])) for n in self.numbers}
        self._records = {r.number: r for u in self._units if self.lands(u.number) for r in u.records if r.trained}
        self._starts: dict[int, int] = {}
        blocks = 0
        for record in self._records.values():
            self._starts[record.number] = blocks
            blocks += max(1, -(-record.numel // NORM_BLOCK))
        self._sums = torch.zeros(blocks, dtype=torch.float64, device=self._device.compute)

    def close(self) -> None:
        self.numbers, self._pieces = frozenset(), {}
        self._landed.clear()
        self._updated.clear()
        self._sums = self._sums[:0]

    def _pieces_of(self, unit: Unit) -> Iterator[_Piece]:
        trained = unit.layout.trained
        assert trained is not None
        records = {r.slices[0][1].parameter: r for r in unit.records if r.trained and r.slices}
        for number, chunk in enumerate(trained.chunks):
            for piece in chunk.slices:
                if piece.stop > piece.start:
                    arrays = self._arrays(unit, number, piece, chunk.start, chunk.numel)
                    yield _Piece(records[piece.parameter].number, piece.start, arrays)

    def _arrays(self, unit: Unit, number: int, piece: Slice, start: int, chunk: int) -> Arrays:
        form, n, at = self._form, piece.stop - piece.start, piece.offset - start
        compute = DTYPES[form.compute]
        parts: dict[str, torch.Tensor | None] = dict.fromkeys(scale_of(role) for role in MOMENTS)
        for part in form.parts:
            parts[part.role] = _part(unit.states[number], form.at(part.role, chunk, at), part.numel(n), DTYPES[part.dtype])
        value = _part(unit.parameters[0], piece.offset * compute.itemsize, n, compute)
        grad = _part(unit.gradients[number], at * self._grad.itemsize, n, self._grad)
        master = value if form.value_is_master else parts["master"]
        m, v = (parts[role] for role in MOMENTS)
        assert master is not None and m is not None and v is not None
        out = None if form.value_is_master else value
        return Arrays(master, parts.get("low"), grad, m, parts[scale_of(MOMENTS[0])], v, parts[scale_of(MOMENTS[1])], out)

    # Gradients

    def lands(self, unit: int) -> bool:
        """Whether the unit's gradients land on the device."""
        return unit in self.numbers or self._units[unit].sums is not None

    def start(self, record: Record, run: Callable[[], None], nbytes: int) -> Transfer:
        """Starts work on a parameter's gradient: `run` calls `store` and `scale`."""
        transfer = self._device.work(run, nbytes, f"gradient {record.name}")
        self._landed.pop(record.number, None)
        self._landed[record.number] = _Landed(transfer)  # last in the order
        return transfer

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        """A gradient in the device's memory, in a dtype that kernels know."""
        there = value.to(self._device.compute)
        return there if there.dtype in (torch.float32, torch.bfloat16, torch.float16) else there.float()

    def store(self, record: Record, part: torch.Tensor, source: torch.Tensor, first: int, accumulate: bool) -> None:
        """Inside of work: elements of a gradient from `first` on come to rest in `part`, uint8 of the shard's memory."""
        start = self._starts[record.number] + first // NORM_BLOCK
        dst = part.view(self._grad)
        self._device.kernels.land(dst, source, accumulate, 1.0, self._sums[start : start + -(-dst.numel() // NORM_BLOCK)])

    def scale(self, part: torch.Tensor, factor: float) -> None:
        """Inside of work: a part of a gradient at rest is multiplied."""
        part = part.view(self._grad)
        self._device.kernels.land(part, part, False, factor, None)

    def forget_sums(self, record: Record) -> None:
        """`record.sums` is right as it is, whatever has landed."""
        self._landed.pop(record.number, None)

    def fetch_sums(self, record: Record | None = None) -> None:
        """The parameter's sums of squares (None: all parameters') are in `record.sums`, with those of all that landed before, in one read."""
        if not self._landed or (record is not None and record.number not in self._landed):
            return
        order = list(self._landed)
        last = order[-1] if record is None else record.number
        sums = self._device.read(self._sums, [self._landed[last]])
        for number in order[: order.index(last) + 1]:
            del self._landed[number]
            there, start = self._records[number].sums, self._starts[number]
            there.copy_(sums[start : start + there.numel()])

    # Updates

    def has(self, unit: int) -> bool:
        return unit in self.numbers

    def update(self, unit: int, hyper: np.ndarray[Any, Any]) -> None:
        """Starts updating those of a unit's parameters that are active in `hyper` (records of ops.HYPER), by its values now."""
        jobs = [(piece, hyper[piece.record].copy()) for piece in self._pieces[unit] if hyper[piece.record]["active"]]
        if not jobs:
            return
        self.wait(unit)  # an earlier update may have failed
        kernels = self._device.kernels

        def run() -> None:
            for piece, fields in jobs:
                kernels.update(piece.arrays, piece.first, fields)

        nbytes = sum(piece.arrays.master.numel() for piece, _ in jobs) * self._form.nbytes(1)
        self._updated[unit] = self._device.work(run, nbytes, f"update {self._units[unit].name}")

    def wait(self, unit: int) -> None:
        """What is computed with a unit's parameters, and what copies its state, sees its update from here on."""
        updated = self._updated.get(unit)
        if updated is None:
            return
        try:
            updated.wait()
        except BaseException as error:  # every later wait meets it too
            self._error = error
            raise
        if updated.done and self._updated.get(unit) is updated:  # another thread may have started the next
            self._updated.pop(unit, None)

    def ready(self, unit: int) -> bool:
        """Whether `wait` would not wait."""
        return unit not in self._updated or self._updated[unit].done

    def synchronize(self) -> None:
        self.check()
        for unit in list(self._updated):
            self.wait(unit)

    def check(self) -> None:
        """Raises the error that ended an earlier update, if it is known by now."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    @property
    def failed(self) -> bool:
        """Whether somebody was told of an error."""
        return self._error is not None

    def finish(self) -> None:
        """As `synchronize`; an error that somebody was told of is not raised once more."""
        if self._error is None:
            self.synchronize()


def _rests_whole(unit: Unit) -> bool:
    tiers = {s.tier for s in (*unit.parameters, *unit.gradients, *unit.states)}
    if "device" in tiers and len(tiers) > 1:
        raise ConfigError(
            f"the plan has a part of unit {unit.name} on the device, where this device needs all of it or none; "
            "give prepare() a plan that was made for this device"
        )
    return "device" in tiers


def _part(shard: Shard, start: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    assert shard.memory is not None
    return shard.memory[start : start + n * dtype.itemsize].view(dtype)
