"""`offload clean` and `offload verify`: what they find, what they leave, and that neither needs torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import offload
from offload.checkpoint import disk
from offload.cli import files, main
from offload.memory.swap import SwapSpace, sweep
from offload.train.rundir import RunDirectory
from runs import SMALL

Said = pytest.CaptureFixture[str]


def stale(directory: Path, name: str = "offload-1-0123456789abcdef", nbytes: int = 8192) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    (path / "state.swap").write_bytes(b"x" * nbytes)
    return path


def clean(said: Said, directory: Path) -> dict[str, list[dict[str, object]]]:
    assert main(["clean", str(directory), "--json"]) == 0
    return json.loads(said.readouterr().out)  # type: ignore[no-any-return]


def test_what_is_stale_goes_and_what_is_in_use_stays(tmp_path: Path, capsys: Said) -> None:
    dead = stale(tmp_path)
    with SwapSpace([(tmp_path, "1MiB")]) as space:  # removes what is stale when it opens
        space.allocate(4096)
        space.open()
        assert not dead.exists()
        dead = stale(tmp_path)
        live = next(p for p in tmp_path.iterdir() if p != dead)
        found = clean(capsys, tmp_path)
        assert [f["path"] for f in found["removed"]] == [str(dead)] and found["removed"][0]["bytes"] == 8192
        assert [f["path"] for f in found["left"]] == [str(live)] and found["left"][0]["why"] == f"in use by process {os.getpid()}"
        assert not dead.exists() and (live / "state.swap").exists()
        assert main(["clean", str(tmp_path)]) == 0
        assert f"left {live}" in capsys.readouterr().out
    assert clean(capsys, tmp_path) == {"removed": [], "left": []}
    assert main(["clean", str(tmp_path)]) == 0 and capsys.readouterr().out == "no swap files\n"


def test_nothing_else_is_touched(tmp_path: Path, capsys: Said) -> None:
    kept = [stale(tmp_path, name) for name in ("offload-1-0123", "offload-x-0123456789abcdef", "other")]
    mine = stale(tmp_path, "offload-2-0123456789abcdef")
    (mine / "notes.txt").write_text("x")
    outside = stale(tmp_path / "outside")
    (tmp_path / "offload-3-0123456789abcdef").symlink_to(outside)
    (tmp_path / "offload-4-0123456789abcdef").write_text("a file")
    found = clean(capsys, tmp_path)
    assert found["removed"] == [] and [f["path"] for f in found["left"]] == [str(mine)] and "other files" in str(found["left"][0]["why"])
    assert (mine / "notes.txt").exists() and (outside / "state.swap").exists() and all((p / "state.swap").exists() for p in kept)
    assert (tmp_path / "offload-4-0123456789abcdef").exists()


def test_a_killed_runs_files(tmp_path: Path, capsys: Said) -> None:
    code = f"""
import os, signal
from offload.memory.swap import SwapSpace
space = SwapSpace([({str(tmp_path)!r}, "1MiB")])
space.allocate(65536)
space.open()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    (left,) = tmp_path.iterdir()
    found = clean(capsys, tmp_path)
    assert [f["path"] for f in found["removed"]] == [str(left)] and found["removed"][0]["bytes"] >= 65536 and not list(tmp_path.iterdir())


def test_a_run_directorys_swap_directories(tmp_path: Path, capsys: Said) -> None:
    SMALL.but(tiers={"nvme": [["../a", "1MiB"], ["../b", "1MiB"], ["../none", "1MiB"]]}).write(tmp_path / "run", "config.toml")
    dead = [stale(tmp_path / "a"), stale(tmp_path / "b")]
    assert [f["path"] for f in clean(capsys, tmp_path / "run")["removed"]] == [str(p) for p in dead]


