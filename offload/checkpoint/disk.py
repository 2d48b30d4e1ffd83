"""What a checkpoint does to the disk, each thing once: whoever tests what is left of an interrupted save stops it here."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError

SAVING = ".saving"  # beside checkpoints: what is being written, and what is being deleted
WINDOW = 32 << 20  # bytes whose way to the drive begins at once
_CWD, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_BEGIN, _FINISH = 2, 7  # SYNC_FILE_RANGE_WRITE; with WAIT_BEFORE and WAIT_AFTER
_libc = ctypes.CDLL(None, use_errno=True)
_renameat2: Any = getattr(_libc, "renameat2", None)
_sync_file_range: Any = getattr(_libc, "sync_file_range", None)


def create_direct(path: Path) -> FileIO | None:
    """A new file to be written past the page cache, from whole pages of memory; None, and no file, where that is not to be had."""
    try:
        return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o666), "wb")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # it is made before it is refused
        return None


def through_cache(file: FileIO) -> None:
    """From here on a direct file is written as any other."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)


def write(file: FileIO, data: memoryview | bytes) -> None:
    """Writes all of `data`."""
    left = memoryview(data)
    while left.nbytes:
        left = left[file.write(left) :]


def read(file: FileIO, into: memoryview) -> None:
    """Fills `into`; OSError where the file ends before."""
    while into.nbytes:
        count = file.readinto(into)
        if not count:
            raise OSError("it was cut while it was read")
        into = into[count:]


def write_behind(descriptor: int, before: int, now: int) -> None:
    """A file that is written on and on has grown from `before` bytes: the drive writes beside, and at most two windows wait in memory."""
    for window in range(before // WINDOW, now // WINDOW):
        _range(descriptor, window, _BEGIN)
        if window:
            _range(descriptor, window - 1, _FINISH)
            os.posix_fadvise(descriptor, (window - 1) * WINDOW, WINDOW, os.POSIX_FADV_DONTNEED)


def _range(descriptor: int, window: int, how: int) -> None:
    """An error of the drive that this is told of, a later fsync is not."""
    if _sync_file_range is not None and _sync_file_range(descriptor, ctypes.c_int64(window * WINDOW), ctypes.c_int64(WINDOW), how):
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):  # those that say that it is not to be had here
            raise OSError(number, os.strerror(number))


def sync(descriptor: int) -> None:
    """Returns when a file, or the names in a directory, are on the drive."""
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    os.rename(old, new)


def exchange(a: Path, b: Path) -> None:
    """Each takes the other's place, at once. OSError where the file system cannot."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _renameat2(_CWD, os.fsencode(a), _CWD, os.fsencode(b), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """A file to read; CheckpointError for what is none, links and pipes included."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, so the checkpoint is not whole; take another") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}; a checkpoint has plain files alone") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no plain file; a checkpoint has these alone")
    with FileIO(descriptor) as file:
        yield file


@contextmanager
def replacing(target: Path, may_replace: Callable[[Path], bool], saving: Path | None = None) -> Iterator[Path]:
    """An empty directory to fill, which then becomes `target`, whole: what was there before stays until that moment, and after any error.

    `saving`: where it lies until then, on the same file system; beside `target` unless given.

    CheckpointError where another process saves to the same place, and where `target` is there and `may_replace` says no.
    """
    where = (saving or target.parent / SAVING) / target.name
    if os.path.lexists(target) and not may_replace(target):
        raise CheckpointError(f"{target} is there and is no checkpoint, so it is not replaced; save to another directory")
    where.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(lock, where, target)
        try:
            _empty(where)
            yield where
            sync(lock)
            _place(where, target)
        except BaseException:
            shutil.rmtree(where, ignore_errors=True)
            raise
    finally:
        os.close(lock)
        _tidy(where.parent)


def _take(lock: int, where: Path, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = os.path.samestat(os.fstat(lock), os.stat(where))
    except (BlockingIOError, FileNotFoundError):
        taken = False
    if not taken:
        raise CheckpointError(f"another save to {target} is under way; wait for it, or save to another directory")


def _place(where: Path, target: Path) -> None:
    old = where.with_name(f"{where.name}.old")
    if os.path.lexists(target):
        old = _swap(where, target, old)
    else:
        rename(where, target)
    sync_directory(target.parent)
    sync_directory(target.parent.parent)  # the parent may be new
    shutil.rmtree(old, ignore_errors=True)


def _swap(where: Path, target: Path, old: Path) -> Path:
    """Puts a directory in the place of another; gives where that is then."""
    try:
        exchange(where, target)
        return where
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise
    shutil.rmtree(old, ignore_errors=True)
    rename(target, old)  # a file system without exchanges: until the next line both lie aside
    try:
        rename(where, target)
    except OSError:
        rename(old, target)
        raise
    return old


def remove(target: Path, saving: Path | None = None) -> None:
    """Deletes a directory; it is gone from its place before the first of its files is. `saving` as in `replacing`."""
    away = (saving or target.parent / SAVING) / f"{target.name}.old"
    away.parent.mkdir(exist_ok=True)
    shutil.rmtree(away, ignore_errors=True)
    rename(target, away)
    sync_directory(target.parent)
    shutil.rmtree(away)
    _tidy(away.parent)


def _empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _tidy(saving: Path) -> None:
    try:
        saving.rmdir()
    except OSError:
        return  # another save's
