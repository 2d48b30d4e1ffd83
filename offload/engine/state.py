"""Values at rest: parameters, masters and moments, wherever their shards are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from offload.engine.record import DTYPES, Record, Unit
from offload.memory.shard import Shard
from offload.planner.layout import Slice

MOMENTS = ("exp_avg", "exp_avg_sq")


class State:
    """Reads and writes parameters, masters and moments. `before(record, reading)` runs first on each access, and before a read gives the
    parameter a value if it has none; `updated(unit, chunk, written)` waits for a chunk's update, or for its write-back; `refresh(record, start,
    part)` puts a newly written part where the device may already have a copy of it."""

    def __init__(
        self,
        units: list[Unit],
        compute: torch.dtype,
        own_master: bool,
        before: Callable[[Record, bool], None],
        updated: Callable[[int, int, bool], None],
        refresh: Callable[[Record, int, torch.Tensor], None],
    ) -> None:
        self.units, self.compute, self.own_master = units, compute, own_master
        self._before, self._updated, self._refresh = before, updated, refresh
        self._generations: dict[int, int] = {}

    def parameter_shard(self, record: Record) -> tuple[Shard, int, torch.dtype]:
        """The shard, the byte where the parameter starts in it, and the dtype stored; updates of what is there are done."""
        unit = self.units[record.unit]
        dtype = DTYPES[unit.layout.flats[record.flat].dtype]
        shard = unit.parameters[record.flat]
        if record.trained:
            for chunk, _ in record.slices:
                self._updated(record.unit, chunk, shard.memory is None)
        return shard, record.offset * dtype.itemsize, dtype

    def _state_part(self, record: Record, role: str, chunk: int, piece: Slice) -> tuple[Shard, int]:
        unit = self.units[record.unit]
        trained = unit.layout.trained
        assert trained is not None
        whole = trained.chunks[chunk]
        order = state_roles(self.own_master).index(role)
        self._updated(record.unit, chunk, unit.states[chunk].memory is None)
        return unit.states[chunk], (order * whole.numel + piece.offset - whole.start) * 4

    def read_value(self, record: Record) -> torch.Tensor:
        """A fresh plain tensor of the parameter's shape and dtype."""
        self._before(record, True)
        if record.trained and not self.own_master and record.dtype != self.compute:
            return self.read_state(record, "master").to(record.dtype).view(record.shape)
        shard, start, dtype = self.parameter_shard(record)
        out = torch.empty(record.numel, dtype=dtype)
        shard.read(start, out)
        return out.to(record.dtype).view(record.shape)

    def write_value(self, record: Record, value: torch.Tensor, *, ready: bool = True) -> None:
        """Stores a whole value: in the master, and in the copy that is computed with. `ready=False` while preparing or initialising."""
        self.write_parts(record, [value.detach().to(device="cpu", dtype=record.dtype).contiguous().view(-1)], ready=ready)

    def write_parts(self, record: Record, parts: Iterable[torch.Tensor], *, ready: bool = True) -> None:
        """Stores a whole value given in flat parts, in order, in any dtype. The record counts as written at the end."""
        if ready:
            self._before(record, False)
        record.version += 1
        shard, start, dtype = self.parameter_shard(record)
        at = 0
        for part in parts:
            flat = part.to(record.dtype)
            if record.trained and not self.own_master:
                self.write_state(record, "master", flat, at)
            stored = flat.to(dtype)
            shard.write(start + at * dtype.itemsize, stored)
            self._refresh(record, at, stored)
            at += flat.numel()
        record.written = True

    def read_state(self, record: Record, role: str) -> torch.Tensor:
        """fp32 values of "master", "exp_avg" or "exp_avg_sq", flat. Where the parameter is its own master, "master" reads it."""
        if role == "master" and self.own_master:
            return self.read_value(record).float().view(-1)
        self._before(record, True)
        out = torch.empty(record.numel, dtype=torch.float32)
        for chunk, piece in record.slices:
            shard, start = self._state_part(record, role, chunk, piece)
            shard.read(start, out[piece.start : piece.stop])
        return out

    def stream(self, record: Record, role: str) -> Iterator[torch.Tensor]:
        """The values of a role in order, at most a chunk at a time: fp32 ("value": the stored copy in its own dtype)."""
        self._before(record, True)
        if role == "value" or (role == "master" and self.own_master):
            shard, start, dtype = self.parameter_shard(record)
            for _, piece in record.slices:
                out = torch.empty(piece.stop - piece.start, dtype=dtype)
                shard.read(start + piece.start * dtype.itemsize, out)
                yield out
            return
        for chunk, piece in record.slices:
            shard, start = self._state_part(record, role, chunk, piece)
            out = torch.empty(piece.stop - piece.start, dtype=torch.float32)
            shard.read(start, out)
            yield out

    def write_state(self, record: Record, role: str, value: torch.Tensor, first: int = 0) -> None:
        """Stores values from element `first` on, as fp32."""
        flat = value.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1)
        for chunk, piece in record.slices:
            begin, end = max(piece.start, first), min(piece.stop, first + flat.numel())
            if begin < end:
                shard, start = self._state_part(record, role, chunk, piece)
                shard.write(start + (begin - piece.start) * 4, flat[begin - first : end - first])

    # Moments. Each record has room for one set; a generation of it belongs to one optimizer.

    def generation(self, record: Record) -> int:
        """Which set of moments a parameter has: 0 before the first, while they are zero."""
        return self._generations.get(record.number, 0)

    def replace_moments(self, record: Record) -> None:
        """The moments are another set from here on, written next; whoever had those before has none."""
        self._generations[record.number] = self.generation(record) + 1

    def start_moments(self, record: Record) -> None:
        """Moments of zero, and no steps yet."""
        if self.generation(record):
            for role in MOMENTS:
                for chunk, piece in record.slices:
                    shard, start = self._state_part(record, role, chunk, piece)
                    shard.write(start, torch.zeros(piece.stop - piece.start))
        self.replace_moments(record)
        record.step = 0


def state_roles(own_master: bool) -> tuple[str, ...]:
    """The order of roles in a state record."""
    return MOMENTS if own_master else ("master", *MOMENTS)
