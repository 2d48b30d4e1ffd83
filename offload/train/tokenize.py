"""Turns documents into packed sequences, in a process of its own.

[Note: tokenizing elsewhere]
A tokenizer keeps tens to hundreds of MiB for ever, which no budget of the run covers, so it lives in a child process that ends before
training starts. The child reads no more text than the run needs and leaves files of tokens, which the run maps and unlinks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from offload.config import format_size
from offload.errors import ConfigError, named
from offload.train.data import Span, unreadable

PIECE_BYTES = 1 << 20
BATCH_PIECES = 16
WINDOW_TOKENS = 1 << 19
PREFIX = ".tokens-"
REFUSED = 3  # the exit code of a child that says itself what a user can mend

Encode = Callable[[list[str]], list[list[int]]]


def pieces(spans: Iterable[Span], strange: set[str] | None = None) -> Iterator[tuple[str, bool]]:
    """The text of `spans` in pieces of about `PIECE_BYTES`, cut after a line; True with the last piece of a document.

    What is no UTF-8 reads as U+FFFD, and `strange` gets the file's path. ConfigError for a file that cannot be read.
    """
    for span in spans:
        try:
            with open(span.path, "rb") as file:
                for data, last in _blocks(file, span):
                    text = data.decode(errors="replace")
                    if strange is not None and "\ufffd" in text and text.encode() != data:
                        strange.add(span.path)
                    yield text, last
        except OSError as error:
            raise unreadable(span.path, error) from None


def _blocks(file: BinaryIO, span: Span) -> Iterator[tuple[bytes, bool]]:
    file.seek(span.start)
    left = span.stop - span.start
    while left > 0:
        data = file.read(min(left, PIECE_BYTES))
        if data and len(data) < left:
            data += file.readline(left - len(data))
        left = left - len(data) if data else 0  # a file that shrank meanwhile ends where it ends
        yield data, left <= 0


def stream(spans: Iterable[Span], encode: Encode, end: int | None, strange: set[str] | None = None) -> Iterator[list[int]]:
    """Token ids of `spans`, some pieces at a time, with `end` after each document; `strange` as in `pieces`."""
    batch: list[tuple[str, bool]] = []

    def encoded() -> Iterator[list[int]]:
        for ids, (_, last) in zip(encode([text for text, _ in batch]), batch, strict=True):
            yield [*ids, end] if last and end is not None else ids
        batch.clear()

    for piece in pieces(spans, strange):
        batch.append(piece)
        if len(batch) == BATCH_PIECES:
            yield from encoded()
    if batch:
        yield from encoded()


def pack(tokens: Iterable[list[int]], seq_length: int, count: int, seed: int) -> npt.NDArray[np.int32]:
    """The first `count` sequences, int32 [<= count, seq_length], of the stream of `tokens`.

    Neighbours in the stream are shuffled within windows of `WINDOW_TOKENS`, so a sequence's place depends on the seed and not on `count`.
    """
    window = max(64, WINDOW_TOKENS // seq_length)
    wanted = -(-count // window) * window
    parts: list[npt.NDArray[np.int32]] = []
    have = 0
    for ids in tokens:
        parts.append(np.array(ids, dtype=np.int32))
        have += len(ids)
        if have >= wanted * seq_length:
            break
    flat = np.concatenate(parts) if parts else np.empty(0, np.int32)
    rows = flat[: len(flat) // seq_length * seq_length].reshape(-1, seq_length)[:wanted]
    order = [start + np.random.default_rng((seed, start)).permutation(min(window, len(rows) - start)) for start in range(0, len(rows), window)]
    return rows[np.concatenate(order)[:count]] if order else rows


def load_encoder(directory: Path) -> tuple[Encode, int | None]:
    """The tokenizer of a Hugging Face directory, and the id that ends a document."""
    config = json.loads((directory / "config.json").read_text())
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
        fast.no_truncation()
        fast.no_padding()
        return lambda texts: [e.ids for e in fast.encode_batch(texts, add_special_tokens=False)], end
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(str(directory))
    return lambda texts: list(slow(texts, add_special_tokens=False)["input_ids"]), end


class Tokenizing:
    """A running child that writes a token file for each of `jobs`: name -> (spans, sequences wanted). `vocabulary`: how many tokens the model has."""

    def __init__(
        self, tokenizer: Path, jobs: dict[str, tuple[list[Span], int]], seq_length: int, seed: int, out: Path, vocabulary: int = 1 << 31
    ) -> None:  # fmt: skip
        self._tokenizer, self._directory = tokenizer, Path(tempfile.mkdtemp(prefix=PREFIX, dir=out))
        request = {
            "tokenizer": str(tokenizer),
            "vocabulary": vocabulary,
            "seq_length": seq_length,
            "seed": seed,
            "jobs": {str(self._file(name)): {"spans": [asdict(s) for s in spans], "count": count} for name, (spans, count) in jobs.items()},
        }
        with tempfile.TemporaryFile("w+") as file:  # a pipe would hold the caller up until the child reads
            json.dump(request, file)
            file.seek(0)
            command = [sys.executable, "-m", "offload.train.tokenize"]
            # Of a process group of its own: Ctrl-C is for the run alone to hear.
            self._child = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.npy"

    def wait(self, note: Callable[[str], None] = lambda text: None) -> Path:
        """Returns when all token files are there: where; `ConfigError` with the child's last words where it failed. `note` hears of strange texts."""
        found, said = self._child.communicate()
        if self._child.returncode < 0:
            raise ConfigError(
                f"tokenizing with {self._tokenizer} was killed (by signal {-self._child.returncode}): where nobody did that, the system was out of "
                "memory; free some, lower tiers.host, or train on fewer tokens"
            )
        if self._child.returncode:
            last = (said.strip().splitlines() or [f"exit code {self._child.returncode}"])[-1]
            failed = f"tokenizing with {self._tokenizer} failed: {last}; give a model directory with a tokenizer that loads"
            raise ConfigError(last if self._child.returncode == REFUSED else failed)
        strange = json.loads(found.splitlines()[-1])
        if strange:
            note(
                f"texts that are no UTF-8: {len(strange)}, the first {named(strange[0])}; what cannot be read there is learned as U+FFFD. "
                "Convert them, as with iconv, or leave them out of data.source"
            )
        return self._directory.absolute()

    def close(self) -> None:
        """Ends the child and removes what it wrote; what was taken stays mapped."""
        if self._child.poll() is None:
            self._child.kill()
        with self._child:  # reaps it and closes its pipes
            pass
        shutil.rmtree(self._directory, ignore_errors=True)


