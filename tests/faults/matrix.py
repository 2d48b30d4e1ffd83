"""Every fault, by where it comes: what a run must make of it, or why there is no such case."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harm
import helpers
from child import Child
from disks import read_only, small_disk
from offload.checkpoint.disk import SAVING
from scene import NEWEST, OLDER, SAVED_NEXT, Scene

PLACES = ("swap read", "swap write", "save", "resume")


@dataclass(frozen=True)
class Case:
    """A run that goes on from step 4, and what becomes of it.

    `before` changes what is on the disk, `harm` is in the run's own process, `meanwhile` acts while that waits, `mend` ends the fault. `code`,
    `error` and `says`, patterns each found in what it printed, are how it ends: with code 0 either at the calm run's end or, `stopped`, before.
    """

    code: int = 0
    error: str = ""
    says: tuple[str, ...] = ()
    harm: Any = None
    before: Callable[[Scene], None] | None = None
    meanwhile: Callable[[Scene, Child], None] | None = None
    mend: Callable[[Scene], None] | None = None
    stopped: bool = False
    left: tuple[str, ...] = ()  # patterns of what stays on swap
    how: str = "--resume"
    of: Callable[[Scene], Any] | None = field(default=None)  # makes `harm`, where it must know where it happens


@dataclass(frozen=True)
class NoCase:
    """Why a fault does not come there."""

    why: str


WAY_BACK = rf"--resume \S+ goes on from {NEWEST}\n"
CHECK = r"check the drive \(dmesg, smartctl -a\) or use another directory$"
HALF = r"(\. An update failed by it, so a step may be applied in part: this model can only be closed; go on from a checkpoint)?$"
FREE = "free space there, give it less or use another directory$"
FULL, BROKEN, SEALED = r"No space left on device \(ENOSPC\)", r"Input/output error \(EIO\)", r"Read-only file system \(EROFS\)"
NO_ROOM = r"error: cannot write {}: No space left on device; make room there or mend it"
NO_SWAP = rf"error: cannot reserve \d+ bytes for swap file \S+/state\.swap: {FULL}, \d+ bytes free; {FREE}"
NONE_WHOLE = rf"error: no checkpoint in \S+/checkpoints is whole; the newest: \S+/{NEWEST}/tensors\.safetensors {{}}.* Or start another run.*--out$"
PASSED_OVER = rf"passed over: \S+/{NEWEST}/tensors\.safetensors {{}}[^\n]*take another"
OTHER_BYTES = r"bytes \d+ to \d+ of the file are not what was written there \(checksum \w+, written as \w+\)"
NOT_SAVED = (rf"cannot save to \S+/{SAVED_NEXT}: ", "what was there before is as it was. Make room or mend the drive and save again", WAY_BACK)
LIVE = r"error: \S+/out: a run is live there \(process {pid}\); give another --out, or end it first$"


def swap_error(side: str, said: str, way: str = CHECK) -> tuple[str, ...]:
    way = way.removesuffix("$") + HALF
    return (rf"error: {side} of \d+ bytes at offset \d+ of \S+/state\.swap failed: {said}; {way}", WAY_BACK)


# What is done to files


def flip(scene: Scene, name: str, which: tuple[str, ...] = (NEWEST,)) -> None:
    for path in _files(scene, name, which):
        helpers.flip(path)


def cut(scene: Scene, name: str, which: tuple[str, ...] = (NEWEST,)) -> None:
    for path in _files(scene, name, which):
        os.truncate(path, path.stat().st_size - 1)


def miss(scene: Scene, name: str, which: tuple[str, ...] = (NEWEST,)) -> None:
    for path in _files(scene, name, which):
        path.unlink()


def _files(scene: Scene, name: str, which: tuple[str, ...]) -> list[Any]:
    return [scene.out / "checkpoints" / step / name for step in which]


def small(scene: Scene) -> None:
    """The run lies on a disk of its own."""
    scene.mounts.enter_context(small_disk("tmpfs", scene.disk, "4m"))
    scene.lay_out()


def full(scene: Scene) -> None:
    small(scene)
    harm.fill(scene.disk / "others", 0)


def room(scene: Scene) -> None:
    (scene.disk / "others").unlink()


def full_swap(scene: Scene) -> None:
    scene.harmed.enter_context(small_disk("tmpfs", scene.swap, "64k"))


def undo(scene: Scene) -> None:
    scene.harmed.close()


# What others do meanwhile


def swaps_there_too(scene: Scene, _: Child) -> None:
    """Another run has the same swap directory, from its start to its end."""
    other = Scene(scene.where / "other", scene.calm)
    shutil.rmtree(other.swap, ignore_errors=True)
    other.swap.symlink_to(scene.swap)
    assert len(list(scene.swap.iterdir())) == 1
    done = other.start().join()
    assert done.code == 0, done.said
    other.finished_right()
    assert len(list(scene.swap.iterdir())) == 1


def cleans(scene: Scene, child: Child) -> None:
    done = scene.command(["clean", str(scene.swap)]).join()
    assert done.code == 0 and re.search(rf"left \S+, [^,]*: in use by process {child.pid}", done.out), done


def is_refused(scene: Scene, child: Child) -> None:
    before = {p: p.read_bytes() for p in scene.out.rglob("*") if p.is_file()}
    for how in ("--resume", "--out"):
        done = scene.start(how=how).join()
        assert (done.code, done.error) == (2, "ConfigError") and re.search(LIVE.format(pid=child.pid), done.said), done
    assert {p: p.read_bytes() for p in scene.out.rglob("*") if p.is_file()} == before


def deletes_swap(scene: Scene, _: Child) -> None:
    shutil.rmtree(scene.swap)


def deletes_what_is_saved(scene: Scene, _: Child) -> None:
    shutil.rmtree(scene.out / SAVING)


def deletes_run(scene: Scene, _: Child) -> None:
    shutil.rmtree(scene.out)


def replaces_run(scene: Scene, _: Child) -> None:
    """The directory is deleted, and a second run begun there, and ended."""
    shutil.rmtree(scene.out)
    scene.lay_out()
    done = scene.start().join()
    assert done.code == 0, done.said
    scene.finished_right()


def read_only_swap(scene: Scene, _: Child | None = None) -> None:
    scene.swap.mkdir(exist_ok=True)
    scene.harmed.enter_context(read_only(scene.swap))


def read_only_run(scene: Scene, _: Child | None = None) -> None:
    scene.harmed.enter_context(read_only(scene.out))


def cleaned(scene: Scene) -> None:
    """The fault is over, and what stayed on swap is removed by hand."""
    undo(scene)
    done = scene.command(["clean", str(scene.swap)]).join()
    assert done.code == 0 and "removed" in done.out


def signals(number: int, times: int = 1, **over: Any) -> dict[str, list[Case | NoCase]]:
    return {place: [Case(harm=harm.Sent(number, place, times), **over)] for place in PLACES}


def stops(number: int) -> dict[str, list[Case | NoCase]]:
    return signals(number, says=("stopping after this step; once more to stop at once\n",), stopped=True)


def damaged(act: Callable[..., None], says: str) -> list[Case | NoCase]:
    """A checkpoint is passed over for the one before; where none is left the run is refused."""
    name, both = "tensors.safetensors", (OLDER, NEWEST)
    return [
        Case(before=lambda scene: act(scene, name), says=(PASSED_OVER.format(says), f"goes on from .*{OLDER}")),
        Case(2, "CheckpointError", (NONE_WHOLE.format(says),), before=lambda scene: act(scene, name, both), mend=Scene.lay_out),
    ]


MATRIX: dict[str, dict[str, list[Case | NoCase]]] = {
    "SIGKILL": signals(signal.SIGKILL, code=-9),
    "SIGTERM": stops(signal.SIGTERM),
    "Ctrl-C": stops(signal.SIGINT),
    "Ctrl-C twice": signals(signal.SIGINT, 2, code=130, says=("stopping after this step", "stopping at once\n")),
    "disk full": {
        "swap read": [NoCase("a read takes no room")],
        "swap write": [
            Case(2, "SwapError", (NO_SWAP,), before=full_swap, mend=undo),
            Case(2, "SwapError", swap_error("write", FULL, FREE), harm.SwapFails("write", errno.ENOSPC)),
        ],
        "save": [
            Case(2, "CheckpointError", (r"No space left on device", *NOT_SAVED), before=small, mend=room,
                 of=lambda scene: harm.Fills(scene.disk / "others", 64 << 10)),
            Case(2, "OffloadError", (NO_ROOM.format(r"\S+/metrics\.jsonl") + ", and go on with --resume$", WAY_BACK),
                 harm.MetricsFill()),
        ],
        "resume": [Case(2, "ConfigError", (NO_ROOM.format(r"\S+/out(/\S+)?"),), before=full, mend=room)],
    },
    "I/O error": {
        "swap read": [Case(2, "SwapError", swap_error("read", BROKEN), harm.SwapFails("read", errno.EIO))],
        "swap write": [Case(2, "SwapError", swap_error("write", BROKEN), harm.SwapFails("write", errno.EIO))],
        "save": [Case(2, "CheckpointError", ("Input/output error", *NOT_SAVED), harm.SaveFails(what, errno.EIO, count))
                 for what, count in (("write", 3), ("sync", 1), ("sync", 5), ("rename", 1))],
        "resume": [
            Case(harm=harm.Unreadable(f"{NEWEST}/tensors.safetensors"),
                 says=(PASSED_OVER.format("cannot be read: Input/output error"), f"goes on from .*{OLDER}")),
            Case(2, "CheckpointError", (NONE_WHOLE.format("cannot be read: Input/output error"),), harm.Unreadable("/tensors.safetensors")),
            Case(2, "CheckpointError", (rf"error: \S+/{NEWEST}/tensors\.safetensors could not be read to its end.*Input/output error; load again$",),
                 harm.LoadFails()),
            Case(2, "SwapError", swap_error("write", BROKEN)[:1], harm.SwapFails("write", errno.EIO, at_once=True)),
        ],
    },
    "bit flipped": {
        "swap read": [Case(2, "SwapError", swap_error("read", OTHER_BYTES, "the drive.*check the drive.*start again from the last checkpoint$"),
                           of=lambda scene: harm.Spoils(scene.swap, "flip"))],
        "swap write": [NoCase("what a drive wrote wrong shows when it is read")],
        "save": [NoCase("a save reads nothing back; it shows when the run goes on, and to `offload verify`")],
        "resume": damaged(flip, "is damaged"),
    },
    "cut": {
        "swap read": [Case(2, "SwapError", swap_error("read", r"the file ends at \d+", "something cut it: use a directory of the run's own$"),
                           of=lambda scene: harm.Spoils(scene.swap, "cut"))],
        "swap write": [NoCase("a write makes the file long again; what is lost shows when it is read")],
        "save": [NoCase("a save reads nothing back; it shows when the run goes on, and to `offload verify`")],
        "resume": damaged(cut, r"has \d+ bytes of \d+: it was cut or written over"),
    },
    "file missing": {
        "swap read": [NoCase("a swap file is open: without its name it stays; see the swap directory that is deleted")],
        "swap write": [NoCase("as for a read")],
        "save": [Case(2, "CheckpointError", ("No such file", *NOT_SAVED), harm.Pauses("save"), meanwhile=deletes_what_is_saved)],
        "resume": damaged(miss, "is missing, so the checkpoint is not whole"),
    },
    "two runs": {
        "swap read": [Case(harm=harm.Pauses(), meanwhile=swaps_there_too)],
        "swap write": [Case(harm=harm.Pauses(), meanwhile=cleans)],
        "save": [Case(harm=harm.Pauses("save"), meanwhile=is_refused)],
        "resume": [Case(harm=harm.Pauses("resume"), meanwhile=is_refused)],
    },
    "swap directory deleted": {
        "swap read": [Case(harm=harm.Pauses(), meanwhile=deletes_swap)],
        "swap write": [NoCase("a step reads and writes: the case of reads has both")],
        "save": [Case(harm=harm.Pauses("save"), meanwhile=deletes_swap)],
        "resume": [Case(harm=harm.Pauses("resume"), meanwhile=deletes_swap)],
    },
    "swap directory read-only": {
        "swap read": [Case(harm=harm.Pauses(), meanwhile=read_only_swap, says=(r"\S+ stays behind: Read-only file system; `offload clean \S+/swap`",),
                           left=("offload-.*",), mend=cleaned)],
        "swap write": [Case(2, "SwapError", swap_error("write", SEALED, "make it writable or use another directory$"),
                            harm.SwapFails("write", errno.EROFS))],
        "save": [NoCase("a save writes nothing to swap, and reads on: the case of reads saves too")],
        "resume": [Case(2, "SwapError", (r"error: cannot swap to \S+/swap: Read-only file system; give a directory that can be written to$",),
                        before=read_only_swap, mend=undo)],
    },
    "run directory deleted": {
        "swap read": [NoCase("swap files lie elsewhere")],
        "swap write": [NoCase("swap files lie elsewhere")],
        "save": [Case(2, "ConfigError", (r"error: \S+/out was deleted or replaced while a run was live there, so nothing more of it is written",),
                      harm.Pauses(), meanwhile=act, mend=mend) for act, mend in ((deletes_run, Scene.lay_out), (replaces_run, None))],
        "resume": [NoCase("no checkpoint is left: the run starts from the start, and says so")],
    },
    "run directory read-only": {
        "swap read": [NoCase("swap files lie elsewhere")],
        "swap write": [NoCase("swap files lie elsewhere")],
        "save": [Case(2, "CheckpointError", ("Read-only file system", *NOT_SAVED), harm.Pauses(), meanwhile=read_only_run, mend=undo)],
        "resume": [Case(2, "ConfigError", (r"error: cannot write a run to \S+/out: Read-only file system; make .*or give another",),
                        before=read_only_run, mend=undo)],
    },
}  # fmt: skip
