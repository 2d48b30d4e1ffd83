"""The update pipeline against `ops.adamw_` in memory: equal bits for every layout of the arrays, frame count and engine."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import _core, ops
from offload.errors import SwapError

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RECORD_BYTES = 65536
ARRAYS = ("master", "grad", "exp_avg", "exp_avg_sq", "out")


def hyper(step: int, count: int = 1, **over: Any) -> np.ndarray[Any, Any]:
    records = np.zeros(count, ops.HYPER)
    usual = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.5, "active": 1, "decoupled": 1}
    for key, value in (usual | over).items():
        records[key] = value
    records["step"] = step
    for i in range(count):
        records["lr"][i] = 1e-2 * (i + 1)
    return records


class Layout(NamedTuple):
    """Which arrays are in the frame; whether there is an `out`; the dtypes of `grad` and `out`."""

    framed: frozenset[str]
    with_out: bool = True
    grad: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.bfloat16

    def dtype(self, name: str) -> torch.dtype:
        return {"grad": self.grad, "out": self.out}.get(name, torch.float32)


class Chunk:
    """A chunk of `sizes` elements in as many segments: its arrays, their twins, and where in a record of the file the framed ones are."""

    def __init__(self, sizes: list[int], layout: Layout, seed: int, offset: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.layout, self.offset = sizes, layout, offset
        self.n = sum(sizes)
        self.arrays = {name: torch.randn(self.n, generator=generator).abs().to(layout.dtype(name)) for name in ARRAYS}
        self.twins = {name: array.clone() for name, array in self.arrays.items()}
        self.starts = {name: 12288 * i for i, name in enumerate(ARRAYS)}

    @property
    def moves(self) -> list[str]:
        return [name for name in ARRAYS if name in self.layout.framed and (name != "out" or self.layout.with_out)]

    def add(self, pipeline: Any, file: Any) -> int:
        segments, begin = [], 0
        for i, size in enumerate(self.sizes):
            places = []
            for name in ARRAYS:
                width = self.arrays[name].element_size()
                if name == "out" and not self.layout.with_out:
                    places.append((-1, 0))
                elif name in self.layout.framed:
                    places.append((1, self.starts[name] + begin * width))
                else:
                    places.append((0, self.arrays[name].data_ptr() + begin * width))
            segments.append((i, size, *places))
            begin += size
        moves = [(file, self.offset + self.starts[name], self.starts[name], self.arrays[name].nbytes) for name in self.moves]
        job: int = pipeline.add_job(moves, segments, moves, CODES[self.layout.grad], CODES[self.layout.out])
        return job

    def save(self, file: Any) -> None:
        for name in self.moves:
            file.write(self.offset + self.starts[name], self.arrays[name].data_ptr(), self.arrays[name].nbytes).wait()

    def fetch(self, file: Any) -> None:
        for name in self.moves:
            file.read(self.offset + self.starts[name], self.arrays[name].data_ptr(), self.arrays[name].nbytes).wait()

    def update_twin(self, records: np.ndarray[Any, Any]) -> None:
        begin = 0
        for record, size in zip(records, self.sizes, strict=False):
            part = {name: twin[begin : begin + size] for name, twin in self.twins.items()}
            begin += size
            ops.adamw_(part["master"], part["grad"], part["exp_avg"], part["exp_avg_sq"], step=int(record["step"]), lr=float(record["lr"]),
                       betas=(float(record["beta1"]), float(record["beta2"])), eps=float(record["eps"]), weight_decay=float(record["weight_decay"]),
                       out=part["out"] if self.layout.with_out else None, grad_scale=float(record["grad_scale"]))  # fmt: skip

    def check(self) -> None:
        for name in ARRAYS:
            assert torch.equal(self.arrays[name], self.twins[name]), name


class Rig:
    """A file, an engine and a pipeline over `frames` frames."""

    def __init__(self, path: Path, frames: int, records: int, *, engine: str = "threads", group: int = 0, threads: int = 2, **faults: Any) -> None:
        self.engine = _core.Engine(engine, 4, 4096, **faults)
        self.file = _core.File(self.engine, str(path), max(records, 1) * RECORD_BYTES)
        self.memory = ops.empty(max(frames, 1) * RECORD_BYTES, torch.uint8)
        self.pipeline = _core.Pipeline([self.memory.data_ptr() + i * RECORD_BYTES for i in range(frames)], RECORD_BYTES, threads, group, self.memory)


def run_and_check(rig: Rig, chunks: list[Chunk], steps: int = 2) -> None:
    jobs = [chunk.add(rig.pipeline, rig.file) for chunk in chunks]
    for chunk in chunks:
        chunk.save(rig.file)
    count = max((len(chunk.sizes) for chunk in chunks), default=1)
    batches = [rig.pipeline.submit(jobs, hyper(step, count)) for step in range(1, steps + 1)]
    for step in range(1, steps + 1):
        for chunk in chunks:
            chunk.update_twin(hyper(step, count))
    for i in range(len(chunks)):
        batches[-1].wait_job(i)
    for batch in batches:
        batch.wait()
        assert batch.done and len(batch) == len(chunks)
    for chunk in chunks:
        chunk.fetch(rig.file)
        chunk.check()


@pytest.mark.parametrize("with_out", [True, False])
def test_every_combination_of_places(tmp_path: Path, with_out: bool) -> None:
    layouts = [Layout(frozenset(name for i, name in enumerate(ARRAYS) if bits >> i & 1), with_out) for bits in range(32)]
    chunks = [Chunk([1000, 24, 1, 777], layout, i, i * RECORD_BYTES) for i, layout in enumerate(layouts)]
    run_and_check(Rig(tmp_path / "a", 3, len(chunks)), chunks)


@pytest.mark.parametrize("grad", list(CODES))
@pytest.mark.parametrize("out", list(CODES))
def test_dtypes(tmp_path: Path, grad: torch.dtype, out: torch.dtype) -> None:
    layout = Layout(frozenset(ARRAYS), True, grad, out)
    run_and_check(Rig(tmp_path / "a", 2, 3), [Chunk([1025], layout, i, i * RECORD_BYTES) for i in range(3)])


@pytest.mark.parametrize("engine", ["io_uring", "threads", "faults"])
@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("group", [0, 1, 4])
def test_frames_groups_and_engines(tmp_path: Path, engine: str, frames: int, group: int) -> None:
    faults = {"seed": frames, "short_rate": 0.3, "interrupt_rate": 0.2, "delay_rate": 0.3, "delay_us_max": 200} if engine == "faults" else {}
    state = Layout(frozenset(("master", "exp_avg", "exp_avg_sq")))
    try:
        rig = Rig(tmp_path / "a", frames, 12, engine=engine, group=group, **faults)
    except _core.Unavailable as error:
        pytest.skip(str(error))
    run_and_check(rig, [Chunk([900 + i], state if i % 4 != 2 else Layout(frozenset()), i, i * RECORD_BYTES) for i in range(12)], steps=3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stream(tmp_path: Path, data: st.DataObject) -> None:
    kinds = st.builds(Layout, st.frozensets(st.sampled_from(ARRAYS)), st.booleans(), st.sampled_from(list(CODES)), st.sampled_from(list(CODES)))
    sizes = st.lists(st.integers(0, 700), max_size=4)
    chunks = [Chunk(data.draw(sizes), data.draw(kinds), i, i * RECORD_BYTES) for i in range(data.draw(st.integers(0, 7)))]
    rig = Rig(tmp_path / "a", data.draw(st.integers(1, 5)), len(chunks), group=data.draw(st.integers(0, 6)), threads=data.draw(st.integers(0, 3)))
    run_and_check(rig, chunks, steps=data.draw(st.integers(1, 3)))


@pytest.mark.parametrize("rule", list(ops.RULES))
@pytest.mark.parametrize("master", list(ops.MASTERS))
@pytest.mark.parametrize("moments", list(ops.MOMENTS))
def test_every_form(tmp_path: Path, rule: str, master: str, moments: str) -> None:
    """A chunk of two parameters' parts, all in the frame: the bits of `ops.update_`."""
    rig, sizes, firsts = Rig(tmp_path / "a", 2, 1), [768, 500], [1024, 0]
    n = sum(sizes)
    torch.manual_seed(0)
    state = {"master": torch.randn(n), "grad": torch.randn(n), "out": torch.zeros(n, dtype=torch.float16), **ops.moments(n, moments, rule)}
    if master == "split":
        whole, state["master"], state["low"] = state["master"], torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        ops.split_(state["master"], state["low"], whole)
    starts = {name: 8192 * i for i, name in enumerate(state)}
    twins = {name: x.clone() for name, x in state.items()}

    def place(name: str, begin: int) -> tuple[int, int]:
        if name not in state:
            return -1, 0
        return 1, starts[name] + state[name].itemsize * (begin // ops.GROUP if name.endswith("scale") else begin)

    segments, begin = [], 0
    for i, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        usual = [place(name, begin) for name in ARRAYS]
        segments.append((i, size, *usual, *(place(name, begin) for name in ("low", "exp_avg_scale", "exp_avg_sq_scale")), first))
        begin += size
    moves = [(rig.file, starts[name], starts[name], x.nbytes) for name, x in state.items()]
    codes = ops.RULES[rule], ops.MASTERS[master], ops.MOMENTS[moments]
    job = rig.pipeline.add_job(moves, segments, moves, 0, 2, *codes)
    for name, x in state.items():
        rig.file.write(starts[name], x.data_ptr(), x.nbytes).wait()
    for step in range(1, 4):
        records = hyper(step, 2, rule=codes[0])
        records["seed"] = [3, 4]
        rig.pipeline.submit([job], records).wait()
        begin = 0
        for size, first, record in zip(sizes, firsts, records, strict=True):
            part = {k: x[begin // 256 : -(-(begin + size) // 256)] if k.endswith("scale") else x[begin : begin + size] for k, x in twins.items()}
            ops.update_(part.pop("master"), part.pop("grad"), np.array(record, ops.HYPER), first=first, **part)
            begin += size
    for name, x in state.items():
        rig.file.read(starts[name], x.data_ptr(), x.nbytes).wait()
        assert torch.equal(x.view(torch.uint8), twins[name].view(torch.uint8)), name


def test_forms_are_checked(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", 1, 1)
    here, absent = (0, rig.memory.data_ptr()), (-1, 0)
    usual = (0, 300, here, here, here, here, absent)
    for segment, codes, text in [
        (usual, (0, 1, 0), "it has low"),
        (usual, (0, 0, 2), "it has exp_avg_scale"),
        ((*usual, here, (1, 0), here, 0), (0, 1, 2), "takes none"),
        ((*usual, here, here, here, 100), (0, 1, 2), "inside a group"),
        (usual, (3, 0, 0), "no rule 3"),
        (usual, (0, 2, 0), "no master 2"),
        (usual, (0, 0, 3), "no moments 3"),
    ]:
        with pytest.raises(ValueError, match=text):
            rig.pipeline.add_job([], [segment], [], 0, 0, *codes)
    job = rig.pipeline.add_job([], [(*usual, absent, absent, absent, 0)], [], 0, 0, 1)
    with pytest.raises(ValueError, match="a job of rule 1 is given hyper-parameters of rule 0"):
        rig.pipeline.submit([job], hyper(1))


def test_streams_over_two_drives(tmp_path: Path) -> None:
    rigs = [Rig(tmp_path / "a", 4, 10), Rig(tmp_path / "b", 1, 10)]
    state = Layout(frozenset(("master", "exp_avg", "exp_avg_sq", "out")))
    chunks = [Chunk([1024], state, i, i * RECORD_BYTES) for i in range(10)]
    files = [rigs[i % 2].file for i in range(10)]
    jobs = [chunk.add(rigs[0].pipeline, file) for chunk, file in zip(chunks, files, strict=True)]
    for chunk, file in zip(chunks, files, strict=True):
        chunk.save(file)
        chunk.update_twin(hyper(1))
    batch = rigs[0].pipeline.submit(jobs, hyper(1))
    batch.wait()
    for chunk, file in zip(chunks, files, strict=True):
        chunk.fetch(file)
        chunk.check()
    assert batch.stats()["bytes_read"] == batch.stats()["bytes_written"] == 10 * 1024 * 14


def test_inactive_jobs_move_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", 2, 1)
    chunk = Chunk([500, 500], Layout(frozenset(("master", "exp_avg", "exp_avg_sq"))), 0, 0)
    chunk.save(rig.file)
    job = chunk.add(rig.pipeline, rig.file)
    batch = rig.pipeline.submit([job], hyper(1, 2, active=0))
    batch.wait()
    assert batch.stats()["bytes_read"] == 0
    chunk.check()
    batch = rig.pipeline.submit([job], hyper(1, 2, active=0), refresh=True)
    batch.wait()
    assert batch.stats()["bytes_read"] == 12000
    chunk.twins["out"] = chunk.twins["master"].to(torch.bfloat16)
    chunk.fetch(rig.file)
    chunk.check()


def test_prepared_batches_read_ahead_and_wait(tmp_path: Path) -> None:
    """Prepared jobs read all but late reads; begun they give the bits of submitted ones; cancelled they change nothing."""
    rig = Rig(tmp_path / "a", 2, 6)
    chunks = [Chunk([1000], Layout(frozenset(ARRAYS)), i, i * RECORD_BYTES) for i in range(6)]
    jobs = []
    for chunk in chunks:
        chunk.save(rig.file)
        moves = {name: (rig.file, chunk.offset + chunk.starts[name], chunk.starts[name], chunk.arrays[name].nbytes) for name in ARRAYS}
        segment = (0, 1000, *((1, chunk.starts[name]) for name in ARRAYS))
        early = [move for name, move in moves.items() if name != "grad"]
        jobs.append(rig.pipeline.add_job(early, [segment], early, 1, 1, late_reads=[moves["grad"]]))
    for step in (1, 2):
        rig.pipeline.cancel(rig.pipeline.prepare(jobs))
        batch = rig.pipeline.prepare(jobs)
        with pytest.raises(ValueError, match="begin or cancel it first"):
            rig.pipeline.submit(jobs, hyper(step))
        assert not any(batch.reached(i) for i in range(len(jobs)))
        for chunk in chunks:
            chunk.arrays["grad"].fill_(step)
            chunk.twins["grad"].fill_(step)
            rig.file.write(chunk.offset + chunk.starts["grad"], chunk.arrays["grad"].data_ptr(), chunk.arrays["grad"].nbytes).wait()
            chunk.update_twin(hyper(step))
        rig.pipeline.begin(batch, hyper(step))
        batch.wait()
        assert batch.done and not batch.failed and batch.reached(5, True)
        with pytest.raises(ValueError, match="not the prepared one"):
            rig.pipeline.begin(batch, hyper(step))
    for chunk in chunks:
        chunk.fetch(rig.file)
        chunk.check()
    left = rig.pipeline.prepare(jobs)
    rig.pipeline = None  # ends it
    assert left.done


@pytest.mark.parametrize(("fault", "code"), [("read_errno", errno.EIO), ("write_errno", errno.ENOSPC)])
@pytest.mark.parametrize("frames", [1, 3])
def test_an_error_stops_the_stream(tmp_path: Path, fault: str, code: int, frames: int) -> None:
    rig = Rig(tmp_path / "a", frames, 20, engine="faults", bad_begin=5 * RECORD_BYTES, bad_end=5 * RECORD_BYTES + 1, **{fault: code})
    state = Layout(frozenset(("master", "exp_avg", "exp_avg_sq")))
    chunks = [Chunk([1000], state if i != 19 else Layout(frozenset()), i, i * RECORD_BYTES) for i in range(20)]
    jobs = [chunk.add(rig.pipeline, rig.file) for chunk in chunks]
    batch = rig.pipeline.submit(jobs[:19], hyper(1))
    where = rf"of 4000 bytes at offset {5 * RECORD_BYTES} of .*/a failed: .*{errno.errorcode[code]}"
    for wait in (batch.wait, lambda: batch.wait_job(5, written=True), lambda: batch.wait_job(18)):
        with pytest.raises(SwapError, match=where) as raised:
            wait()
        assert raised.value.errno == code
    batch.wait_job(0, written=True)
    assert batch.done
    later = rig.pipeline.submit(jobs, hyper(2))
    with pytest.raises(SwapError, match=where):
        later.wait()
    chunks[19].check()


def test_waiting_leaves_other_threads_running(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", 1, 1, engine="faults")
    chunk = Chunk([1000], Layout(frozenset(("master", "exp_avg", "exp_avg_sq"))), 0, 0)
    chunk.save(rig.file)
    rig.engine.hold()
    batch = rig.pipeline.submit([chunk.add(rig.pipeline, rig.file)], hyper(1))
    assert not batch.done
    opener = threading.Thread(target=rig.engine.release)
    opener.start()  # needs the interpreter's lock while this thread waits
    batch.wait_job(0)
    batch.wait()
    opener.join()
    assert batch.done


def test_jobs_are_checked(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", 1, 1)
    framed, here = (1, 0), (0, rig.memory.data_ptr())
    good = (0, 10, framed, framed, framed, framed, (-1, 0))
    move = (rig.file, 0, 0, RECORD_BYTES)
    for reads, segments, text in [
        ([(rig.file, 1, 0, RECORD_BYTES)], [good], "outside .*/a"),
        ([(rig.file, 0, 1, RECORD_BYTES)], [good], "outside the frame"),
        ([move], [(0, 1 << 62, framed, framed, framed, framed, framed)], "outside the frame"),
        ([move], [(0, 10, (1, 2), here, here, here, (-1, 0))], "not aligned"),
        ([move], [(0, 10, framed, (-1, 0), framed, framed, framed)], "only out may be absent"),
        ([move], [(0, 10, framed, (2, 0), framed, framed, framed)], "base is 0"),
        ([move], [(0, 10, framed, (0, 0), framed, framed, framed)], "no address"),
        ([], [good], "takes none"),
    ]:
        with pytest.raises(ValueError, match=text):
            rig.pipeline.add_job(reads, segments, [], 0, 0)
    job = rig.pipeline.add_job([move], [good], [], 0, 0)
    with pytest.raises(ValueError, match="no job 1"):
        rig.pipeline.submit([job + 1], hyper(1))
    with pytest.raises(ValueError, match="hyper-parameters 0 of 0"):
        rig.pipeline.submit([job], hyper(1)[:0])
    with pytest.raises(ValueError, match="64-byte records"):
        rig.pipeline.submit([job], np.zeros(8))
    batch = rig.pipeline.submit([], hyper(1))
    batch.wait()
    assert batch.done
    with pytest.raises(IndexError):
        batch.wait_job(0)
