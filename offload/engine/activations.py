"""Boundary activations away from the device: out when their unit's forward begins, back before its backward.

[Note: activations away]
What leaves is a gradient-requiring tensor among a repeated unit's inputs. An `Away` takes its place in the arguments that the checkpoint
keeps, so it lives exactly as long as the graph that may need it, whatever becomes of that graph; its bytes in the host arena or in an extent
are free again when nothing refers to them. The move starts before the unit computes and reads the tensor while others may use it: the version that
it had is compared when it is needed again, and a changed one is refused, as a checkpoint refuses it. Everything else (masks, positions, small
tensors, a tensor that several units are given, what the user's own hooks save) stays with the checkpoint.
Boundaries are numbered as they leave. Backward needs them in the reverse of that order: each visit starts bringing back the newest ones that
are no newer than what is computed.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef

from offload.errors import OffloadError, SwapError
from offload.memory.arena import PAGE, round_up
from offload.memory.shard import Shard
from offload.memory.spans import Spans
from offload.memory.stalls import ACTIVATION
from offload.memory.swap import Extent, SwapSpace
from offload.transfer.device import Copy, Device, Put
from offload.transfer.frames import FramePool
from offload.transfer.queue import Transfer

log = logging.getLogger("offload")

SMALLEST = PAGE  # bytes below which a tensor stays
ALIGN = 64  # addresses are kept modulo this, as kernels may choose by them
AHEAD = 2  # boundaries on their way back at most


@dataclass(eq=False)
class _Resting:
    """Where the bytes of one tensor rest, the move out, and the file transfers that it and direct fetches started."""

    shard: Shard
    writes: list[Transfer]
    reads: list[Transfer]
    leaving: Transfer | None = None

    def settled(self) -> None:
        """Waits until all of it is there; raises what went wrong."""
        if self.leaving is not None:
            self.leaving.wait()
        for write in self.writes:
            write.wait()


class Pool:
    """Memory of one tier for tensors that come and go.

    Where there is no room `settle()` lets moves under way end, as these hold what was given up; then `more(nbytes)` makes another block, or raises.
    A block is a uint8 tensor on the host, or an extent of `space`.
    """

    def __init__(self, more: Callable[[int], torch.Tensor | Extent], settle: Callable[[], None], space: SwapSpace | None) -> None:
        self._more, self._settle, self._space = more, settle, space
        self._spans = Spans()
        self._blocks: list[np.ndarray[Any, Any] | Extent] = []
        self._returned: deque[tuple[int, int, int, list[Transfer], list[Transfer]]] = deque()

    def add(self, block: torch.Tensor | Extent) -> None:
        self._spans.add(block.numel() if isinstance(block, torch.Tensor) else block.nbytes)
        self._blocks.append(block.numpy() if isinstance(block, torch.Tensor) else block)

    def take(self, nbytes: int) -> _Resting:
        """Room for `nbytes`, which is free again when nothing holds the shard or a tensor that views it."""
        self._collect()
        size = round_up(nbytes, PAGE)
        at = self._spans.take(size)
        if at is None:
            self._settle()
            self._collect()
            at = self._spans.take(size)
        if at is None:
            self.add(self._more(size))
            at = self._spans.take(size)
        assert at is not None
        number, start = at
        block, writes, reads = self._blocks[number], list[Transfer](), list[Transfer]()
        if isinstance(block, Extent):
            shard = Shard("nvme", size, extent=Extent(block.file, block.offset + start, size), space=self._space)
            held: object = shard
        else:
            held = part = block[start : start + size]
            shard = Shard("host", size, memory=torch.from_numpy(part))
        # not the queues' own transfers: the traceback of a failed one would hold the shard
        weakref.finalize(held, self._returned.append, (number, start, size, writes, reads)).atexit = False
        return _Resting(shard, writes, reads)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, of those that the pool has."""
        self._collect()
        return self._spans.free_bytes

    def _collect(self) -> None:
        while self._returned:
            number, start, size, writes, reads = self._returned[0]  # stays there if a wait is interrupted
            moves = writes + reads
            for move in moves:  # what is under way to or from an extent must not meet what comes next
                with contextlib.suppress(SwapError):
                    move.wait()
            self._returned.popleft()
            if all(move.done for move in moves):  # else its device is stuck: it is not used again
                self._spans.give(number, start, size)

    def close(self) -> None:
        self._blocks, self._spans = [], Spans()
        self._returned.clear()