def take(directory: Path, name: str) -> npt.NDArray[np.int32]:
    """Sequences int32 [count, seq_length] of a job, mapped from a file that `Tokenizing.close` leaves without a name."""
    try:
        tokens: npt.NDArray[np.int32] = np.load(directory / f"{name}.npy", mmap_mode="r")
    except FileNotFoundError:
        raise ConfigError(f"{directory} is not seen from here: give an --out on a file system that all ranks have") from None
    return tokens


def run(request: dict[str, Any]) -> list[str]:
    """The child's work; the files that are no UTF-8."""
    tokenizer, vocabulary = Path(request["tokenizer"]), request["vocabulary"]
    encode, end = load_encoder(tokenizer)
    strange: set[str] = set()
    for path, job in request["jobs"].items():
        spans = [Span(**s) for s in job["spans"]]
        tokens = pack(stream(spans, encode, end, strange), request["seq_length"], job["count"], request["seed"])
        if tokens.size and tokens.max() >= vocabulary:
            raise ConfigError(
                f"data.source: the tokenizer in {tokenizer} gives token {tokens.max()}, and the model knows {vocabulary} tokens, from 0: "
                "put the model's own tokenizer beside its config.json, or mend vocab_size there"
            )
        try:
            np.save(path, tokens)
        except OSError as error:
            size = format_size(tokens.nbytes)
            raise ConfigError(
                f"cannot write {size} of tokens to {path}: {error.strerror or error}; make room there, or give an --out on another disk"
            ) from None
    return sorted(strange)


def main(argv: Sequence[str] = ()) -> int:
    """Reads one request from standard input."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        print(json.dumps(run(json.load(sys.stdin))))
    except ConfigError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
