"""Arenas, staging buffers, swap queues, the gradients' chunk cache, and what the machine's limits are read from."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import offload
from offload.engine.chunk_cache import ChunkCache
from offload.errors import BudgetError, OffloadError
from offload.memory import limits
from offload.memory.arena import HUGE_PAGE, PAGE, Arena, reserve
from offload.memory.budget import Budget
from offload.memory.limits import resident_bytes
from offload.memory.shard import Shard
from offload.memory.swap import SwapSpace
from offload.transfer.frames import FramePool
from offload.transfer.queue import Pace, SwapQueue

MIB = 1 << 20


# Arenas


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5 * MIB + 12345])
def test_reserve(nbytes: int) -> None:
    memory = reserve(nbytes)
    assert memory.dtype == torch.uint8
    assert memory.numel() == nbytes
    if nbytes:
        assert memory.data_ptr() % (HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE) == 0
        assert not bool(memory.any())
        memory.fill_(7)
        assert bool((memory == 7).all())


def _mapping(address: int) -> list[str]:
    """The lines of smaps for the mapping that holds an address."""
    lines: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and ":" not in head:
            if lines:
                return lines
            first, last = (int(x, 16) for x in head.split("-"))
            if first <= address < last:
                lines = [line]
        elif lines:
            lines.append(line)
    return lines


def _field(lines: list[str], name: str) -> str:
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(name + ":"))


@pytest.mark.parametrize("nbytes", [64 << 10, 3 * MIB + 5])
def test_arena_is_exact_and_stays_out_of_forks(nbytes: int) -> None:
    """Not rounded to a power of two, resident only when written, not copied to a child."""
    arena = Arena("host", nbytes)
    assert arena.nbytes == -(-nbytes // PAGE) * PAGE
    region = arena.take(nbytes)
    lines = _mapping(region.data_ptr())
    assert "dc" in _field(lines, "VmFlags").split()
    region.fill_(1)
    assert int(_field(_mapping(region.data_ptr()), "Rss").split()[0]) * 1024 <= nbytes + HUGE_PAGE


def test_arena_regions() -> None:
    """Regions start on pages, do not overlap, and are storages of their own, so that a view tells where it is."""
    arena = Arena("device", 10 * PAGE)
    regions = [arena.take(n) for n in (1, PAGE, PAGE + 1, 0, 100)]
    assert arena.used_bytes == 5 * PAGE
    starts = [r.data_ptr() for r in regions if r.numel()]
    assert all(s % PAGE == 0 for s in starts)
    for i, region in enumerate(regions):
        region.fill_(i + 1)
    assert all(bool((r == i + 1).all()) for i, r in enumerate(regions))
    storages = [r.untyped_storage().data_ptr() for r in regions if r.numel()]
    assert storages == starts
    assert [r[:1].view(-1).untyped_storage().data_ptr() for r in regions if r.numel()] == starts
    assert [r.untyped_storage().nbytes() for r in regions if r.numel()] == [r.numel() for r in regions if r.numel()]
    with pytest.raises(OffloadError, match=r"device arena of 40960 bytes has 20480 left, 24576"):
        arena.take(5 * PAGE + 1)


def test_arena_gives_its_memory_back() -> None:
    before = resident_bytes()
    arena = Arena("host", 64 * MIB)
    region = arena.take(64 * MIB)
    region.fill_(1)
    assert resident_bytes() - before > 60 * MIB
    arena.close()
    del region
    gc.collect()
    assert resident_bytes() - before < 8 * MIB
    arena.close()


# Budgets


def test_budget() -> None:
    budget = Budget("host", 100)
    first = budget.reserve(60, "state")
    with pytest.raises(BudgetError, match=r"slots needs 50 bytes of the host tier, which has 40 of its budget of 100 left"):
        budget.reserve(50, "slots")
    with budget.reserve(40, "slots"):
        assert (budget.used, budget.free, budget.peak) == (100, 0, 100)
    assert budget.free == 40
    first.release()
    first.release()
    assert (budget.used, budget.peak) == (0, 100)


def test_budget_under_threads() -> None:
    budget = Budget("host", 50)

    def work() -> None:
        for _ in range(200):
            with contextlib.suppress(BudgetError), budget.reserve(20, "x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert budget.used == 0
    assert budget.peak <= 40


# Limits


def _fake_cgroup(monkeypatch: pytest.MonkeyPatch, root: Path, lines: str, files: dict[str, str]) -> int | None:
    for name, text in {"/proc/self/cgroup": lines, **files}.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(limits, "Path", lambda p: root / str(p).lstrip("/"))
    return limits.cgroup_memory_limit()


@pytest.mark.parametrize(
    ("lines", "files", "want"),
    [
        ("0::/a/b\n", {"/sys/fs/cgroup/a/b/memory.max": "1000\n", "/sys/fs/cgroup/a/memory.max": "max\n"}, 1000),
        ("0::/a/b\n", {"/sys/fs/cgroup/a/b/memory.max": "max\n", "/sys/fs/cgroup/a/memory.max": "500\n"}, 500),
        ("0::/a/b\n", {"/sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
        ("0::/\n", {"/sys/fs/cgroup/memory.max": "123456\n"}, 123456),
        ("0::/gone\n", {"/sys/fs/cgroup/memory.max": "77\n"}, 77),
        ("4:memory:/x\n0::/y\n", {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:cpu,memory:/x\n", {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "2048\n"}, 2048),
        ("4:memory:/x\n", {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("3:cpuset:/x\n", {"/sys/fs/cgroup/cpuset/x/memory.limit_in_bytes": "1\n"}, None),
        ("0::/a\n", {"/sys/fs/cgroup/a/memory.max": "garbage\n"}, None),
        ("", {}, None),
    ],
)
def test_cgroup_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, files: dict[str, str], want: int | None) -> None:
    assert _fake_cgroup(monkeypatch, tmp_path, lines, files) == want


def test_host_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    here = limits.host_limits()
    assert 0 < here.available <= here.total
    assert here.usable > 0
    monkeypatch.setattr(limits, "cgroup_memory_limit", lambda: 123 * MIB)
    assert limits.host_limits().usable == 123 * MIB
    assert limits.resident_bytes_max() >= limits.resident_bytes() // 2


def test_peak_is_this_process_own() -> None:
    """A process started by a large one has not that one's peak."""
    script = """
from offload.memory.limits import resident_bytes_max
own = next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmHWM"))
print(resident_bytes_max() - own)
"""
    block = torch.ones(64 * MIB)  # 256 MiB
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout
    del block
    assert abs(int(out)) < 16 * MIB


