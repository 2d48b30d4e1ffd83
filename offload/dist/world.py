"""One rank's view of all ranks: collectives that say who is late or gone, and small values shared.

[Note: in step]
Ranks that do different things would wait for each other until they are late. So whatever is shared goes by one channel, with its name, and ranks
compare names: who reads a value that is divided, steps, saves, or begins a forward or backward, finds at once that another does something else. Parts
of a world use its channel too: two ranks meet in the order of the program, whatever world each takes the other to be in. Units that are gathered are
compared likewise, in a channel of their own for each model, as its fetches have a thread of their own.

torch.distributed is met in this package alone, and only where there are several ranks. On CPUs collectives are messages between ranks
(`link.py`) and sums in the order of ranks (`sums.py`), made by whoever waits for them; on CUDA they are NCCL's.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from offload.dist.board import Board
from offload.dist.devices import check_devices, device_name
from offload.dist.link import Link, Lost
from offload.dist.mesh import beside, column, equal_rows, rows_of
from offload.dist.sums import Spaces, Sum, SumForAll
from offload.errors import ConfigError, RankError

TIMEOUT = 600.0  # seconds
TIMEOUT_VARIABLE = "OFFLOAD_COLLECTIVE_TIMEOUT"
_SHARED, _GATHERED = "what ranks tell each other", "what ranks tell each other, of gathers"  # channels
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_HEAD = 256  # bytes of what is shared that come at once
_NOTED = 2.0  # seconds between a rank's notes
_LONG = 60.0  # seconds of a wait that is told of


class _Waitable(Protocol):
    def wait(self) -> object: ...


class Work:
    """A collective under way; its tensors are its until `wait` returns. On CUDA the wait is the current stream's."""

    def __init__(self, world: World | None, what: str, parts: Sequence[_Waitable] = (), then: Callable[[], object] | None = None) -> None:
        self._world, self._what, self._parts, self._then = world, what, parts, then

    def wait(self) -> None:
        """Raises `RankError`, naming this rank, the other where it is known, what was waited for and how long. A second call returns at once."""
        parts, self._parts = self._parts, ()
        if parts and self._world is not None:
            self._world._wait(self._what, parts)
        then, self._then = self._then, None
        if then is not None:
            then()


