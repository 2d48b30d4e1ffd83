"""What a step is about to do, compared among ranks before any of it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from offload.dist.world import World
from offload.engine.background import Hypers
from offload.engine.record import Record
from offload.errors import ConfigError


def agree_on_step(
    job: World, records: Sequence[Record], hypers: Mapping[int, Hypers], factors: Mapping[int, float], order: list[int]
) -> list[int]:  # fmt: skip
    """The first rank's `order` of units, on all ranks: others may have used other units.

    `hypers`: by number, what parameters are updated with; `factors`: what their gradients are multiplied by besides. ConfigError, on all ranks,
    where they differ, as state that is divided would fall apart. A collective.
    """
    hypers = {number: values | {"grad_scale": values["grad_scale"] * factors[number]} for number, values in hypers.items()}
    told = job.share([_digest(hypers), order if job.rank == 0 else None], "start of a step")
    if any(digest != told[0][0] for digest, _ in told):
        found = job.share({records[number].name: values for number, values in hypers.items()}, "start of a step, compared")
        raise ConfigError(_difference(found, [job.name(rank) for rank in range(job.size)]))
    return list(told[0][1])


def _digest(hypers: Mapping[int, Hypers]) -> str:
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number in sorted(hypers):
        alike.setdefault(tuple(hypers[number].values()), []).append(number)
    return xxhash.xxh3_128_hexdigest(repr(alike).encode())


def _difference(found: Sequence[Mapping[str, Hypers]], names: Sequence[int]) -> str:
    """`found`: by rank, and by parameter, what it would be updated with. `names`: the ranks' own numbers."""
    first = found[0]
    for rank, other in enumerate(found):
        for name in [*first, *other]:
            if name not in first or name not in other:
                with_it, without = (names[0], names[rank]) if name in first else (names[rank], names[0])
                return (
                    f"step() would update {name} on rank {with_it} and not on rank {without}, and has updated nothing of this model: give the "
                    "optimizer the same parameters on all ranks, and set .grad alike"
                )
            key = next((key for key in first[name] if repr(first[name][key]) != repr(other[name][key])), None)
            if key is not None:
                return (
                    f"step() would update {name} with {key} = {first[name][key]} on rank {names[0]} and {other[name][key]} on rank {names[rank]}, "
                    "and has updated nothing of this model: give all ranks the same settings; a scheduler that follows a loss wants its mean over "
                    "ranks"
                )
    raise AssertionError("ranks do not differ")
