"""A file that a deleted checkpoint leaves to the next one: writing over it spares the drive and the file system what a new file costs them.

[Note: what may be written over]
A spare is no part of any checkpoint: its directory was renamed away, and that is on the drive, before the file is taken out of it. It is kept,
and taken, only where nothing else has it: no other name (a hard link of a backup's), and no descriptor or mapping of any process, which would go on
reading what it has opened if the file were deleted. The latter the kernel says by a lease: it gives one for writing to whoever alone has a file
open. Where it cannot say so, files are deleted. A save takes the spare as a file of its own, aside like all that it writes: whatever ends it then,
nothing but the spare is lost.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from contextlib import suppress
from pathlib import Path

from offload.checkpoint import disk

NAME = "spare"
NAMES = 1 << 20  # bytes that directories and small files take, at most


class Spare:
    """At most one file, at `path`, on the file system of the checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, file: Path) -> None:
        """Moves a file here, which nothing names any more but a directory that is being deleted; not where it is someone else's too, nor where the
        disk has less room left than it takes: that goes to those who ask for it."""
        with suppress(OSError):
            space = os.statvfs(file)
            if space.f_bavail * space.f_frsize >= os.lstat(file).st_blocks * 512 and _is_free(file):
                disk.rename(file, self.path)

    def take(self, path: Path) -> bool:
        """Moves the file to `path`, to be written over; False where there is none, or it is someone else's too."""
        if not os.path.lexists(self.path):
            return False
        try:
            if _is_free(self.path):
                disk.rename(self.path, path)
                return True
        except OSError:
            pass
        self.give_up()
        return False

    def make_way(self) -> None:
        """Gives it up where the disk is so full that not even names of new files may find room."""
        with suppress(OSError):
            space = os.statvfs(self.path)
            if space.f_bavail * space.f_frsize < NAMES:
                self.give_up()

    def give_up(self) -> bool:
        """Gives its room back to the disk; False where there is none to give."""
        try:
            os.unlink(self.path)
        except OSError:
            return False
        return True


def _is_free(path: Path) -> bool:
    """Whether a plain file has this one name, and nobody has it open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            return False
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # to whom opens it just now the kernel would have us told by one that kills
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