class World:
    """Rank `rank` of `size`; `local_rank` of `local_size` on this machine.

    State is divided among the ranks of `within`: all, or, where there are `replicas` groups of more than one rank, those of this rank's group. Then
    `across` is those that have the same share as this one, in the order of groups, else None. Both are worlds over the same connections, whose ranks
    are named in errors as this one counts them, and end with it. See [Note: groups]. Each prepared model has its own, `of_model`.

    `moved` counts by kind the bytes that this rank must receive by the book: (n-1)/n of the whole buffer, for an all-reduce twice that.
    Collectives of one name must be begun in one order on all ranks; on CPUs those of different names need not be, but each thread must wait for its
    reductions in one order. Any thread may begin them, while `share` and what is made of it are one thread's at a time.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = 0, 1
        self.moved: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.replicas = 1
        self.across: World | None = None
        self._within: World | None = None
        self._home: World | None = None  # the world that this is a part of
        self._counting = threading.Lock()
        self._closed, self._owner, self._nccl, self._group = False, False, False, None  # type: tuple[bool, bool, bool, Any]
        self._process = os.getpid()
        self._rows: list[list[int]] = []  # that this world is divided into
        self._model, self._of = 1, ""  # which model's this is, and what its names end with
        self._models: dict[int, bool] = {}  # of a home: by number, whether a model has it
        self._views: dict[tuple[int, str], World] = {}

    @classmethod
    def alone(cls) -> World:
        """Rank 0 of 1, for which every collective is a copy or nothing."""
        return cls()

    @classmethod
    def current(cls, mesh: Any = None, device: str | None = None) -> World:
        """That of a DeviceMesh (`rows_of`), of an initialised default group, or of torchrun's environment, which initialises one; else `alone()`.

        Every call without a mesh gives the same one until it is closed, and so do those with meshes that are alike. `device`: "cuda" or "cpu", what
        collectives will be of; unless given, both where there is a GPU. ConfigError for meshes of other kinds and half an environment.
        """
        return cls._of_job(device) if mesh is None else _of_mesh(mesh, device)

    @classmethod
    def beside(cls, mesh: Any, tensor: Any, device: str | None) -> tuple[World, World]:
        """Of ranks among which parameters are divided over the 1-D mesh `tensor` already: the world of `mesh`, or of this rank alone where all ranks
        are of `tensor`, and that of `tensor`. Both are parts of one. ConfigError as in `current`. A collective."""
        return _of_two_meshes(mesh, tensor, device)

    @classmethod
    def _of_job(cls, device: str | None) -> World:
        distributed = sys.modules.get("torch.distributed")
        group = distributed.group.WORLD if distributed is not None and distributed.is_available() else None
        stale = not _default or _default[0]._closed or _default[0]._group is not group
        if stale or (_wants_nccl(device) and not _default[0]._nccl):
            world = _of_environment(device)
            if world.size == 1:
                return world
            _default[:] = [world]
        return _default[0]

    def divide(self, replicas: int) -> None:
        """This world is of so many groups of consecutive ranks from now on. ConfigError where they would not be equal. A collective."""
        self._divide(equal_rows(self.size, replicas))

    @property
    def within(self) -> World:
        return self if self._within is None else self._within

    @property
    def home(self) -> World:
        """The world that this is a part of, or this."""
        return self if self._home is None else self._home

    def name(self, rank: int) -> int:
        """One of these ranks as the job counts it."""
        return self._ranks[rank] if self.size > 1 else rank

    def of_machine(self, values: Sequence[int]) -> int:
        """Of all ranks' values, in the order of ranks, the sum of those on this rank's machine."""
        return sum(value for value, host in zip(values, self._hosts, strict=True) if host == self._hosts[self.rank])

    def gather_into(self, full: torch.Tensor, own: torch.Tensor, what: str, reducing: bool = False, ordered: bool = False) -> Work:
        """Starts to fill `full` [size * S] with every rank's `own` [S], same dtype and device, which may be the part of it that is this rank's.

        `reducing`: in the order of reductions, of which it is the end. `ordered`: all such are made in one order on all ranks, else the wait for one
        is a RankError.
        """
        if full.numel() != self.size * own.numel() or full.dtype != own.dtype:
            raise ValueError(f"{what}: {own.numel()} {own.dtype} of each of {self.size} ranks is not {full.numel()} {full.dtype}")
        self._count("all_gather", full)
        if self.size == 1:
            if full.data_ptr() != own.data_ptr():
                full.copy_(own)
            return Work(None, what)
        name = f"all-gather of {what}{self._of}"
        if full.is_cuda:
            import torch.distributed as dist

            group = self._reduces if reducing else self._gathers
            if ordered:  # compared before it is launched: NCCL would take what another rank gathers for this, or wait for ever
                self._work(name, lambda: [_Order(self, name)]).wait()
            return self._work(name, lambda: [dist.all_gather_into_tensor(full, own, group=group, async_op=True)])
        link = self._sum_link if reducing else self._gather_link
        return self._work(name, lambda: [*([_Order(self, name)] if ordered else []), *link.gather(list(full.view(self.size, -1)), own, name)])

    def reduce_scatter(self, own: torch.Tensor, full: torch.Tensor, what: str) -> Work:
        """Starts to set `own` [S], in a dtype of its own, to the sum over ranks of this rank's part of `full` [size * S]; it may be that part.

        Summed in the order of ranks, in fp32 at least, on CPUs; as NCCL does on CUDA.
        """
        if full.numel() != self.size * own.numel():
            raise ValueError(f"{what}: {full.numel()} elements are not {own.numel()} of each of {self.size} ranks")
        self._count("reduce_scatter", full)
        if self.size == 1:
            if full.data_ptr() != own.data_ptr():
                own.copy_(full)
            return Work(None, what)
        name = f"reduce-scatter of {what}{self._of}"
        if full.is_cuda:
            import torch.distributed as dist

            out = own if own.dtype == full.dtype else torch.empty_like(own, dtype=full.dtype)
            work = self._work(name, lambda: [dist.reduce_scatter_tensor(out, full, group=self._reduces, async_op=True)])
            work._then = (lambda: own.copy_(out)) if out is not own else None
            return work
        return self._work(name, lambda: [Sum(self._sum_link, self._spaces, list(full.view(self.size, -1)), own, name)])

    def all_reduce(self, x: torch.Tensor, what: str, op: Literal["sum", "max"] = "sum") -> Work:
        """Starts to set `x`, contiguous, to the sum or the largest over ranks, of the same bits on all; sums as in `reduce_scatter`."""
        self._count("all_reduce", x)
        if self.size == 1:
            return Work(None, what)
        name = f"all-reduce of {what}{self._of}"
        if x.is_cuda:
            import torch.distributed as dist

            operation = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            return self._work(name, lambda: [dist.all_reduce(x, operation, group=self._reduces, async_op=True)])
        return self._work(name, lambda: [SumForAll(self._sum_link, self._spaces, x.view(-1), name, op == "max")])

    def send(self, x: torch.Tensor, rank: int, what: str) -> Work:
        """Starts to send `x`, contiguous, on the CPU, to a rank, which receives it by this name; those of one name come in order."""
        return self._work(what, lambda: [self._talk.send(x, rank, what)])

    def receive(self, x: torch.Tensor, rank: int, what: str) -> Work:
        """Starts to fill `x`, contiguous, on the CPU, with as many bytes that a rank sends by this name."""
        return self._work(what, lambda: [self._talk.receive(x, rank, what)])

    def share(self, value: Any, what: str = "values") -> list[Any]:
        """Every rank's `value`, as JSON has it (a tuple comes as a list), by rank. Blocks; not for what is large."""
        return [json.loads(text) for text in self._exchange(json.dumps(value), what)] if self.size > 1 else [value]

    def broadcast(self, value: Any, source: int = 0, what: str = "a decision") -> Any:
        """Rank `source`'s `value`, as JSON has it; that of others is not looked at."""
        return self.share(value if self.rank == source else None, what)[source]

    def barrier(self, what: str) -> None:
        """Returns when every rank has come to it."""
        self.share(None, what)

    def agree(self, value: Any, what: str) -> None:
        """ConfigError, on all ranks, unless all give the same `value`."""
        self._check_alike(self.share(value, what), [0] * self.size, what)

    def agree_on_machines(self, value: Any, what: str) -> None:
        """As `agree`, among those of each machine, which may have names of its own for one thing."""
        if self.size > 1:
            self._check_alike(self.share(value, what), [self._hosts.index(host) for host in self._hosts], what)

    def _check_alike(self, found: Sequence[Any], with_ranks: Sequence[int], what: str) -> None:
        for rank, (other, first) in enumerate(zip(found, with_ranks, strict=True)):
            if other != found[first]:
                names = self._ranks[first], self._ranks[rank]
                raise ConfigError(
                    f"{what} differs between ranks: {found[first]!r} on rank {names[0]}, {other!r} on rank {names[1]}; give all ranks the same"
                )

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks what ends this one, and lets go of whatever they or this one wait for. Nothing is collective afterwards."""
        if self._home is not None:
            self._home.fail(error)
        elif self.size > 1 and not self._closed:
            self._board.fail(f"{type(error).__name__}: {' '.join(str(error).split())}")
            self._cut()

    def close(self) -> None:
        """Ends this rank's connections; the other ranks' collectives with it fail. More calls do nothing, nor do those of a part."""
        if self.size > 1 and not self._closed and self._home is None and os.getpid() == self._process:
            self._closed = True
            atexit.unregister(self._ending)
            self._at_exit.detach()
            self._board.close()
            if self._owner:
                import torch.distributed as dist

                if dist.is_initialized():
                    dist.destroy_process_group()

    def _ending(self) -> None:
        """As the process ends: what ends it, if an exception does, is told to the others, and nobody here waits for them any more."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and os.getpid() == self._process:
            self.fail(error)

    # ---- several ranks

    def _connect(self, ranks: list[int], device: str | None) -> None:
        """Makes the groups; all of `ranks` do at once."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self._timeout, self._group, self._ranks = _timeout(), dist.group.WORLD, ranks
        _connected[0] += 1
        self._nccl = nccl = _wants_nccl(device)

        def group(backend: str) -> Any:
            return dist.new_group(ranks, timeout=_patience(), backend=backend, use_local_synchronization=True)

        self._gathers, self._reduces = (group("cpu:gloo,cuda:nccl" if nccl else "gloo") for _ in range(2))
        self._gather_link, self._sum_link, self._talk = (
            Link(g, self.rank, self.size, self._timeout) for g in (self._gathers, self._reduces, group("gloo"))
        )  # fmt: skip
        self._links = [self._gather_link, self._sum_link, self._talk]
        store = PrefixStore(f"offload/{_start()}/{_connected[0]}/{ranks}", _get_default_store())
        self._board = Board(store, ranks[self.rank], min(_NOTED, self._timeout / 4), min(_LONG, self._timeout / 2), self._cut)
        # Closed at the end of the process by itself: the board's thread must not be within torch when Python ends, which aborts the process. That is
        # after all that is made later and may still wait for others has ended; `_ending` comes before any of it.
        self._at_exit = weakref.finalize(World, self.close)
        atexit.register(self._ending)
        self._spaces = Spaces(self.size)
        self._locate(self.share(os.environ.get("GROUP_RANK") or socket.gethostname(), "names of machines"))
        if nccl:
            check_devices(self.share(device_name(), "devices"), [self._ranks[rank] for rank in range(self.size)])

    def _locate(self, hosts: list[str]) -> None:
        """`hosts`: every rank's machine."""
        self._hosts = hosts
        self.local_rank, self.local_size = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])

    def _divide(self, rows: Sequence[Sequence[int]]) -> None:
        """As `divide`, into these groups of as many ranks each."""
        self.replicas, self._within, self.across = len(rows), None, None
        self._rows = [list(row) for row in rows]
        if 1 < len(rows) < self.size:
            self._within = self._part(next(row for row in rows if self.rank in row))
            self.across = self._part(column(rows, self.rank))

    def _part(self, members: Sequence[int], of: str = "") -> World:
        """Some of this world's ranks in this order, `of` a model. All of them make it at once."""
        part = World(members.index(self.rank), len(members))
        part._home, part._timeout, part._board, part._spaces = self.home, self._timeout, self._board, Spaces(part.size)
        part._links = [link.among(members) for link in self._links]
        part._gather_link, part._sum_link, part._talk = part._links
        part._ranks, part._nccl = [self._ranks[member] for member in members], self._nccl
        part._of = of or self._of
        part._locate([self._hosts[member] for member in members])
        if self._nccl:
            import torch.distributed as dist

            part._gathers, part._reduces = (
                dist.new_group(part._ranks, timeout=_patience(), backend="nccl", use_local_synchronization=True) for _ in range(2)
            )
        return part

    def _cut(self) -> None:
        for link in self._links:
            link.cut()

    def _count(self, kind: str, buffer: torch.Tensor) -> None:
        home = self.home
        with home._counting:
            home.moved[kind] += buffer.nbytes * (self.size - 1) // self.size * (2 if kind == "all_reduce" else 1)

    def _work(self, name: str, start: Callable[[], Sequence[_Waitable]]) -> Work:
        self._board.at = f"the {name}"
        try:
            return Work(self, f"the {name}", start())
        except Lost as lost:
            raise self._error(f"the {name}", lost.peer, lost.late, lost.seconds) from None

    def _wait(self, what: str, parts: Sequence[_Waitable]) -> None:
        board, start = self._board, time.monotonic()
        try:
            with board.waiting(what, self._ranks):
                for part in parts:
                    part.wait()
        except Lost as lost:
            raise self._error(what, lost.peer, lost.late, lost.seconds) from None
        except RuntimeError as error:  # NCCL's
            raise self._error(what, None, time.monotonic() - start >= 0.95 * self._timeout, time.monotonic() - start) from error

    def _exchange(self, text: str, what: str) -> list[str]:
        """Every rank's text. RankError, on all ranks, where one is at something else. See [Note: in step]."""
        what += self._of
        name, data = what.removeprefix("the ").encode(), text.encode()
        raw = struct.pack("<2I", len(name), len(data)) + name + data
        own = torch.frombuffer(bytearray(raw.ljust(_HEAD, b"\0")), dtype=torch.uint8)
        heads = list(torch.empty(self.size, _HEAD, dtype=torch.uint8, device="cpu"))
        self._work(what, lambda: self._talk.gather(heads, own[:_HEAD], _SHARED)).wait()
        sizes = [struct.unpack_from("<2I", bytes(head[:8].numpy())) for head in heads]
        # before more is awaited, which who is at something else does not send; of a long name the rest is compared below
        self._check_step([_decoded(head[8 : 8 + n]) for head, (n, _) in zip(heads, sizes, strict=True)])
        rests = [torch.empty(max(0, 8 + sum(size) - _HEAD), dtype=torch.uint8, device="cpu") for size in sizes]
        if any(rest.numel() for rest in rests):
            self._work(what, lambda: self._talk.gather(rests, own[_HEAD:], _SHARED)).wait()
        told = [bytes(torch.cat(both).numpy())[8:] for both in zip(heads, rests, strict=True)]
        self._check_step([f"the {got[:n].decode()}" for got, (n, _) in zip(told, sizes, strict=True)])
        return [got[n : n + m].decode() for got, (n, m) in zip(told, sizes, strict=True)]

    def _check_step(self, at: Sequence[str]) -> None:
        """RankError unless all ranks are at the same thing."""
        other = next((rank for rank in range(self.size) if at[rank] != at[0]), None)
        if other is not None:
            raise RankError(
                f"ranks do different things: rank {self._ranks[0]} is at {at[0]}, rank {self._ranks[other]} at {at[other]}. All must make the same "
                "calls in the same order: what one is to do alone (to evaluate, to save, to read what is divided among ranks) all have to do"
            )

    def _error(self, what: str, peer: int | None, late: bool, seconds: float) -> RankError:
        """`peer` as the whole world counts it; ranks are named as the job counts them."""
        if self._home is not None:
            return self._home._error(what, peer, late, seconds)
        failed, own, other = self._board.failure(), self._ranks[self.rank], self._ranks[peer] if peer is not None else None
        if failed is not None:
            text = f"rank {failed[0]} has failed: {failed[1]}; so {what} cannot be on rank {own} after {seconds:.0f} s"
        elif other is None:
            text = f"{what} failed on rank {own} after {seconds:.0f} s"
        elif late:
            last = self._board.last(other)
            text = (
                f"rank {other} has not come to {what}, for which rank {own} has waited {seconds:.0f} s; "
                f"{f'it was last at {last}' if last else 'it has not told where it is'}. {TIMEOUT_VARIABLE} sets the seconds to wait"
            )
        else:
            text = f"rank {own} has lost its connection to rank {other} in {what}, after {seconds:.0f} s: its process has ended, or the network"
        error = RankError(text)
        error.told = failed is not None
        return error


