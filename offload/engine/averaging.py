"""Averages of gradients over ranks where they rest, for those that each rank first summed by itself (stages 0 and 1).

[Note: local sums]
A backward inside of `no_sync` lands its gradients as one rank's does, and so does the one that follows outside: sums are fp32, in the order of
micro-batches. Of the latter backward a unit is averaged, chunk by chunk where it rests, once all that this rank's graph has for it came, in the order
and the thread of any reduction. So ranks move one fp32 sum a step, whatever the number of micro-batches. What was kept and no backward averaged is
averaged by whoever needs it of all: a norm, or the update. Where ranks are in groups, a chunk is summed within each and then over them.
"""

from __future__ import annotations

import torch

from offload import _core
from offload.dist.collectives import sum_across
from offload.dist.world import World
from offload.engine.atrest import AtRest
from offload.engine.gradients import Gradients
from offload.engine.record import CODES, NORM_BLOCK, Record, Unit
from offload.engine.reduction import Reduction
from offload.memory.stalls import RANKS
from offload.planner.share import Share
from offload.transfer.queue import SwapQueue, Transfer


class Averaging:
    """Does it, by jobs of the `queue` of reductions."""

    def __init__(self, gradients: Gradients, world: World, queue: SwapQueue) -> None:
        self._gradients, self._world, self._queue = gradients, world, queue

    def start(self, unit: Unit, present: set[int]) -> None:
        """Starts to average a unit, in which some rank has gradients of the parameters of these numbers: where this one has not, they are zeros."""
        gradients, trained = self._gradients, [r for r in unit.records if r.trained]
        for record in trained:
            self._prepare(record, record.number in present)
        landings = [transfer for r in trained for transfer in gradients._entries[r.number].landing]
        mark = gradients.device.mark()

        def run() -> None:
            for transfer in landings:
                transfer.wait()
            with gradients.device.beside(mark):
                for chunk in range(len(unit.gradients)):
                    self._average(unit, chunk, trained)

        nbytes = sum(shard.nbytes for shard in unit.gradients)
        job: Transfer = self._queue.submit(run, nbytes, what=f"sums of gradients of {unit.name}")
        for record in trained:
            gradients._entries[record.number].landing.append(job)

    def _prepare(self, record: Record, present: bool) -> None:
        """What rests is the gradient as it reads."""
        gradients, entry = self._gradients, self._gradients._entries[record.number]
        if record.grad is None and present:
            zeros = torch.zeros(record.shape, dtype=gradients.dtype, device=gradients.device.compute)
            record.grad = AtRest(gradients.land(record, zeros))
        elif entry.zeroed or entry.scale != 1.0:
            gradients._settle(entry)
            if entry.zeroed:
                gradients._store(record, torch.zeros(record.numel, dtype=gradients.dtype, device="cpu"), accumulate=False)
            gradients._rescale(record, entry.scale)
            entry.scale = 1.0

    def _average(self, unit: Unit, chunk: int, records: list[Record]) -> None:
        gradients, shard = self._gradients, unit.gradients[chunk]
        gradients.let_go(unit.number, chunk)
        with gradients._alone_here():
            there = gradients._memory(records[0], chunk, fresh=False, dirty=False).view(gradients.dtype)
            in_place = shard.memory is not None and there.dtype == torch.float32
            total = there if in_place else there.to(torch.float32, copy=True)  # a staging buffer may be wanted for another chunk meanwhile
        moved = total.to(gradients.device.compute)
        with gradients.device.stalls.waiting(RANKS):
            self._sum(moved, f"the gradients of {unit.name}")
        if moved is not total:
            total.copy_(moved)
        with gradients._alone_here():
            out = gradients._memory(records[0], chunk, fresh=True, dirty=True)  # all of it is written
            for record in records:
                for number, start, first, stop in gradients._pieces(record):
                    if number == chunk:
                        _core.land(
                            out.data_ptr() + start, CODES[gradients.dtype], total.data_ptr() + start // gradients.dtype.itemsize * 4,
                            CODES[torch.float32], stop - first, False, 1.0 / self._world.size, record.sums.data_ptr() + first // NORM_BLOCK * 8, 0,
                        )  # fmt: skip
            if gradients._cache is not None and shard.memory is None:
                gradients._cache.finish(gradients._first_chunk[unit.number] + chunk)

    def _sum(self, x: torch.Tensor, name: str) -> None:
        """Sets `x` to its sum over ranks; of groups in the order of [Note: groups], so that little crosses from one to another."""
        if self._world.across is None:
            self._world.all_reduce(x, name).wait()
            return
        lacks = -x.numel() % self._world.within.size
        equal = torch.cat([x, x.new_zeros(lacks)]) if lacks else x  # chunks are of multiples of 4096 elements, groups of any number of ranks
        sum_across(self._world, equal, name, divided=False)
        if lacks:
            x.copy_(equal[: x.numel()])


def share(gradients: Gradients, plan_share: Share, dtype: torch.dtype, world: World) -> Reduction:
    """Gradients are those of several ranks from here on, and move between them in `dtype`; see [Note: reduction]."""
    reduction = Reduction(gradients.units, plan_share, dtype, gradients.device, world, gradients._land_reduced)
    reduction.start = lambda record: gradients._arrival(record, record.grad is not None)
    reduction.landing = gradients._reducing
    gradients.reduction = reduction
    return reduction
