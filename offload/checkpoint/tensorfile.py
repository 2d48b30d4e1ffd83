"""safetensors files as they lie on the disk: headers written and checked. Without torch.

[Note: untrusted headers]
Nothing is allocated by what a header says before it agrees with the file: its length with the file's, each tensor's bytes with its shape, and
all of them together with what is left of the file, without gaps. Names are never paths.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.checkpoint import disk
from offload.checkpoint.manifest import parse
from offload.errors import CheckpointError, named

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8}
HEADER_MOST = 100_000_000  # as the format has it
DIMENSIONS_MOST = 64
PAGE = 4096


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its dtype as safetensors names it, and its first byte, from the end of the header (from the file's start once read)."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * BYTES[self.dtype]


def arrange(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Entries for (name, dtype, shape), larger elements first, so that each is aligned to its own size where it lies."""
    placed, at = {}, 0
    for name, dtype, shape in sorted(entries, key=lambda e: -BYTES[e[1]]):
        placed[name] = Entry(dtype, shape, at)
        at += placed[name].nbytes
    return placed


def header(entries: dict[str, Entry]) -> bytes:
    """What a file of these begins with: whole pages, so that tensors of whole pages lie on pages, as they do where they are moved from."""
    content = {n: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.start + e.nbytes]} for n, e in entries.items()}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    if len(text) > HEADER_MOST:
        raise CheckpointError(f"a safetensors file cannot name {len(entries)} tensors: its header would have {len(text)} bytes")
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> dict[str, Entry]:
    """The entries of a file. See [Note: untrusted headers]; CheckpointError."""
    with disk.opened(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8) or b"", "little")
            if size < 8 or length > min(size - 8, HEADER_MOST):
                raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in {size}")
            content = parse(path, file.read(length) or b"")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no table")
    entries = {name: _entry(path, name, entry) for name, entry in content.items() if name != "__metadata__"}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda e: (e[1].start, e[1].nbytes)):
        if entry.start != at:
            raise CheckpointError(f"{path} is damaged: {named(name)} starts at byte {entry.start}, and what is before it ends at {at}")
        at += entry.nbytes
    if at != size - 8 - length:
        raise CheckpointError(f"{path} is damaged: its tensors take {at} bytes, and {size - 8 - length} are there")
    return {name: Entry(e.dtype, e.shape, e.start + 8 + length) for name, e in entries.items()}


def _entry(path: Path, name: str, entry: Any) -> Entry:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        good = len(entry) == 3 and dtype in BYTES and len(shape) <= DIMENSIONS_MOST
        good = good and all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, start, end))
        good = good and math.prod(n or 1 for n in shape) < 1 << 62  # torch computes with the others even where one is 0
        made = Entry(dtype, shape, start)
        if good and end - start == made.nbytes:
            return made
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{path} is damaged: what its header says of {named(name)} is no dtype, shape and bytes of a tensor")