class _Order:
    """What each rank gathers now, by name, started to be told; the wait compares."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        own = torch.frombuffer(bytearray(name.encode()[-_HEAD:].ljust(_HEAD, b"\0")), dtype=torch.uint8)
        self._names = list(torch.empty(world.size, _HEAD, dtype=torch.uint8, device="cpu"))
        self._messages = world._talk.gather(self._names, own, f"{_GATHERED}{world._of}")

    def wait(self) -> None:
        """Raises `Lost`, RankError."""
        for message in self._messages:
            message.wait()
        self._world._check_step([_decoded(name) for name in self._names])


def of_model(world: World) -> World:
    """The world for one more model, until it is left: what models gather and reduce in threads of their own is not taken for another's.

    A model has the lowest number that no rank's models have; the first is the world's own. A collective.
    """
    home = world.home
    taken = set().union(*world.share([number for number, held in home._models.items() if held], "models that are prepared"))
    number = next(number for number in range(1, len(taken) + 2) if number not in taken)
    home._models[number] = True
    if number == 1:
        return world
    view = home._views.get((number, str(world._rows)))
    if view is None:
        of = f" of model {number}"
        view = home._views[number, str(world._rows)] = world._part(range(world.size), of)
        view._model, view.moved = number, world.moved
        if world._rows:
            view._divide(world._rows)
    return view


def leave(world: World) -> None:
    """The model whose world this is was closed: its number is another's to take."""
    world.home._models[world._model] = False


