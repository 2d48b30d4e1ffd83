"""Values that several ranks have parts of, put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.dist.world import World
from offload.errors import BudgetError, CheckpointError, ConfigError, OffloadError, PlanError, RankError, SwapError

_KINDS = {kind.__name__: kind for kind in (BudgetError, CheckpointError, ConfigError, OffloadError, PlanError, SwapError)}


def assemble(world: World, out: torch.Tensor, what: str) -> None:
    """Fills `out` (contiguous, CPU, any dtype), of which each rank has its part and zeros (all bytes) elsewhere, with every rank's. Parts do not
    overlap.

    A collective: all ranks call it, in one order. Bytes are added as integers, so -0.0 and NaNs keep their bits.
    """
    raw = out.view(-1).view(torch.uint8)
    if world.size > 1 and raw.numel():
        words = raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw
        world.all_reduce(words, what).wait()


@contextmanager
def alike(world: World | None, what: str) -> Iterator[None]:
    """What is raised inside on one rank is raised on all at the end, to which all come: elsewhere as an error of the same kind that names the rank.

    `what` is the same text on all ranks, as their message has its name: no path in it, which each may write in its own way.
    Nothing inside is a collective, as a rank that raises takes part in none. One of no kind of ours is an OffloadError elsewhere.
    """
    if world is None:
        yield
        return
    trouble: Exception | None = None
    try:
        yield
    except RankError:  # it ends all ranks
        raise
    except Exception as error:
        trouble = error
    said = world.share(None if trouble is None else [type(trouble).__name__, str(trouble)], what)
    if trouble is not None:
        raise trouble
    rank = next((rank for rank, told in enumerate(said) if told is not None), None)
    if rank is not None:
        name, text = said[rank]
        kind = _KINDS.get(name, OffloadError)
        raise kind(f"{what} failed on rank {world.name(rank)}: {text if name in _KINDS else f'{name}: {text}'}")


def same(world: World, value: torch.Tensor, what: str) -> torch.Tensor:
    """Rank 0's value on every rank: a plain tensor on the CPU, `value` itself where it is that. A collective."""
    if world.size == 1:
        return value
    plain = value.detach().to("cpu", copy=True).contiguous() if world.rank == 0 else torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    assemble(world, plain, what)
    return plain


def sum_across(world: World, memory: torch.Tensor, what: str, divided: bool) -> None:
    """Sets `memory` [ranks of a group * S], on all ranks of a world of groups, to its sum over them: over those of each group, in order, and then
    over groups. `divided`: this rank's share alone, elements [S * rank within the group, ...); the rest is left as it comes.

    A collective. A group's sum is rounded to the dtype of `memory`. See [Note: groups].
    """
    within, across = world.within, world.across
    assert across is not None
    share = memory.numel() // within.size
    own = memory[share * within.rank : share * (within.rank + 1)]
    within.reduce_scatter(own, memory, what).wait()
    across.all_reduce(own, what).wait()
    if not divided:
        within.gather_into(memory, own, what, reducing=True).wait()


def add_up(world: World, x: torch.Tensor, what: str) -> None:
    """Sets `x` (CPU) to its sum over ranks. A collective."""
    if world.size > 1:
        world.all_reduce(x, what).wait()
