"""Swap queues: order, bounds in jobs and in bytes, errors at their own wait."""

from __future__ import annotations

import threading

import pytest

from offload.transfer.queue import Pace, SwapQueue


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("sizes", "most"), [([4, 4, 4, 4, 4], 8), ([1, 9, 1, 1, 20, 3], 5), ([5, 5, 5], 0), ([3, 3, 3], None)])
def test_pending_bytes_are_bounded(sizes: list[int], most: int | None, seed: int | None) -> None:
    """What is pending never exceeds the bound, but for one transfer alone that is larger; all run, in order."""
    queue = SwapQueue("test", pace=Pace(seed=seed))
    lock, ran, pending, peaks = threading.Lock(), [], [0, 0], []

    def run(i: int) -> None:
        with lock:
            ran.append(i)
            pending[0] -= 1
            pending[1] -= sizes[i]

    for i, nbytes in enumerate(sizes):
        queue.submit(lambda i=i: run(i), nbytes, most)  # type: ignore[misc]
        with lock:
            pending[0] += 1
            pending[1] += nbytes
            peaks.append(tuple(pending))
    queue.close()
    assert ran == list(range(len(sizes)))
    assert pending == [0, 0]
    assert most is None or all(count <= 1 or nbytes <= most for count, nbytes in peaks)


def test_a_full_queue_makes_room_for_a_waiting_transfer() -> None:
    """A transfer that is put off runs when another waits for its bytes; its error comes at its own wait."""
    queue = SwapQueue("test", pace=Pace(seed=0))

    def fail() -> None:
        raise ValueError("bad sector")

    first = queue.submit(fail, 10, 10)
    second = queue.submit(lambda: None, 10, 10)
    assert first.done
    second.wait()
    with pytest.raises(ValueError, match="bad sector"):
        first.wait()
    queue.close()


@pytest.mark.parametrize("wait", ["until", "submit", "wait"])
def test_an_interrupted_wait_demands_nothing_further(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    def interrupted(enough: object) -> None:
        raise KeyboardInterrupt

    queue, going = SwapQueue("test", bound=1), threading.Event()
    job = queue.submit(going.wait, 8, 8)
    waits = {"until": lambda: queue.until(0), "submit": lambda: queue.submit(print, 8, 8), "wait": job.wait}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(queue._changed, "wait_for", interrupted)
        waits[wait]()
    assert queue._demanded == 0
    going.set()
    queue.close()
