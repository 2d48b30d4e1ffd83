"""Swap files and swap spaces: one contract, whichever engine moves the bytes."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _core
from offload.errors import BudgetError, ConfigError, OffloadError, SwapError
from offload.memory import swap
from offload.memory.swap import Extent, SwapFile, SwapSpace

FAULTS = {"seed": 3, "short_rate": 0.3, "interrupt_rate": 0.2, "delay_rate": 0.1, "delay_us_max": 200}


def make_engine(name: str, depth: int = 8, block: int = 65536, **faults: Any) -> Any:
    if name == "faults":
        return _core.Engine("faults", depth, block, **(faults or FAULTS))
    try:
        return _core.Engine(name, depth, block)
    except _core.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["io_uring", "threads", "faults"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that every swap file of the test gets."""
    made = request.param
    monkeypatch.setattr(swap, "open_engine", lambda *_: make_engine(made))
    return str(made)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that moves nothing until it is released."""
    made = make_engine("faults", 2, 4096, seed=0)
    made.hold()
    monkeypatch.setattr(swap, "open_engine", lambda *_: made)
    return made


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def mounted(kind: str, where: Path, options: str) -> Iterator[Path]:
    where.mkdir()
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(where)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


# --- SwapFile ---------------------------------------------------------------------------------------------------------------------------------


def test_every_size_round_trips(engine: str, tmp_path: Path) -> None:
    sizes = [*range(1026), 4095, 4096, 4097, 65535, 65536, 65537, 200001]
    total = sum(sizes)
    data = random_bytes(total)
    parts = list(data.split(sizes))
    with SwapFile(tmp_path / "a", total) as file:
        offset = 0
        writes = []
        for part in parts:
            writes.append(file.write(offset, part))
            offset += part.nbytes
        for write in writes:
            write.wait()
        back = torch.zeros(total, dtype=torch.uint8)
        reads, offset = [], 0
        for part in back.split(sizes):
            reads.append(file.read(offset, part))
            offset += part.nbytes
        for read in reads:
            read.wait()
        assert all(read.done for read in reads)
    assert torch.equal(back, data)
    assert (tmp_path / "a").read_bytes() == bytes(data.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_dtypes(engine: str, tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.randn(3, 1001).to(dtype)
    back = torch.empty_like(data)
    with SwapFile(tmp_path / "a", "1MiB") as file:
        file.write(13, data).wait()
        file.read(13, back).wait()
    assert torch.equal(back, data)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30000), st.integers(0, 20000), st.integers(0, 64)), max_size=8), st.integers(0, 2**32))
def test_any_offset_size_and_address(tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int, int]], seed: int) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    model = torch.zeros(50000, dtype=torch.uint8)
    with SwapFile(path, 50000, delete=True, block=8192) as file:
        for i, (offset, size, shift) in enumerate(writes):
            data = random_bytes(size + shift, seed + i)[shift:]
            file.write(offset, data).wait()
            model[offset : offset + size] = data
        back = torch.zeros(50064, dtype=torch.uint8)[seed % 64 :][:50000]
        file.read(0, back).wait()
    assert torch.equal(back, model)


def test_sizes_and_offsets_past_32_bits(tmp_path: Path) -> None:
    start, size = (2 << 30) - 4096, (2 << 30) + 8193
    if shutil.disk_usage(tmp_path).free < 3 * size:
        pytest.skip("not enough free disk")
    marks = [0, 4096, (2 << 30) - 1, 2 << 30, (2 << 30) + 4096, size - 1]
    data = torch.empty(size, dtype=torch.uint8)  # untouched pages cost no memory
    for i, at in enumerate(marks):
        data[at] = i + 1
    with SwapFile(tmp_path / "a", start + size, delete=True) as file:
        if not file.describe()["direct"]:
            pytest.skip("the file would be in memory")
        file.write(start, data).wait()
        assert file.counters()["bytes_written"] == size
        back = torch.zeros(1, dtype=torch.uint8)
        for i, at in enumerate(marks):
            file.read(start + at, back).wait()
            assert back.item() == i + 1


def test_error_is_raised_at_its_own_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_engine("faults", 4, 4096, read_errno=errno.EIO, write_errno=errno.ENOSPC, bad_begin=8192, bad_end=8193)
    monkeypatch.setattr(swap, "open_engine", lambda *_: made)
    data = torch.zeros(4096, dtype=torch.uint8)
    with SwapFile(tmp_path / "a", 65536) as file:
        transfers = [file.write(4096 * i, data) for i in range(8)] + [file.read(8192, data)]
        for i, transfer in enumerate(transfers):
            if i not in (2, 8):
                transfer.wait()
        for _ in range(2):
            with pytest.raises(SwapError, match=r"write of 4096 bytes at offset 8192 of .*/a failed: .*ENOSPC.*free space there") as raised:
                transfers[2].wait()
        assert raised.value.errno == errno.ENOSPC
        assert isinstance(raised.value, OffloadError)
        with pytest.raises(SwapError, match="EIO"):
            transfers[8].wait()


def test_a_file_cut_short_is_an_error(engine: str, tmp_path: Path) -> None:
    with SwapFile(tmp_path / "a", 65536) as file:
        os.truncate(tmp_path / "a", 10000)
        with pytest.raises(SwapError, match="the file ends at"):
            file.read(4096, torch.zeros(20000, dtype=torch.uint8)).wait()


def test_dropped_tensor_lives_until_done(held: Any, tmp_path: Path) -> None:
    file = SwapFile(tmp_path / "a", "1MiB")
    data = random_bytes(100000)
    copy, watch = data.clone(), weakref.ref(data)
    file.write(5, data)  # neither the transfer nor the tensor is kept
    del data
    gc.collect()
    assert watch() is not None
    held.release()
    held.drain()
    back = torch.zeros(100000, dtype=torch.uint8)
    file.read(5, back).wait()
    assert torch.equal(back, copy)
    assert watch() is None
    file.close()


def test_close_finishes_what_is_in_flight(held: Any, tmp_path: Path) -> None:
    file = SwapFile(tmp_path / "a", "1MiB")
    data = random_bytes(1 << 20)
    transfer = file.write(0, data)
    closer = threading.Thread(target=file.close)
    closer.start()
    assert not transfer.done
    held.release()
    closer.join()
    transfer.wait()
    assert transfer.done
    file.close()
    assert (tmp_path / "a").read_bytes() == data.numpy().tobytes()
    with pytest.raises(ValueError, match="closed"):
        file.read(0, data)


def test_wait_lets_a_signal_through(held: Any, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    file = SwapFile(tmp_path / "a", "1MiB")
    transfer = file.read(0, torch.zeros(1))
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
            transfer.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    held.release()
    transfer.wait()
    file.close()


def test_reopened_file_has_what_was_written(tmp_path: Path) -> None:
    data = random_bytes(10001)
    with SwapFile(tmp_path / "a", 20000) as file:
        file.write(7, data).wait()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    back = torch.empty_like(data)
    with SwapFile(tmp_path / "a", 20000, direct=False, delete=True) as file:
        assert file.describe()["direct"] is False
        file.read(7, back).wait()
    assert torch.equal(back, data)
    assert not (tmp_path / "a").exists()


def test_wrong_tensors_and_ranges(tmp_path: Path) -> None:
    good = torch.zeros(10, dtype=torch.float32)
    with SwapFile(tmp_path / "a", 100) as file:
        for bad in ([1.0], good.numpy(), torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), torch.zeros(2, dtype=torch.cfloat).conj()):
            with pytest.raises(TypeError, match="CPU tensor is wanted"):
                file.write(0, bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not contiguous"):
            file.read(0, torch.zeros(3, 3).t())
        for offset in (-1, 61, 1 << 62, 1 << 80, 0.5):
            with pytest.raises(ValueError, match="outside the file of 100 bytes"):
                file.read(offset, good)  # type: ignore[arg-type]
        file.read(60, good).wait()
        file.read(100, torch.zeros(0)).wait()


def test_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: list[dict[str, Any]] = [{"engine": "aio"}, {"queue_depth": 0}, {"queue_depth": -1}, {"block": "1000"}, {"block": "1MiBs"}, {"block": "2GiB"}]
    for wrong in bad:
        with pytest.raises(ConfigError):
            SwapFile(tmp_path / "a", 100, **wrong)
    monkeypatch.setenv("OFFLOAD_IO", "aio")
    with pytest.raises(ConfigError, match="OFFLOAD_IO='aio'"):
        SwapFile(tmp_path / "a", 100)
    assert not (tmp_path / "a").exists()
    monkeypatch.setenv("OFFLOAD_IO", "threads")
    with SwapFile(tmp_path / "a", 100) as file:
        assert file.describe()["engine"] == "threads"
    with pytest.raises(SwapError, match="/nowhere/a"):
        SwapFile("/nowhere/a", 100)
    with pytest.raises(SwapError, match="no regular file"):
        SwapFile("/dev/null", 100)


def test_fallback_to_threads_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real: Callable[..., Any] = _core.Engine

    def refuse(kind: str, *rest: Any) -> Any:
        if kind == "io_uring":
            raise _core.Unavailable("not here")
        return real(kind, *rest)

    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    monkeypatch.setattr(_core, "Engine", refuse)
    monkeypatch.setattr(swap, "_said", set())
    with caplog.at_level(logging.WARNING, "offload"):
        for name in "ab":
            with SwapFile(tmp_path / name, 100) as file:
                assert file.describe()["engine"] == "threads"
    assert [r.getMessage() for r in caplog.records] == ["no io_uring (not here): file I/O uses threads, which is slower"]
    with pytest.raises(ConfigError, match="cannot be had: not here"):
        SwapFile(tmp_path / "a", 100, engine="io_uring")


def test_file_system_without_direct_io(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(swap, "_said", set())
    data = random_bytes(70001)
    back = torch.empty_like(data)
    with mounted("ramfs", tmp_path / "ram", "size=1m") as where, caplog.at_level(logging.WARNING, "offload"), SwapFile(where / "a", "1MiB") as file:
        described = file.describe()
        assert described["direct"] is False and described["refusal"]
        file.write(3, data).wait()
        file.read(3, back).wait()
    assert torch.equal(back, data)
    assert "no direct I/O in" in caplog.text


def test_full_disk(engine: str, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=1m") as where:
        with pytest.raises(SwapError, match=r"cannot reserve 4194304 bytes for swap file .*/a: .*ENOSPC.*bytes free; free space") as raised:
            SwapFile(where / "a", "4MiB")
        assert raised.value.errno == errno.ENOSPC
        assert list(where.iterdir()) == []
        with SwapFile(where / "a", "512KiB") as file:
            file.write(0, torch.zeros(512 << 10, dtype=torch.uint8)).wait()
        os.unlink(where / "a")
        space = SwapSpace([(where, "1GiB")])
        space.allocate(2 << 20)
        with pytest.raises(SwapError, match="ENOSPC"):
            space.open()
        assert list(where.iterdir()) == []


# --- SwapSpace --------------------------------------------------------------------------------------------------------------------------------


def test_extents_do_not_overlap_and_fit(tmp_path: Path) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 40000), max_size=30), st.lists(st.integers(0, 200000), max_size=4))
    def holds(sizes: list[int], capacities: list[int]) -> None:
        space = SwapSpace([(tmp_path / str(i), c) for i, c in enumerate(capacities)])
        used: list[Extent] = []
        for size in sizes:
            try:
                used.append(space.allocate(size))
            except BudgetError:
                filled = [sum(-(-e.nbytes // 4096) * 4096 for e in used if e.file == i) for i in range(len(capacities))]
                assert all(c - f < -(-size // 4096) * 4096 for c, f in zip(capacities, filled, strict=True))
        for i, a in enumerate(used):
            assert a.offset % 4096 == 0 and a.offset + a.nbytes <= capacities[a.file]
            assert all(b.file != a.file or b.offset >= a.offset + a.nbytes for b in used[i + 1 :])

    holds()
    assert list(tmp_path.iterdir()) == []


def test_space_round_trip_modes_and_end(engine: str, tmp_path: Path) -> None:
    space = SwapSpace([(tmp_path / "x" / "y", "1MiB"), (tmp_path, 1 << 20)])
    extents = [space.allocate(n) for n in (5000, 100001, 1, 0)]
    assert [e.file for e in extents] == [0, 1, 0, 1]
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="not open"):
        space.read(extents[0], 0, 0, 0)
    space.open()
    (home,) = tmp_path.glob("offload-*")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (file,) = home.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == 102400
    extents.append(space.allocate(300000))
    data = [random_bytes(e.nbytes, i) for i, e in enumerate(extents)]
    for transfer in [space.write(e, 0, d.data_ptr(), e.nbytes, d) for e, d in zip(extents, data, strict=True)]:
        transfer.wait()
    for extent, wanted in zip(extents, data, strict=True):
        back = torch.zeros_like(wanted)
        start = extent.nbytes // 3
        space.read(extent, start, back.data_ptr(), extent.nbytes - start).wait()
        assert torch.equal(back[: extent.nbytes - start], wanted[start:])
        with pytest.raises(ValueError, match="outside the extent"):
            space.read(extent, start, back.data_ptr(), extent.nbytes - start + 1)
    counters = space.counters()
    assert counters["nvme_write"] == sum(e.nbytes for e in extents)
    assert len(space.describe()) == 2
    space.close()
    space.close()
    assert space.counters() == counters
    assert [p.name for p in tmp_path.rglob("*")] in (["x", "y"], ["y", "x"])


def test_over_capacity_names_what_is_left(tmp_path: Path) -> None:
    space = SwapSpace([(tmp_path, "1MiB")], owner="the optimizer")
    space.allocate(1 << 19)
    with pytest.raises(BudgetError, match=r"the optimizer needs 600 KiB more of nvme and has 512 KiB of 1 MiB left in .*; give nvme more"):
        space.allocate(600 << 10)


def test_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    space = SwapSpace([(tmp_path / "good", 4096), (tmp_path / "file" / "sub", 4096)])
    with pytest.raises(SwapError, match=r"cannot swap to .*/file/sub: Not a directory; give a directory"):
        space.open()
    assert list((tmp_path / "good").iterdir()) == []


OWNER = """
import sys
from offload.memory.swap import SwapSpace
space = SwapSpace([(sys.argv[1], "1MiB")])
space.allocate(4096)
space.open()
print("open", flush=True)
line = sys.stdin.readline()
if line == "raise\\n": raise SystemExit(3)
"""


def owner(directory: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", OWNER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline() != "open\n":
        raise RuntimeError("the child did not come up")
    return child


def test_live_and_stale_directories(tmp_path: Path) -> None:
    child = owner(tmp_path)
    (theirs,) = tmp_path.glob("offload-*")
    foreign = tmp_path / "offload-notes"
    foreign.mkdir()
    with SwapSpace([(tmp_path, 4096)]) as space:
        space.allocate(4096)
        space.open()
        assert (theirs / "state.swap").exists()
        child.kill()
        child.wait()
        assert theirs.exists()
        assert swap.reclaim(tmp_path) == [theirs]
        assert not theirs.exists()
        assert len(list(tmp_path.glob("offload-*/state.swap"))) == 1
    assert list(tmp_path.iterdir()) == [foreign]


def test_stale_directory_goes_at_the_next_open(tmp_path: Path) -> None:
    child = owner(tmp_path)
    child.kill()
    child.wait()
    with SwapSpace([(tmp_path, 4096)]) as space:
        space.open()
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["before it is opened", "before it is locked"])
def test_a_directory_that_another_rank_takes_for_stale_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    opened, gone = os.open, list[Path]()

    def open_late(path: Any, *args: Any, **kwargs: Any) -> int:
        first = not gone and str(path).startswith(f"{tmp_path}/offload-rank3-") and sys._getframe(1).f_code.co_name == "_own_subdirectory"
        descriptor = opened(path, *args, **kwargs) if first and taken == "before it is locked" else -1
        if first:
            gone.append(Path(path))
            assert swap.reclaim(tmp_path) == gone
        return descriptor if descriptor >= 0 else opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    with SwapSpace([(tmp_path, 4096)], rank=3) as space:
        space.allocate(4096)
        space.open()
        (ours,) = tmp_path.iterdir()
        assert gone and ours not in gone and (ours / "state.swap").exists()
        assert swap.sweep(tmp_path)[0].stays == f"in use by process {os.getpid()}"


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_no_files_after_exit(tmp_path: Path, how: str) -> None:
    child = owner(tmp_path)
    child.communicate(f"{how}\n")
    assert child.returncode == (3 if how == "raise" else 0)
    assert list(tmp_path.iterdir()) == []


def test_forked_child_leaves_its_parents_files(engine: str, tmp_path: Path) -> None:
    with SwapSpace([(tmp_path, "1MiB")]) as space:
        extent = space.allocate(5000)
        space.open()
        data = random_bytes(5000)
        space.write(extent, 0, data.data_ptr(), 5000).wait()
        pid = os.fork()
        if pid == 0:
            try:
                space.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        back = torch.empty_like(data)
        space.read(extent, 0, back.data_ptr(), 5000).wait()
        assert torch.equal(back, data)


def test_dropped_space_is_closed(tmp_path: Path) -> None:
    space = SwapSpace([(tmp_path, 4096)])
    space.allocate(10)
    space.open()
    assert len(list(tmp_path.iterdir())) == 1
    del space
    gc.collect()
    assert list(tmp_path.iterdir()) == []
