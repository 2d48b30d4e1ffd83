"""Runs that end early go on: after a signal, a kill or a damaged checkpoint, elsewhere, to the losses and the bits of a run that did not end."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.checkpoint import disk
from offload.checkpoint.manifest import verify
from offload.cli import main
from offload.errors import CheckpointError, ConfigError
from offload.train.checkpoints import Checkpoints
from offload.train.data import RandomSequences
from runs import SMALL, records_of, sizes, summary_of

# Dropout draws from torch's generator; fp16 gradients need a scale, which here grows every third step.
RUN = SMALL.but(
    model={"config": sizes(attention_dropout=0.2)},
    data={"eval_sequences": 2, "accumulate": 2},
    precision={"compute": "fp32", "grad": "fp16", "moments": "int8"},
    optimizer={"clip": 1.0, "schedule": "cosine", "warmup": 2},
    train={"steps": 7},
    checkpoint={"every": 2},
)
PLACE = "tiers.place={parameter='host', gradient='host', optimizer='nvme'}"
ELSEWHERE = ["train.device=sim", PLACE, "tiers.device=48MiB", "train.activations=recompute"]
STEPS = 7


@pytest.fixture(scope="module", autouse=True)
def _growing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, growth_interval=3))
        yield


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    where = tmp_path_factory.mktemp("calm")
    RUN.train(where)
    return where


@pytest.fixture
def copy(calm: Path, tmp_path: Path) -> Path:
    """The run as it was after step 6, its last checkpoint."""
    shutil.copytree(calm, tmp_path / "copy")
    out = tmp_path / "copy/out"
    shutil.rmtree(out / "checkpoints/step-00000007")
    (out / "summary.json").unlink()
    return tmp_path / "copy"


def same_run(out: Path, calm: Path) -> None:
    """Losses, digest, evaluations and all that is counted by the step."""
    got, want = summary_of(out), summary_of(calm / "out")
    for key in ("losses", "steps", "tokens", "digest", "loss_first", "loss_last", "eval_loss_first", "eval_loss_last", "skipped", "checkpoint"):
        assert got[key] == want[key], key
    steps, wanted = records_of(out), records_of(calm / "out")
    for key in ("step", "loss", "lr", "grad_norm", "loss_scale", "skipped"):
        assert [r[key] for r in steps] == [r[key] for r in wanted], key
    assert sorted(os.listdir(out / "checkpoints")) == ["step-00000006", "step-00000007"]


def test_a_run_leaves_its_newest_checkpoints(calm: Path) -> None:
    out = calm / "out"
    assert sorted(os.listdir(out / "checkpoints")) == ["step-00000006", "step-00000007"]
    for path in (out / "checkpoints").iterdir():
        verify(path)
    done = summary_of(out)
    assert done["checkpoint"] == "step-00000007" and not done["interrupted"] and len(done["losses"]) == STEPS
    assert len({r["loss_scale"] for r in records_of(out)}) == 3


@pytest.mark.parametrize("stop", [3, 6])
def test_a_stopped_run_goes_on_elsewhere(calm: Path, tmp_path: Path, stop: int) -> None:
    asked = iter(range(100))
    first = RUN.train(tmp_path, stopped=lambda: next(asked) == stop)
    assert first["interrupted"] and first["steps"] == stop and first["checkpoint"] == f"step-{stop:08d}"
    RUN.train(tmp_path, *ELSEWHERE, resume=True)
    same_run(tmp_path / "out", calm)
    assert not list((tmp_path / "swap").glob("*"))


def test_what_a_run_did_after_its_checkpoint_is_done_again(calm: Path, copy: Path) -> None:
    (copy / "out/.saving/step-00000008").mkdir(parents=True)
    with open(copy / "out/metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    got = RUN.train(copy, resume=True)
    same_run(copy / "out", calm)
    moved = summary_of(calm / "out")["moved_bytes"]
    assert got["moved_bytes"] == moved  # of the whole run


def test_a_damaged_checkpoint_is_passed_over(calm: Path, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints = copy / "out/checkpoints"
    for name in ("step-00000007", "step-00000009"):
        shutil.copytree(checkpoints / "step-00000006", checkpoints / name)
        (checkpoints / name / "manifest.json").unlink()
    RUN.train(copy, resume=True)
    assert "passed over" in capfd.readouterr().err
    same_run(copy / "out", calm)

    (copy / "out/summary.json").unlink()
    for path in checkpoints.iterdir():
        (path / "state.json").write_text("{}")
    before = (copy / "out/metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole; the newest: .*step-00000007/state.json"):
        RUN.train(copy, resume=True)
    assert (copy / "out/metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_does_not_count_as_kept(copy: Path) -> None:
    checkpoints = copy / "out/checkpoints"
    shutil.copytree(checkpoints / "step-00000006", checkpoints / "step-00000004")
    shutil.copytree(checkpoints / "step-00000006", checkpoints / "step-00000005")
    (checkpoints / "step-00000005/state.json").unlink()
    kept = Checkpoints(checkpoints)
    (checkpoints / "step-00000006/manifest.json").unlink()
    assert kept.newest_whole(lambda _: None) == (4, checkpoints / "step-00000004")
    shutil.rmtree(checkpoints / "step-00000006")
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000006")
    kept.retain(2, 6, lambda _: None)
    assert list(kept.all()) == [4, 6]


def test_a_newer_releases_checkpoint_is_not_passed_over(copy: Path) -> None:
    """It would be deleted with those that are damaged."""
    manifest = copy / "out/checkpoints/step-00000006/manifest.json"
    shutil.copytree(manifest.parent, copy / "out/checkpoints/step-00000004")
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    before = {p: p.read_bytes() for p in (copy / "out").rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(CheckpointError, match=r"step-00000006 is a checkpoint of version 2; .*update offload"):
        RUN.train(copy, resume=True)
    assert {p: p.read_bytes() for p in (copy / "out").rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_a_checkpoint_that_lay_aside_is_put_back(calm: Path, copy: Path) -> None:
    """A save that was killed between two renames, on a file system without exchanges."""
    home = copy / "out/.saving/step-00000006"
    home.mkdir(parents=True)
    (copy / "out/checkpoints/step-00000006").rename(home / "old")
    with pytest.raises(ConfigError, match="has checkpoints"):
        RUN.train(copy)
    RUN.train(copy, resume=True)
    same_run(copy / "out", calm)


def test_a_finished_run_is_left_as_it_is(calm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in (calm / "out").rglob("*") if p.name != ".lock"}
    assert main(["train", str(calm / "run.toml"), "--resume", str(calm / "out"), "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out) == summary_of(calm / "out") and "finished" in said.err
    assert {p: p.stat().st_mtime_ns for p in (calm / "out").rglob("*") if p.name != ".lock"} == before


def test_a_finished_run_can_be_made_longer(copy: Path, calm: Path) -> None:
    shutil.rmtree(copy / "out")
    shutil.copytree(calm / "out", copy / "out")
    got = RUN.train(copy, "train.steps=8", resume=True)
    assert got["steps"] == 8 and got["losses"][:STEPS] == summary_of(calm / "out")["losses"]


@pytest.mark.parametrize(
    ("override", "says"),
    [("optimizer.lr=1.0", "optimizer.lr is 1.0 and was 0.01"), ("train.seed=1", "train.seed"), ("data.seq_length=8", "data.seq_length"),
     ("model.config.num_hidden_layers=3", "model.config"), ("precision.moments='fp32'", "precision.moments"), ("train.steps=5", "past that")],
)  # fmt: skip
def test_a_run_goes_on_as_it_was(copy: Path, override: str, says: str) -> None:
    before = {p: p.read_bytes() for p in (copy / "out").rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(ConfigError, match=says):
        RUN.train(copy, override, resume=True)
    assert {p: p.read_bytes() for p in (copy / "out").rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_a_run_goes_on_with_what_it_has_learned_from(copy: Path, calm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (copy / "out/metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(RandomSequences, "digest", lambda self, count: "others")
        with pytest.raises(ConfigError, match=r"data\.source has other texts than those that .*step-00000006 has learned from"):
            RUN.train(copy, resume=True)
    assert (copy / "out/metrics.jsonl").read_bytes() == kept
    RUN.train(copy, resume=True)
    same_run(copy / "out", calm)


def test_checkpoints_are_never_replaced_by_another_run(copy: Path) -> None:
    with pytest.raises(ConfigError, match="has checkpoints: --resume"):
        RUN.train(copy)
    (copy / "out/metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="lacks steps before 6"):
        RUN.train(copy, resume=True)


def test_a_full_drive_ends_a_run_and_leaves_its_checkpoints(calm: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(CheckpointError, match=r"cannot save to .*step-00000007: No space left"):
        RUN.train(copy, resume=True)
    assert os.listdir(copy / "out/checkpoints") == ["step-00000006"] and not list((copy / "swap").glob("*"))
    monkeypatch.undo()
    RUN.train(copy, resume=True)
    same_run(copy / "out", calm)


KILL = """
import functools, os, signal, sys
import torch
from offload.checkpoint import disk
from offload.cli import main

torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, growth_interval=3)

left = int(sys.argv[1])

def dying(real):
    def act(*args, **named):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **named)
    return act

for name in ("write", "sync", "rename", "exchange"):
    setattr(disk, name, dying(getattr(disk, name)))
sys.exit(main(sys.argv[2:]))
"""


def test_killed_within_saves_and_resumed(calm: Path, tmp_path: Path) -> None:
    """The first save's tensors, the third's directory, and what is left of both."""
    RUN.write(tmp_path)
    for point, there in ((30, []), (150, ["step-00000002"])):
        argv = [sys.executable, "-c", KILL, str(point), "train", str(tmp_path / "run.toml"), "--resume", str(tmp_path / "out")]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = sorted((tmp_path / "out/checkpoints").glob("step-*"))
        assert [p.name for p in found][: len(there)] == there
        for path in found:
            verify(path)
    RUN.train(tmp_path, resume=True)
    same_run(tmp_path / "out", calm)
    assert not list((tmp_path / "swap").glob("*"))


def test_a_signal_saves(tmp_path: Path) -> None:
    run = RUN.but(checkpoint={"every": 1000}, train={"steps": 100000}).write(tmp_path)
    argv = [sys.executable, "-m", "offload", "train", str(run), "--out", str(tmp_path / "out")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGTERM)
        assert "--resume" in process.stdout.read()
    assert process.returncode == 0 and "stopping" in said and "Traceback" not in said
    left = summary_of(tmp_path / "out")
    assert left["interrupted"] and left["checkpoint"] == f"step-{left['steps']:08d}" and left["steps"] >= 3
    verify(tmp_path / "out/checkpoints" / left["checkpoint"])