def test_prepare_heeds_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the container cannot hold is refused before it is allocated, with numbers and ways out; the model stays as it was."""
    monkeypatch.setattr(limits, "cgroup_memory_limit", lambda: resident_bytes() + 8 * MIB)
    model = torch.nn.Linear(2048, 2048)
    before, files = model.weight.detach().clone(), list(tmp_path.iterdir())
    with pytest.raises(offload.PlanError, match=r"machine is short.*usable here are .*Ways out: .*; .*; "):
        offload.prepare(model, offload.Tiers("1GiB", "1GiB", [(str(tmp_path / "swap"), "1GiB")]))
    assert list(tmp_path.iterdir()) == files
    assert torch.equal(model.weight, before)
    assert type(model.weight) is torch.nn.Parameter


# Staging buffers


def test_frame_pool() -> None:
    pool = FramePool(torch.zeros(3 * PAGE, dtype=torch.uint8), 3, PAGE)
    taken = [pool.take() for _ in range(3)]
    assert pool.free == 0
    assert len({t.data_ptr() for t in taken}) == 3
    got: list[torch.Tensor] = []
    waiter = threading.Thread(target=lambda: got.append(pool.take()))
    waiter.start()
    assert not got
    pool.give(taken[1])
    waiter.join()
    assert got[0].data_ptr() == taken[1].data_ptr()
    for t in (taken[0], taken[2], got[0]):
        pool.give(t)
    assert pool.free == 3


# Swap queues


@pytest.fixture(params=[None, 0, 1, 2])
def queue(request: pytest.FixtureRequest) -> Iterator[SwapQueue]:
    made = SwapQueue("test", bound=4, pace=Pace(seed=request.param))
    yield made
    made.close()


def test_queue_runs_in_order(queue: SwapQueue) -> None:
    ran: list[int] = []
    jobs = [queue.submit(lambda i=i: ran.append(i), i) for i in range(50)]
    jobs[30].wait()
    assert ran[:31] == list(range(31))
    queue.drain()
    assert ran == list(range(50))
    assert all(j.done for j in jobs)
    assert queue.moved_bytes == sum(range(50))
    queue.drain()


def test_queue_errors_are_raised_at_their_own_wait(queue: SwapQueue) -> None:
    def fails() -> None:
        raise OSError("this one")

    jobs = [queue.submit(fails if i % 3 == 1 else lambda: None, 1) for i in range(12)]
    queue.drain()
    for i, job in enumerate(jobs):
        if i % 3 == 1:
            for _ in range(2):
                with pytest.raises(OSError, match="this one"):
                    job.wait()
        else:
            job.wait()
    queue.submit(lambda: None, 1).wait()


def test_queue_is_bounded(queue: SwapQueue) -> None:
    """No more than `bound` jobs are pending: a submission more waits for room."""
    gate, pending, most = threading.Event(), deque[int](), []
    blocker = queue.submit(gate.wait, 0)

    def feed() -> None:
        for i in range(10):
            queue.submit(lambda: most.append(len(queue._jobs)), 0)
            pending.append(i)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while len(pending) < 3:  # the blocker is one of four
        os.sched_yield()
    assert len(queue._jobs) <= 4
    gate.set()
    feeder.join()
    queue.drain()
    blocker.wait()
    assert len(most) == 10
    assert max(most) <= 4


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_close_drains(seed: int | None) -> None:
    made = SwapQueue("test", pace=Pace(seed=seed))
    ran: list[int] = []
    for i in range(10):
        made.submit(lambda i=i: ran.append(i), 1)
    made.close()
    assert ran == list(range(10))
    assert not made._thread.is_alive()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.submit(lambda: None, 0)


def test_lazy_transfers_run_at_the_latest_when_waited_for() -> None:
    """Some seed puts a transfer off until somebody waits; every one is done by then."""
    for seed in range(30):
        made = SwapQueue("test", pace=Pace(seed=seed))
        ran: list[int] = []
        jobs = [made.submit(lambda i=i, ran=ran: ran.append(i), 1) for i in range(5)]
        jobs[-1].wait()
        assert ran == list(range(5))
        made.close()


def test_queue_lets_go_of_what_ran() -> None:
    """A transfer that is kept does not keep what it moved."""
    import weakref

    class Big:
        pass

    made = SwapQueue("test")
    big = Big()
    seen = weakref.ref(big)
    job = made.submit(lambda big=big: None, 1)
    job.wait()
    del big
    made.drain()
    gc.collect()
    assert seen() is None
    made.close()


# The chunk cache against a model


class CacheMachine(RuleBasedStateMachine):
    """Chunks on a real swap file behind a few frames hold what was last written to them, whatever was evicted in between."""

    SIZES = (100, 4096, 5000, 8192, 1)

    @initialize(frames=st.integers(1, 4), engine=st.sampled_from(["threads", "auto"]))
    def start(self, frames: int, engine: str) -> None:
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.space = SwapSpace([(self.directory.name, MIB)], engine=engine)
        self.shards = [Shard("nvme", n, extent=self.space.allocate(n), space=self.space) for n in self.SIZES]
        self.space.open()
        self.pool = FramePool(reserve(frames * 8192), frames, 8192)
        self.cache = ChunkCache(self.pool, frames)
        self.model: dict[int, torch.Tensor] = {}
        self.counter = 0

    def _value(self, nbytes: int) -> torch.Tensor:
        self.counter += 1
        return torch.arange(nbytes, dtype=torch.int64).mul_(31).add_(self.counter * 7).to(torch.uint8)

    @rule(key=st.integers(0, 4), share=st.floats(0, 1))
    def write_part(self, key: int, share: float) -> None:
        memory = self.cache.memory(key, self.shards[key], fresh=False, dirty=True)
        held = self.model.setdefault(key, torch.zeros(self.SIZES[key], dtype=torch.uint8))
        assert memory.numel() == self.SIZES[key]
        assert torch.equal(memory, held)
        n = int(share * memory.numel())
        memory[:n] = self._value(n)
        held[:n] = memory[:n]

    @rule(key=st.integers(0, 4))
    def write_whole(self, key: int) -> None:
        memory = self.cache.memory(key, self.shards[key], fresh=True, dirty=True)
        memory.copy_(self._value(memory.numel()))
        self.model[key] = memory.clone()

    @rule(key=st.integers(0, 4))
    def read(self, key: int) -> None:
        memory = self.cache.memory(key, self.shards[key], fresh=False, dirty=False)
        assert torch.equal(memory, self.model.get(key, torch.zeros(self.SIZES[key], dtype=torch.uint8)))

    @rule(key=st.integers(0, 4))
    def finish(self, key: int) -> None:
        self.cache.finish(key)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert self.pool.free == self.pool.count
        for key, want in self.model.items():
            out = torch.empty(self.SIZES[key], dtype=torch.uint8)
            self.shards[key].read(0, out)
            assert torch.equal(out, want)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def frames_are_bounded(self) -> None:
        assert 0 <= self.pool.free <= self.pool.count

    def teardown(self) -> None:
        if hasattr(self, "space"):
            self.cache.flush()
            self.space.close()
            self.directory.cleanup()


CacheMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestChunkCache = CacheMachine.TestCase


def test_cache_error_loses_no_frame(tmp_path: Path) -> None:
    """A write-back that fails is raised, and is done again by the next flush; then its staging buffer returns to the pool."""
    full = True

    class Failing:
        done = True

        def wait(self) -> None:
            if full:
                raise offload.SwapError("disk full")

    class FailingShard(Shard):
        def write_async(self, start: int, data: torch.Tensor) -> Any:
            return Failing()

    pool = FramePool(reserve(2 * PAGE), 2, PAGE)
    cache = ChunkCache(pool, 2)
    for key in range(2):
        cache.memory(key, FailingShard("nvme", 100), fresh=True, dirty=True)
    for _ in range(2):
        with pytest.raises(offload.SwapError, match="disk full"):
            cache.flush()
    full = False
    cache.flush()
    assert pool.free == 2


# Shards in a child


def _in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does `work`: 0, or 3 if it raised OffloadError; the signal, negative, if it was killed."""
    child = os.fork()
    if not child:
        status = 9
        try:
            work()
            status = 0
        except OffloadError:
            status = 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_shard_in_a_child_raises(tmp_path: Path, tier: str) -> None:
    with SwapSpace([(str(tmp_path), MIB)]) as space:
        extent = space.allocate(8192)
        space.open()
        shard = Shard(tier, 8192, memory=Arena("host", 8192).take(8192)) if tier == "host" else Shard(tier, 8192, extent=extent, space=space)
        data = torch.arange(8192).to(torch.uint8)
        shard.write(0, data)
        out = torch.empty(8192, dtype=torch.uint8)
        assert _in_child(lambda: shard.read(0, out)) == 3
        assert _in_child(lambda: shard.write(0, out)) == 3
        shard.read(0, out)
        assert torch.equal(out, data)
