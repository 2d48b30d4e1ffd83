"""A deleted checkpoint's file, which the next save writes over: never one that somebody still has, and nothing whole is lost by it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload
from checkpoints import steps, trained
from disks import small_disk
from helpers import Prepared
from offload.checkpoint import blocks, disk, save, spare
from offload.checkpoint.manifest import TENSORS, verify
from offload.checkpoint.spare import Spare
from offload.errors import CheckpointError, OffloadError
from offload.observe.metrics import MetricsWriter
from offload.train.checkpoints import Checkpoints


@pytest.fixture
def run(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(save, "FILE_LEAST", 1)
    monkeypatch.setattr(blocks, "block_bytes", lambda room: 8192)
    return Run(tmp_path / "run", *trained(prepared))


class Run:
    """Saves a step later each time, and keeps two."""

    def __init__(self, path: Path, model: Any, optimizer: Any) -> None:
        self.checkpoints, self.step, self.model, self.optimizer = Checkpoints(path / "checkpoints"), 0, model, optimizer
        self.spare = self.checkpoints.spare.path

    def save(self, times: int = 1, more: bool = True) -> None:
        for _ in range(times):
            self.step += 1
            steps(self.model, self.optimizer, self.step, self.step + 1)
            self.checkpoints.save(self.step, self.model, self.optimizer, self.step)
            self.checkpoints.retain(2, self.step, pytest.fail, more)

    def tensors(self, step: int) -> Path:
        return self.checkpoints.at(step) / TENSORS

    def check(self) -> None:
        """What is kept is whole, and the newest what a save to a new file has."""
        found = self.checkpoints.all()
        assert list(found) == [self.step - 1, self.step]
        for path in found.values():
            verify(path)
        offload.save(self.checkpoints.path.parent / "new", self.model, self.optimizer, self.step)
        for name in os.listdir(found[self.step]):
            assert (found[self.step] / name).read_bytes() == (self.checkpoints.path.parent / "new" / name).read_bytes(), name


def test_a_file_goes_from_save_to_save(run: Run) -> None:
    run.save(2)
    assert not run.checkpoints.saving.exists()
    for _ in range(3):
        oldest = run.tensors(run.step - 1).stat().st_ino
        run.save()
        assert os.listdir(run.checkpoints.saving) == [spare.NAME] and run.spare.stat().st_ino == oldest
        run.check()
    left = run.spare.stat().st_ino
    run.save()
    assert run.tensors(run.step).stat().st_ino == left
    run.save(more=False)
    assert not run.checkpoints.saving.exists()
    run.check()


def test_a_small_checkpoint_leaves_none_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "FILE_LEAST", 1 << 30)
    run.save(4)
    run.check()
    run.checkpoints.close()
    assert not run.checkpoints.saving.exists()


def _linked(file: Path) -> Callable[[], object]:
    other = file.parents[2] / "backup"
    os.link(file, other)
    return other.read_bytes


def _opened(file: Path) -> Callable[[], object]:
    descriptor = os.open(file, os.O_RDONLY)

    def read() -> bytes:
        found = os.pread(descriptor, 1 << 24, 0)
        os.close(descriptor)
        return found

    return read


def _mapped(file: Path) -> Callable[[], object]:
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return lambda: mapped[:]


@pytest.mark.parametrize("held", [_linked, _opened, _mapped])
@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_somebody_has_is_not_written_over(run: Run, held: Callable[[Path], Callable[[], bytes]], kept: bool) -> None:
    """Whether they came by it before the checkpoint was deleted, or after."""
    run.save(3 if kept else 2)
    file = run.spare if kept else run.tensors(1)
    before, read = file.read_bytes(), held(file)
    run.save()
    assert kept or not run.spare.exists()
    run.save(2)
    assert read() == before
    run.check()


def test_where_the_kernel_does_not_tell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = spare.fcntl.fcntl

    def refusing(descriptor: Any, command: int, *rest: Any) -> Any:
        if command == spare.fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, *rest)

    monkeypatch.setattr(spare.fcntl, "fcntl", refusing)
    run.save(4)
    assert not run.checkpoints.saving.exists()
    run.check()


def test_no_link_is_followed(run: Run, tmp_path: Path) -> None:
    run.save(3)
    run.spare.unlink()
    (tmp_path / "theirs").write_bytes(b"theirs")
    run.spare.symlink_to(tmp_path / "theirs")
    run.save()
    assert (tmp_path / "theirs").read_bytes() == b"theirs" and not run.tensors(run.step).is_symlink()
    run.check()


def test_a_disk_with_little_room_gets_it_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Space:
        f_bavail, f_frsize = 1, 4096

    with monkeypatch.context() as patch:
        patch.setattr(spare.os, "statvfs", lambda path: Space)
        run.save(4)
        assert not run.checkpoints.saving.exists()
    run.save()
    assert run.spare.exists()


def test_a_full_disk_gets_it_back_before_a_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 0, 4096

    run.save(3)
    assert run.spare.exists()
    taken: list[bool] = []
    monkeypatch.setattr(spare.os, "statvfs", lambda path: Full)
    monkeypatch.setattr(disk, "create_large", lambda path, nbytes, take, real=disk.create_large: taken.append(take(path)) or real(path, nbytes))
    run.save()
    assert taken == [False] and not run.spare.exists()
    run.check()


@pytest.mark.parametrize("what", ["write_at", "sync", "rename"])
def test_a_drive_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    run.save(4)
    kept = {path: path.read_bytes() for step in run.checkpoints.all() for path in run.checkpoints.at(step).iterdir()}

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(disk, what, fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            run.checkpoints.save(9, run.model, run.optimizer, None)
    assert kept == {path: path.read_bytes() for step in run.checkpoints.all() for path in run.checkpoints.at(step).iterdir()}
    assert not run.checkpoints.saving.exists()
    run.save(3)
    run.check()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_metrics_have_its_room_on_a_full_disk(tmp_path: Path, kind: str) -> None:
    with small_disk(kind, tmp_path / "disk") as where:
        left = Spare(where / spare.NAME)
        left.path.write_bytes(bytes(1 << 20))
        with MetricsWriter(where / "metrics.jsonl", left.give_up) as metrics:
            metrics.write({"step": 1})
            metrics.sync()
            _fill(where / "others")
            for step in range(2, 2000):
                metrics.write({"step": step, "more": "x" * 100})
            metrics.sync()
            assert not left.path.exists()
            assert [json.loads(line)["step"] for line in (where / "metrics.jsonl").read_text().splitlines()] == list(range(1, 2000))
            _fill(where / "more")
            with pytest.raises(OffloadError, match=r"cannot write .*metrics.jsonl: No space left"):
                for step in range(2000):
                    metrics.write({"step": step, "more": "x" * 100})
                metrics.sync()


def _fill(file: Path) -> None:
    with open(file, "wb", buffering=0) as out:
        try:
            while out.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """Of a spare too small too, which is gone with what was to be saved."""
    with small_disk("ext4", tmp_path / "disk") as where:
        left = Spare(where / spare.NAME)
        left.path.write_bytes(bytes(1 << 20))
        with pytest.raises(OSError) as raised:
            disk.create_large(where / "x", 1 << 25, left.take)
        assert raised.value.errno == errno.ENOSPC and not left.path.exists()


KILLED = """
import os, random, signal, sys
from pathlib import Path
from offload.checkpoint import blocks, disk
from offload.checkpoint.manifest import Manifest, may_replace, verify
from offload.checkpoint.spare import Spare

