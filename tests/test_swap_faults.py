"""Swap files, swap spaces and the pipeline under faults: seeded schedules, wrong bits, full disks, stuck devices."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from disks import small_disk
from helpers import BF16, flip, ids, net
from offload import _core, ops
from offload.config import format_size
from offload.errors import ConfigError, SwapError
from offload.memory import swap
from offload.memory.swap import STUCK_AFTER, Extent, SwapFile, SwapSpace

SCHEDULES = 1000
NOT_WRITTEN = "are not what was written there"
RATES = {"short_rate": 0.5, "interrupt_rate": 0.4, "delay_rate": 0.1, "reorder_rate": 0.5, "read_error_rate": 0.1, "write_error_rate": 0.1,
         "torn_rate": 0.1, "flip_rate": 0.1}  # fmt: skip


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one, so that a thousand synchronous writes do not take a minute."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def faulty(seed: int, stuck_after: float = STUCK_AFTER) -> Any:
    """An engine with its own mix of faults, about half of the kinds at once."""
    chosen = random.Random(seed)
    rates = {name: most * chosen.random() * chosen.randrange(2) for name, most in RATES.items()}
    return _core.Engine("faults", 1 + seed % 5, 16384 if seed % 3 else 4096, stuck_after, seed=seed, delay_us_max=100, **rates)


def good(transfer: Any, where: str) -> bool:
    """Whether it succeeds; an error must be its own, and the same at every wait."""
    said = []
    for _ in range(2):
        try:
            transfer.wait()
            said.append("")
        except SwapError as error:
            said.append(str(error))
    assert transfer.done
    assert said[0] == said[1]
    if said[0]:
        assert f"of {transfer.nbytes} bytes at offset {transfer.offset} of " in said[0]
        assert where in said[0]
    return not said[0]


def test_schedules_of_files(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = 0
    path, size = quick / "a", 60000
    for seed in range(SCHEDULES):
        monkeypatch.setattr(swap, "open_engine", lambda *_, seed=seed: faulty(seed))
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(size), 8) + [4096 * draw.randrange(14) for _ in range(3)])
        parts = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        model = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        with SwapFile(path, size, direct=seed % 4 != 0, checksum=True, delete=True) as file:
            for turn in range(2):
                if turn:
                    model = model.flip(0)
                writes = [file.write(a, model[a:b]) for a, b in parts]
                known = [good(w, str(path)) for w in writes]
                backs = [torch.zeros(b - a, dtype=torch.uint8) for a, b in parts]
                reads = [file.read(a, back) for (a, _), back in zip(parts, backs, strict=True)]
                for (a, b), back, read, sure in zip(parts, backs, reads, known, strict=True):
                    arrived = good(read, str(path))
                    failed += not arrived
                    assert not (arrived and sure) or torch.equal(back, model[a:b])
            counters = file.counters()
            assert counters["in_flight"] == counters["waiting"] == 0
            assert counters["requests"] == 4 * len(parts)
    assert failed > 100


def test_schedules_of_spaces(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = 0
    for seed in range(SCHEDULES):
        made = iter([faulty(2 * seed), faulty(2 * seed + 1)])
        monkeypatch.setattr(swap, "open_engine", lambda *_, made=made: next(made))
        draw = random.Random(seed)
        with SwapSpace([(quick / "x", "1MiB"), (quick / "y", "1MiB")], direct=seed % 4 != 0, checksum=True) as space:
            extents = [space.allocate(draw.choice([0, 1, 4096, draw.randrange(20000)])) for _ in range(6)]
            space.open()
            extents.append(space.allocate(draw.randrange(9000)))
            assert {e.file for e in extents} == {0, 1}
            data = [torch.randint(0, 256, (e.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + i))
                    for i, e in enumerate(extents)]  # fmt: skip
            writes = [space.write(e, 0, d.data_ptr(), e.nbytes, d) for e, d in zip(extents, data, strict=True)]
            known = [good(w, "state.swap") for w in writes]
            starts = [draw.randrange(e.nbytes + 1) for e in extents]
            backs = [torch.zeros_like(d[s:]) for d, s in zip(data, starts, strict=True)]
            reads = [space.read(e, s, b.data_ptr(), b.nbytes, b) for e, s, b in zip(extents, starts, backs, strict=True)]
            for d, s, back, read, sure in zip(data, starts, backs, reads, known, strict=True):
                arrived = good(read, "state.swap")
                failed += not arrived
                assert not (arrived and sure) or torch.equal(back, d[s:])
    assert failed > 100
    assert [p for p in quick.rglob("*") if p.name not in ("x", "y")] == []


N = 700
RECORD = 12288


class Chunk:
    """A state record of N elements: master and moments in the file, gradient and copy in memory, and their twins."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.state = torch.rand(3 * N, generator=generator)
        self.grad = torch.randn(N, generator=generator)
        self.out = torch.zeros(N, dtype=torch.bfloat16)
        self.twin_out = torch.zeros(N, dtype=torch.bfloat16)

    def segment(self) -> tuple[Any, ...]:
        return (0, N, (1, 0), (0, self.grad.data_ptr()), (1, 4 * N), (1, 8 * N), (0, self.out.data_ptr()))

    def update_twin(self, step: int) -> None:
        master, exp_avg, exp_avg_sq = self.state.split(N)
        ops.adamw_(master, self.grad, exp_avg, exp_avg_sq, step=step, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, out=self.twin_out)