def _decoded(name: torch.Tensor) -> str:
    return f"the {bytes(name.numpy()).rstrip(bytes(1)).decode(errors='replace')}"


def _wants_nccl(device: str | None) -> bool:
    import torch.distributed as dist

    return device != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()


_default: list[World] = []  # that of the whole job, while it is open
_meshes: dict[tuple[str | None, str], tuple[World, ...]] = {}  # by device and ranks
_connected = [0]  # how many there were: the same on all ranks


def _timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"{TIMEOUT_VARIABLE} = {text!r}: give seconds, more than 0")
    return seconds


def _patience() -> timedelta:
    """For connections to be made, which takes a while on a machine that is busy."""
    return timedelta(seconds=max(_timeout(), 120.0))


def _start() -> str:
    """Which start of the job's ranks this is."""
    return f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {os.environ.get('WORLD_SIZE', '')}"


def _of_mesh(mesh: Any, device: str | None) -> World:
    rows = rows_of(mesh)
    ranks = sorted(rank for row in rows for rank in row)
    if len(ranks) == 1:
        return World.alone()

    def divide(world: World) -> tuple[World, ...]:
        world._divide([[ranks.index(rank) for rank in row] for row in rows])
        return (world,)

    return _made((device, str(rows)), ranks, device, divide)[0]


