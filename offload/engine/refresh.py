"""What other ranks updated, brought to where this rank keeps all parameters (stages 1 and 2).

[Note: refresh]
A step updates this rank's share of each unit's parameters. In the order of the next forward, and beside it, ranks then gather each unit whole,
where it rests. Who touches a parameter waits for its unit; the next step's updates wait for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from offload.dist.world import World
from offload.engine.record import DTYPES, Unit
from offload.errors import ConfigError
from offload.memory.shard import Shard
from offload.memory.stalls import RANKS, Stalls
from offload.planner.layout import PAGE
from offload.planner.share import Share
from offload.transfer.frames import FramePool
from offload.transfer.queue import SwapQueue, Transfer


class Refresh:
    """The gathers of one step, by unit. `updated(unit)` returns when this rank's own updates of it are where it rests.

    A part of a staging buffer holds a piece of every rank's share: ConfigError where parameters rest on NVMe and it has no room for a page of each.
    """

    def __init__(
        self, units: Sequence[Unit], share: Share, world: World, frames: FramePool | None, stalls: Stalls, updated: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._units, self._share, self._world, self._frames, self._stalls, self._updated = units, share, world, frames, stalls, updated
        self._queue = SwapQueue("gather", bound=len(units) + 1, stalls=stalls, cause=RANKS)
        weakref.finalize(self, self._queue.close)  # its thread ends with a model that is dropped without close()
        self._jobs: dict[int, Transfer] = {}
        if frames is not None and frames.nbytes < share.ranks * PAGE and any(s.memory is None for u in units for s in u.parameters):
            raise ConfigError(f"parameters on nvme with {share.ranks} ranks want stage 3, or place parameters on the host")

    def start(self, units: Iterable[int]) -> None:
        """Starts to gather these units, whose updates are under way. A collective."""
        self._jobs = {}
        for number in units:
            unit = self._units[number]
            if unit.layout.trained is not None:
                self._jobs[number] = self._queue.submit(lambda unit=unit: self._gather(unit), unit.parameters[0].nbytes, what=unit.name)  # type: ignore[misc]

    def wait(self, unit: int) -> None:
        job = self._jobs.get(unit)
        if job is not None:
            job.wait()

    def done(self, unit: int) -> bool:
        job = self._jobs.get(unit)
        return job is None or job.done

    def settle(self) -> None:
        """All are over; raises what went wrong."""
        for unit in list(self._jobs):
            self.wait(unit)

    def _gather(self, unit: Unit) -> None:
        self._updated(unit.number)
        flat, shard = unit.layout.trained, unit.parameters[0]
        assert flat is not None
        size = flat.share * DTYPES[flat.dtype].itemsize
        name = f"the parameters of {unit.name}"
        if shard.memory is None:
            self._through_frame(shard, size, name)
            return
        whole = shard.memory[: size * self._share.ranks]
        with self._stalls.waiting(RANKS):
            self._world.gather_into(whole, whole[size * self._share.rank : size * (self._share.rank + 1)], name).wait()

    def _through_frame(self, shard: Shard, size: int, name: str) -> None:
        """Shares of `size` bytes each, a piece of every one at a time."""
        assert self._frames is not None
        ranks, rank = self._share.ranks, self._share.rank
        most = self._frames.nbytes // ranks // PAGE * PAGE
        frame = self._frames.take()
        try:
            for at in range(0, size, most):
                n = min(most, size - at)
                pieces = frame[: n * ranks].view(ranks, n)
                shard.read_async(rank * size + at, pieces[rank]).wait()
                with self._stalls.waiting(RANKS):
                    self._world.gather_into(frame[: n * ranks], pieces[rank], name).wait()
                writes = [shard.write_async(r * size + at, pieces[r]) for r in range(ranks) if r != rank]
                for write in writes:
                    write.wait()
        finally:
            self._frames.give(frame)

    def close(self) -> None:
        self._queue.close()
