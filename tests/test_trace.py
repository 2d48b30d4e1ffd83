"""Traces: what is in them, in which order, bounded, whole or absent."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models as M
import offload
from offload.engine.registry import engine_of
from offload.errors import OffloadError
from offload.memory.recorder import Recorder
from offload.observe.trace import Trace
from offload.train.loop import Trainer
from offload.transfer.device import SimDevice

X = torch.linspace(-1, 1, 64).view(4, 16)


def load(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    whole: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return whole


def tracks(whole: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """(start, stop, name) of each track's spans, in order."""
    names = {e["tid"]: e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "thread_name"}
    out = defaultdict(list)
    for e in whole["traceEvents"]:
        if e["ph"] == "X":
            out[names[e["tid"]]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return {track: sorted(spans) for track, spans in out.items()}


def asynchronous(whole: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    begun, out = {}, defaultdict(list)
    for e in whole["traceEvents"]:
        if e["ph"] == "b":
            begun[e["id"]] = e["ts"]
        elif e["ph"] == "e":
            out[e["cat"]].append((begun.pop(e["id"]), e["ts"]))
    assert not begun
    return out


SLACK = 0.01  # microseconds: what is written is rounded


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_run(tmp_path: Path, device: str, place: str) -> None:
    chosen: Any = SimDevice(seed=1) if device == "sim" else device
    with M.prepared(
        M.seeded(lambda: M.Stack(depth=4, width=16)), M.tiers(tmp_path), device=chosen, place=M.placed(place), slots=3, activations="recompute"
    ) as model:
        with offload.runtime(model).trace(tmp_path / "trace.json.gz"):
            M.train(model, M.mean_square, 3)
            offload.runtime(model).synchronize()
        assert engine_of(model).stalls.recorder is None
        units = {u.name for u in engine_of(model).units}
    assert not list(tmp_path.glob(".partial*"))
    whole = load(tmp_path / "trace.json.gz")
    spans, moves = tracks(whole), asynchronous(whole)
    assert not any(whole["otherData"]["dropped"].values())
    assert len(spans["steps"]) == 3
    assert {name for _, _, name in spans["compute"]} >= {f"{phase} {u}" for phase in ("forward", "backward") for u in units}
    assert any(name.startswith("recompute") for _, _, name in spans["compute"])
    for track in set(spans) - {"compute"}:  # one thing after another
        assert all(a[1] <= b[0] + SLACK for a, b in zip(spans[track], spans[track][1:], strict=False)), track
    for a in spans["compute"]:  # or inside each other
        assert all(b[0] >= a[1] - SLACK or b[1] <= a[1] + SLACK for b in spans["compute"] if b[0] > a[0])
    assert spans["update"] and spans["landing"] and spans["stalls"]
    if device == "sim":
        for start, _, name in spans["h2d"]:  # what is fetched is there before the unit that it is for is done with it
            assert name in units
            assert any(start <= stop and what.split(" ", 1)[1] == name for _, stop, what in spans["compute"])
        assert spans["d2h"]
    on_drives = {kind: [m for track, found in moves.items() if track.startswith(f"nvme {kind}") for m in found] for kind in ("read", "write")}
    assert all(bool(found) is (place == "nvme") for found in on_drives.values())
    assert bool(moves["update reads"]) is bool(moves["update writes"]) is (place == "nvme")
    assert all(start <= stop for found in moves.values() for start, stop in found)
    counters = {e["name"] for e in whole["traceEvents"] if e["ph"] == "C"}
    assert counters == {"bytes", "queue depth"}


def test_fetches_end_before_what_they_are_for(tmp_path: Path) -> None:
    """Each arrival is followed by the end of a forward or backward of its unit, and none begins in the past."""
    with M.prepared(M.seeded(lambda: M.Stack(depth=4, width=16)), M.tiers(tmp_path), device="sim", place=M.placed("host"), slots=3) as model:
        optimizer = offload.optim.AdamW(model.parameters())
        with offload.runtime(model).trace(tmp_path / "trace.json"):
            for _ in range(2):
                M.mean_square(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            offload.runtime(model).synchronize()
    spans = tracks(load(tmp_path / "trace.json"))
    for start, stop, name in spans["h2d"]:
        assert 0 <= start <= stop
        assert any(stop <= end for _, end, what in spans["compute"] if what.endswith(f" {name}")), name


def test_events_are_bounded() -> None:
    recorder = Recorder(most=10)
    for i in range(25):
        recorder.span("compute", str(i), float(i), stop=i + 0.5)
    events, gone = recorder.taken()
    assert [e.name for e in events] == [str(i) for i in range(15, 25)] and gone == 15
    assert recorder.taken()[1] == 15


def test_what_gave_way_is_said(tmp_path: Path) -> None:
    with (
        M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device="sim", place=M.placed("nvme")) as model,
        Trace(engine_of(model), tmp_path / "trace.json.gz", offload.runtime(model).tier_bytes, most=7),
    ):
        M.train(model, lambda m: M.mean_square(m, X), 4)
        offload.runtime(model).synchronize()
    whole = load(tmp_path / "trace.json.gz")
    dropped = whole["otherData"]["dropped"]
    assert dropped["spans and counters"] > 0 and dropped["updates"] > 0 and any(v for k, v in dropped.items() if k.startswith("nvme"))
    assert len([e for e in whole["traceEvents"] if e["ph"] in "XC"]) <= 7 + 7
    moves = asynchronous(whole)
    assert sum(len(found) for track, found in moves.items() if track.startswith("nvme")) <= 7


def test_only_the_newest_steps(tmp_path: Path) -> None:
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path)) as model, offload.runtime(model).trace(tmp_path / "t.json", steps=2):
        M.train(model, lambda m: M.mean_square(m, X), 5)
    spans = tracks(load(tmp_path / "t.json"))
    assert len(spans["steps"]) == 2
    assert min(s[0][0] for s in spans.values()) >= spans["steps"][0][0]


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path)) as model:
        runtime = offload.runtime(model)
        with pytest.raises(offload.ConfigError, match=r"missing/trace\.json\.gz: No such file"):
            runtime.trace(tmp_path / "missing/trace.json.gz")
        with pytest.raises(offload.ConfigError, match=r"cannot write a trace to .*run"):
            runtime.trace(tmp_path / "run")
        assert engine_of(model).stalls.recorder is None
        with runtime.trace(tmp_path / "t.json"), pytest.raises(offload.ConfigError, match="is being recorded"):
            runtime.trace(tmp_path / "u.json")
        trace = runtime.trace(tmp_path / "run/trace.json.gz")
        M.train(model, lambda m: M.mean_square(m, X), 1)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(offload.OffloadError, match=r"run/trace\.json\.gz: No such file"):
            trace.close()
        trace.close()
        assert engine_of(model).stalls.recorder is None
        with pytest.raises(ValueError, match="the user's own"), runtime.trace(tmp_path / "v.json"):
            raise ValueError("the user's own")
        assert load(tmp_path / "v.json")["traceEvents"]


def test_an_earlier_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text("before")
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path)) as model:
        trace = offload.runtime(model).trace(tmp_path / "t.json")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("offload.observe.trace.os.fsync", full)
            with pytest.raises(offload.OffloadError, match="No space left"):
                trace.close()
    assert (tmp_path / "t.json").read_text() == "before" and sorted(p.name for p in tmp_path.glob("*t.json")) == ["t.json"]


def test_a_run_goes_on_without_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    def close() -> None:
        raise OffloadError("cannot write the trace: disk full")

    trainer, notes = Trainer.__new__(Trainer), []
    trainer._runtime = SimpleNamespace(trace=lambda path, steps, events: SimpleNamespace(close=close))
    trainer._path, trainer._directory, trainer._reporter = tmp_path, SimpleNamespace(path=tmp_path), SimpleNamespace(note=notes.append)  # type: ignore[assignment]
    with trainer._traced():
        pass
    assert notes == ["cannot write the trace: disk full"]