def _of_two_meshes(mesh: Any, tensor: Any, device: str | None) -> tuple[World, World]:
    import torch.distributed as dist

    own, (others,) = dist.get_rank(), rows_of(tensor)
    if mesh is None and len(others) < dist.get_world_size():
        raise ConfigError(f"parameters are DTensors over ranks {others}: say which ranks divide the data, as prepare(..., mesh=mesh['dp'])")
    rows = rows_of(mesh) if mesh is not None else [[own]]
    ranks = beside(rows, others, own, dist.get_world_size())
    if len(ranks) == 1:
        return World.alone(), World.alone()

    def divide(whole: World) -> tuple[World, ...]:
        members = sorted(rank for row in rows for rank in row)
        data = whole._part([ranks.index(rank) for rank in members])
        data._divide([[members.index(rank) for rank in row] for row in rows])
        return data, whole._part([ranks.index(rank) for rank in others])

    data, beside_it = _made((device, f"{rows} beside {others}"), ranks, device, divide)
    return data, beside_it


def _made(key: tuple[str | None, str], ranks: list[int], device: str | None, divide: Callable[[World], tuple[World, ...]]) -> tuple[World, ...]:
    """A world of these ranks of the job, or parts of it; those of the last call with this key, while they are open."""
    import torch.distributed as dist

    there = _meshes.get(key)
    if there is None or there[0].home._closed or there[0].home._group is not dist.group.WORLD:
        world = World(ranks.index(dist.get_rank()), len(ranks))
        world._connect(ranks, device)
        there = _meshes[key] = divide(world)
    return there