def test_what_a_live_run_removes_meanwhile_counts_nothing(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (run / ".saving/step-00000004").mkdir(parents=True)
    SMALL.but(tiers={"nvme": None}).write(run, "config.toml")
    monkeypatch.setattr(files.os, "walk", lambda path: [(str(path), ["new"], ["gone"])])
    with RunDirectory(run):
        (left,) = clean(capsys, run)["left"]
    assert left["why"] == "in use by a live run" and int(str(left["bytes"])) <= 4096


def test_copies_of_users_are_no_checkpoints_of_a_run(tmp_path: Path) -> None:
    names = ("step-00000002", "step-00000010", "step-100000000", "step-00000010.bak", "step-2")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [p.name for p in files.checkpoints(str(tmp_path))] == list(names[:3])


def test_what_a_killed_run_left_of_saves(tmp_path: Path, capsys: Said) -> None:
    """The one to write over next, and what was begun; not what another still has, nor what is the only copy."""
    run, saving = tmp_path / "run", tmp_path / "run/.saving"
    for name in ("step-00000004/new", "step-00000002/old"):
        (saving / name).mkdir(parents=True)
        (saving / name / "tensors.safetensors").write_bytes(b"x" * 8192)
    (saving / "spare").write_bytes(b"x" * 8192)
    assert clean(capsys, run) == {"removed": [], "left": []}  # no run's
    SMALL.but(tiers={"nvme": None}).write(run, "config.toml")
    with RunDirectory(run):
        found = clean(capsys, run)
        assert not found["removed"] and {str(f["why"]) for f in found["left"]} == {
            "in use by a live run", "the only copy of a checkpoint: --resume puts it back"
        }  # fmt: skip
    with disk.replacing(run / "mine", lambda path: True) as mine:
        found = clean(capsys, run)
        assert [f["path"] for f in found["removed"]] == [str(saving / name) for name in ("spare", "step-00000004")]
        assert sum(int(str(f["bytes"])) for f in found["removed"]) >= 16384
        assert {str(f["path"]): f["why"] for f in found["left"]} == {
            str(saving / "mine"): "in use by a save", str(saving / "step-00000002"): "the only copy of a checkpoint: --resume puts it back"
        }  # fmt: skip
        assert mine.is_dir()
    assert (saving / "step-00000002/old/tensors.safetensors").exists()
    shutil.rmtree(saving / "step-00000002")
    assert clean(capsys, run) == {"removed": [], "left": []} and not saving.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do all of it")
def test_what_may_not_be_looked_at(tmp_path: Path) -> None:
    path = stale(tmp_path)
    path.chmod(0)
    try:
        assert "cannot be opened" in sweep(tmp_path)[0].stays
    finally:
        path.chmod(0o700)


@pytest.mark.parametrize("command", ["clean", "verify"])
def test_no_directory(tmp_path: Path, capsys: Said, command: str) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none", tmp_path / "file"):
        assert main([command, str(path), "--json"]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "no directory" in said.err


# verify


def test_verify(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint, or all of a run's, in order; the first that is damaged is the error."""

    def verify(path: Path) -> None:
        if (path / "bad").exists():
            raise offload.CheckpointError(f"{path} is damaged")

    monkeypatch.setattr(files.importlib, "import_module", lambda name: SimpleNamespace(verify=verify))
    steps = [tmp_path / "run/checkpoints" / f"step-{i:08d}" for i in (1, 2)]
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert main(["verify", str(tmp_path / "run")]) == 2 and "no checkpoint yet" in capsys.readouterr().err
    for step in steps:
        step.mkdir()
    for path, want in ((tmp_path / "run", steps), (steps[1], steps[1:])):
        assert main(["verify", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"verified": [str(p) for p in want]}
    assert main(["verify", str(steps[0])]) == 0 and str(steps[0]) in capsys.readouterr().out
    (steps[1] / "bad").touch()
    assert main(["verify", str(tmp_path / "run"), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"error: {steps[1]} is damaged. Whole: {steps[0].name}\n"
    (steps[0] / "bad").touch()
    assert main(["verify", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"error: {steps[0]} is damaged. Not whole either: {steps[1].name}. None is whole\n"
    assert main(["verify", str(steps[1])]) == 2
    assert capsys.readouterr().err == f"error: {steps[1]} is damaged\n"


@pytest.mark.parametrize("argv", [["clean", "DIR"], ["verify", "DIR"], ["verify", "--help"], ["export", "--help"]])
def test_without_torch(tmp_path: Path, argv: list[str]) -> None:
    code = "import sys\nfrom offload.cli import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *(str(tmp_path) if a == "DIR" else a for a in argv)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
