"""What commands do with files on the disk, without torch: `offload verify` and `offload clean`."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.cli.app import emit
from offload.config import RunConfig, format_size
from offload.errors import CheckpointError, ConfigError

_STEP = re.compile(r"step-([0-9]{8,})")  # as runs name them


def checkpoints(directory: str) -> list[Path]:
    """The checkpoint that `directory` is, or those of the run that it is, oldest first; at least one, or ConfigError."""
    path = Path(directory)
    if not os.path.isdir(path):  # Path's own raises where a name is too long
        raise ConfigError(f"{directory} is no directory; give a checkpoint, or the directory of a run")
    if not os.path.isfile(path / "config.toml") and not os.path.isdir(path / "checkpoints"):
        return [path]
    try:
        named = ((p, _STEP.fullmatch(p.name)) for p in (path / "checkpoints").iterdir() if p.is_dir())
        found = [p for _, p in sorted((int(step[1]), p) for p, step in named if step)]
    except FileNotFoundError:
        found = []
    except OSError as error:
        raise ConfigError(f"cannot look into {path / 'checkpoints'}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{directory} has no checkpoint yet; a run saves them where its file has a table [checkpoint]")
    return found


def check(checkpoint: Path) -> None:
    """CheckpointError where a checkpoint is not whole and sound."""
    try:
        manifest = importlib.import_module("offload.checkpoint.manifest")
    except ModuleNotFoundError:
        raise ConfigError("checkpoints are not available in this version") from None
    manifest.verify(checkpoint)


def verify_command(directory: str, as_json: bool) -> int:
    """Prints the checkpoints that are good; the first that is not is the error, which tells of the others too."""
    found = checkpoints(directory)
    good, bad = list[Path](), dict[Path, CheckpointError]()
    for path in found:
        try:
            check(path)
            good.append(path)
        except CheckpointError as error:
            bad[path] = error
    if bad:
        first, *others = bad
        more = f". Not whole either: {_names(others)}" if others else ""
        more += f". Whole: {_names(good)}" if good else ". None is whole" if others else ""
        raise CheckpointError(f"{bad[first]}{more}")
    result = {"verified": [str(path) for path in found]}
    emit(result, as_json, lambda r: "\n".join(f"{path}: every byte is as it was written" for path in r["verified"]))
    return 0


def _names(found: list[Path]) -> str:
    return ", ".join(path.name for path in found)


def _swap_directories(directory: str) -> list[Path]:
    path = Path(directory)
    if not os.path.isdir(path):
        raise ConfigError(f"{directory} is no directory; give a swap directory, or the directory of a run")
    if not os.path.isfile(path / "config.toml"):
        return [path]
    return [Path(disk) for disk, _ in RunConfig.load(path / "config.toml").tiers_value().nvme if os.path.isdir(disk)]


def _text(result: dict[str, Any]) -> str:
    lines = [f"removed {left['path']}, {format_size(left['bytes'])}" for left in result["removed"]]
    lines += [f"left {left['path']}, {format_size(left['bytes'])}: {left['why']}" for left in result["left"]]
    return "\n".join(lines) or "no swap files"


def _saving(run: Path) -> list[tuple[Path, int, str]]:
    """Removes what a killed run left of saves beside its checkpoints, but not the only copy of one: each with its bytes, and why it stays."""
    from offload.checkpoint import disk

    saving, found = run / disk.SAVING, []
    if not (run / "config.toml").is_file() or not saving.is_dir():
        return []
    with open(run / ".lock", "ab") as lock:
        live = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            live = True
        for path in sorted(saving.iterdir()) if saving.is_dir() else ():
            why = "in use by a live run" if live else "in use by a save" if disk.is_busy(path) else ""
            if disk.aside(run / "checkpoints" / path.name, saving) is not None:
                why = "the only copy of a checkpoint: --resume puts it back"
            nbytes = _bytes(path)
            if not why:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            found.append((path, nbytes, why))
        disk.tidy(saving)
    return found


def _bytes(path: Path) -> int:
    """What a file or directory takes, which a live run may be about to rename or remove."""
    total, inside = 0, (os.path.join(top, name) for top, names, files in os.walk(path) for name in (*names, *files))
    for file in (str(path), *inside):
        with suppress(FileNotFoundError):
            total += os.lstat(file).st_blocks * 512
    return total


def clean_command(directory: str, as_json: bool) -> int:
    """Prints what was removed, and what was left and why."""
    from offload.memory.swap import sweep

    removed, left = [], []
    for path in _swap_directories(directory):
        try:
            found = sweep(path)
        except OSError as error:
            raise ConfigError(f"cannot look into {path}: {error.strerror}") from None
        removed += [{"path": str(f.path), "bytes": f.nbytes} for f in found if not f.stays]
        left += [{"path": str(f.path), "bytes": f.nbytes, "why": f.stays} for f in found if f.stays]
    try:
        for aside, nbytes, why in _saving(Path(directory)):
            (left if why else removed).append({"path": str(aside), "bytes": nbytes} | ({"why": why} if why else {}))
    except OSError as error:
        raise ConfigError(f"cannot clean {error.filename or directory}: {error.strerror}") from None
    emit({"removed": removed, "left": left}, as_json, _text)
    return 0