class _Outbox:
    """Staging buffers from which files are written: each is free again when its write is done."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._free, self._writing = list(buffers), deque[tuple[torch.Tensor, Transfer]]()
        self.nbytes = buffers[0].numel() if buffers else 0

    def write(self, shard: Shard, start: int, nbytes: int, fill: Callable[[torch.Tensor], None]) -> Transfer:
        buffer = self._free.pop() if self._free else self._oldest()
        try:
            fill(buffer)
            transfer = shard.write_async(start, buffer[:nbytes])
        except BaseException:
            self._free.append(buffer)
            raise
        self._writing.append((buffer, transfer))
        return transfer

    def _oldest(self) -> torch.Tensor:
        buffer, transfer = self._writing[0]
        with contextlib.suppress(SwapError):  # raised again where what was written is needed
            transfer.wait()
        if not transfer.done:
            transfer.wait()  # the device is stuck: says so
        self._writing.popleft()
        return buffer


@dataclass(frozen=True)
class _Form:
    """How a tensor lies in the bytes that were moved: `shift` bytes after their start, `span` bytes from its first element to its last."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    shift: int
    span: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGN, elements * tensor.element_size())

    @property
    def nbytes(self) -> int:
        return self.shift + self.span

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_strided((self.span // tensor.element_size(),), (1,)).view(torch.uint8)

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.shift : self.nbytes].view(self.dtype).as_strided(self.size, self.stride)


@dataclass(eq=False)
class Away:
    """A tensor that left the device, in the place where a checkpoint would keep it."""

    unit: str
    key: tuple[int, int]
    form: _Form
    source: TensorWeakRef
    watch: torch.Tensor  # shares the source's version counter and none of its memory
    version: int
    resting: _Resting | None
    stays: torch.Tensor | None = None
    coming: tuple[torch.Tensor, Transfer] | None = None
    task: int = -1  # the backward that last took it


@dataclass
class Counters:
    """`misses`: boundaries that were not on their way when they were needed."""

    misses: int = 0


class Activations:
    """Moves boundaries out and back. Until `open` nothing leaves. `in_slot` says whether a tensor views a parameter."""

    def __init__(self, device: Device, in_slot: Callable[[torch.Tensor], bool]) -> None:
        self.device, self._in_slot = device, in_slot
        self.counters = Counters()
        self._mark = 0, 0  # numbers of the newest boundary before this forward of the model, and of the newest
        self._collected = self._said_kept = False
        self._pool: Pool | None = None
        self._outbox = _Outbox([])
        self._frames: FramePool | None = None
        self._live: dict[int, list[weakref.ref[Away]]] = {}
        self._seen: weakref.WeakValueDictionary[int, Away] = weakref.WeakValueDictionary()
        self._shared: set[tuple[int, int]] = set()

    def open(self, pool: Pool, buffers: list[torch.Tensor]) -> None:
        """From now on boundaries rest in `pool`; the last of the staging `buffers` is for the way back from nvme, the others for the way out."""
        self._pool, self._outbox = pool, _Outbox(buffers[:-1])
        self._frames = FramePool(buffers[-1], 1, buffers[-1].numel()) if buffers else None

    def close(self) -> None:
        """Lets go of all memory; graphs that are still held cannot be run backward."""
        for away in self._alive():
            away.resting = away.coming = away.stays = None
        if self._pool is not None:
            self._pool.close()
        self._pool, self._frames, self._outbox = None, None, _Outbox([])

    @property
    def free_bytes(self) -> int:
        """Bytes reserved for boundaries that hold none now."""
        return self._pool.free_bytes if self._pool is not None else 0

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._mark, self._collected = (self._mark[1], self._mark[1]), False

    def settle(self) -> None:
        """Ends moves under way and lets go of graphs that nobody can reach any more, so that what they hold comes back."""
        self.device.settle()
        if torch._C._current_graph_task_id() < 0:  # what a backward that raised had queued is kept by autograd until the next backward
            with torch.enable_grad():
                x = torch.zeros((), requires_grad=True)
                torch.autograd.grad(x.clone(), x)
        if not self._collected:  # of an error that was raised, the traceback holds what it came through
            gc.collect()
            self._collected = True

    @property
    def mark(self) -> tuple[int, int]:
        """For `ahead`: what has left in this forward so far."""
        return self._mark

    # Out

    def leave(self, number: int, unit: str, args: Any, kwargs: Any, kept: bool = False) -> tuple[Any, Any]:
        """The arguments of a unit's forward with an `Away` for each tensor that leaves. BudgetError where no tier has room for it.

        `kept`: hooks of the model's own keep what is saved for backward, these arguments too, so that nothing leaves.
        """
        if self._pool is None:
            return args, kwargs
        if kept:
            if not self._said_kept:
                self._said_kept = True
                log.warning("%s runs inside a checkpoint, or hooks for saved tensors, of the model's own, which keep its inputs", unit)
            return args, kwargs
        self._mark = self._mark[0], self._mark[1] + 1
        count = itertools.count()

        def out(leaf: Any) -> Any:
            return self._away(leaf, unit, (number, next(count))) if isinstance(leaf, torch.Tensor) else leaf

        return _mapped((args, kwargs), out)  # type: ignore[no-any-return]

    def _away(self, tensor: torch.Tensor, unit: str, key: tuple[int, int]) -> Any:
        if not self._may_leave(tensor):
            return tensor
        before = self._seen.get(id(tensor))
        if before is not None and before.source() is tensor:  # another unit needs it too: it has to be here for both
            self._shared |= {key, before.key}
            before.stays, before.resting, before.coming = tensor.detach(), None, None
            return tensor
        if key in self._shared:
            return tensor
        assert self._pool is not None
        watch = tensor.detach()
        watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        with self.device.stalls.waiting(ACTIVATION):
            form = _Form.of(tensor)
            resting, raw = self._pool.take(form.nbytes), form.raw(tensor)
            resting.leaving = self.device.stow(raw, self._storing(raw, form, resting))
        away = Away(unit, key, form, TensorWeakRef(tensor), watch, watch._version, resting)
        self._live.setdefault(self._mark[1], []).append(weakref.ref(away, _dropper(self._live, self._mark[1])))
        self._seen[id(tensor)] = away
        return away

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or not tensor.requires_grad or not tensor.is_floating_point() or tensor.layout != torch.strided:
            return False
        if tensor.nbytes < SMALLEST or tensor.device != self.device.compute or tensor.is_neg() or self._in_slot(tensor):
            return False
        return _Form.of(tensor).span <= 2 * tensor.nbytes  # of a thin slice of something large, the gaps would move too

    def _storing(self, raw: torch.Tensor, form: _Form, resting: _Resting) -> Callable[[Put], None]:
        memory, outbox = resting.shard.memory, self._outbox
        if memory is not None:
            return lambda put: put(memory[form.shift : form.nbytes], raw)

        def store(put: Put) -> None:
            for start in range(0, resting.shard.nbytes, outbox.nbytes):
                first, last = max(start, form.shift), min(start + outbox.nbytes, form.nbytes)

                def fill(buffer: torch.Tensor, start: int = start, first: int = first, last: int = last) -> None:
                    put(buffer[first - start : last - start], raw[first - form.shift : last - form.shift])

                nbytes = min(outbox.nbytes, resting.shard.nbytes - start)
                resting.writes.append(outbox.write(resting.shard, start, nbytes, fill))

        return store

    # Back

    def ahead(self, mark: tuple[int, int]) -> None:
        """In backward, where what was computed up to that mark is next: the newest boundaries before it start to come back."""
        task, found = torch._C._current_graph_task_id(), 0
        for number in reversed(list(self._live)):
            if number > mark[1]:
                continue
            if number <= mark[0]:
                return
            for ref in self._live.get(number, ()):
                away = ref()
                if away is not None and away.task != task:
                    with contextlib.suppress(OffloadError):  # raised again where it is needed
                        self._fetch(away)
            found += 1
            if found == AHEAD:
                return

    def back(self, tree: Any) -> Any:
        """The arguments with every tensor on the device again. SwapError if one was not written or cannot be read."""
        return _mapped(tree, lambda leaf: self._tensor(leaf) if isinstance(leaf, Away) else leaf)

    def forget(self) -> None:
        """After a backward: what came back and was not needed goes."""
        for away in self._alive():
            away.coming = None

    def _alive(self) -> list[Away]:
        return [away for refs in list(self._live.values()) for ref in refs if (away := ref()) is not None]

    def _fetch(self, away: Away) -> None:
        """Starts bringing a tensor back, unless it is where the device computes from, or on its way."""
        resting = away.resting
        if resting is None or away.coming is not None or (resting.shard.memory is not None and self.device.direct):
            return
        target = self.device.scratch(resting.shard.nbytes)
        part = target if resting.shard.memory is None else target[: away.form.nbytes]
        with self.device.stalls.waiting(ACTIVATION):
            arriving = self.device.fetch([Copy(part, resting.shard, 0, torch.uint8)], self._frames, resting.settled, "activation")
        if self.device.direct:
            resting.reads.append(arriving)
        away.coming = target, arriving

    def _tensor(self, away: Away) -> torch.Tensor:
        if away.watch._version != away.version:
            raise OffloadError(
                f"an input of {away.unit} was changed in place after the unit was given it, and its backward computes from it again; "
                "write x = x + y for x += y there"
            )
        away.task = torch._C._current_graph_task_id()
        if away.stays is not None:
            return away.stays.detach().requires_grad_()
        if away.resting is None:
            raise OffloadError(f"the runtime that held an input of {away.unit} was closed")
        memory = away.resting.shard.memory if self.device.direct else None
        if memory is None:
            self.counters.misses += away.coming is None
            self._fetch(away)
            coming, away.coming = away.coming, None
            assert coming is not None
            memory, arriving = coming
            with self.device.stalls.waiting(ACTIVATION):
                arriving.wait()
        return away.form.tensor(memory).requires_grad_()


def _dropper(live: dict[int, list[weakref.ref[Away]]], number: int) -> Callable[[Any], None]:
    """Called when a boundary's last tensor is gone; holds nothing but the table."""

    def drop(ref: weakref.ref[Away]) -> None:
        if all(r() is None for r in live.get(number, ())):
            live.pop(number, None)

    return drop


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of each leaf in tuples, lists and dicts; a container in which nothing changed stays the same object."""
    if isinstance(tree, dict) and type(tree) is dict:
        values = {k: _mapped(v, change) for k, v in tree.items()}
        return values if any(values[k] is not v for k, v in tree.items()) else tree
    if type(tree) in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        items = [_mapped(v, change) for v in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return change(tree)
