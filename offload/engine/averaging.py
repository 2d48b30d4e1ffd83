"""Averages of gradients over ranks where they rest, for those that each rank first summed by itself (stages 0 and 1).

[Note: local sums]
A backward inside of `no_sync` lands its gradients as one rank's does, and so does the one that follows outside: sums are fp32, in the order of
micro-batches. Of the latter backward a unit is averaged, chunk by chunk where it rests, once all that this rank's graph has for it came, in the order
and the thread of any reduction. So ranks move one fp32 sum a step, whatever the number of micro-batches. What was kept and no backward averaged is
averaged by whoever needs it of all: a norm, or the update. Where ranks are in groups, a chunk is summed within each and then over them.
"""

from __future__ import annotations

import torch

from offload.dist.collectives import sum_across
from offload.dist.world import World
from offload.engine.atrest import AtRest
from offload.engine.gradients import Gradients
from offload.engine.record import Record, Unit
from offload.memory.stalls import RANKS
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
        landings = [transfer for r in trained for transfer in gradients.entries[r.number].landing]
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
            gradients.entries[record.number].landing.append(job)

    def _prepare(self, record: Record, present: bool) -> None:
        """What rests is the gradient as it reads."""
        gradients, places, entry = self._gradients, self._gradients.places, self._gradients.entries[record.number]
        if record.grad is None and present:
            zeros = torch.zeros(record.shape, dtype=places.dtype, device=gradients.device.compute)
            record.grad = AtRest(gradients.land(record, zeros))
        elif record.number in places.zeroed or entry.scale != 1.0:
            entry.settle()
            if record.number in places.zeroed:
                places.store(record, torch.zeros(record.numel, dtype=places.dtype), accumulate=False)
            places.scale(record, entry.scale)
            entry.scale = 1.0

    def _average(self, unit: Unit, chunk: int, records: list[Record]) -> None:
        gradients = self._gradients
        total = gradients.places.chunk(records, chunk)
        moved = total.to(gradients.device.compute)
        with gradients.device.stalls.waiting(RANKS):
            self._sum(moved, f"the gradients of {unit.name}")
        if moved is not total:
            total.copy_(moved)
        gradients.places.replace(records, chunk, total, 1.0 / self._world.size)

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
