"""Where a checkpoint is written: at once, in one place, whole or absent, whatever fails."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload
from checkpoints import steps, trained
from helpers import Prepared
from offload import _core
from offload.checkpoint import disk
from offload.engine.registry import engine_of
from offload.errors import CheckpointError

FILES = ("manifest.json", "state.json", "tensors.safetensors")


def test_a_directory_is_replaced_at_once(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(prepared)
    at = tmp_path / "new" / "at"
    for round_, exchange in enumerate((disk.exchange, disk.exchange, _no_exchange)):
        monkeypatch.setattr(disk, "exchange", exchange)
        steps(model, optimizer, round_, round_ + 1)
        offload.save(at, model, optimizer, round_)
        assert offload.load(str(at), model, optimizer) == round_
        assert os.listdir(at.parent) == ["at"]
    (at / "mine").touch()
    with pytest.raises(CheckpointError, match="not replaced"):
        offload.save(at, model, optimizer)
    assert sorted(os.listdir(at)) == sorted([*FILES, "mine"])
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="not replaced"):
        offload.save(tmp_path / "model.safetensors", model, optimizer)


def test_a_link_is_not_replaced_and_names_where_it_leads(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer = trained(prepared)
    offload.save(tmp_path / "real", model, optimizer, 1)
    for name, leads in (("link", "real"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / leads)
        with pytest.raises(CheckpointError, match=rf"{name} is a symbolic link, .*: save to \S+/{leads}, or to another directory"):
            offload.save(tmp_path / name, model, optimizer)
    assert offload.load(tmp_path / "link", model, optimizer) == 1
    (tmp_path / "drive").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "drive")
    offload.save(tmp_path / "mounted/at", model, optimizer, 2)
    assert offload.load(tmp_path / "drive/at", model, optimizer) == 2


def test_where_no_directory_can_be_made(prepared: Prepared) -> None:
    model, optimizer = trained(prepared)
    with pytest.raises(CheckpointError, match=r"cannot save to /proc/at: No such file or directory"):
        offload.save("/proc/at", model, optimizer)


def _no_exchange(a: Path, b: Path) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_two_saves_to_one_place(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer = trained(prepared)
    with disk.replacing(tmp_path / "at", lambda p: True) as where:
        with pytest.raises(CheckpointError, match=r"another save to .* is under way"):
            offload.save(tmp_path / "at", model, optimizer)
        offload.save(tmp_path / "other", model, optimizer)
        assert where.is_dir()
    assert (tmp_path / "at").is_dir() and not (tmp_path / disk.SAVING).exists()


@pytest.mark.parametrize("exchange", [disk.exchange, _no_exchange])
@pytest.mark.parametrize(
    ("what", "number", "at"),
    [*(("write", errno.ENOSPC, i) for i in (0, 1, 9)), *(("sync", errno.EIO, i) for i in range(5)), *(("rename", errno.EROFS, i) for i in range(2))],
)
def test_a_drive_that_fails(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int, at: int, exchange: Callable[[Path, Path], None]
) -> None:
    if what == "rename" and exchange is not _no_exchange:
        what, at = "exchange", 0
    model, optimizer = trained(prepared, 1)
    offload.save(tmp_path / "at", model, optimizer, "first")
    monkeypatch.setattr(disk, "exchange", exchange)
    count, real = itertools.count(), getattr(disk, what)

    def fail(*args: Any) -> None:
        if next(count) == at:
            raise OSError(number, os.strerror(number))
        real(*args)

    monkeypatch.setattr(disk, what, fail)
    with pytest.raises(CheckpointError, match=f"cannot save to .*{os.strerror(number)}.*Make room"):
        offload.save(tmp_path / "at", model, optimizer, "second")
    monkeypatch.undo()
    assert not (tmp_path / disk.SAVING).exists()
    assert offload.load(tmp_path / "at", model, optimizer) == "first"


def test_a_first_save_that_fails_at_the_last(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that could not be made to last is taken back."""
    model, optimizer = trained(prepared, 1)
    count, real = itertools.count(), disk.sync

    def fail(descriptor: int) -> None:
        if next(count) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(disk, "sync", fail)
    with pytest.raises(CheckpointError, match="cannot save to"):
        offload.save(tmp_path / "at", model, optimizer)
    assert next(count) > 4 and not (tmp_path / "at").exists() and not (tmp_path / disk.SAVING).exists()


