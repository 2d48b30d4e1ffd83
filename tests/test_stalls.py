"""Where time goes: each moment of the compute thread is compute or one cause's, whoever waits inside whom and on whose behalf."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models as M
import offload
from offload.engine.registry import engine_of
from offload.memory.stalls import CAUSES, Lane, Stalls
from offload.transfer.device import SimDevice
from offload.transfer.queue import Pace, SwapQueue

X = torch.linspace(-1, 1, 64).view(4, 16)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def counted(stalls: Stalls) -> dict[str, float]:
    return {cause: seconds for cause, seconds in stalls.seconds().items() if seconds}


def elsewhere(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_names_are_the_documented_ones() -> None:
    assert set(CAUSES) == {"fetch", "nvme_read", "nvme_write", "gradient", "update", "staging", "activation", "ranks"}
    assert set(Stalls().seconds()) == set(CAUSES)


def test_waits_inside_each_other_count_once(clock: Clock) -> None:
    stalls = Stalls(clock)
    clock.pass_(50)
    with stalls.waiting("fetch"):
        clock.pass_(1)
        with stalls.waiting("nvme_read"):
            clock.pass_(2)
            assert counted(stalls) == {"fetch": 1, "nvme_read": 2}  # under way
        clock.pass_(4)
        with stalls.waiting("fetch"):
            clock.pass_(8)
    clock.pass_(50)
    assert counted(stalls) == {"fetch": 13, "nvme_read": 2}


def test_activations_count_whole(clock: Clock) -> None:
    stalls = Stalls(clock)
    with stalls.waiting("gradient"), stalls.waiting("activation"):
        clock.pass_(1)
        with stalls.waiting("nvme_write"), stalls.waiting("staging"):
            clock.pass_(2)
    assert counted(stalls) == {"activation": 3}


def test_an_error_ends_a_wait(clock: Clock) -> None:
    stalls = Stalls(clock)
    with pytest.raises(offload.SwapError), stalls.waiting("update"):
        clock.pass_(1)
        with stalls.waiting("nvme_write"):
            clock.pass_(2)
            raise offload.SwapError("bad sector")
    clock.pass_(4)
    assert counted(stalls) == {"update": 1, "nvme_write": 2}


def test_what_an_interrupt_left_ends_with_the_next_forward(clock: Clock) -> None:
    stalls = Stalls(clock)
    stalls.waiting("fetch").__enter__()
    clock.pass_(1)
    stalls.computing()
    clock.pass_(1)
    assert not counted(stalls)
    with stalls.waiting("update"):
        stalls.computing()
        clock.pass_(1)
    assert not counted(stalls)


def test_other_threads_count_nowhere(clock: Clock) -> None:
    stalls = Stalls(clock)

    def other() -> None:
        with stalls.waiting("fetch"):
            clock.pass_(1)

    elsewhere(other)
    with stalls.waiting("gradient"):
        elsewhere(other)
    assert counted(stalls) == {"gradient": 1}


def test_whoever_computes_is_counted(clock: Clock) -> None:
    """Backward may have a thread of its own; forward and step may move to another."""
    stalls = Stalls(clock)

    def wait() -> None:
        with stalls.waiting("fetch"):
            clock.pass_(1)

    def backward() -> None:
        stalls.computing("backward")
        wait()

    def forward() -> None:
        stalls.computing()
        wait()

    elsewhere(backward)
    wait()
    assert counted(stalls) == {"fetch": 2}
    elsewhere(forward)
    assert counted(stalls) == {"fetch": 3}
    wait()
    assert counted(stalls) == {"fetch": 3}


def test_a_wait_for_a_thread_counts_as_what_it_waits_for(clock: Clock) -> None:
    stalls, lane = Stalls(clock), Lane()
    begin, ended = threading.Semaphore(0), threading.Semaphore(0)

    def worker() -> None:
        stalls.serve(lane)
        with stalls.waiting("nvme_read"):
            ended.release()
            begin.acquire()
        ended.release()
        begin.acquire()
        with stalls.waiting("staging"):
            ended.release()
            begin.acquire()
        stalls.leave()

    thread = threading.Thread(target=worker)
    thread.start()
    ended.acquire()
    clock.pass_(1)  # of its own accord: nobody waits for it yet
    with stalls.waiting("fetch", lambda: stalls.of(lane)):
        clock.pass_(2)
        begin.release()
        ended.acquire()
        clock.pass_(4)
        assert counted(stalls) == {"nvme_read": 2, "fetch": 4}
        begin.release()
        ended.acquire()
        clock.pass_(8)
    clock.pass_(16)
    begin.release()
    thread.join()
    assert counted(stalls) == {"nvme_read": 2, "fetch": 4, "staging": 8}


def test_a_queue_says_what_its_thread_waits_for(clock: Clock) -> None:
    class Late(Pace):
        def lazy(self) -> bool:
            return True

    stalls = Stalls(clock)
    queue = SwapQueue("test", pace=Late(), stalls=stalls, cause="fetch")

    def run() -> None:
        clock.pass_(1)
        with stalls.waiting("nvme_read"):
            clock.pass_(2)

    queue.submit(run, 1).wait()
    assert counted(stalls) == {"fetch": 1, "nvme_read": 2}
    first = queue.submit(run, 10, 10)
    queue.submit(lambda: None, 10, 10).wait()  # is let in when the first is done
    assert first.done and counted(stalls) == {"fetch": 2, "nvme_read": 4}
    queue.close()


def test_units_that_are_fetched_late_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def late(slots: int) -> int:
        caplog.clear()
        with M.prepared(M.seeded(lambda: M.Stack(depth=4, width=16)), M.tiers(tmp_path), device="sim", place=M.placed("host"), slots=slots) as model:
            M.train(model, M.mean_square, 5)
            stats = offload.runtime(model).stats()
            assert any(f"{stats['prefetch_misses']} of {stats['fetches']} fetches" in note for note in stats["notes"])
        return sum("began only when they were needed" in message for message in caplog.messages)

    assert late(1) == 1
    assert late(6) == 0


STEPS = st.lists(st.one_of(st.sampled_from(CAUSES), st.floats(0, 8).filter(lambda s: s == 0 or s > 1e-6), st.none(), st.booleans()), max_size=40)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_causes_and_compute_make_the_whole(steps: list[Any]) -> None:
    """Waits that begin (a name) and end (None) in any order, time that passes, and a pipeline that reads (True) or does not (False)."""
    clock = Clock()
    stalls = Stalls(clock)
    pipeline, reading = {"nvme_read": 0.0}, False
    compute = waiting = 0.0
    open_: list[AbstractContextManager[None]] = []
    for step in steps:
        if isinstance(step, bool):
            reading = step
        elif isinstance(step, str):
            open_.append(stalls.waiting(step, pipeline.copy if step == "update" else None))
            open_[-1].__enter__()
        elif step is None:
            if open_:
                open_.pop().__exit__(None, None, None)
        else:
            clock.pass_(step)
            pipeline["nvme_read"] += step if reading else 0.0
            compute, waiting = (compute, waiting + step) if open_ else (compute + step, waiting)
        assert min(stalls.seconds().values()) >= 0
        assert sum(stalls.seconds().values()) == pytest.approx(waiting)
        assert clock() - 100.0 - sum(stalls.seconds().values()) == pytest.approx(compute, abs=1e-6)


@pytest.mark.parametrize("activations", ["recompute", "nvme"])
@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_run(tmp_path: Path, device: str, place: str, activations: str) -> None:
    """What compute waits for is no more than the run lasts, and nothing is left under way; moves outside of it are not counted."""
    chosen: Any = SimDevice(seed=1) if device == "sim" else device
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=chosen, place=M.placed(place), activations=activations) as model:
        runtime, engine = offload.runtime(model), engine_of(model)
        runtime.reset_counters()
        start = engine.stalls.clock()
        M.train(model, lambda m: M.mean_square(m, X), 2)
        runtime.synchronize()
        stalls, passed = runtime.stalls(), engine.stalls.clock() - start
        assert set(stalls) == set(CAUSES) and min(stalls.values()) >= 0
        assert 0 < sum(stalls.values()) <= passed
        assert not engine.stalls._compute.waits
        before = runtime.stats()
        with runtime.uncounted():
            runtime.digest()
        assert runtime.stats()["stall_seconds"] == pytest.approx(before["stall_seconds"], abs=1e-9)
        elsewhere(lambda: [p.sum() for p in model.parameters()])
        assert runtime.stats()["stall_seconds"] == pytest.approx(before["stall_seconds"], abs=1e-9)
        assert before["compute_seconds"] > 0
