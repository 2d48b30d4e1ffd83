"""Safetensors directories, written aside in pieces, read back, and only then put in their place.

What is written is synchronised, dropped from the page cache and compared with its checksums before anything is renamed. A directory that does not
exist yet appears whole. One that does gives way whole to one that has its other files too. Where that cannot be done (it has subdirectories, is the
working directory or a mount) files are replaced one by one: until the last of the new ones is there it has no index and no configuration, so nobody
reads a mixture of two models.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate, chain
from pathlib import Path

import torch

from offload.checkpoint import disk
from offload.checkpoint.blocks import FILE_LEAST, block_bytes, given, write_blocks
from offload.checkpoint.disk import exchange
from offload.checkpoint.dtypes import STORED
from offload.checkpoint.manifest import Hashed, checksum
from offload.config import format_size
from offload.errors import CheckpointError, OffloadError

log = logging.getLogger("offload")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROOM = 8 << 20  # bytes, for the blocks of a large file
_OURS = re.compile(r"\.offload-saving-[0-9a-f]{16}")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Output:
    """A tensor to be written: `parts()` gives its values in order, flat, in its dtype, in pieces."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    parts: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def write_directory(directory: Path, outputs: Sequence[Output], most: int, parameters: int, others: Callable[[Path], None]) -> list[str]:
    """Writes `outputs` as one file, or shards of at most `most` bytes (a larger tensor has one of its own) with an index; returns the files' names.

    `parameters`: their number, for the index. `others(path)` writes further files into a directory. CheckpointError: nothing is changed then,
    but where it says so.
    """
    directory = resolved(directory)
    shards = Shards.of(outputs, most)
    try:
        with aside(directory) as partial:
            _check_room(partial, sum(output.nbytes for output in outputs))
            others(partial)
            sums = {name: _write(partial / name, shard) for name, shard in shards.files.items()}
            _write_index(partial / INDEX, shards, parameters)
            put_beside(partial)
            for name, digest in sums.items():
                _compare(partial / name, digest)
            put(partial, directory)
    except OffloadError:
        raise
    except OSError as error:
        raise CheckpointError(f"{directory} could not be written: {error}; free space or give another directory") from error
    return list(shards.files)


def resolved(directory: Path) -> Path:
    """CheckpointError for what can be no directory."""
    try:
        return directory.resolve()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise CheckpointError(f"{str(directory)!r:.200} can be no directory: {error}; give another") from None


def begin(partial: Path, shards: Shards, parameters: int, others: Callable[[Path], None]) -> None:
    """Makes all files, with everything but tensors in them, which come next. OSError, CheckpointError."""
    _check_room(partial, sum(shard.nbytes for shard in shards.files.values()))
    others(partial)
    for name, shard in shards.files.items():
        with disk.create_large(partial / name, shard.nbytes) as file:
            disk.write_at(file, memoryview(shard.header), 0)
            file.truncate(shard.nbytes)
    _write_index(partial / INDEX, shards, parameters)


@dataclass(frozen=True)
class _Shard:
    """A file: its header, and its tensors in order, each with its first byte."""

    header: bytes
    placed: list[tuple[Output, int]]

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> _Shard:
        order = list(STORED)
        ordered = sorted(outputs, key=lambda o: (order.index(o.dtype), o.name))
        first = _header(ordered)
        starts = accumulate((output.nbytes for output in ordered), initial=len(first))
        return cls(first, list(zip(ordered, starts, strict=False)))

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(output.nbytes for output, _ in self.placed)


@dataclass(frozen=True)
class Shards:
    """The files with weights, by name, in order."""

    files: dict[str, _Shard]

    @classmethod
    def of(cls, outputs: Sequence[Output], most: int) -> Shards:
        shards = _shards(outputs, most)
        names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        return cls({name: _Shard.of(shard) for name, shard in zip(names, shards, strict=True)})


def _shards(outputs: Sequence[Output], most: int) -> list[list[Output]]:
    """As transformers cuts them: in order, a new one where the next tensor does not fit."""
    shards: list[list[Output]] = []
    current: list[Output] = []
    size = 0
    for output in outputs:
        if output.nbytes > most:
            shards.append([output])
            continue
        if size + output.nbytes > most:
            shards.append(current)
            current, size = [], 0
        current.append(output)
        size += output.nbytes
    return [*shards, current] if current or not shards else shards


