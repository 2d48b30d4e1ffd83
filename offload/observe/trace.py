"""A trace of a run for Perfetto or chrome://tracing: what each link and each worker did when. See [Note: recording]."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.engine.engine import Engine
from offload.errors import ConfigError, OffloadError
from offload.memory.recorder import EVENTS_MOST, Recorder, Sample, Span
from offload.observe.closing import Closing

TRACKS = ("steps", "compute", "stalls", "h2d", "d2h", "device", "landing", "update")
SAMPLED_EVERY = 2e-3  # seconds, at the least
_Event = dict[str, Any]


class Trace(Closing):
    """Records from when it is made until `close()`, which writes the file; a context manager.

    Spans, newest `most` alone: units' forward, recompute and backward ("compute"), compute's waits ("stalls"), copies by link, gradients landing, the
    update of each chunk, and, as they overlap, its reads and writes and each drive's transfers as asynchronous spans. Counters: bytes held by
    tier, depth of each queue. `steps`: only the newest so many are written. ConfigError: `path` cannot be written, or another trace is recorded.
    """

    def __init__(self, engine: Engine, path: str | os.PathLike[str], tier_bytes: Callable[[], dict[str, int]], *, steps: int | None = None,
                 most: int = EVENTS_MOST) -> None:  # fmt: skip
        self._engine, self._path, self._tier_bytes, self._steps = engine, Path(path), tier_bytes, steps
        self._partial = self._path.with_name(f".partial-{self._path.name}")
        self._sampled = 0.0
        if engine.stalls.recorder is not None:
            raise ConfigError("a trace of this model is being recorded; close it before starting another")
        try:
            if self._path.is_dir():
                raise IsADirectoryError(0, "it is a directory")
            self._partial.touch()
            self._partial.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write a trace to {self._path}: {error.strerror}; give a file in a directory that can be written") from None
        self._recorder: Recorder | None = Recorder(most, engine.stalls.clock)
        self._recorder.on_visit = self._sample
        self._set(most, self._recorder)

    def _set(self, most: int, recorder: Recorder | None) -> None:
        self._engine.background.trace(most)
        if self._engine.space is not None:
            self._engine.space.trace(most)
        self._engine.stalls.recorder = recorder

    def _sample(self) -> None:
        recorder = self._recorder
        if recorder is None or recorder.clock() < self._sampled + SAMPLED_EVERY:
            return
        self._sampled = recorder.clock()
        recorder.sample("bytes", self._tier_bytes())
        depths = self._engine.device.depths()
        if self._engine.space is not None:
            depths |= self._engine.space.depths()
        recorder.sample("queue depth", depths)

    def close(self) -> None:
        """Ends recording and returns when the file is there, whole. OffloadError: it cannot be written. Idempotent."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        events, gone = recorder.taken()
        jobs, jobs_gone = self._engine.background.traced()
        drives = self._engine.space.traced() if self._engine.space is not None else {}
        self._set(0, None)
        ends = recorder.steps
        since = ends[-self._steps - 1] if self._steps is not None and len(ends) > self._steps else 0.0
        dropped = {"spans and counters": gone, "updates": jobs_gone} | {f"nvme {d}": g for d, (_, g) in drives.items()}
        budgets = {tier: budget.capacity for tier, budget in self._engine.budgets.items()}
        errors: list[OSError] = []

        def write() -> None:
            def made() -> Iterator[_Event]:
                yield from _recorded(events, since)
                yield from _updates(jobs, since)
                for drive, (moves, _) in drives.items():
                    yield from _transfers(drive, moves, since)

            try:
                origin = min((e["ts"] for e in made()), default=0.0)
                self._write(_document(made(), origin, dropped, budgets))
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=write, name="offload-trace")
        thread.start()
        thread.join()
        if errors:
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)
            raise OffloadError(f"cannot write the trace {self._path}: {errors[0].strerror}; make room there, or give another file") from errors[0]

    def _write(self, pieces: Iterator[str]) -> None:
        """Piece by piece: the whole text would weigh more than small budgets leave."""
        with open(self._partial, "wb") as file:
            with contextlib.ExitStack() as stack:
                out: Any = file
                if self._path.suffix == ".gz":
                    out = stack.enter_context(gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=file))
                for piece in pieces:
                    out.write(piece.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._partial, self._path)


def _span(track: str, name: str, start: float, stop: float, detail: Mapping[str, float] | None) -> _Event:
    event = {"ph": "X", "track": track, "name": name, "ts": start, "dur": stop - start}
    return event | {"args": dict(detail)} if detail else event


def _asynchronous(track: str, name: str, start: float, stop: float, detail: Mapping[str, float] | None = None) -> Iterator[_Event]:
    """Spans of one kind that overlap."""
    common = {"cat": track, "name": name}
    yield common | {"ph": "b", "ts": start} | ({"args": dict(detail)} if detail else {})
    yield common | {"ph": "e", "ts": stop}


def _recorded(events: list[Span | Sample], since: float) -> Iterator[_Event]:
    for event in events:
        if isinstance(event, Sample):
            if event.at >= since:
                yield {"ph": "C", "name": event.counter, "ts": event.at, "args": dict(event.values)}
        elif event.start >= since:
            yield _span(*event)


def _updates(jobs: list[tuple[str, tuple[float, ...]]], since: float) -> Iterator[_Event]:
    for name, (read, read_end, update, update_end, write, write_end) in jobs:
        if update < since:
            continue
        yield _span("update", name, update, update_end, None)
        if read and read_end:
            yield from _asynchronous("update reads", name, read, read_end)
        if write and write_end:
            yield from _asynchronous("update writes", name, write, write_end)


def _transfers(drive: str, moves: list[tuple[bool, int, float, float]], since: float) -> Iterator[_Event]:
    for is_write, nbytes, start, stop in moves:
        if start >= since:
            track = f"nvme {'write' if is_write else 'read'} {drive}"
            yield from _asynchronous(track, track, start, stop, {"bytes": nbytes})


def _document(events: Iterator[_Event], origin: float, dropped: Mapping[str, int], budgets: Mapping[str, int]) -> Iterator[str]:
    """Chrome's trace format, in pieces: microseconds from `origin` on, one thread for each track, ids for asynchronous spans."""
    numbers = {track: i for i, track in enumerate(TRACKS, 1)}
    used: set[str] = set()
    pid = os.getpid()
    text = json.JSONEncoder(separators=(",", ":")).encode
    opened = 0
    yield '{"traceEvents":[' + text({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "offload"}})
    for event in events:
        track = event.pop("track", "")
        used.add(track)
        placed = event | {"pid": pid, "tid": numbers.get(track, 0), "ts": round((event["ts"] - origin) * 1e6, 3)}
        if "dur" in event:
            placed["dur"] = round(event["dur"] * 1e6, 3)
        if event["ph"] in "be":  # an end follows its beginning
            opened += event["ph"] == "b"
            placed["id"] = opened
        yield "," + text(placed)
    for track in TRACKS:
        for what, args in (("thread_name", {"name": track}), ("thread_sort_index", {"sort_index": numbers[track]})) if track in used else ():
            yield "," + text({"ph": "M", "pid": pid, "tid": numbers[track], "name": what, "args": args})
    other = {"clock": "CLOCK_MONOTONIC", "origin_seconds": origin, "dropped": dict(dropped), "budget_bytes": dict(budgets)}
    yield '],"displayTimeUnit":"ms","otherData":' + text(other) + "}"