root, seed = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(seed)
point, fatal = 0, -1

def dying(real, halves):
    def act(*args, **named):
        global point
        for half in (False, True):
            if point == fatal:
                if half and halves:
                    real(args[0], args[1][: args[1].nbytes // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            point += 1
        found = real(*args, **named)
        if point == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        point += 1
        return found
    return act

def save(base, step):
    text = b"%d" % step * (1 + 7919 * (step * seed % 5))  # some larger than the spare, some smaller
    with disk.replacing(base / f"step-{step}", may_replace, base / ".saving") as where:
        manifest = Manifest()
        parts, take = [blocks.given(text), blocks.given(text)], Spare(base / ".saving/spare").take
        manifest.add_large(where, "tensors.safetensors", parts, 2 * len(text), 0, take)
        manifest.add(where, "state.json", [text])
        manifest.write(where)

def remove(base, step):
    disk.remove(base / f"step-{step}", base / ".saving", lambda gone: Spare(base / ".saving/spare").keep(gone / "tensors.safetensors"))

def present(base):
    for path in base.glob("step-*"):
        verify(path)
        assert (path / "state.json").read_bytes().startswith(path.name[5:].encode())
    return {p.name for p in base.glob("step-*")}

blocks.block_bytes = lambda room: 4096
disk.sync = lambda descriptor: None  # a killed process loses nothing that it wrote
names = ("write", "write_at", "sync", "rename", "exchange")
real, rmtree, unlink = [getattr(disk, name) for name in names], disk.shutil.rmtree, os.unlink
taken = 0
for fatal in range(2000):
    base = root / str(fatal)
    base.mkdir()
    save(base, 1)
    save(base, 2)
    os.link(base / "step-2/tensors.safetensors", base / "backup")
    backup = (base / "backup").read_bytes()
    child = os.fork()
    if not child:
        try:
            for name, act in zip(names, real, strict=True):
                setattr(disk, name, dying(act, name == "write_at"))
            disk.shutil.rmtree, os.unlink = dying(rmtree, False), dying(unlink, False)
            save(base, 3)
            remove(base, 1)  # kept
            save(base, 4)    # over that of 1
            remove(base, 2)  # not kept, as it has another name
            save(base, 5)
            remove(base, 3)
            save(base, 6)    # over that of 3
            remove(base, 4)
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    there = present(base)
    assert {"step-1", "step-2"} <= there or {"step-2", "step-3"} <= there or {"step-3", "step-4"} <= there or {"step-4", "step-5"} <= there \
        or there == {"step-5", "step-6"}, (fatal, there)
    assert (base / "backup").read_bytes() == backup, fatal
    taken += (base / ".saving/spare").exists()
    save(base, 7)  # what was left is in nobody's way, and may be taken
    assert present(base) == there | {"step-7"}
    assert (base / "backup").read_bytes() == backup, fatal
    if status == 0:
        assert there == {"step-5", "step-6"}
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, fatal
assert "torch" not in sys.modules and taken
print(fatal)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_anywhere_between_saves(tmp_path: Path, seed: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100  # points