def test_the_only_one_is_never_deleted(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exchanges, and with a drive that refuses every name from between the two renames on, it lies aside; the next save finds it."""
    model, optimizer = trained(prepared, 1)
    offload.save(tmp_path / "at", model, optimizer, "first")
    monkeypatch.setattr(disk, "exchange", _no_exchange)
    count, real = itertools.count(), os.rename

    def fail(old: Path, new: Path) -> None:
        if next(count):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(old, new)

    monkeypatch.setattr(disk, "rename", fail)
    aside = tmp_path / disk.SAVING / "at/old"
    with pytest.raises(CheckpointError, match=f"cannot save to .*; what was there before is {aside}"):
        offload.save(tmp_path / "at", model, optimizer, "second")
    with pytest.raises(CheckpointError, match=f"no directory.*what was there before is {aside}: move it back"):
        offload.load(tmp_path / "at", model, optimizer)
    assert offload.load(aside, model, optimizer) == "first"
    monkeypatch.undo()
    monkeypatch.setattr(disk, "write", fail)
    with pytest.raises(CheckpointError, match="as it was"):
        offload.save(tmp_path / "at", model, optimizer, "third")
    assert offload.load(tmp_path / "at", model, optimizer) == "first" and os.listdir(tmp_path / "at") and not (tmp_path / disk.SAVING).exists()


def test_a_save_begun_while_another_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the second has written is taken for what the first is to delete."""

    def save(text: str) -> None:
        with disk.replacing(tmp_path / "at", lambda p: True) as where:
            (where / "state.json").write_text(text)

    save("one")
    real = disk.shutil.rmtree
    tried: list[str] = []

    def tidy(path: Path, *args: Any, **named: Any) -> None:
        if not tried:
            tried.append("")
            with pytest.raises(CheckpointError, match="under way"):
                save("other")
        real(path, *args, **named)

    monkeypatch.setattr(disk.shutil, "rmtree", tidy)
    save("two")
    assert tried and (tmp_path / "at/state.json").read_text() == "two"
    save("three")
    assert (tmp_path / "at/state.json").read_text() == "three" and os.listdir(tmp_path) == ["at"]


KILLED = """
import os, signal, sys
from pathlib import Path
from offload.checkpoint import disk
from offload.checkpoint.manifest import Manifest, may_replace, verify
from offload.errors import CheckpointError

root, exchanges = Path(sys.argv[1]), sys.argv[2] == "exchange"
point = 0

def dying(real, halves):
    def act(*args, **named):
        global point
        for half in (False, True):
            if point == fatal:
                if half and halves:
                    args[0].write(memoryview(args[1])[: memoryview(args[1]).nbytes // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            point += 1
        real(*args, **named)
        if point == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        point += 1
    return act

def refuse(a, b):
    raise OSError(22, "no")

def save(target, text):
    with disk.replacing(target, may_replace) as where:
        manifest = Manifest()
        manifest.add(where, "tensors.safetensors", [text * 1000, text * 500])
        manifest.add(where, "state.json", [text])
        manifest.write(where)

def text(target):
    verify(target)
    return (target / "state.json").read_bytes()

if not exchanges:
    disk.exchange = refuse
fatal, asides = -1, 0
disk.sync = lambda descriptor: None  # a killed process loses nothing that it wrote
real = disk.write, disk.sync, disk.rename, disk.exchange, disk.shutil.rmtree
for fatal in range(1000):
    base = root / str(fatal)
    disk.write, disk.sync, disk.rename, disk.exchange, disk.shutil.rmtree = real
    base.mkdir()
    save(base / "step-1", b"one")
    save(base / "step-2", b"two")
    child = os.fork()
    if not child:
        try:
            disk.write = dying(real[0], True)
            disk.sync, disk.rename, disk.exchange, disk.shutil.rmtree = (dying(f, False) for f in real[1:])
            save(base / "step-2", b"new")    # replaces
            save(base / "step-3", b"three")  # is another
            disk.remove(base / "step-1")     # and the oldest goes
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    present = {p.name: text(p) for p in base.glob("step-*")}  # whole, each
    if exchanges:
        assert present["step-2"] in (b"two", b"new"), (fatal, present)
    elif "step-2" not in present:  # between two renames: both lie aside, whole, and where is said
        assert {text(p) for p in (base / ".saving/step-2").iterdir()} == {b"two", b"new"}, fatal
        try:
            verify(base / "step-2")
        except CheckpointError as error:
            assert str(base / ".saving/step-2/old") in str(error)
        disk.recover(base, base / ".saving")
        assert text(base / "step-2") == b"two"
        asides += 1
    assert "step-1" in present or "step-3" in present, (fatal, present)
    save(base / "step-2", b"again")  # what was left is in nobody's way
    save(base / "step-3", b"again")
    assert text(base / "step-2") == text(base / "step-3") == b"again"
    if status == 0:
        assert present == {"step-2": b"new", "step-3": b"three"} and not (base / ".saving").exists()
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
assert "torch" not in sys.modules and bool(asides) != exchanges
print(fatal)
"""


@pytest.mark.parametrize("how", ["exchange", "renames"])
def test_killed_anywhere_in_a_save(tmp_path: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60  # points


def test_memory_that_was_freed_makes_room(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user's loop has freed and the heap keeps is given back before a save takes memory, where it is scarce."""
    model, optimizer = trained(prepared)
    there = engine_of(model).device
    trims: list[None] = []
    monkeypatch.setattr(_core, "trim", lambda: trims.append(None))
    for most, times in ((1 << 60, 0), (0, 1)):
        there.resident_bytes_most = most
        offload.save(tmp_path / "saved", model, optimizer)
        assert len(trims) == times
