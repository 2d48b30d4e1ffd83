"""Large files of a checkpoint: written past the page cache, in blocks, to the same bytes as any others."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

import offload
from checkpoints import digest, steps, trained
from helpers import Prepared
from offload.checkpoint import blocks, disk, save, together
from offload.checkpoint.manifest import Manifest, verify
from offload.errors import CheckpointError


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of some bytes counts as large, and blocks are small."""
    monkeypatch.setattr(save, "FILE_LEAST", 1)
    monkeypatch.setattr(blocks, "block_bytes", lambda room: 8192)


def cut(nbytes: int, seed: int) -> list[bytes]:
    """Random bytes in parts of all sizes, empty ones too."""
    draw, parts = random.Random(seed), []
    while nbytes:
        parts.append(draw.randbytes(min(nbytes, draw.choice((0, 1, 100, 4095, 8192, 50000)))))
        nbytes -= len(parts[-1])
    return parts


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8192, 4 * 8192, 300_001])
def test_any_parts_of_any_size(tmp_path: Path, direct: None, nbytes: int) -> None:
    parts = cut(nbytes, nbytes)
    (tmp_path / "spare").write_bytes(b"x" * 100_000)
    for where, take in ((tmp_path / "x", lambda path: False), (tmp_path / "y", taken(tmp_path / "spare"))):
        with disk.create_large(where, nbytes, take) as file:
            assert blocks.write_blocks(file, map(blocks.given, parts), 8192) == (nbytes, xxhash.xxh3_128_hexdigest(b"".join(parts)))
        assert where.read_bytes() == b"".join(parts)
    assert not (tmp_path / "spare").exists()