def hyper(step: int) -> np.ndarray[Any, Any]:
    records = np.zeros(1, ops.HYPER)
    for key, value in {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "grad_scale": 1, "active": 1, "decoupled": 1, "step": step}.items():
        records[key] = value
    return records


def test_schedules_of_the_pipeline(quick: Path) -> None:
    failed, path = 0, str(quick / "a")
    memory = ops.empty(4 * RECORD, torch.uint8)
    for seed in range(SCHEDULES):
        file = _core.File(faulty(seed), path, 4 * RECORD, seed % 4 != 0, True)
        chunks = [Chunk(4 * seed + i) for i in range(4)]
        saved = [file.write(RECORD * i, c.state.data_ptr(), 12 * N, c.state) for i, c in enumerate(chunks)]
        known = [good(s, path) for s in saved]
        pipeline = _core.Pipeline([memory.data_ptr() + RECORD * i for i in range(1 + seed % 4)], RECORD, 1, seed % 3, memory)
        moves = [[(file, RECORD * i, 0, 12 * N)] for i in range(4)]
        jobs = [pipeline.add_job(m, [c.segment()], m, 0, 1) for m, c in zip(moves, chunks, strict=True)]
        for step in (1, 2):
            batch = pipeline.submit(jobs, hyper(step))
            for i, chunk in enumerate(chunks):
                try:
                    batch.wait_job(i, written=True)
                    chunk.update_twin(step)
                    assert not known[i] or torch.equal(chunk.out, chunk.twin_out)
                except SwapError as error:
                    assert path in str(error)
                    known[i] = False
                    failed += 1
        for i, chunk in enumerate(chunks):
            back = torch.zeros(3 * N)
            arrived = good(file.read(RECORD * i, back.data_ptr(), 12 * N, back), path)
            assert not (arrived and known[i]) or torch.equal(back, chunk.state)
        del pipeline, batch
    assert failed > 100


