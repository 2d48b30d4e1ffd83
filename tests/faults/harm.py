"""Faults: each, called in a process that is about to run a command, makes something happen to it later on."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from offload import _core
from offload.checkpoint import blocks, disk, load, save
from offload.checkpoint.manifest import Hashed
from offload.memory import swap
from offload.memory.swap import SwapSpace
from offload.train import rundir
from offload.train.loop import Trainer

FIRST = 5  # the step before which faults set in: the first one of a run that goes on from its fourth
_EXT4_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2  # as if the power went: what is not on the drive is lost


def _before_step(act: Callable[[Trainer], None], number: int = FIRST) -> None:
    real = Trainer._step

    def step(self: Trainer, index: int) -> None:
        if index + 1 == number:
            self._runtime.synchronize()
            act(self)
        real(self, index)

    Trainer._step = step  # type: ignore[method-assign]


def _armed(module: Any, name: str, act: Callable[..., Any], at_once: bool = False) -> None:
    """From the fault's step on (or at once) `module.name` is `act(real, *args)`."""
    real = getattr(module, name)

    def arm(_: object = None) -> None:
        setattr(module, name, lambda *args, **named: act(real, *args, **named))

    arm() if at_once else _before_step(arm)


@dataclass
class Sent:
    """A signal comes, `times` times, within a swap read or write, a save, or while a checkpoint is loaded."""

    number: int
    place: str
    times: int = 1

    def __call__(self, pipe: Connection) -> None:
        if self.place in ("swap read", "swap write"):
            _armed(SwapSpace, self.place.removeprefix("swap "), self._after)
        elif self.place == "resume":
            _armed(load, "_read", self._after, at_once=True)
        elif self.number == signal.SIGKILL:
            _armed(disk, "write", self._halfway)
        else:
            _armed(Hashed, "listed", self._after)

    def _after(self, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        done = real(*args, **named)
        self._send()
        return done

    def _halfway(self, real: Callable[..., Any], file: FileIO, data: Any) -> None:
        real(file, memoryview(data)[: memoryview(data).nbytes // 2])
        self._send()

    def _send(self) -> None:
        while self.times:
            assert self.number == signal.SIGKILL or threading.current_thread() is threading.main_thread()
            self.times -= 1
            os.kill(os.getpid(), self.number)


@dataclass
class Pauses:
    """It waits, before a step, within the save after it, or while a checkpoint is loaded, until it is answered."""

    place: str = "step"

    def __call__(self, pipe: Connection) -> None:
        def wait(*_: object) -> None:
            pipe.send("here")
            pipe.recv()

        waited: list[None] = []

        def once(real: Callable[..., Any], *args: Any) -> Any:
            if not waited:
                waited.append(wait())
            return real(*args)

        if self.place == "step":
            _before_step(wait)
        elif self.place == "save":
            _armed(Hashed, "listed", once)
        else:
            _armed(load, "_read", once, at_once=True)


@dataclass
class SwapFails:
    """Reads or writes of swap files fail with `number`, from the fault's step on or from the first."""

    side: str
    number: int
    at_once: bool = False

    def __call__(self, pipe: Connection) -> None:
        engines: list[Any] = []

        def opened(engine: str = "auto", queue_depth: int = 32, block: int | str = "1MiB", stuck_after: float = swap.STUCK_AFTER) -> Any:
            engines.append(_core.Engine("faults", queue_depth, swap.parse_size(block), stuck_after))
            if self.at_once:
                fail()
            return engines[-1]

        def fail(_: object = None) -> None:
            for engine in engines:
                engine.fail(**{self.side: self.number})

        swap.open_engine = opened
        if not self.at_once:
            _before_step(fail)


@dataclass
class SaveFails:
    """The `count`-th write, sync or rename of the next save fails with `number`."""

    what: str
    number: int
    count: int = 1

    def __call__(self, pipe: Connection) -> None:
        _armed(disk, self.what, self._fail)

    def _fail(self, real: Callable[..., Any], *args: Any) -> Any:
        self.count -= threading.current_thread().name != "offload-metrics"
        if not self.count:
            raise OSError(self.number, os.strerror(self.number))
        return real(*args)


@dataclass
class Fills:
    """The disk that a file is on is full but for `left` bytes, from the fault's step on."""

    file: Path
    left: int

    def __call__(self, pipe: Connection) -> None:
        _before_step(lambda _: fill(self.file, self.left))


def fill(file: Path, left: int) -> None:
    size = 0
    with open(file, "wb", buffering=0) as out:
        try:
            while n := out.write(bytes(4096)):
                size += n
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        out.truncate(max(0, size - left))


@dataclass
class MetricsFill:
    """The disk that metrics are written to is full from the fault's step on."""

    def __call__(self, pipe: Connection) -> None:
        def fill(trainer: Trainer) -> None:
            for descriptor in os.listdir("/proc/self/fd"):
                with suppress(FileNotFoundError):
                    if os.readlink(f"/proc/self/fd/{descriptor}") == str(trainer._directory.path / rundir.METRICS):
                        os.dup2(os.open("/dev/full", os.O_WRONLY), int(descriptor))

        _before_step(fill)


@dataclass
class Spoils:
    """What is on swap is flipped, a bit in each block, or cut."""

    directory: Path
    how: str

    def __call__(self, pipe: Connection) -> None:
        _before_step(self._spoil)

    def _spoil(self, trainer: Trainer) -> None:
        (path,) = self.directory.glob("offload-*/state.swap")
        if self.how == "cut":
            os.truncate(path, 0)
            return
        with open(path, "r+b") as file:
            for at in range(100, path.stat().st_size, 4096):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 4]))
            file.flush()
            os.fsync(file.fileno())


@dataclass
class Unreadable:
    """Files of checkpoints whose path ends like this cannot be read."""

    end: str

    def __call__(self, pipe: Connection) -> None:
        real = disk.opened

        @contextmanager
        def opened(path: Path) -> Iterator[FileIO]:
            with real(path) as file:
                yield _Broken(os.dup(file.fileno())) if str(path).endswith(self.end) else file

        disk.opened = opened


class _Broken(FileIO):
    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass
class LoadFails:
    """The checkpoint that was verified cannot be read a second time."""

    def __call__(self, pipe: Connection) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        _armed(load, "_read", fail, at_once=True)


EVENTS = [(disk, "write"), (disk, "write_at"), (disk, "sync"), (disk, "rename"), (disk, "exchange"), (SwapSpace, "read"),
          (SwapSpace, "write"), (rundir.RunDirectory, "write"), (rundir.RunDirectory, "check")]  # fmt: skip


@dataclass
class Dies:
    """The process is killed before or after its `count`-th event of any kind; `told`: how many there were. `cuts`: the power of this mount too.
    `large`: checkpoints are written as large ones are, in blocks, over those that were deleted."""

    count: int
    told: int = 0
    cuts: Path | None = None
    large: bool = False

    def __call__(self, pipe: Connection) -> None:
        if self.large:
            save.FILE_LEAST, blocks.block_bytes = 1, lambda room: 8192  # type: ignore[assignment]
        for owner, name in EVENTS:
            _armed(owner, name, self._event, at_once=True)

    def _event(self, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._pass()
        done = real(*args, **named)
        self._pass()
        return done

    def _pass(self) -> None:
        self.told += 1
        if self.told != self.count:
            return
        if self.cuts is not None:
            mount = os.open(self.cuts, os.O_RDONLY)
            fcntl.ioctl(mount, _EXT4_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        os.kill(os.getpid(), signal.SIGKILL)
