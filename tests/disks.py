"""File systems of their own for tests: small ones, and directories that can only be read. Tests are skipped where there may be no mounts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE = "16m"


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def _mounted(where: Path, *arguments: str) -> Iterator[None]:
    _run("mount", *arguments, str(where))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def mounted_anew(where: Path) -> None:
    """What `small_disk` made of kind ext4, as after a start of the machine."""
    subprocess.run(["umount", str(where)], check=True)
    _run("mount", "-o", "loop", str(where.with_suffix(".img")), str(where))


@contextmanager
def small_disk(kind: str, where: Path, size: str = SIZE) -> Iterator[Path]:
    """A file system of its own, "tmpfs" or "ext4"; the latter's image is beside it, with the suffix .img."""
    where.mkdir(exist_ok=True)
    image = where.with_suffix(".img")
    if kind == "ext4":
        _run("truncate", "-s", size, str(image))
        _run("mkfs.ext4", "-q", "-F", str(image))
    arguments = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"] if kind == "tmpfs" else ["-o", "loop", str(image)]
    with _mounted(where, *arguments):
        yield where
    image.unlink(missing_ok=True)


@contextmanager
def read_only(where: Path) -> Iterator[None]:
    """What goes through this path can only be read, by root too; what is open already stays as it is."""
    with _mounted(where, "--bind", str(where)):
        _run("mount", "-o", "remount,ro,bind", str(where))
        yield