# --- Checksums --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_is_named(tmp_path: Path, engine: str, direct: bool) -> None:
    data = torch.randint(0, 256, (70001,), dtype=torch.uint8)
    back = torch.zeros_like(data)
    try:
        file = SwapFile(tmp_path / "a", 80000, engine=engine, direct=direct, checksum=True, delete=True)
    except ConfigError as error:
        pytest.skip(str(error))
    with file:
        assert file.describe()["checksum"] is True
        file.write(4097, data).wait()
        for at in (4097, 8191, 8192, 50000, 4097 + 70000):
            flip(tmp_path / "a", at)
            begin, end = max(4097, at // 4096 * 4096), min(4097 + 70001, (at // 4096 + 1) * 4096)
            with pytest.raises(SwapError, match=rf"of .*/a failed: bytes {begin} to {end} of the file {NOT_WRITTEN} \(checksum .* check the drive"):
                file.read(4097, back).wait()
            with pytest.raises(SwapError, match=NOT_WRITTEN):
                file.read(at, back[:1]).wait()
            flip(tmp_path / "a", at)
            file.read(4097, back).wait()
        assert torch.equal(back, data)
        assert file.counters()["bytes_verified"] >= 5 * 70001


def test_a_flipped_bit_stops_an_update(tmp_path: Path) -> None:
    with SwapSpace([(tmp_path, "1MiB")], checksum=True) as space:
        chunk = Chunk(0)
        extent = space.allocate(12 * N)
        space.open()
        space.write(extent, 0, chunk.state.data_ptr(), 12 * N, chunk.state).wait()
        (path,) = tmp_path.glob("offload-*/state.swap")
        flip(path, 6000)
        frame = ops.empty(RECORD, torch.uint8)
        pipeline = _core.Pipeline([frame.data_ptr()], RECORD, 1, 0, frame)
        move = [(space.native(0), extent.offset, 0, 12 * N)]
        batch = pipeline.submit([pipeline.add_job(move, [chunk.segment()], move, 0, 1)], hyper(1))
        with pytest.raises(SwapError, match=f"bytes 4096 to 8192 of the file {NOT_WRITTEN}"):
            batch.wait()
        assert not chunk.out.any()
        assert space.counters()["checksum_bytes"] > 0


def test_a_flipped_bit_stops_a_run(tmp_path: Path) -> None:
    """A byte of the master weights changes on disk between two steps."""
    model = net()
    tiers = offload.Tiers("64MiB", "64MiB", [(tmp_path / "swap", "64MiB")], checksum=True)
    place = {"optimizer": "nvme", "parameter": "host", "gradient": "host"}
    offload.prepare(model, tiers, device="cpu", precision=BF16, place=place)
    with offload.runtime(model) as runtime:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-3)
        batch = ids()

        def step() -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            runtime.synchronize()

        step()
        assert 0 < runtime._engine.space.counters()["checksum_bytes"] <= tiers.checksum_bytes(runtime.plan.resting["nvme"])
        (path,) = (tmp_path / "swap").glob("offload-*/state.swap")
        flip(path, 6000)
        with pytest.raises(SwapError, match=rf"{re.escape(str(path))} failed: bytes 4096 to 8192 of the file {NOT_WRITTEN}"):
            step()


def test_checksums_count_in_the_host_budget(tmp_path: Path) -> None:
    """What the sums take is planned for, and a plan that has no room for them is refused."""
    assert offload.Tiers("1GiB", "1GiB", [(tmp_path, "1GiB")]).checksum_bytes(1 << 30) == 0
    tiers = offload.Tiers("1GiB", "1GiB", [(tmp_path, "1GiB")], checksum=True)
    assert 1 << 20 < tiers.checksum_bytes(1 << 30) < 3 << 19 and tiers.checksum_bytes(0) == 0
    with pytest.raises(ConfigError, match="checksum = 'yes': give true or false"):
        offload.Tiers("1GiB", "1GiB", checksum="yes")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024)
    plain, summed = (
        offload.plan(model, offload.Tiers("64MiB", "24MiB", [(tmp_path, "1GiB")], checksum=checksum), device="sim", batch=(1, 8))
        for checksum in (False, True)
    )
    assert summed.resting["nvme"] >= plain.resting["nvme"]
    assert summed.peak_bytes["host"] + (summed.resting["nvme"] >> 10) <= 24 << 20


def test_without_checksums_nothing_is_compared(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (9000,), dtype=torch.uint8)
    back = torch.zeros_like(data)
    with SwapFile(tmp_path / "a", 9000, checksum=False, delete=True) as file:
        file.write(0, data).wait()
        flip(tmp_path / "a", 10)
        file.read(0, back).wait()
        assert file.counters()["bytes_verified"] == 0
    assert (back != data).sum() == 1


