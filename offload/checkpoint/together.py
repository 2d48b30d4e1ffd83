"""A checkpoint's tensors, written by all ranks at once: each its own pieces, where shapes alone say that they lie.

The first rank makes the directory and, once all have written, reads the file back for the manifest's checksum: it compares each piece with the
checksum that its writer took, and finds gaps. Whatever fails on one rank fails on all, and leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import TypeVar

import xxhash

from offload.checkpoint import disk
from offload.checkpoint.manifest import STATE, TENSORS, Listed, Manifest, may_replace
from offload.dist.world import World
from offload.errors import CheckpointError, SwapError

T = TypeVar("T")
Placed = tuple[int, memoryview]  # where it lies in the file, and its bytes
_Note = list[int | str]  # where a piece lies, its bytes, and their checksum


def save_together(
    world: World, target: Path, saving: Path | None, state: bytes, header: bytes, nbytes: int, pieces: Callable[[], Iterable[Placed]],
    take: Callable[[Path], bool],
) -> None:  # fmt: skip
    """Writes `target`: `header` and `nbytes` bytes of tensors, of which this rank has `pieces`, and `state`. `take` as in `disk.create_large`.
    CheckpointError, on all ranks."""
    with ExitStack() as closing:

        def begin() -> str:
            where = closing.enter_context(disk.replacing(target, may_replace, saving))
            with disk.create_large(where / TENSORS, len(header) + nbytes, take) as file:
                disk.write_at(file, memoryview(header), 0)
                file.truncate(len(header) + nbytes)
            return str(where)

        where = Path(_all(world, target, begin if world.rank == 0 else lambda: "")[0])
        notes = _all(world, target, lambda: _write(where / TENSORS, pieces()))

        def finish() -> None:
            manifest = Manifest()
            manifest.files[TENSORS] = _read_back(where / TENSORS, header, nbytes, [note for found in notes for note in found])
            manifest.add(where, STATE, [state])
            manifest.write(where)
            closing.close()

        _all(world, target, finish if world.rank == 0 else lambda: None)


def _all(world: World, target: Path, act: Callable[[], T]) -> list[T]:
    """What `act` gives on every rank, once it has ended on all. What it raises on one is raised on all."""
    trouble: OSError | CheckpointError | None = None
    result: T | None = None
    try:
        result = act()
    except (OSError, CheckpointError) as error:
        trouble = error
    found = world.share([_text(target, world.rank, trouble), result], f"the save to {target}")
    said = next((text for text, _ in found if text is not None), None)
    if isinstance(trouble, SwapError):
        raise trouble
    if said is not None:
        raise CheckpointError(said) from trouble
    return [value for _, value in found]


def _text(target: Path, rank: int, error: OSError | CheckpointError | None) -> str | None:
    if error is None or isinstance(error, CheckpointError):
        return str(error) if error is not None else None
    return (
        f"cannot save to {target}: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}, on rank {rank}; what was there "
        "before is as it was. Make room or mend the drive and save again, or save elsewhere"
    )


def _write(path: Path, pieces: Iterable[Placed]) -> list[_Note]:
    notes: list[_Note] = []
    waiting = 0
    with FileIO(path, "r+b") as file:
        for at, data in pieces:
            file.seek(at)
            disk.write(file, data)
            notes.append([at, data.nbytes, xxhash.xxh3_64_hexdigest(data)])
            waiting += data.nbytes
            if waiting >= disk.WINDOW:  # few dirty pages, and few that stay
                disk.sync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                waiting = 0
        disk.sync(file.fileno())
    return notes


def _read_back(path: Path, header: bytes, nbytes: int, notes: list[_Note]) -> Listed:
    whole, end = xxhash.xxh3_128(header), len(header)
    with FileIO(path, "rb") as file:
        file.seek(end)
        for at, size, checksum in sorted(notes, key=lambda note: int(note[0])):
            data = file.read(int(size)) or b""
            if at != end or len(data) != size or xxhash.xxh3_64_hexdigest(data) != checksum:
                raise CheckpointError(f"{path} does not read as ranks wrote it, at byte {at}; nothing was saved: mend the drive, or save elsewhere")
            whole.update(data)
            end += len(data)
    if end != len(header) + nbytes:
        raise CheckpointError(f"{path} lacks what is behind byte {end} of {len(header) + nbytes}, which no rank wrote; nothing was saved")
    return Listed(end, whole.hexdigest())
