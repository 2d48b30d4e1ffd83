"""Values that several ranks have parts of, put together."""

from __future__ import annotations

import torch

from offload.dist.world import World


def assemble(world: World, out: torch.Tensor, what: str) -> None:
    """Fills `out` (contiguous, CPU, any dtype), of which each rank has its part and zeros (all bytes) elsewhere, with every rank's. Parts do not
    overlap.

    A collective: all ranks call it, in one order. Bytes are added as integers, so -0.0 and NaNs keep their bits.
    """
    raw = out.view(-1).view(torch.uint8)
    if world.size > 1 and raw.numel():
        words = raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw
        world.all_reduce(words, what).wait()


def same(world: World, value: torch.Tensor, what: str) -> torch.Tensor:
    """Rank 0's value on every rank: a plain tensor on the CPU, `value` itself where it is that. A collective."""
    if world.size == 1:
        return value
    plain = value.detach().to("cpu", copy=True).contiguous() if world.rank == 0 else torch.zeros(value.shape, dtype=value.dtype)
    assemble(world, plain, what)
    return plain


def add_up(world: World, x: torch.Tensor, what: str) -> None:
    """Sets `x` (CPU) to its sum over ranks. A collective."""
    if world.size > 1:
        world.all_reduce(x, what).wait()