def test_what_others_wrote_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 64)
    back = torch.zeros(16384, dtype=torch.uint8)
    with SwapFile(tmp_path / "a", 16384, checksum=True) as file:
        file.read(0, back).wait()
        file.write(100, back[:50]).wait()
        flip(tmp_path / "a", 200)
        file.read(0, back).wait()  # of the block, what was written here is as it was
        flip(tmp_path / "a", 120)
        with pytest.raises(SwapError, match="bytes 100 to 150 of the file"):
            file.read(0, back).wait()


def test_every_way_of_summing_is_one(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for start in range(9):
        for size in (*range(70), 4096):
            assert _core.checksum(data.data_ptr() + start, size) == _core.checksum(data.data_ptr() + start, size, table=True)
    assert _core.CHECKSUM_WAY in ("sse4.2", "armv8", "table")


# --- A stuck device ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine whose device answers nothing until it is released."""
    engine = _core.Engine("faults", 1, 4096, 0.02)
    engine.hold()
    monkeypatch.setattr(swap, "open_engine", lambda *_: engine)
    yield engine
    engine.release()


def test_a_stuck_device_is_reported_where_one_waits(stuck: Any, tmp_path: Path) -> None:
    with SwapFile(tmp_path / "a", "1MiB") as file:
        data = torch.randint(0, 256, (8192,), dtype=torch.uint8)
        write, read = file.write(0, data), file.read(65536, torch.zeros(5))
        pending = r"no request has finished for .* s; 1 requests are with the kernel: write of 4096 bytes at offset 0 of .* since .*; 2 transfers"
        for _ in range(2):
            with pytest.raises(SwapError, match=rf"^read of 20 bytes at offset 65536 of .*/a is not done: {pending}") as raised:
                read.wait()
            assert raised.value.errno == errno.ETIMEDOUT
        with pytest.raises(SwapError, match=r"^write of 8192 bytes at offset 0"):
            write.wait()
        assert not write.done
        stuck.release()
        write.wait()
        read.wait()
    assert (tmp_path / "a").read_bytes()[:8192] == data.numpy().tobytes()


def test_a_stuck_device_does_not_hang_the_pipeline(stuck: Any, tmp_path: Path) -> None:
    chunk = Chunk(0)
    file = _core.File(stuck, str(tmp_path / "a"), RECORD)
    frame = ops.empty(RECORD, torch.uint8)
    pipeline = _core.Pipeline([frame.data_ptr()], RECORD, 1, 0, frame)
    move = [(file, 0, 0, 12 * N)]
    batch = pipeline.submit([pipeline.add_job(move, [chunk.segment()], move, 0, 1)], hyper(1))
    for wait in (batch.wait, lambda: batch.wait_job(0)):
        with pytest.raises(SwapError, match="an update is not done: no request has finished"):
            wait()
    stuck.release()
    batch.wait()


def test_a_stuck_device_does_not_hang_the_end(tmp_path: Path) -> None:
    """What it may still write to is kept; the files are removed and the error is raised by close()."""
    code = """
import sys, torch
from offload import _core
from offload.errors import SwapError
from offload.memory import swap
engine = _core.Engine("faults", 1, 4096, 0.05)
swap.open_engine = lambda *_: engine
space = swap.SwapSpace([(sys.argv[1], "1MiB")])
extent = space.allocate(4096)
space.open()
engine.hold()
data = torch.zeros(1024)
space.read(extent, 0, data.data_ptr(), 4096, data)
try:
    space.close()
except SwapError as error:
    print(error)
    print(engine.counters()["in_flight"])
engine.release()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "an I/O engine cannot finish its work: no request has finished" in done.stdout
    assert done.stdout.endswith("\n1\n")
    assert list(tmp_path.iterdir()) == []


def test_how_long_is_set(tmp_path: Path) -> None:
    with SwapFile(tmp_path / "a", 4096, stuck_after=2.5, delete=True) as file:
        assert file.describe()["stuck_after"] == 2.5
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="stuck_after"):
            SwapFile(tmp_path / "a", 4096, stuck_after=wrong)


# --- A full disk ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up(tmp_path: Path, kind: str) -> None:
    """What is reserved can be written when others have taken the rest; growing is refused, says how much there is, and breaks nothing."""
    with small_disk(kind, tmp_path / "small") as where, SwapSpace([(where, "1GiB")], checksum=True) as space:
        extent = space.allocate(4 << 20)
        space.open()
        with (where / "others").open("wb") as others, pytest.raises(OSError, match="No space left"):
            while True:
                others.write(bytes(1 << 20))
                others.flush()
        data = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8)
        space.write(extent, 0, data.data_ptr(), data.nbytes, data).wait()
        with pytest.raises(SwapError, match=r"cannot reserve \d+ bytes for swap file .*ENOSPC.* bytes free; free space there") as raised:
            space.allocate(8 << 20)
        assert raised.value.errno == errno.ENOSPC
        back = torch.zeros_like(data)
        space.read(extent, 0, back.data_ptr(), back.nbytes, back).wait()
        assert torch.equal(back, data)
        with pytest.raises(SwapError, match="ENOSPC"):
            SwapFile(where / "more", "64MiB")
        assert not (where / "more").exists()
        assert format_size(space.allocated_bytes) == "4 MiB"
        (where / "others").unlink()
        more = space.allocate(1 << 20)
        assert more == Extent(0, 4 << 20, 1 << 20)
        space.write(more, 0, data.data_ptr(), 1 << 20, data).wait()


# --- Counters, registered memory, several drives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_counters(tmp_path: Path, engine: str) -> None:
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    try:
        file = SwapFile(tmp_path / "a", "1MiB", engine=engine, queue_depth=4, block=65536, delete=True)
    except ConfigError as error:
        pytest.skip(str(error))
    with file:
        for transfer in [file.write(0, data), file.read(0, data)]:
            transfer.wait()
        counters = file.counters()
        assert counters["bytes_read"] == counters["bytes_written"] == 1 << 20
        assert (counters["requests"], counters["pieces"]) == (2, 32)
        assert counters["in_flight"] == counters["waiting"] == 0
        assert 1 <= counters["in_flight_max"] <= 4
        for side in ("read", "write"):
            p50, p90, p99, most = (counters[f"{side}_latency_us_{x}"] for x in ("p50", "p90", "p99", "max"))
            assert 0 < p50 <= p90 <= p99 <= most


def test_registered_memory(tmp_path: Path) -> None:
    data = ops.empty(1 << 20, torch.uint8).random_(0, 255)
    want, back = data.clone(), ops.empty(1 << 20, torch.uint8)
    with SwapFile(tmp_path / "a", "1MiB", delete=True) as file:
        taken = [file.register(data), file.register(back)]
        assert file.describe()["engine"] == "io_uring" or not any(taken)  # and there the kernel decides
        file.write(0, data).wait()
        file.read(0, back).wait()
        file.read(4096, data[: 1 << 19]).wait()
        assert torch.equal(back, want)
        assert torch.equal(data[: 1 << 19], want[4096 : 4096 + (1 << 19)])


def test_each_drive_has_a_queue_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one drive answers nothing, the others go on."""
    engines = [_core.Engine("faults", 2, 4096) for _ in range(3)]
    made = iter(engines)
    monkeypatch.setattr(swap, "open_engine", lambda *_: next(made))
    with SwapSpace([(tmp_path / name, "1MiB") for name in "xyz"]) as space:
        extents = [space.allocate(10000) for _ in range(9)]
        assert [e.file for e in extents] == [0, 1, 2] * 3
        space.open()
        data = torch.randint(0, 256, (10000,), dtype=torch.uint8)
        engines[1].hold()
        transfers = [space.write(e, 0, data.data_ptr(), e.nbytes, data) for e in extents]
        for i, transfer in enumerate(transfers):
            if i % 3 != 1:
                transfer.wait()
        assert not any(t.done for t in transfers[1::3])
        assert space.counters()["waiting"] + space.counters()["in_flight"] > 0
        engines[1].release()
        for transfer in transfers:
            transfer.wait()
        assert [e.counters()["bytes_written"] for e in engines] == [30000] * 3
        assert space.counters()["nvme_write"] == 90000
