"""Sequences of tokens in an order that the seed alone fixes.

A run reads sequences 0, 1, 2, ... of one endless list: step `s`, micro-batch `m` and rank `r` take consecutive slices of it, so neither
tiers, nor devices, nor the number of ranks change what is learned from, and a resumed run goes on where it was.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from offload.errors import ConfigError, named

# one kind of random choice each, so that none follows from another
_FILES, _EPOCH, _TRAIN, _EVAL = range(4)

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a text file: one document."""

    path: str
    start: int
    stop: int


class Source(Protocol):
    """An endless list of sequences of `seq_length` token ids."""

    def __getitem__(self, index: int) -> Tokens: ...

    def digest(self, count: int) -> str:
        """A hash of the first `count` sequences."""


class RandomSequences:
    """Uniform random tokens; sequence `index` depends on the seed and the index."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, held_out: bool = False) -> None:
        self._shape = (vocab_size, seq_length)
        self._key = (seed, _EVAL if held_out else _TRAIN)

    def __getitem__(self, index: int) -> Tokens:
        vocab_size, seq_length = self._shape
        return np.random.default_rng((*self._key, index)).integers(0, vocab_size, seq_length)

    def digest(self, count: int) -> str:
        return repr((*self._shape, *self._key))


class PackedSequences:
    """Rows of a token matrix [sequences, seq_length]; the first epoch in its order, each later one in an order of its own."""

    def __init__(self, tokens: npt.NDArray[np.int32], seed: int) -> None:
        self._tokens, self._seed = tokens, seed
        self._epoch, self._order = 0, np.arange(len(tokens))
        self._hash, self._hashed = xxhash.xxh3_128(), 0  # of the first so many

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Tokens:
        epoch, row = divmod(index, len(self._tokens))
        if epoch != self._epoch:
            count = len(self._tokens)
            self._order = np.random.default_rng((self._seed, _EPOCH, epoch)).permutation(count) if epoch else np.arange(count)
            self._epoch = epoch
        return np.asarray(self._tokens[self._order[row]], dtype=np.int64)

    def digest(self, count: int) -> str:
        """Of those of the first epoch, from which others follow; it tells where that ended, if it did. What the last one was of is not read again."""
        ended = f" of {len(self._tokens)}" if count > len(self._tokens) else ""
        if count < self._hashed:
            self._hash, self._hashed = xxhash.xxh3_128(), 0
        rows = self._tokens[self._hashed : count]
        if len(rows):
            self._hash.update(np.ascontiguousarray(rows).data)
            self._hashed += len(rows)
        return str(self._hash.hexdigest()) + ended


def micro_batch(source: Source, step: int, micro: int, *, batch_size: int, accumulate: int, rank: int = 0, ranks: int = 1) -> Tokens:
    """Token ids [batch_size, seq_length] of micro-batch `micro` of `step`, both counted from 0."""
    first = ((step * accumulate + micro) * ranks + rank) * batch_size
    return np.stack([source[first + i] for i in range(batch_size)])


def find_files(patterns: Sequence[str]) -> list[str]:
    """The non-empty files that absolute paths or globs name, sorted, each once whatever links lead there; `ConfigError` where one names none."""
    found: set[str] = set()
    for pattern in patterns:
        matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        files = {path for path in matches if os.path.isfile(path)}
        if not files and any(map(os.path.isdir, matches)):
            raise ConfigError(f"data.source: {named(pattern)} is a directory; name the files in it, as {named(pattern)}/**/*.txt")
        if not files:
            raise ConfigError(f"data.source: no file matches {named(pattern)}; paths are relative to the run file")
        found |= {path for path in files if os.path.getsize(path)}
    if not found:
        raise ConfigError(f"data.source: no text found, all files of {', '.join(patterns)} are empty")
    once: dict[str, str] = {}
    for path in sorted(found):
        once.setdefault(os.path.realpath(path), path)
    return list(once.values())


def unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"data.source: cannot read {path}: {error.strerror}; mend that, or leave the file out")


def _whole_character(path: str, at: int) -> int:
    """The start of the first character of UTF-8 from byte `at` on."""
    try:
        with open(path, "rb") as file:
            file.seek(at)
            following = file.read(3)
    except OSError as error:
        raise unreadable(path, error) from None
    return at + len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))


def split(files: Sequence[str], held_out: float, seed: int) -> tuple[list[Span], list[Span]]:
    """Documents to train on and documents kept apart, each in the seed's order.

    `held_out` is the share of the files kept apart, at least one where it is not 0; of a single file, its tail.
    """
    whole = [Span(path, 0, os.path.getsize(path)) for path in files]
    if len(whole) == 1 and held_out:
        cut = _whole_character(files[0], round(whole[0].stop * (1 - held_out)))
        return [Span(whole[0].path, 0, cut)], [Span(whole[0].path, cut, whole[0].stop)]
    order = np.random.default_rng((seed, _FILES)).permutation(len(whole))
    kept = min(max(1, round(held_out * len(whole))), len(whole) - 1) if held_out else 0
    return [whole[i] for i in order[kept:]], [whole[i] for i in order[:kept]]


def has_tokenizer(directory: Path) -> bool:
    """Whether `directory` holds the files of a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
    return any(os.path.isfile(directory / name) for name in names)
