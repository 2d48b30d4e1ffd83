"""The directory of a run: one live run at a time, and files that are whole or absent."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from offload.checkpoint.disk import SAVING, make, sync_directory
from offload.errors import ConfigError
from offload.train import tokenize

METRICS, SUMMARY, CHECKPOINTS = "metrics.jsonl", "summary.json", "checkpoints"
_OWN = {"config.toml", METRICS, SUMMARY, CHECKPOINTS, SAVING, "trace.json.gz", "report.html", ".lock"}
_SCRATCH = (tokenize.PREFIX, ".partial-")


def _own(name: str) -> bool:
    return name in _OWN or name.startswith(_SCRATCH)


def _is_record(record: Any, step: int) -> bool:
    """Whether a line of `metrics.jsonl` has what a summary is made of."""
    numbers = ("seconds", "tokens", "compute_seconds")
    good = record["step"] == step and all(isinstance(record[key], (int, float)) for key in numbers) and isinstance(record["stall_seconds"], dict)
    return good and isinstance(record["loss"], (int, float, type(None)))


class RunDirectory:
    """A locked run directory, made if missing; what an earlier run left in it is replaced by `begin`, anything else in it is a refusal. `resume`
    goes on with it.

    Raises `ConfigError` where another run is live in it, where it holds other files, and where it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._refuse_inside()
            if self.path.is_dir():
                self._refuse_strangers()
            make(self.path)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._take()
        except OSError as error:
            os.close(self._lock)
            raise self._unwritable(error) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write a run to {self.path}: {error.strerror or error}; make room there or mend it, or give another directory")

    def _refuse_inside(self) -> None:
        """A checkpoint, or the directory that has them, is given where a run's is meant; nor is a run to lie among them."""
        path = self.path.absolute()
        for run in path.parents[:2]:
            if path.relative_to(run).parts[0] == CHECKPOINTS and os.path.isfile(run / "config.toml"):
                raise ConfigError(
                    f"{self.path} is among the checkpoints of the run in {run}: --resume {run} goes on from the newest of them; or give another "
                    "directory"
                )

    def _refuse_strangers(self) -> None:
        others = sorted(name for name in os.listdir(self.path) if not _own(name))
        if others:
            raise ConfigError(
                f"{self.path} holds {others[0]!r}, which is no part of a run that may be replaced or gone on with: move it away, "
                "or give another directory"
            )

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            raise ConfigError(f"{self.path}: a run is live there (process {pid}); give another --out, or end it first") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._remove(lambda name: name.startswith(_SCRATCH))

    def _remove(self, wanted: Callable[[str], bool]) -> list[str]:
        names = [name for name in os.listdir(self.path) if wanted(name)]
        for name in names:
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        return names

    def check(self) -> None:
        """ConfigError where the directory is no longer the one that is locked: what another run has there now is not this one's to change."""
        try:
            same = os.path.samestat(os.fstat(self._lock), os.stat(self.path / ".lock"))
        except OSError:
            same = False
        if not same:
            raise ConfigError(
                f"{self.path} was deleted or replaced while a run was live there, so nothing more of it is written; start it again, with another "
                "--out where something else is there now"
            )

    def begin(self, config: str) -> bool:
        """Removes an earlier run, now that this one can start, and writes `config.toml`; whether there was one. Checkpoints stay."""
        try:
            removed = self._remove(lambda name: name in _OWN - {".lock", CHECKPOINTS})
        except OSError as error:
            raise self._unwritable(error) from None
        self.write("config.toml", config)
        return bool(removed)

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary of the run that is here, if it came to the end of `steps` steps."""
        try:
            summary = json.loads((self.path / SUMMARY).read_text())
            done = not summary["interrupted"] and summary["steps"] >= steps
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return summary if done else None

    def records(self, steps: int) -> list[dict[str, Any]]:
        """What `metrics.jsonl` has of the first `steps` steps. ConfigError where it lacks any."""
        path = self.path / METRICS
        records: list[dict[str, Any]] = []
        try:
            with open(path, "rb") as file:
                for line in itertools.islice(file, steps):
                    records.append(json.loads(line))
            good = len(records) == steps and all(_is_record(r, i) for i, r in enumerate(records, 1))
        except FileNotFoundError:
            good = not steps
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read back to step {steps}, so the run cannot go on: {error}; start another with --out") from None
        if not good:
            raise ConfigError(f"{path} lacks steps before {steps}, where the checkpoint is, so the run cannot go on; start another with --out")
        return records

    def resume(self, config: str, records: Sequence[dict[str, Any]]) -> None:
        """Cuts `metrics.jsonl` back to these records, and writes `config.toml`, now that the run can go on."""
        try:
            self._remove(lambda name: name in (SUMMARY, "report.html"))
        except OSError as error:
            raise self._unwritable(error) from None
        self.write(METRICS, "".join(json.dumps(record) + "\n" for record in records))
        self.write("config.toml", config)

    def write(self, name: str, text: str) -> None:
        """Writes a file that is whole or absent, whenever the machine stops."""
        partial = self.path / f".partial-{name}"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path / name)
            sync_directory(self.path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ConfigError(f"cannot write {self.path / name}: {error.strerror}; make room there or mend it, and go on with --resume") from None

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """`write` of `value` as indented JSON."""
        self.write(name, json.dumps(value, indent=1) + "\n")

    def close(self) -> None:
        """Lets another run have the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