def _of_environment(device: str | None) -> World:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        world = World(distributed.get_rank(), distributed.get_world_size())
    else:
        size, rank = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
        if size in ("", "0", "1"):
            return World.alone()
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing or not size.isdigit() or not rank.isdigit():
            raise ConfigError(
                f"WORLD_SIZE = {size!r} without {', '.join(missing) or 'a RANK that is a number'}: start ranks with torchrun, or unset it"
            )
        world = World(int(rank), int(size))
        with _mortal():
            _initialise(world, device)
    if world.size > 1:
        with _mortal():
            world._connect(list(range(world.size)), device)
    return world


@contextmanager
def _mortal() -> Iterator[None]:
    """Whatever handles SIGTERM, it ends this process at once: it waits for others within torch, where Python's handlers would not be heard."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _initialise(world: World, device: str | None) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    nccl = _wants_nccl(device)
    if nccl:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", world.rank)) % torch.cuda.device_count())
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=_patience()))
        # torchrun keeps one store when it starts ranks again: what those before left in it must not be taken for news
        store = PrefixStore(_start(), store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", store=store, rank=world.rank, world_size=world.size, timeout=_patience())
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(f"rank {world.rank} of {world.size} finds no others at {where}: {' '.join(str(error).split())}") from None
    world._owner = True
