"""`offload bench` and the machine's profile."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.cli import bench
from offload.cli.app import main
from offload.config import parse_size
from offload.errors import ConfigError
from offload.observe import adam as adam_measure
from offload.observe import measure, peers, profile


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time, a profile of the test's own, no peers that start slowly."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "PIECE", 1 << 20)
    monkeypatch.setattr(adam_measure, "adam_parameters", lambda: 1 << 16)
    monkeypatch.setattr(measure, "probe_bytes", lambda *_: 8 << 20)
    monkeypatch.setattr(bench, "SWEEP", ((1 << 20, 8), (65536, 4)))
    monkeypatch.setattr(peers, "deepspeed_adam_seconds", lambda _: None)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_swap(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "fio_seconds", lambda path, op, nbytes, depth, block: nbytes / 1e9)
    swap = run(capsys, "swap", "--path", str(tmp_path))["swap"]
    assert all(swap["gb_per_second"][name][op] > 0 for name in ("SwapFile", "SwapFile with checksums", "fio") for op in measure.SWAP_OPS)
    assert swap["gb_per_second"]["fio"]["read"] == pytest.approx(1.0)
    assert swap["of_fio"]["write"] == pytest.approx(swap["gb_per_second"]["SwapFile"]["write"], rel=0.5)
    assert set(swap["checksum_cost"]) == set(measure.SWAP_OPS)
    assert {"aiofiles", "buffered, one request at a time", "SwapFile, engine threads"} <= set(swap["gb_per_second"])
    assert swap["best"] == {key: swap["sweep"][0][key] for key in ("block", "depth")}
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]
    assert profile.load("swap", where=tmp_path / "not" / "there" / "yet") == swap


def test_without_fio(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)
    swap = run(capsys, "swap", "--path", str(tmp_path))["swap"]
    assert swap["of_fio"] == {} and "fio" not in swap["gb_per_second"]


def test_copy_and_adam(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates = measure.copy_rates
    monkeypatch.setattr(measure, "copy_rates", lambda: rates(1 << 20, 2))
    copy = run(capsys, "copy")["copy"]
    assert all(value > 0 for value in copy["gb_per_second"].values())
    assert torch.cuda.is_available() or copy["device"].startswith("sim")
    adam = run(capsys, "adam")["adam"]
    forms = [row["form"] for row in adam["rows"]]
    assert forms[: len(adam_measure.FORMS)] == [form.name for form in adam_measure.FORMS]
    assert all(row["gb_per_second"] > 0 and row["share_of_in_place"] > 0 for row in adam["rows"])
    assert profile.load("adam") == adam and profile.load("copy") == copy and profile.load("step", where="/") is None


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"parameters": 5, "tokens": 6, "device": "cpu", "seconds": {"plain torch": 2.0, "all in host": 1.0}, "refused": {"nvme": "no room"}}
    monkeypatch.setattr(bench, "measure_step", lambda _: step)
    monkeypatch.setattr(peers, "fio_seconds", lambda path, op, nbytes, depth, block: nbytes / 1e9)
    rates = measure.copy_rates
    monkeypatch.setattr(measure, "copy_rates", lambda: rates(1 << 20, 2))
    assert main(["bench", "--path", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for text in ("GB/s", "cost of checksums", "SwapFile over fio", "best with blocks of", "multiplied in", "2.00", "no room", "profile.json"):
        assert text in said


def test_step_runs_on_its_own(tmp_path: Path) -> None:
    """In a process of its own, with a model small enough for a test."""
    code = f"""
from offload.cli import bench_step
bench_step.VOCAB, bench_step.WIDTH, bench_step.BLOCKS, bench_step.TOKENS, bench_step.ROUNDS = 64, 64, 2, 16, 1
found = bench_step.measure({str(tmp_path)!r})
if set(found["seconds"]) != {{"plain torch", "all in host", "optimizer on nvme"}} or found["refused"] or min(found["seconds"].values()) <= 0:
    raise SystemExit(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    usage = type("Usage", (), {"free": parse_size("100MiB")})
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"100 MiB free in .*; measuring needs 256 MiB"):
        measure.probe_bytes(tmp_path, 0.1)


def test_stale_and_foreign_profiles_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile.load("adam") is None
    now = datetime.now(UTC)
    path = profile.save("adam", {"rows": [1]})
    assert path == tmp_path / "cache" / "offload" / "profile.json" == profile.profile_path()
    profile.save("swap", {"read": 1}, where=tmp_path)
    assert profile.load("adam") == {"rows": [1]} and profile.load("swap", where=tmp_path) == {"read": 1}
    assert profile.load("swap") is None and profile.load("swap", where="/proc") is None
    assert profile.load("adam", now=now + timedelta(days=29)) == {"rows": [1]}
    assert profile.load("adam", now=now + timedelta(days=31)) is None
    assert profile.load("adam", now=now - timedelta(days=2)) is None
    entry = json.loads(path.read_text())["entries"]["adam"]
    assert datetime.fromisoformat(entry["date"]) <= datetime.now(UTC) and entry["machine"] == profile.machine() and entry["versions"]["torch"]
    real = profile.machine()
    for key, other in {"number": "x", "processor": "Z80", "cpus": 999, "memory_bytes": 1, "gpus": ["some"]}.items():
        monkeypatch.setattr(profile, "machine", lambda key=key, other=other: real | {key: other})
        assert profile.load("adam") is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for text in ("", "[]", "{", '{"format": 1}', '{"format": 1, "entries": {"adam": 3}}'):
        path.write_text(text)
        assert profile.load("adam") is None
    profile.save("adam", {"rows": [2]})
    assert profile.load("adam") == {"rows": [2]}
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_a_profile_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(bench, "measure_copy", lambda: {"device": "sim", "gb_per_second": {}})
    assert main(["bench", "copy", "--json"]) == 0
    said = capsys.readouterr()
    assert "profile" not in json.loads(said.out)
    assert said.err.startswith("the machine's profile cannot be written: ")
