"""What a checkpoint does to the disk, each thing once: whoever tests what is left of an interrupted save stops it here."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError

SAVING = ".saving"  # beside checkpoints: what is being written, and what is being deleted
WINDOW = 32 << 20  # bytes whose way to the drive begins at once
_NEW, _OLD, _GONE = "new", "old", "gone"  # see [Note: what is aside]
_TRIES = 100
_CWD, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_BEGIN, _FINISH = 2, 7  # SYNC_FILE_RANGE_WRITE; with WAIT_BEFORE and WAIT_AFTER
_libc = ctypes.CDLL(None, use_errno=True)
_renameat2: Any = getattr(_libc, "renameat2", None)
_sync_file_range: Any = getattr(_libc, "sync_file_range", None)
_fallocate: Any = getattr(_libc, "fallocate", None)


def create_large(path: Path, nbytes: int, take: Callable[[Path], bool] = lambda path: False) -> FileIO:
    """A file of `nbytes`, reserved, for `write_at`: past the page cache, from whole pages of memory, where that is to be had. It is new, unless
    `take(path)` has put one there to be written over. OSError."""
    taken = take(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        file = FileIO(os.open(path, flags | (0 if taken else os.O_EXCL) | os.O_DIRECT, 0o666), "wb")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = FileIO(os.open(path, flags, 0o666), "wb")  # it is made before it is refused
    try:
        if taken and os.fstat(file.fileno()).st_size > nbytes:
            file.truncate(nbytes)
        _reserve(file.fileno(), nbytes)
    except BaseException:
        file.close()
        raise
    return file


def _reserve(descriptor: int, nbytes: int) -> None:
    """Takes the room for a file at once, where that is to be had: a drive without it is full before anything is written."""
    if _fallocate is not None and nbytes and _fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))


def through_cache(file: FileIO) -> None:
    """From here on a direct file is written as any other."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)


def write_at(file: FileIO, data: memoryview, at: int) -> None:
    """Writes all of `data` to byte `at` of a file of `create_large`, in any thread."""
    while data.nbytes:
        try:
            count = os.pwrite(file.fileno(), data, at)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            through_cache(file)  # a file system that says only now that it cannot, or is left within a page
            continue
        data, at = data[count:], at + count


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
    except PermissionError:
        raise CheckpointError(f"{path} may not be read by this user; mend its permissions") from None
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
    if os.path.islink(target):
        raise CheckpointError(f"{target} is a symbolic link, which a save would replace: save to {os.path.realpath(target)}, or to another directory")
    if os.path.lexists(target) and not may_replace(target):
        raise CheckpointError(f"{target} is there and is no checkpoint, so it is not replaced; save to another directory")
    make(target.parent)
    with _held(target, saving) as home:
        (home / _NEW).mkdir()
        yield home / _NEW
        sync_directory(home / _NEW)
        _place(home, target)


def remove(target: Path, saving: Path | None = None, salvage: Callable[[Path], None] = lambda gone: None) -> None:
    """Deletes a directory; it is gone from its place before the first of its files is. `saving` as in `replacing`; `salvage(gone)` may take files
    from where it lies then."""
    with _held(target, saving) as home:
        rename(target, home / _GONE)
        sync_directory(target.parent)
        salvage(home / _GONE)
        shutil.rmtree(home / _GONE)


def recover(parent: Path, saving: Path) -> None:
    """Puts back what a killed save had moved aside from `parent`. For whoever has both to itself; `replacing` does it where it comes by."""
    for home in sorted(saving.iterdir()) if saving.is_dir() else []:
        _put_back(home, parent / home.name)


def aside(target: Path, saving: Path | None = None) -> Path | None:
    """Where a save that was killed, or could not even undo what it did, has left what was at `target`, which is not there now."""
    old = (saving or target.parent / SAVING) / target.name / _OLD
    return old if os.path.isdir(old) and not os.path.lexists(target) else None


def is_busy(home: Path) -> bool:
    """Whether what lies in `.saving/NAME/` is a live save's."""
    try:
        lock = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # not one
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def make(directory: Path) -> None:
    """Makes a directory and those above it, so that they are there after a power cut too."""
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


@contextmanager
def _held(target: Path, saving: Path | None) -> Iterator[Path]:
    """An empty directory for what goes to `target` and comes from there, this process's alone and gone afterwards.

    [Note: what is aside] In it are `new`, which is not whole yet or was just exchanged; `old`, whole, while its place is taken without an exchange,
    and so the only one until the second of two renames; `gone`, which is being deleted. The lock is on the directory that has them, which never
    moves: so nobody empties what another has begun to fill.
    """
    home = (saving or target.parent / SAVING) / target.name
    lock = _lock(home, target)
    try:
        _put_back(home, target)
        _empty(home)
        yield home
    finally:
        if not os.path.lexists(home / _OLD) or os.path.lexists(target):
            shutil.rmtree(home, ignore_errors=True)
        os.close(lock)
        tidy(home.parent)


def _lock(home: Path, target: Path) -> int:
    busy = CheckpointError(f"another save to {target} is under way; wait for it, or save to another directory")
    gone: FileNotFoundError | None = None
    for _ in range(_TRIES):  # whoever ends a save removes what the next one has just made
        try:
            home.mkdir(parents=True, exist_ok=True)
            lock = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:  # or no directory can be made there, as in /proc
            gone = error
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(home)):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise busy from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise gone or busy


def _put_back(home: Path, target: Path) -> None:
    if os.path.lexists(home / _OLD) and not os.path.lexists(target):
        rename(home / _OLD, target)
        sync_directory(target.parent)


def _place(home: Path, target: Path) -> None:
    """What is new becomes `target`. What was there is deleted later; it comes back where the drive does not take the change of names."""
    placed = os.stat(home / _NEW)
    try:
        _swap(home, target)
        sync_directory(target.parent)
    except BaseException:
        with suppress(OSError):
            _undo(home, target, placed)
        raise
    if os.path.lexists(home / _OLD):
        rename(home / _OLD, home / _GONE)


def _swap(home: Path, target: Path) -> None:
    if not os.path.lexists(target):
        rename(home / _NEW, target)
        return
    try:
        exchange(home / _NEW, target)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise
        rename(target, home / _OLD)  # a file system without exchanges: until the next line both lie aside
        rename(home / _NEW, target)


def _undo(home: Path, target: Path, placed: os.stat_result) -> None:
    if os.path.lexists(target) and os.path.samestat(os.stat(target), placed):
        if os.path.lexists(home / _NEW):
            exchange(home / _NEW, target)
            return
        rename(target, home / _NEW)
    if os.path.lexists(home / _OLD):
        rename(home / _OLD, target)


def _empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def tidy(saving: Path) -> None:
    """Removes a directory that has nothing left in it."""
    try:
        saving.rmdir()
    except OSError:
        return  # another save's, or a spare
