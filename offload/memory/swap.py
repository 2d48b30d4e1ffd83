"""Swap files: one of the user's own (`SwapFile`), and a runtime's share of the drives it was given (`SwapSpace`).

A transfer between memory and a file is asynchronous: `read` and `write` return at once, and the transfer's `wait()` returns when it is done or
raises its `SwapError`. Transfers of one file are started in order, but may finish in any: what must see another's bytes waits for it first.

With `checksum`, what is written is remembered as a sum (CRC-32C in four lanes) of each aligned block of 4096 bytes, or of the part of it that was
written, and compared when it is read: other bytes are a `SwapError` that names the file and the extent. It takes 0.1% of the file's size in memory
and some 50 ms of a core for each GB moved: more than 2% of what a fast drive does on a machine whose cores are busy, so it is made on request.
A device from which nothing comes for `stuck_after` seconds is a `SwapError` at whoever waits, which says what is pending; the transfers themselves
stay under way, with their memory, and can be waited for again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from offload import _core
from offload.config import format_size, parse_size
from offload.errors import BudgetError, ConfigError, SwapError
from offload.memory.stalls import Stalls

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("offload")
_said: set[str] = set()

ENGINES = ("auto", "io_uring", "threads")
EXTENT_ALIGN = 4096
STUCK_AFTER = 60.0  # seconds
_SUBDIRECTORY = re.compile(r"offload-(rank[0-9]+-)?[0-9]+-[0-9a-f]{16}")
_FILE_NAME = "state.swap"


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning(message)


def open_engine(engine: str = "auto", queue_depth: int = 32, block: int | str = "1MiB", stuck_after: float = STUCK_AFTER) -> Any:
    """A started `_core.Engine`.

    `engine`: "io_uring", "threads", or "auto", which is what OFFLOAD_IO names, else io_uring, else threads (said once in the log).
    `queue_depth`: pieces in flight at once; `block`: bytes of a piece; `stuck_after`: seconds.

    ConfigError where one is unknown, out of range or not to be had.
    """
    chosen, source = engine, "engine"
    if engine == "auto" and os.environ.get("OFFLOAD_IO"):
        chosen, source = os.environ["OFFLOAD_IO"], "OFFLOAD_IO"
    if chosen not in ENGINES:
        raise ConfigError(f"{source}={chosen!r} is no I/O engine; give one of {', '.join(ENGINES)}")
    nbytes = parse_size(block)
    try:
        if chosen != "auto":
            return _core.Engine(chosen, queue_depth, nbytes, stuck_after)
        try:
            return _core.Engine("io_uring", queue_depth, nbytes, stuck_after)
        except _core.Unavailable as error:
            _say_once(f"no io_uring ({error}): file I/O uses threads, which is slower")
            return _core.Engine("threads", queue_depth, nbytes, stuck_after)
    except _core.Unavailable as error:
        raise ConfigError(f"{source}={chosen!r} cannot be had: {error}; give another or none") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"queue_depth={queue_depth!r}, block={block!r}, stuck_after={stuck_after!r}: {str(error).splitlines()[0]}") from error


def _open_file(engine: Any, path: str, nbytes: int, direct: bool, checksum: bool) -> Any:
    file = _core.File(engine, path, nbytes, direct, checksum)
    if direct and not file.direct:
        _say_once(f"no direct I/O in {os.path.dirname(path)} ({file.refusal}): it goes through the page cache")
    return file


def _describe(file: Any, engine: Any) -> dict[str, object]:
    return {"path": file.path, "nbytes": file.nbytes, "engine": engine.kind, "direct": file.direct, "refusal": file.refusal,
            "queue_depth": engine.queue_depth, "block": engine.block, "checksum": file.checksum, "stuck_after": engine.stuck_after}  # fmt: skip


def _unlink(path: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class SwapFile:
    """A file of `size` bytes to write CPU tensors to and read them from, asynchronously and past the page cache.

    `path` is created (mode 0600), or opened as it is; its space is reserved on the disk at once: `SwapError` where there is too little.
    `size`, `block`: a number of bytes or "24GiB". `direct=False` uses the page cache; so does, saying it once, a file system without direct I/O.
    Any offset, element count and address will do; multiples of 4096 bytes are fastest.
    `delete`: remove the file at `close()`, or when the object or the interpreter is gone. It is not for use in a forked child.
    `checksum`, `stuck_after`: see the module; what was in the file before it was opened here has no checksum.
    """

    def __init__(self, path: str | os.PathLike[str], size: int | str, *, engine: str = "auto", direct: bool = True, queue_depth: int = 32,
                 block: int | str = "1MiB", delete: bool = False, checksum: bool = False, stuck_after: float = STUCK_AFTER) -> None:  # fmt: skip
        nbytes = parse_size(size)
        self._engine = open_engine(engine, queue_depth, block, stuck_after)
        self._file: Any = None
        self._file = _open_file(self._engine, os.fspath(path), nbytes, direct, checksum)
        self._unlink = weakref.finalize(self, _unlink, os.fspath(path), os.getpid()) if delete else None

    def write(self, offset: int, tensor: torch.Tensor) -> Any:
        """Starts writing `tensor` (CPU, contiguous, any dtype) at byte `offset`; returns the transfer, which keeps it alive.

        The tensor must not change until the transfer is done. TypeError: not such a tensor; ValueError: outside the file, or closed.
        """
        return self._open_file().write(self._range(offset, tensor), tensor.data_ptr(), tensor.nbytes, tensor)

    def read(self, offset: int, tensor: torch.Tensor) -> Any:
        """Starts reading `tensor` (CPU, contiguous, any dtype) from byte `offset`; returns the transfer. Errors as for `write`."""
        return self._open_file().read(self._range(offset, tensor), tensor.data_ptr(), tensor.nbytes, tensor)

    def describe(self) -> dict[str, object]:
        """Path, bytes, engine and settings in use; `direct` is False with the reason in `refusal` where direct I/O was not to be had."""
        return _describe(self._open_file(), self._engine)

    def register(self, tensor: torch.Tensor) -> bool:
        """Tells the kernel about memory (a CPU tensor's) that transfers will use; False where that is of no use or not allowed (`ulimit -l`).

        It stays allocated until `close()`.
        """
        self._open_file()
        return bool(self._engine.register(tensor.data_ptr(), tensor.nbytes, tensor))

    def counters(self) -> dict[str, int]:
        """So far: `bytes_read`, `bytes_written`, `bytes_verified` (those compared with checksums), `requests` (transfers), `pieces`, `retries`.

        `in_flight`, `in_flight_max`: pieces that the kernel has, now and at most; `waiting`, `waiting_max`: transfers queued before it;
        `read_latency_us_p50`, `_p90`, `_p99`, `_max`, and `write_...`: a piece's time with the kernel, at most an eighth too high.
        """
        counters: dict[str, int] = self._engine.counters()
        return counters

    def close(self) -> None:
        """Waits for all transfers and closes the file; idempotent. Their errors are raised by their own `wait()`, not here."""
        file, self._file = self._file, None
        if file is None:
            return
        self._engine.close()
        if self._unlink is not None:
            self._unlink()
        elif not file.direct:
            file.sync()

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open_file(self) -> Any:
        if self._file is None:
            raise ValueError("the swap file is closed")
        return self._file

    def _range(self, offset: int, tensor: torch.Tensor) -> int:
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a CPU tensor is wanted, not {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
            raise TypeError(f"a plain CPU tensor is wanted, not {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
        size = self._open_file().nbytes
        if not isinstance(offset, int) or not 0 <= offset <= size - tensor.nbytes:
            raise ValueError(f"{tensor.nbytes} bytes at offset {offset!r} are outside the file of {size} bytes")
        return offset


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes at `offset`, a multiple of 4096, of the `file`-th file of a swap space."""

    file: int
    offset: int
    nbytes: int


class _Home:
    """One directory's part of a swap space: a subdirectory of ours, locked for life, with one file in it."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self.directory = directory
        self.capacity = capacity
        self.used = 0
        self.path: Path | None = None
        self.lock = -1
        self.engine: Any = None
        self.file: Any = None

    @property
    def room(self) -> int:
        return self.capacity - self.used

    def open(self, engine: Any, direct: bool, checksum: bool, rank: int | None = None) -> None:
        self.engine = engine
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            reclaim(self.directory)
            self.path, self.lock = _own_subdirectory(self.directory, rank)
        except OSError as error:
            text = error.strerror or str(error)
            raise SwapError(f"cannot swap to {self.directory}: {text}; give a directory that can be written to") from error
        self.file = _open_file(engine, str(self.path / _FILE_NAME), self.used, direct, checksum)

    def close(self) -> None:
        try:
            if self.engine is not None:
                self.engine.close()
        finally:  # also where the device is stuck
            self.engine = self.file = None
            if self.path is not None and (error := _remove(self.path)) is not None:
                _log.warning("%s stays behind: %s; `offload clean %s` removes it once that can be done", self.path, error.strerror, self.directory)
            if self.lock >= 0:
                os.close(self.lock)
            self.path, self.lock = None, -1


def _own_subdirectory(directory: Path, rank: int | None) -> tuple[Path, int]:
    """Makes `offload-<pid>-<random>`, with several ranks `offload-rank<rank>-<pid>-<random>` (mode 0700), and locks it; the lock is the returned
    descriptor's and dies with it."""
    name = "offload" if rank is None else f"offload-rank{rank}"
    while True:
        path = directory / f"{name}-{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        # Until it is locked another process, as one of many ranks that start at once, may take it for a stale one and remove it.
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, lock):
                return path, lock
        except BlockingIOError:
            pass
        except BaseException:
            os.close(lock)
            path.rmdir()
            raise
        os.close(lock)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> OSError | None:
    """Removes a subdirectory of ours with its swap file; whatever else is in it stays, and so does the directory then: says why."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / _FILE_NAME)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)
    except OSError as error:
        return error
    return None


@dataclass(frozen=True)
class Left:
    """A swap subdirectory in a directory: its bytes on the disk, and why it stays (empty: it was stale, and is removed)."""

    path: Path
    nbytes: int
    stays: str = ""


def sweep(directory: str | os.PathLike[str]) -> list[Left]:
    """Removes the swap subdirectories in `directory` whose owners are gone (nobody holds their lock); says what was found. OSError."""
    return [_sweep(Path(entry.path)) for entry in sorted(os.scandir(directory), key=lambda e: e.name)
            if _SUBDIRECTORY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]  # fmt: skip


def _sweep(path: Path) -> Left:
    nbytes = 0
    with contextlib.suppress(OSError):  # no file, or another user's
        nbytes = os.lstat(path / _FILE_NAME).st_blocks * 512
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return Left(path, nbytes, f"cannot be opened: {error.strerror}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(path, lock):
            _remove(path)
        return Left(path, nbytes, "cannot be removed, or holds other files" if _is_still(path, lock) else "")
    except BlockingIOError:
        return Left(path, nbytes, f"in use by process {path.name.split('-')[-2]}")
    except OSError as error:
        return Left(path, nbytes, f"cannot be locked: {error.strerror}")
    finally:
        os.close(lock)


def reclaim(directory: str | os.PathLike[str]) -> list[Path]:
    """The paths that a `sweep` of `directory` removed."""
    return [left.path for left in sweep(directory) if not left.stays]


def _within(extent: Extent, start: int, nbytes: int) -> int:
    if start < 0 or nbytes < 0 or start + nbytes > extent.nbytes:
        raise ValueError(f"{nbytes} bytes at {start} are outside the extent of {extent.nbytes} bytes")
    return extent.offset + start


def _close_homes(homes: list[_Home], pid: int) -> None:
    if os.getpid() != pid:  # a forked child owns nothing of its parent's
        return
    with contextlib.ExitStack() as stack:  # each is closed, whatever another raises
        for home in homes:
            stack.callback(home.close)


class SwapSpace:
    """Extents on the drives of one runtime: `allocate` them, `open` the files, then `read` and `write`.

    `directories`: pairs of a directory (created if missing) and the bytes that may be used in it (a number or "24GiB"); extents are spread
    over them in turn. Each directory gets a locked subdirectory of mode 0700 with one file of mode 0600, both removed by `close()` and at the
    interpreter's exit; what killed processes left is removed by the next `open()`. Each directory has an engine, and so a queue, of its own, made as
    by `open_engine`. `checksum`, `stuck_after`: see the module. `rank`: this process's among several, for the subdirectories' names.
    """

    def __init__(self, directories: Iterable[tuple[str | os.PathLike[str], int | str]], *, owner: str = "offload", engine: str = "auto",
                 direct: bool = True, queue_depth: int = 32, block: int | str = "1MiB", checksum: bool = False,
                 stuck_after: float = STUCK_AFTER, stalls: Stalls | None = None, rank: int | None = None) -> None:  # fmt: skip
        self._rank = rank
        self._homes = [_Home(Path(directory), parse_size(capacity)) for directory, capacity in directories]
        self._owner = owner
        self._engine = engine
        self._direct = direct
        self._queue_depth = queue_depth
        self._block = block
        self._checksum = checksum
        self._stuck_after = stuck_after
        self.stalls = stalls or Stalls()
        self._next = 0
        self._opened = False
        self._counted: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, _close_homes, self._homes, os.getpid())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all extents, each rounded up to 4096."""
        return sum(home.used for home in self._homes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be allocated in all."""
        return sum(home.capacity for home in self._homes)

    def allocate(self, nbytes: int) -> Extent:
        """An extent of `nbytes` on the next drive with room for it; after `open()` it is reserved on the disk at once.

        BudgetError: no drive has that much left of its capacity. SwapError: the disk is full.
        """
        if nbytes < 0:
            raise ValueError(f"an extent cannot have {nbytes} bytes")
        rounded = -(-nbytes // EXTENT_ALIGN) * EXTENT_ALIGN
        for turn in range(len(self._homes)):
            index = (self._next + turn) % len(self._homes)
            home = self._homes[index]
            if home.room < rounded:
                continue
            if home.file is not None:
                home.file.grow(home.used + rounded)
            extent = Extent(index, home.used, nbytes)
            home.used += rounded
            self._next = (index + 1) % len(self._homes)
            return extent
        left = ", ".join(f"{format_size(home.room)} of {format_size(home.capacity)} left in {home.directory}" for home in self._homes)
        raise BudgetError(f"{self._owner} needs {format_size(rounded)} more of nvme and has {left or 'no directory'}; give nvme more")

    def open(self) -> None:
        """Makes the files and reserves exactly what is allocated. SwapError: a disk is full or a directory cannot be used; nothing is left behind."""
        if self._opened:
            raise ConfigError("the swap space is open or was closed; make another")
        if not self._finalizer.alive:
            raise ConfigError("the swap space was closed; make another")
        try:
            for home in self._homes:
                home.open(open_engine(self._engine, self._queue_depth, self._block, self._stuck_after), self._direct, self._checksum, self._rank)
        except BaseException:
            self.close()
            raise
        self._opened = True
        if self.stalls.recorder is not None:
            self.trace(self.stalls.recorder.most)

    def read(self, extent: Extent, start: int, address: int, nbytes: int, keep: object = None) -> Any:
        """Starts reading `nbytes` from byte `start` of the extent into memory at `address`; returns the transfer.

        The transfer keeps the object `keep` alive until it is done. ValueError: outside the extent, or not open.
        """
        return self.native(extent.file).read(_within(extent, start, nbytes), address, nbytes, keep)

    def write(self, extent: Extent, start: int, address: int, nbytes: int, keep: object = None) -> Any:
        """Starts writing `nbytes` of memory at `address` to byte `start` of the extent; as `read`."""
        return self.native(extent.file).write(_within(extent, start, nbytes), address, nbytes, keep)

    def native(self, file: int) -> Any:
        """The `_core.File` of the `file`-th directory, as `_core.Pipeline.add_job` wants it."""
        if self._homes[file].file is None:
            raise ValueError("the swap space is not open")
        return self._homes[file].file

    def depths(self) -> dict[str, int]:
        """Transfers that are not done, by directory."""
        return {f"nvme {home.directory}": home.engine.outstanding for home in self._homes if home.engine is not None}

    def trace(self, most: int) -> None:
        """From here on the newest `most` transfers of each directory are noted; 0: none."""
        for home in self._homes:
            if home.engine is not None:
                home.engine.trace(most)

    def traced(self) -> dict[str, tuple[list[tuple[bool, int, float, float]], int]]:
        """By directory what was noted, (write, bytes, start, stop), oldest first, and how many gave way."""
        return {str(home.directory): home.engine.traced() for home in self._homes if home.engine is not None}

    def drain(self) -> None:
        """Waits for all transfers; their errors are raised by their own `wait()`."""
        for home in self._homes:
            if home.engine is not None:
                home.engine.drain()

    def register(self, address: int, nbytes: int, keep: object) -> bool:
        """Tells the kernel about memory that transfers will use; False where that is of no use or not allowed. `keep` lives until `close()`."""
        taken = [home.engine.register(address, nbytes, keep) for home in self._homes if home.engine is not None]
        return bool(taken) and all(taken)

    def counters(self) -> dict[str, int]:
        """`nvme_read` and `nvme_write`, bytes moved since `open()`, and the rest as `SwapFile.counters`, all directories together.

        They are still there after `close()`. `checksum_bytes`: memory that the checksums take.
        """
        if self._counted:
            return dict(self._counted)
        homes = [home for home in self._homes if home.engine is not None and home.file is not None]
        counted: dict[str, int] = _core.Engine.counters_of([home.engine for home in homes])
        moved = {"nvme_read": counted.pop("bytes_read"), "nvme_write": counted.pop("bytes_written")}
        return moved | counted | {"checksum_bytes": sum(home.file.checksum_bytes for home in homes)}

    def describe(self) -> list[dict[str, object]]:
        """Per directory: path, bytes, engine, whether I/O is direct and if not why, queue depth, block."""
        return [_describe(home.file, home.engine) for home in self._homes if home.file is not None]

    def close(self) -> None:
        """Waits for all transfers, removes the files and subdirectories; idempotent. SwapError: a device is stuck; they are removed all the same."""
        try:
            self.drain()
        finally:
            self._counted = self.counters()
            self._finalizer()

    def __enter__(self) -> SwapSpace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
