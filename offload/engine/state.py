"""Values at rest: parameters, masters and moments, wherever their shards are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from offload.engine.record import DTYPES, Record, Unit
from offload.memory.shard import Shard
from offload.planner.layout import Slice


class State:
    """Reads and writes parameters, masters and moments. `before` runs first on each access (updates under way, initialisation);
    `refresh(record, value)` puts a newly written value where the device may already have a copy of it."""

    def __init__(
        self,
        units: list[Unit],
        compute: torch.dtype,
        own_master: bool,
        before: Callable[[Record], None],
        refresh: Callable[[Record, torch.Tensor], None],
    ) -> None:
        self.units, self.compute, self.own_master = units, compute, own_master
        self._before, self._refresh = before, refresh

    def parameter_shard(self, record: Record) -> tuple[Shard, int, torch.dtype]:
        """The shard, the byte where the parameter starts in it, and the dtype stored."""
        unit = self.units[record.unit]
        dtype = DTYPES[unit.layout.flats[record.flat].dtype]
        return unit.parameters[record.flat], record.offset * dtype.itemsize, dtype

    def _state_part(self, record: Record, role: str, chunk: int, piece: Slice) -> tuple[Shard, int]:
        unit = self.units[record.unit]
        trained = unit.layout.trained
        assert trained is not None
        whole = trained.chunks[chunk]
        order = state_roles(self.own_master).index(role)
        return unit.states[chunk], (order * whole.numel + piece.offset - whole.start) * 4

    def read_value(self, record: Record) -> torch.Tensor:
        """A fresh plain tensor of the parameter's shape and dtype."""
        self._before(record)
        if record.trained and not self.own_master and record.dtype != self.compute:
            return self.read_state(record, "master").to(record.dtype).view(record.shape)
        shard, start, dtype = self.parameter_shard(record)
        out = torch.empty(record.numel, dtype=dtype)
        shard.read(start, out)
        return out.to(record.dtype).view(record.shape)

    def write_value(self, record: Record, value: torch.Tensor, *, ready: bool = True) -> None:
        """Stores a value of the parameter's dtype: in the master, and in the copy that is computed with. `ready=False` while initialising."""
        if ready:
            self._before(record)
        record.version += 1
        flat = value.detach().to(device="cpu", dtype=record.dtype).contiguous().view(-1)
        if record.trained and not self.own_master:
            self.write_state(record, "master", flat.float())
        shard, start, dtype = self.parameter_shard(record)
        stored = flat.to(dtype)
        shard.write(start, stored)
        self._refresh(record, stored)

    def read_state(self, record: Record, role: str) -> torch.Tensor:
        """fp32 values of "master", "exp_avg" or "exp_avg_sq", flat. Where the parameter is its own master, "master" reads it."""
        if role == "master" and self.own_master:
            return self.read_value(record).float().view(-1)
        self._before(record)
        out = torch.empty(record.numel, dtype=torch.float32)
        for chunk, piece in record.slices:
            shard, start = self._state_part(record, role, chunk, piece)
            shard.read(start, out[piece.start : piece.stop])
        return out

    def stream(self, record: Record, role: str) -> Iterator[torch.Tensor]:
        """The values of a role in order, at most a chunk at a time: fp32 ("value": the stored copy in its own dtype)."""
        self._before(record)
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

    def write_state(self, record: Record, role: str, value: torch.Tensor) -> None:
        flat = value.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1)
        for chunk, piece in record.slices:
            shard, start = self._state_part(record, role, chunk, piece)
            shard.write(start, flat[piece.start : piece.stop])


def state_roles(own_master: bool) -> tuple[str, ...]:
    """The order of roles in a state record."""
    return ("exp_avg", "exp_avg_sq") if own_master else ("master", "exp_avg", "exp_avg_sq")
