"""A checkpoint's tensors, written by all ranks at once: each its own stretches, where shapes alone say that they lie.

The first rank makes the directory; its checksum comes by way of all ([Note: relay]), so nothing is read back. Whatever fails on one rank fails on
all, and leaves nothing.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

from offload.checkpoint import blocks, disk
from offload.checkpoint.blocks import Part, Stretch
from offload.checkpoint.manifest import STATE, TENSORS, Listed, Manifest, may_replace
from offload.checkpoint.relay import Relay, Spoilt
from offload.dist.world import World
from offload.errors import CheckpointError, OffloadError, RankError

log = logging.getLogger("offload")
T = TypeVar("T")


class Piece(NamedTuple):
    """What this rank writes: bytes [start, stop) of the file, made of `parts()`. `joint`: these are made by all ranks together, which come to them
    in one order, whether they write any of it or not; they do not raise but at their end."""

    start: int
    stop: int
    parts: Callable[[], Iterable[Part]]
    joint: bool = False


def save_together(
    world: World, target: Path, saving: Path | None, state: bytes, nbytes: int, pieces: Sequence[Piece], room: int, take: Callable[[Path], bool]
) -> None:
    """Writes `target`: a file of `nbytes` bytes of tensors, of which this rank has `pieces`, in order, and `state`. `room` as in
    `Manifest.add_large`, `take` as in `disk.create_large`. CheckpointError, on all ranks."""
    with ExitStack() as closing:

        def begin() -> tuple[str, list[tuple[int, int]]]:
            where = ""
            if world.rank == 0:
                path = closing.enter_context(disk.replacing(target, may_replace, saving))
                with disk.create_large(path / TENSORS, nbytes, take) as file:
                    file.truncate(nbytes)
                where = str(path)
            return where, [(p.start, p.stop) for p in pieces if p.stop > p.start]

        found = on_all(world, target, begin)
        where = Path(found[0][0])
        relay = Relay(world, [ranges for _, ranges in found], "the checkpoint")
        sums = on_all(world, target, lambda: _write(where / TENSORS, pieces, relay, blocks.block_bytes(room)))

        def finish() -> None:
            manifest = Manifest()
            manifest.files[TENSORS] = Listed(nbytes, next(text for text in sums if text is not None))
            manifest.add(where, STATE, [state])
            manifest.write(where)
            closing.close()

        on_all(world, target, finish if world.rank == 0 else lambda: None)


def on_all(world: World, target: Path, act: Callable[[], T]) -> list[T]:
    """What `act` gives on every rank, as JSON has it, once it has ended on all. What it raises on one is raised on all."""
    trouble: Exception | None = None
    result: T | None = None
    try:
        result = act()
    except RankError:
        raise
    except Exception as error:
        trouble = error
    found = world.share([_text(target, world.rank, trouble), result], "the save of the checkpoint")
    said = next((text for text, _ in found if text is not None), None)
    if isinstance(trouble, OSError) and not isinstance(trouble, OffloadError):
        raise CheckpointError(_text(target, world.rank, trouble)) from trouble
    if trouble is not None:
        raise trouble
    if said is not None:
        raise CheckpointError(said)
    return [value for _, value in found]


def _text(target: Path, rank: int, error: Exception | None) -> str | None:
    if isinstance(error, OSError) and not isinstance(error, OffloadError):
        return (
            f"cannot save to {target}: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}, on rank {rank}; what was there "
            "before is as it was. Make room or mend the drive and save again, or save elsewhere"
        )
    return None if error is None else str(error) if isinstance(error, OffloadError) else f"the save to {target} failed on rank {rank}: {error!r}"


def _write(path: Path, pieces: Sequence[Piece], relay: Relay, block: int) -> str | None:
    """Writes this rank's pieces; the file's checksum, on the rank that has its end."""
    begun: list[Iterator[Part]] = []

    def stretches() -> Iterator[Stretch]:
        for piece in pieces:
            begun.append(iter(piece.parts()))
            yield Stretch(piece.start, begun[-1], piece.joint)

    try:
        with _existing(path, os.O_DIRECT) as file, _existing(path, 0) as edges:
            blocks.write_stretches(file, edges, stretches(), block, relay)
            disk.sync(edges.fileno())
    except RankError:  # it ends the job
        raise
    except Exception as error:
        _go_through(pieces, begun, relay)
        if isinstance(error, Spoilt):
            return None
        raise
    relay.settle()
    return relay.hexdigest()


def _go_through(pieces: Sequence[Piece], begun: Sequence[Iterator[Part]], relay: Relay) -> None:
    """What other ranks need of this one to come to their end, after it has failed: in the order of the file, as they come to it."""
    for i, piece in enumerate(pieces):
        if piece.joint:
            try:
                deque(begun[i] if i < len(begun) else piece.parts(), maxlen=0)
            except RankError:
                raise
            except Exception as error:
                log.debug("after a save has failed already: %r", error)
        relay.skip(piece.start, piece.stop)
    relay.settle()


def _existing(path: Path, flag: int) -> FileIO:
    """A file to write parts of; past the page cache by O_DIRECT, where that is to be had."""
    try:
        return FileIO(os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag), "wb")
    except OSError:
        if not flag:
            raise
        return FileIO(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb")