def _header(ordered: Sequence[Output]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for output in ordered:
        entries[output.name] = {"dtype": STORED[output.dtype], "shape": list(output.shape), "data_offsets": [at, at + output.nbytes]}
        at += output.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, shard: _Shard) -> str:
    """Writes a file; returns the checksum of its bytes."""
    parts = chain([shard.header], _parts([output for output, _ in shard.placed]))
    if shard.nbytes >= FILE_LEAST:
        with disk.create_large(path, shard.nbytes) as file:
            return write_blocks(file, map(given, parts), block_bytes(ROOM))[1]
    with FileIO(path, "xb") as file:
        out = Hashed(file)
        for part in parts:
            out.write(part)
        return out.listed().xxh3_128


def _parts(outputs: Sequence[Output]) -> Iterator[memoryview | bytes]:
    for output in outputs:
        nbytes = 0
        for part in output.parts():
            data = part.contiguous().view(-1).view(torch.uint8).numpy().data
            nbytes += data.nbytes
            yield data
        if nbytes != output.nbytes:
            raise CheckpointError(f"{output.name} gave {nbytes} bytes of {output.nbytes}; nothing was saved")


def _write_index(path: Path, shards: Shards, parameters: int) -> None:
    """Where there are several files."""
    if len(shards.files) == 1:
        return
    where = {output.name: name for name, shard in shards.files.items() for output, _ in shard.placed}
    nbytes = sum(output.nbytes for shard in shards.files.values() for output, _ in shard.placed)
    metadata = {"total_parameters": parameters, "total_size": nbytes}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True) + "\n")


def _compare(path: Path, want: str) -> None:
    """Reads a file from the disk, not from what the kernel still has of it, where that can be asked for."""
    with FileIO(path) as file:
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = checksum(file)
    if found != want:
        raise CheckpointError(f"{path.name} reads back other bytes than were written, so nothing was saved: check the disk of {path.parent.parent}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_beside(partial: Path) -> None:
    """All of its files are on the drive."""
    for path in partial.iterdir():
        _sync(path)


def _check_room(where: Path, nbytes: int) -> None:
    free = shutil.disk_usage(where).free
    if free < nbytes:
        raise CheckpointError(
            f"{where.parent} has {format_size(free)} free and the weights take {format_size(nbytes)}; free space or give another directory"
        )


# Putting them in their place


@contextmanager
def aside(directory: Path) -> Iterator[Path]:
    """A locked directory to write to, on the disk that `directory` is on; removed if it is still there at the end."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; give another")
    home = directory if directory.is_dir() and not _exchangeable(directory) else directory.parent
    home.mkdir(parents=True, exist_ok=True)
    _reclaim(home)
    partial = home / f".offload-saving-{secrets.token_hex(8)}"
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _reclaim(home: Path) -> None:
    """Removes what savers that were killed left in `home`: nobody holds its lock."""
    for path in home.iterdir():
        if not _OURS.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                log.warning("removed %s, which an interrupted save had left", path)
            finally:
                os.close(lock)


def _exchangeable(directory: Path) -> bool:
    here, above = Path.cwd(), directory.parent
    plain = all(entry.is_file(follow_symlinks=False) for entry in os.scandir(directory))
    return plain and directory not in (here, *here.parents) and os.access(above, os.W_OK) and directory.stat().st_dev == above.stat().st_dev


def put(partial: Path, directory: Path) -> None:
    """Renames the new files into place; see the module for what is there meanwhile."""
    _sync(partial)
    new = {path.name for path in partial.iterdir()}
    if not directory.exists():
        os.rename(partial, directory)
    elif partial.parent == directory or not _exchange(partial, directory, new):
        try:
            _replace(partial, directory, new)
        except OSError as error:
            raise CheckpointError(f"{directory} has no whole model now, as its files could not be replaced: {error}; save again") from error
    _sync(directory.parent)


def _is_weights(name: str) -> bool:
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


def _exchange(partial: Path, directory: Path, new: set[str]) -> bool:
    """`partial` takes the place of `directory` at once, with the files of it that are not weights; False, and nothing done, where it cannot."""
    try:
        for path in directory.iterdir():
            if path.name not in new and not _is_weights(path.name):
                os.link(path, partial / path.name)
        partial.chmod(directory.stat().st_mode & 0o7777)
        _sync(partial)
        exchange(partial, directory)
    except OSError:
        return False
    return True


def _replace(partial: Path, directory: Path, new: set[str]) -> None:
    last = [name for name in (INDEX, "config.json") if name in new]
    stale = [path.name for path in directory.iterdir() if _is_weights(path.name) and path.name not in new]
    for name in {INDEX, *last}:
        (directory / name).unlink(missing_ok=True)
    _sync(directory)
    for name in stale:
        (directory / name).unlink(missing_ok=True)
    for name in [*sorted(new - set(last)), *last]:
        os.replace(partial / name, directory / name)
    _sync(directory)
