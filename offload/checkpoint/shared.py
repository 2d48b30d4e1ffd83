"""Safetensors directories that several ranks write at once: each what rests on it, where shapes alone say that it lies.

The first rank makes the directory and, at last, puts it in its place. Once all have written each reads back what it wrote, from the disk, and
compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from offload.checkpoint import disk
from offload.checkpoint.together import on_all
from offload.checkpoint.writer import Output, Shards, aside, begin, put, put_beside, resolved
from offload.dist.world import World
from offload.errors import CheckpointError

Runs = Callable[[], Iterable[tuple[int, int, int]]]


class Values(NamedTuple):
    """Some of a tensor's values, flat; `runs` has (first, behind the last, which element of the tensor the first is) of each stretch of them."""

    values: torch.Tensor
    runs: Runs


class _Note(NamedTuple):
    """What was written to a file: where its elements, of so many bytes, are counted from, which they are, and the hash of the bytes."""

    start: int
    size: int
    runs: Runs
    hash: int


def write_shared(
    world: World, directory: Path, outputs: Sequence[Output], most: int, parameters: int, others: Callable[[Path], None],
    own: Callable[[int, Output], Iterable[Values]],
) -> list[str]:  # fmt: skip
    """As `write_directory`, on all ranks. `own(i, output)`: what this rank writes of the output of that number; all ranks' together are all of it."""
    directory = resolved(directory)
    world.agree_on_machines(str(directory), "the directory to save to")
    shards = Shards.of(outputs, most)
    with ExitStack() as closing:

        def start() -> str:
            if world.rank:
                return ""
            partial = closing.enter_context(aside(directory))
            begin(partial, shards, parameters, others)
            return str(partial)

        partial = Path(on_all(world, directory, start)[0])
        notes: dict[str, list[_Note]] = {}

        def write() -> int:
            numbers, count = {id(output): i for i, output in enumerate(outputs)}, 0
            for name, shard in shards.files.items():
                with FileIO(os.open(partial / name, os.O_WRONLY | os.O_CLOEXEC), "wb") as file:
                    for output, at in shard.placed:
                        for values in own(numbers[id(output)], output):
                            notes.setdefault(name, []).append(_write(file, at, values))
                            count += values.values.nbytes
                    disk.sync(file.fileno())
            return count

        written = sum(on_all(world, directory, write))
        if written != (nbytes := sum(output.nbytes for output in outputs)):
            raise CheckpointError(f"ranks wrote {written} bytes of {nbytes} of the weights; nothing was saved")
        on_all(world, directory, lambda: _compare(partial, notes))

        def finish() -> None:
            put_beside(partial)
            put(partial, directory)
            closing.close()

        on_all(world, directory, finish if world.rank == 0 else lambda: None)
    return list(shards.files)


def _write(file: FileIO, start: int, piece: Values) -> _Note:
    data, size = piece.values.contiguous().view(-1).view(torch.uint8).numpy().data, piece.values.itemsize
    for first, stop, at in piece.runs():
        disk.write_at(file, data[first * size : stop * size], start + at * size)
    return _Note(start, size, piece.runs, xxhash.xxh3_64_intdigest(data))


def _compare(partial: Path, notes: dict[str, list[_Note]]) -> None:
    for name, of_file in notes.items():
        with FileIO(partial / name) as file:
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for start, size, runs, want in of_file:
                found = xxhash.xxh3_64()
                for first, stop, at in runs():
                    file.seek(start + at * size)
                    data = memoryview(bytearray((stop - first) * size))
                    disk.read(file, data)
                    found.update(data)
                if found.intdigest() != want:
                    home = partial.parent
                    raise CheckpointError(f"{name} reads back other bytes than were written, so nothing was saved: check the disk of {home}")
