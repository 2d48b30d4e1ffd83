"""What updates that start early ask of gradients, and how they take them: from where they rest, or from the staging buffers in which they landed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from offload.engine.gradients import Gradients
from offload.engine.record import Record
from offload.transfer.queue import Transfer

Start = Callable[[int, Mapping[int, int]], Mapping[int, Transfer]]


def check_spent(gradients: Gradients, stepped: Iterable[Record] | None = None) -> None:
    """OffloadError if this backward would add to, or a step of `stepped` would use, a gradient that went into its update and was not kept."""
    for record in gradients.records if stepped is None else stepped:
        if gradients._entries[record.number].spent and (stepped is not None or gradients.earlier(record)):
            gradients._check_kept(record)


def spend(gradients: Gradients, records: Iterable[Record]) -> None:
    """What came of these goes into their updates, or to nobody, and others come in its place."""
    for record in records:
        gradients._entries[record.number].spent = True


def any_came(gradients: Gradients) -> bool:
    """Whether any gradient has ever come to rest."""
    return any(entry.generation for entry in gradients._entries.values())


def begun(gradients: Gradients, record: Record) -> bool:
    """Whether the parameter has a gradient other than the zeros of zero_grad(set_to_none=False)."""
    return record.parameter.grad is not None and not gradients._entries[record.number].zeroed


def landed(gradients: Gradients, records: Sequence[Record], wait: bool = False) -> bool:
    """Whether what came has landed. Never waits unless it is to; raises what went wrong."""
    for record in records:
        gradients._copy_sum(record)
    entries = [gradients._entries[r.number] for r in records]
    if not wait and any(e.zeroed or not all(t.done for t in e.landing) for e in entries):
        return False
    for entry in entries:
        gradients._settle(entry)
    return True


def give(gradients: Gradients, unit: int, at_once: Callable[[int, int], bool], start: Start, keep: bool) -> bool:
    """Starts the updates of a unit whose gradients have landed; False, and nothing done, where one could read its gradient neither from
    NVMe nor, `at_once`, from a staging buffer. Never waits. Unless they are to `keep`, gradients taken from a buffer are not written.

    `start(unit, lent)`: `lent` has by chunk the address of the gradient, where the update is to take it from; gives what reads there, by chunk.
    """
    cache, shards = gradients._cache, gradients.units[unit].gradients
    if cache is None or all(shard.memory is not None for shard in shards):
        start(unit, {})
        return True
    if not gradients._lock.acquire(blocking=False):  # something lands, which may wait for a drive
        return False
    try:
        first, ready, lent = gradients._first_chunk[unit], True, dict[int, int]()
        for chunk, shard in enumerate(shards):
            frame = cache.frame(first + chunk) if shard.memory is None else None
            if frame is not None and at_once(unit, chunk):
                lent[chunk] = frame.data_ptr()
            elif frame is not None and not cache.written(first + chunk):
                cache.finish(first + chunk)
                ready = False
        if not ready:
            return False
        for chunk, reader in start(unit, lent).items():
            cache.lend(first + chunk, reader, keep=keep)
        for record in gradients.units[unit].records if not keep else ():
            gradients._entries[record.number].spent |= any(chunk in lent for chunk, _ in record.slices)
        return True
    finally:
        gradients._lock.release()
