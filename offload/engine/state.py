"""Values at rest: parameters, masters and moments, wherever their shards are and in whatever form."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple

import torch

from offload import ops
from offload.dist.collectives import assemble
from offload.dist.world import World
from offload.engine.background import Background
from offload.engine.record import DTYPES, Record, Unit
from offload.memory.shard import Shard, check_process
from offload.planner.form import GROUP, MOMENTS, Part, StateForm, scale_of
from offload.planner.layout import round_up
from offload.planner.share import ALONE, Share

Piece = Callable[[], torch.Tensor]
READERS = 2  # pieces that are read at once


class Source(NamedTuple):
    """`numel` values, flat: `fill(first, out, beside)` begins to put those from `first` on in `out`, as many as it has, and may use as many bytes
    `beside`; they are there once what it gives was called, in any thread, while nothing is updated or written. `there(first, n)`: `n` of them where
    they rest in memory just so, else None."""

    numel: int
    fill: Callable[[int, torch.Tensor, torch.Tensor], Callable[[], object]]
    there: Callable[[int, int], torch.Tensor | None] = lambda first, n: None


def ahead(pool: Executor | None, pieces: Iterable[Piece]) -> Iterator[torch.Tensor]:
    """What pieces read, in order, the next ones while one is used. `pool` has READERS threads; None: each is read when its turn comes, in this
    thread, as where ranks read together."""
    if pool is None:
        yield from (piece() for piece in pieces)
        return
    reading: deque[Future[torch.Tensor]] = deque()
    for piece in pieces:
        reading.append(pool.submit(piece))
        if len(reading) > READERS:
            yield reading.popleft().result()
    while reading:
        yield reading.popleft().result()


class _Stretch(NamedTuple):
    """Elements [first, stop) of a parameter; they lie in one chunk, from its element `at` on."""

    chunk: int
    at: int
    first: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.first


class State:
    """Reads and writes parameters, masters and moments. `before(record, reading)` runs first on each access, and before a read gives the
    parameter a value if it has none; each access waits for the updates that it needs; `refresh(record, start, part)` puts a newly written part
    where the device may already have a copy of it.

    Of several ranks each has its share. Reading what is divided is a collective, which all ranks call in one order (as DTensor.full_tensor is);
    a write is of the whole value, given alike on all.
    """

    def __init__(
        self,
        units: list[Unit],
        form: StateForm,
        before: Callable[[Record, bool], None],
        background: Background,
        refresh: Callable[[Record, int, torch.Tensor], None],
        world: World | None = None,
        share: Share = ALONE,
    ) -> None:
        self._world, self._share = world, share
        self.units, self.form, self.compute = units, form, DTYPES[form.compute]
        self._before, self._background, self._refresh = before, background, refresh
        self._generations: dict[int, int] = {}
        self.give_up: Callable[[int], bool] = lambda unit: True  # drops what the device has of a unit, unless it is in use
        self.guard: Callable[[Record], None] = lambda record: None  # raises where an update has started too early for this access

    def parameter_shard(self, record: Record) -> tuple[Shard, int, torch.dtype]:
        """The shard, the byte where the parameter starts in it (it may lie outside, where shares begin), and the dtype stored; updates of what is
        there are done."""
        unit = self.units[record.unit]
        dtype = DTYPES[unit.layout.flats[record.flat].dtype]
        shard = unit.parameters[record.flat]
        if record.trained:
            self.guard(record)
            for chunk, _ in record.slices:
                self._background.wait(record.unit, chunk, shard.memory is None)
            self._background.jobs.others.wait(record.unit)
        return shard, (record.offset - self._share.span(unit.layout.flats[record.flat], "parameter")[0]) * dtype.itemsize, dtype

    def _here(self, record: Record, first: int, stop: int) -> tuple[int, int]:
        """Of elements [first, stop) of a parameter, those whose copy that is computed with rests here."""
        begin, end = self._share.span(self.units[record.unit].layout.flats[record.flat], "parameter")
        first = min(max(first, begin - record.offset), stop)
        return first, max(first, min(stop, end - record.offset))

    def _meet(self, record: Record, role: str, what: str) -> None:
        """All ranks read a value whose parts of a role they divide among them, or RankError."""
        if self._world is not None and self._share.divides(role):
            self._world.barrier(f"{what} of {record.name}")

    def _assemble(self, record: Record, role: str, out: torch.Tensor) -> torch.Tensor:
        """Fills `out`, which has what rests here of a role and zeros elsewhere."""
        if self._world is not None and self._share.divides(role):
            assemble(self._world, out, f"{record.name} at rest")
        return out

    def _empty(self, n: int, dtype: torch.dtype, role: str) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype, device="cpu") if self._share.divides(role) else torch.empty(n, dtype=dtype, device="cpu")

    def _stretches(self, record: Record, first: int = 0, stop: int | None = None) -> Iterator[_Stretch]:
        """Elements [first, stop) of a parameter, chunk by chunk."""
        trained = self.units[record.unit].layout.trained
        assert trained is not None
        for chunk, piece in record.slices:
            begin, end = max(piece.start, first), min(piece.stop, record.numel if stop is None else stop)
            if begin < end:
                yield _Stretch(chunk, piece.offset - trained.chunks[chunk].start + begin - piece.start, begin, end)

    def _part(self, record: Record, role: str, where: _Stretch) -> tuple[Shard, int]:
        """The shard that has a part of the state, and the byte where the stretch's values of it start."""
        unit = self.units[record.unit]
        assert unit.layout.trained is not None
        self.guard(record)
        self._background.wait(record.unit, where.chunk, unit.states[where.chunk].memory is None)
        return unit.states[where.chunk], self.form.at(role, unit.layout.trained.chunks[where.chunk].numel, where.at)

    def _rests(self, record: Record, where: _Stretch) -> bool:
        return bool(self.units[record.unit].states[where.chunk].tier)

    def _read_part(self, record: Record, role: str, where: _Stretch, out: torch.Tensor | None = None) -> torch.Tensor:
        """A part of the state as it is stored, which rests here."""
        part = self.form.part(role)
        out = torch.empty(part.numel(where.numel), dtype=DTYPES[part.dtype], device="cpu") if out is None else out
        shard, start = self._part(record, role, where)
        shard.read(start, out)
        return out

    def _write_part(self, record: Record, role: str, where: _Stretch, stored: torch.Tensor) -> None:
        if not self._rests(record, where):
            return
        shard, start = self._part(record, role, where)
        self._write(shard, start, stored)

    def _write(self, shard: Shard, start: int, stored: torch.Tensor) -> None:
        if shard.memory is None:
            self._background.drop()
        shard.write(start, stored)

    # Parameters and masters

    def read_value(self, record: Record) -> torch.Tensor:
        """A fresh plain tensor of the parameter's shape and dtype."""
        self._before(record, True)
        if record.trained and self.form.master != "own" and record.dtype != self.compute:
            return self.read_state(record, "master").to(record.dtype).view(record.shape)
        self._meet(record, "parameter", "value")
        return self._read_stored(record, 0, record.numel).to(record.dtype).view(record.shape)

    def read_parts(self, record: Record, first: int, stop: int, most: int, own: bool = False) -> Iterator[torch.Tensor]:
        """Elements [first, stop) of a value as it reads, flat and in order, at most `most` at a time. `own`: all are of those of `own`, so that
        it is no collective."""
        self._before(record, True)
        from_master = record.trained and self.form.master != "own" and record.dtype != self.compute
        for at in range(first, stop, most):
            end = min(at + most, stop)
            if not from_master:
                yield (self._read_own if own else self._read_stored)(record, at, end).to(record.dtype)
                continue
            for where in self._stretches(record, at, end):
                out = self._empty(where.numel, torch.float32, "optimizer")
                self._read(record, "master", where, out)
                yield (out if own else self._assemble(record, self._role("master"), out)).to(record.dtype)

    def _read_stored(self, record: Record, first: int, stop: int) -> torch.Tensor:
        """Elements [first, stop) of the copy that is computed with, in its own dtype."""
        return self._assemble(record, "parameter", self._read_own(record, first, stop))

    def _read_own(self, record: Record, first: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `_read_stored`; zeros, or what `out` has, for what rests elsewhere."""
        shard, start, dtype = self.parameter_shard(record)
        out = self._empty(stop - first, dtype, "parameter") if out is None else out
        begin, end = self._here(record, first, stop)
        if begin < end:
            shard.read(start + begin * dtype.itemsize, out[begin - first : end - first])
        return out

    def _role(self, role: str) -> str:
        """Whose division among ranks values of "master", "exp_avg" or "exp_avg_sq" follow."""
        return "parameter" if role == "master" and self.form.master == "own" else "optimizer"

    def write_value(self, record: Record, value: torch.Tensor, *, ready: bool = True) -> None:
        """Stores a whole value: in the master, and in the copy that is computed with. `ready=False` while preparing or initialising."""
        self.write_parts(record, [value.detach().to(device="cpu", dtype=record.dtype).contiguous().view(-1)], ready=ready)

    def kept(self, record: Record) -> tuple[int, int]:
        """The elements of a parameter that are to be given where its value is written, first and behind the last: those of which something rests
        here; or all, where the device has a copy that is in use. Any other copy of the device's is dropped: they are written next."""
        if not self._share.divides("parameter") or not self.give_up(record.unit):
            return 0, record.numel
        return self.own(record)

    def write_parts(self, record: Record, parts: Iterable[torch.Tensor], first: int = 0, *, ready: bool = True, exact: bool = False) -> None:
        """Stores a whole value given in flat parts, in order, in any dtype, or those from element `first` on of `kept`. The record counts as
        written at the end.

        They are rounded to the parameter's dtype first, as by an assignment to it; `exact`: they are masters, and kept as they are.
        """
        if ready:
            self._before(record, False)
        record.version += 1
        at = first
        for part in parts:
            flat = part if exact else part.to(record.dtype)
            if record.trained and self.form.master != "own":
                for where in self._stretches(record, at, at + flat.numel()):
                    self._write_master(record, where, flat[where.first - at : where.stop - at])
            if not (record.trained and self.form.master == "split"):
                self._write_stored(record, at, flat)
            at += flat.numel()
        record.written = True

    def _write_stored(self, record: Record, first: int, values: torch.Tensor) -> None:
        shard, start, dtype = self.parameter_shard(record)
        stored = values.to(dtype)
        begin, end = self._here(record, first, first + stored.numel())
        if begin < end:
            self._write(shard, start + begin * dtype.itemsize, stored[begin - first : end - first])
        self._refresh(record, first, stored)

    def _write_master(self, record: Record, where: _Stretch, values: torch.Tensor) -> None:
        """Stores a master; a split one whole, with the half that is computed with."""
        master = values.to(torch.float32)
        if self.form.master == "fp32":
            self._write_part(record, "master", where, master)
            return
        high, low = torch.empty(where.numel, dtype=torch.bfloat16, device="cpu"), torch.empty(where.numel, dtype=torch.int16, device="cpu")
        ops.split_(high, low, master)
        self._write_part(record, "low", where, low)
        self._write_stored(record, where.first, high)

    # Reading any role

    def read_state(self, record: Record, role: str) -> torch.Tensor:
        """fp32 values of "master", "exp_avg" or "exp_avg_sq", flat."""
        self._before(record, True)
        self._meet(record, self._role(role), "value" if role == "master" else role)
        out = self._empty(record.numel, torch.float32, self._role(role))
        for where in self._stretches(record):
            self._read(record, role, where, out[where.first : where.stop])
        return self._assemble(record, self._role(role), out)

    def pieces(self, record: Record, role: str) -> Iterator[Piece]:
        """The values of a role in order, at most a chunk at a time: fp32 ("value": the stored copy in its own dtype).

        Each is read when it is called, in any thread, while nothing is updated or written; what rests in memory is not copied.
        """
        self._before(record, True)
        if role == "value":
            for _, piece in record.slices:
                yield partial(self._read_stored, record, piece.start, piece.stop)
            return
        for where in self._stretches(record):
            yield partial(self._fp32, record, role, where)

    def _fp32(self, record: Record, role: str, where: _Stretch) -> torch.Tensor:
        divided = self._role(role)
        if (role != "master" or self.form.master == "fp32") and not self._share.divides(divided):
            part = self.form.part(role)
            if part.dtype == "fp32":
                return self._stored(record, part, where)
        out = self._empty(where.numel, torch.float32, divided)
        self._read(record, role, where, out)
        return self._assemble(record, divided, out)

    # What a checkpoint holds: masters in fp32, whatever their form, and moments to the bit, as they are stored

    def kept_moments(self) -> list[Part]:
        """The arrays that moments are stored in."""
        return [part for part in self.form.parts if part.role.startswith(MOMENTS)]

    def sources(self, record: Record, role: str, stored: bool, first: int = 0, stop: int | None = None) -> Iterator[Source]:
        """The values of a role in order, as `pieces` has them; `stored`: those of a part of the state as it is stored. Of elements [first, stop) of
        the parameter; with several ranks these are among those of `own`."""
        self._before(record, True)
        if role == "value":
            for _, piece in record.slices:
                begin, end = max(piece.start, first), min(piece.stop, record.numel if stop is None else stop)
                if begin < end:
                    yield Source(end - begin, partial(self._fill_value, record, begin))
            return
        part = self.form.part(role) if stored or self.form.master == "fp32" else None
        for where in self._stretches(record, first, stop):
            if part is not None:
                yield Source(part.numel(where.numel), partial(self._fill_part, record, part, where), partial(self._there, record, part, where))
            else:
                yield Source(where.numel, partial(self._fill_master, record, where))

    def _fill_value(self, record: Record, start: int, first: int, out: torch.Tensor, beside: torch.Tensor) -> Callable[[], object]:
        shard, begin, dtype = self.parameter_shard(record)
        return shard.begin_read(begin + (start + first) * dtype.itemsize, out)

    def _fill_part(self, record: Record, part: Part, where: _Stretch, first: int, out: torch.Tensor, beside: torch.Tensor) -> Callable[[], object]:
        shard, begin = self._part(record, part.role, where)
        return shard.begin_read(begin + first * out.itemsize, out)

    def _there(self, record: Record, part: Part, where: _Stretch, first: int, n: int) -> torch.Tensor | None:
        shard, begin = self._part(record, part.role, where)
        dtype = DTYPES[part.dtype]
        return shard.there(begin + first * dtype.itemsize, n, dtype)

    def _fill_master(self, record: Record, where: _Stretch, first: int, out: torch.Tensor, beside: torch.Tensor) -> Callable[[], object]:
        if self.form.master == "own":
            return self._fill_value(record, where.first, first, out, beside)
        (high, above, dtype), (low, below) = self.parameter_shard(record), self._part(record, "low", where)
        n, reads, halves = out.numel(), [], []
        for shard, start, memory in (
            (high, above + (where.first + first) * 2, beside[: 2 * n].view(dtype)),
            (low, below + first * 2, beside[2 * n :].view(torch.int16)),
        ):
            half = shard.there(start, n, memory.dtype)
            if half is None:
                half = memory
                reads.append(shard.begin_read(start, half))
            halves.append(half)

        def finish() -> None:
            for read in reads:
                read()
            ops.join_(out, *halves, threads=1)

        return finish

    def _stored(self, record: Record, part: Part, where: _Stretch) -> torch.Tensor:
        """A part of the state as it is stored: a view of what rests in memory, where ranks do not divide it."""
        if self._share.divides("optimizer"):
            out = self._empty(part.numel(where.numel), DTYPES[part.dtype], "optimizer")
            return self._assemble(record, "optimizer", self._read_part(record, part.role, where, out) if self._rests(record, where) else out)
        shard, start = self._part(record, part.role, where)
        if shard.memory is None or not shard.memory.is_cpu:
            return self._read_part(record, part.role, where)
        check_process(shard.owner)
        return shard.memory[start : start + part.nbytes(where.numel)].view(DTYPES[part.dtype])

    def own(self, record: Record) -> tuple[int, int]:
        """The elements of a parameter that this rank saves, first and behind the last: its share, whatever rests here besides."""
        flat = self.units[record.unit].layout.flats[record.flat]
        first = max(0, self._share.rank * flat.share - record.offset)
        return first, max(first, min(record.numel, (self._share.rank + 1) * flat.share - record.offset))

    def write_stored(self, record: Record, role: str, read: Callable[[int, torch.Tensor], None]) -> None:
        """Stores what rests here of a part of the state, as it is: `read(at, out)` fills `out` with its values from number `at` on."""
        self._before(record, False)
        part = self.form.part(role)
        for where in self._stretches(record):
            if self._rests(record, where):
                stored = torch.empty(part.numel(where.numel), dtype=DTYPES[part.dtype], device="cpu")
                read(part.numel(where.first), stored)
                self._write_part(record, role, where, stored)

    def _read(self, record: Record, role: str, where: _Stretch, out: torch.Tensor) -> None:
        """Fills `out`, fp32, with values of "master", "exp_avg" or "exp_avg_sq"; what rests elsewhere is left."""
        if role == "master" and self.form.master == "own":
            self._read_own(record, where.first, where.stop, out)
        elif not self._rests(record, where):
            return
        elif role == "master" and self.form.master == "split":
            ops.join_(out, self._read_own(record, where.first, where.stop), self._read_part(record, "low", where))
        elif self.form.part(role).dtype == "fp32":
            self._read_part(record, role, where, out)
        elif self.form.moments == "int8":
            ops.decode_moment_(out, self._read_part(record, role, where), self._read_part(record, scale_of(role), where))
        else:
            ops.convert_(out, self._read_part(record, role, where))

    # Moments. Each record has room for one set; a generation of it belongs to one optimizer.

    def write_moment(self, record: Record, role: str, value: torch.Tensor, first: int = 0) -> None:
        """Stores values of "exp_avg" or "exp_avg_sq" from element `first` on, to nearest. Of an int8 group that is written in part the other
        elements are kept as they read, and rounded again if its scale grows."""
        flat = value.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1)
        for where in self._stretches(record, first, first + flat.numel()):
            self._write_moment(record, role, where, flat[where.first - first : where.stop - first])

    def _write_moment(self, record: Record, role: str, where: _Stretch, values: torch.Tensor) -> None:
        if not self._rests(record, where):
            return
        part = self.form.part(role)
        if self.form.moments != "int8":
            stored = values if part.dtype == "fp32" else ops.convert_(torch.empty(where.numel, dtype=DTYPES[part.dtype], device="cpu"), values)
            self._write_part(record, role, where, stored)
            return
        whole = self._whole_groups(record, where)
        if whole != where:
            around = torch.empty(whole.numel, dtype=torch.float32, device="cpu")
            self._read(record, role, whole, around)
            around[where.first - whole.first : where.stop - whole.first] = values
            values = around
        codes = torch.empty(whole.numel, dtype=DTYPES[part.dtype], device="cpu")
        scale = torch.empty(-(-whole.numel // GROUP), dtype=torch.float32, device="cpu")
        ops.encode_moment_(codes, scale, values)
        self._write_part(record, role, whole, codes)
        self._write_part(record, scale_of(role), whole, scale)

    def _whole_groups(self, record: Record, where: _Stretch) -> _Stretch:
        first, stop = where.first // GROUP * GROUP, min(round_up(where.stop, GROUP), record.numel)
        return _Stretch(where.chunk, where.at - (where.first - first), first, stop)

    def generation(self, record: Record) -> int:
        """Which set of moments a parameter has: 0 before the first, while they are zero."""
        return self._generations.get(record.number, 0)

    def replace_moments(self, record: Record) -> None:
        """The moments are another set from here on, written next; whoever had those before has none."""
        self._generations[record.number] = self.generation(record) + 1

    def start_moments(self, record: Record) -> None:
        """Moments of zero, and no steps yet."""
        if self.generation(record):
            for where in self._stretches(record):
                for part in self.form.parts:
                    if part.role.startswith(MOMENTS):
                        self._write_part(record, part.role, where, torch.zeros(part.nbytes(where.numel), dtype=torch.uint8, device="cpu"))
        self.replace_moments(record)
        record.step = 0