class Noted:
    """What was hashed, by where it lies."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bytes]] = []

    def update(self, data: memoryview, at: int) -> None:
        self.seen.append((at, bytes(data)))

    def ended_by(self, error: BaseException) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("seed", range(4))
def test_stretches_of_several_writers_in_one_file(tmp_path: Path, seed: int) -> None:
    """Each byte is written once, pages that stretches share through the cache, all others past it; and hashed in order."""
    draw = random.Random(seed)
    nbytes = draw.choice((300_001, 20_000, 9000))
    data, at, cuts = draw.randbytes(nbytes), 0, [0]
    while at < nbytes:
        at = min(nbytes, at + draw.choice((1, 700, 4096, 8192, 30_000)))
        cuts.append(at)
    own: list[list[tuple[int, int]]] = [[], [], []]
    for first, last in itertools.pairwise(cuts):
        draw.choice(own).append((first, last))
    with disk.create_large(tmp_path / "x", nbytes) as file:
        file.truncate(nbytes)
    for ranges in own:
        noted, asked = Noted(), list[int]()

        def parts(first: int, last: int) -> Iterator[blocks.Part]:
            asked.append(sum(len(seen) for _, seen in noted.seen))  # noqa: B023
            middle = draw.randint(first, last)
            yield from (blocks.given(data[first:middle]), blocks.given(data[middle:last]))

        with together._existing(tmp_path / "x", os.O_DIRECT) as file, together._existing(tmp_path / "x", 0) as edges:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            stretches = [blocks.Stretch(first, parts(first, last), alone=True) for first, last in ranges]
            blocks.write_stretches(file, edges, stretches, 8192, noted)
            assert fcntl.fcntl(file, fcntl.F_GETFL) == flags  # nothing that is no whole page was tried past the cache
        assert b"".join(seen for _, seen in noted.seen) == b"".join(data[first:last] for first, last in ranges)
        assert all(data[at : at + len(seen)] == seen for at, seen in noted.seen)
        assert asked == list(itertools.accumulate((last - first for first, last in ranges), initial=0))[:-1]
    assert (tmp_path / "x").read_bytes() == data


def taken(spare: Path) -> Callable[[Path], bool]:
    """A file that is there is the one to write over."""

    def take(path: Path) -> bool:
        spare.rename(path)
        return True

    return take


def test_a_large_file_is_as_any_other(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = offload.Precision(master="split", moments="int8")
    for place, over in (("host", {}), ("nvme", {}), ("host", {"precision": split}), ("nvme", {"precision": split})):
        model, optimizer = trained(prepared, 2, place, **over)
        offload.save(tmp_path / "small", model, optimizer, "x")
        with monkeypatch.context() as patch:
            patch.setattr(save, "FILE_LEAST", 1)
            patch.setattr(blocks, "block_bytes", lambda room: 4096)
            offload.save(tmp_path / "large", model, optimizer, "x")
        verify(tmp_path / "large")
        for name in os.listdir(tmp_path / "small"):
            assert (tmp_path / "small" / name).read_bytes() == (tmp_path / "large" / name).read_bytes(), name
        before = digest(model)
        steps(model, optimizer, 2, 3)
        assert offload.load(tmp_path / "large", model, optimizer) == "x" and digest(model) == before


def test_without_direct_writes(tmp_path: Path, direct: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses them when the file is made, or only when it is written."""
    parts, open_, pwrite = cut(100_000, 1), os.open, os.pwrite

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        descriptor = open_(path, flags, *rest, **named)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return descriptor

    def late(descriptor: int, data: Any, at: int) -> int:
        if descriptor not in buffered:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, data[:5000], at)  # as little as it likes

    def through_cache(file: Any) -> None:
        buffered.add(file.fileno())
        through(file)

    buffered, through = set[int](), disk.through_cache
    for patches in ({(disk.os, "open"): refusing}, {(disk.os, "pwrite"): late, (disk, "through_cache"): through_cache}):
        where = tmp_path / str(len(patches))
        where.mkdir()
        with monkeypatch.context() as patch:
            for (module, name), value in patches.items():
                patch.setattr(module, name, value)
            manifest = Manifest()
            manifest.add_large(where, "tensors.safetensors", map(blocks.given, parts), 100_000, 0, lambda path: False)
        assert (where / "tensors.safetensors").read_bytes() == b"".join(parts)
        assert manifest.files["tensors.safetensors"].xxh3_128 == xxhash.xxh3_128_hexdigest(b"".join(parts))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_drive_that_fails(prepared: Prepared, tmp_path: Path, direct: None, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    model, optimizer = trained(prepared, 1)
    offload.save(tmp_path / "at", model, optimizer, "first")
    threads, count, write = threading.active_count(), itertools.count(), disk.write_at

    def fail(*args: Any) -> None:
        if next(count) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    monkeypatch.setattr(disk, "write_at", fail)
    with pytest.raises(CheckpointError, match=r"cannot save to .*No space left.*Make room"):
        offload.save(tmp_path / "at", model, optimizer, "second")
    monkeypatch.undo()
    assert threading.active_count() == threads and not (tmp_path / disk.SAVING).exists()
    assert offload.load(tmp_path / "at", model, optimizer) == "first"


def test_no_block_is_begun_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, write = itertools.count(), disk.write_at

    def fail(file: Any, data: memoryview, at: int) -> None:
        if next(count) >= 5:
            raise OSError(errno.EIO, str(at))
        write(file, data, at)

    monkeypatch.setattr(disk, "write_at", fail)
    with disk.create_large(tmp_path / "x", 1 << 20) as file, pytest.raises(OSError) as raised:
        blocks.write_blocks(file, [blocks.given(bytes(1 << 20))], 4096)
    assert next(count) <= 6 + blocks.WRITERS and 5 - blocks.WRITERS < int(raised.value.strerror) // 4096 <= 5


def test_a_part_that_cannot_be_made(tmp_path: Path, direct: None) -> None:
    def fail(at: int, out: memoryview, beside: memoryview) -> Callable[[], object]:
        raise ZeroDivisionError

    def late() -> Iterator[blocks.Part]:
        yield blocks.given(bytes(100_000))
        raise ZeroDivisionError

    for name, parts in (("a", late()), ("b", [blocks.given(bytes(100_000)), blocks.Part(100_000, fail)])):
        threads = threading.active_count()
        with pytest.raises(ZeroDivisionError):
            Manifest().add_large(tmp_path, name, parts, 200_000, 0, lambda path: False)
        assert threading.active_count() == threads


def test_blocks_keep_within_their_room() -> None:
    for room in (0, 1 << 20, 10 << 20, 1 << 30):
        block = blocks.block_bytes(room)
        assert block % blocks.PAGE == 0 and (2 * block * blocks.COUNT <= max(room, 2 * blocks.COUNT * blocks.LEAST))
