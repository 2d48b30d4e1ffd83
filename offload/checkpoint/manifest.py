"""The manifest of a checkpoint: what version it is, and a checksum of every byte of every file, its own included. Without torch.

[Note: manifest]
`manifest.json` is written last. It is the one text that its content renders to, and its last entry is the checksum of that text without the
entry; so any other byte anywhere in it is found. A newer version is refused before anything else is looked at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from offload.checkpoint import disk
from offload.errors import CheckpointError, named

if TYPE_CHECKING:
    from offload.checkpoint.blocks import Part

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
FORMAT, VERSION = "offload checkpoint", 1
JSON_MOST = 1 << 28  # bytes of a JSON file that is read
_BLOCK = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*\.(json|safetensors)")
_SUM = re.compile(r"[0-9a-f]{32}")


class NewerVersion(CheckpointError):
    """A checkpoint that is nothing the worse for it: a newer release reads it."""


@dataclass(frozen=True)
class Listed:
    """A file as the manifest has it."""

    nbytes: int
    xxh3_128: str


class Hashed:
    """A file that is written once, from its start to its end, and hashed on the way."""

    def __init__(self, file: FileIO) -> None:
        self._file, self._hash, self.nbytes = file, xxhash.xxh3_128(), 0

    def write(self, data: memoryview | bytes) -> None:
        disk.write(self._file, data)
        self._hash.update(data)
        before, self.nbytes = self.nbytes, self.nbytes + memoryview(data).nbytes
        disk.write_behind(self._file.fileno(), before, self.nbytes)

    def listed(self) -> Listed:
        """What the manifest is to say of it, once it is on the drive."""
        disk.sync(self._file.fileno())
        return Listed(self.nbytes, self._hash.hexdigest())


@dataclass
class Manifest:
    """The files of a checkpoint, by name."""

    files: dict[str, Listed] = field(default_factory=dict)

    def add(self, directory: Path, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Writes a file of the checkpoint, part by part: one is made while those before it are written."""
        with FileIO(directory / name, "xb") as file, ThreadPoolExecutor(1, "offload-save") as pool:
            out, written = Hashed(file), None
            for part in parts:
                if written is not None:
                    written.result()
                written = pool.submit(out.write, part)
            if written is not None:
                written.result()
            self.files[name] = out.listed()

    def add_large(self, directory: Path, name: str, parts: Iterable[Part], nbytes: int, room: int, take: Callable[[Path], bool]) -> None:
        """Writes a file of `nbytes`, past the page cache where that is to be had, in blocks that take at most `room` bytes of memory where that is
        enough. `take` as in `disk.create_large`."""
        from offload.checkpoint import blocks  # numpy is not for those who verify

        with disk.create_large(directory / name, nbytes, take) as file:
            written = Listed(*blocks.write_blocks(file, parts, blocks.block_bytes(room)))
            disk.sync(file.fileno())
        self.files[name] = written

    def write(self, directory: Path) -> None:
        """Writes the manifest itself; the checkpoint is whole from then on."""
        with FileIO(directory / MANIFEST, "xb") as file:
            out = Hashed(file)
            out.write(self.render())
            out.listed()

    def render(self) -> bytes:
        """See [Note: manifest]."""
        files = {name: {"bytes": f.nbytes, "xxh3_128": f.xxh3_128} for name, f in sorted(self.files.items())}
        content = {"format": FORMAT, "version": VERSION, "files": files}
        own = xxhash.xxh3_128_hexdigest(_render(content))
        return _render(content | {"xxh3_128": own})


def _render(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def may_replace(directory: Path) -> bool:
    """Whether a directory has nothing but what a checkpoint has, whole or not."""
    return directory.is_dir() and not directory.is_symlink() and {MANIFEST, STATE, TENSORS}.issuperset(os.listdir(directory))


def read_manifest(directory: Path) -> Manifest:
    """CheckpointError for what is no whole manifest, and for one of a newer version."""
    path = directory / MANIFEST
    if not os.path.isdir(directory):  # Path's own raises where a name is too long
        old = disk.aside(directory)
        raise CheckpointError(
            f"{directory} is no directory, so no checkpoint"
            + (f"; a save to it was interrupted, and what was there before is {old}: move it back" if old is not None else "")
        )
    if not os.path.lexists(path):
        raise CheckpointError(f"{directory} has no {MANIFEST}: it is no checkpoint, or not a whole one; take another")
    text = read_json_bytes(path)
    content = parse(path, text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint of offload's, or is damaged; take another")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        newer = named(str(version))
        raise NewerVersion(f"{directory} is a checkpoint of version {newer}; this release reads up to {VERSION}: update offload to read it")
    listed = content.get("files")
    manifest = Manifest({name: _listed(path, name, entry) for name, entry in listed.items()} if isinstance(listed, dict) else {})
    if not manifest.files or manifest.render() != text:
        raise CheckpointError(f"{path} is damaged: it does not agree with its own checksum; take another checkpoint")
    return manifest


def _listed(path: Path, name: str, entry: Any) -> Listed:
    good = isinstance(entry, dict) and entry.keys() == {"bytes", "xxh3_128"} and type(entry["bytes"]) is int and entry["bytes"] >= 0
    if not good or not isinstance(entry["xxh3_128"], str) or not _SUM.fullmatch(entry["xxh3_128"]):
        raise CheckpointError(f"{path} is damaged: what it says of {named(name)} is no size with a checksum; take another checkpoint")
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(f"{path} names {named(name)}, which no file of a checkpoint is called; take another checkpoint")
    return Listed(entry["bytes"], entry["xxh3_128"])


def read_json_bytes(path: Path) -> bytes:
    """A JSON file as it is. CheckpointError for one that is too large to be one of ours."""
    with disk.opened(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > JSON_MOST:
                raise CheckpointError(f"{path} has {size} bytes, more than any of a checkpoint's; take another checkpoint")
            return file.read(size + 1) or b""
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; take another checkpoint") from error


def parse(path: Path, text: bytes) -> Any:
    """JSON, or a CheckpointError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON ({error}); take another checkpoint") from None


def checksum(file: FileIO) -> str:
    """xxh3_128 of all that is left to read of a file."""
    hashed, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    while count := file.readinto(block):
        hashed.update(block[:count])
    return str(hashed.hexdigest())


def verify(directory: Path) -> None:
    """Reads every byte of a checkpoint and compares it with the manifest. CheckpointError names the file that is missing, cut or changed."""
    directory = Path(directory)
    for name, listed in read_manifest(directory).files.items():
        check_file(directory / name, listed)


def check_file(path: Path, listed: Listed) -> None:
    """CheckpointError unless a file is what the manifest says."""
    with disk.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != listed.nbytes:
            raise CheckpointError(f"{path} has {size} bytes of {listed.nbytes}: it was cut or written over; take another checkpoint")
        try:
            found = checksum(file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; take another checkpoint") from error
    if found != listed.xxh3_128:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were saved; take another checkpoint")
