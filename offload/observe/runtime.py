"""What a user sees of a run: counters, digest, synchronisation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from offload import _core
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.memory.limits import resident_bytes, resident_bytes_max
from offload.memory.recorder import EVENTS_MOST
from offload.memory.stalls import CAUSES
from offload.observe.base import base_bytes
from offload.observe.trace import Trace
from offload.planner.placement import Plan, human

DIGEST_BYTES = 32 << 20  # of pieces that are read, at most


class Runtime:
    """What runs behind one prepared model: counters, digest, synchronisation. A context manager that closes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._excluded: dict[str, int] = dict.fromkeys(self._moved(), 0)
        self._since, self._stalled = engine.stalls.clock(), dict.fromkeys(CAUSES, 0.0)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def plan(self) -> Plan:
        return self._engine.plan

    def stats(self) -> dict[str, Any]:
        """Counters so far. Bytes by tier and by link, seconds by cause of stall."""
        e = self._engine
        base = base_bytes()
        held = {t: b.peak for t, b in e.budgets.items()}
        peak_rss = resident_bytes_max()
        if e.device.name != "cuda":
            held["device"] = max(held["device"], peak_rss - base - held["host"])
        else:
            held["device"] = max(held["device"], torch.cuda.max_memory_reserved(e.device.compute))
        stalls, pipeline = self.stalls(), e.background.seconds()
        return {
            "parameters": e.plan.parameters,
            "state_bytes": e.plan.state_bytes,
            "state_bytes_per_rank": e.plan.state_bytes_per_rank,
            "base_bytes": base,
            "budget_bytes": {t: b.capacity for t, b in e.budgets.items()},
            "peak_bytes": held | {"rss": peak_rss},
            "moved_bytes": {k: v - self._excluded[k] for k, v in self._moved().items()},
            "stall_seconds": stalls,
            "compute_seconds": e.stalls.clock() - self._since - sum(stalls.values()),
            "update_seconds": {k: pipeline.get(k, 0.0) for k in ("compute", "read_wait", "write_wait")},
            "placement": e.plan.describe(),
            "activations": e.plan.activations,
            "activation_bytes": e.plan.activation_bytes,
            "recomputed_units": len(e.plan.recomputed),
            "passing_units": len(e.passing.units),
            "summed_units": len(e.plan.summed),
            "fetches": e.slots.counters.fetches,
            "prefetch_misses": e.slots.counters.misses + e.activations.counters.misses,
            "skipped": e.skipped,
            "notes": self._notes(),
        }  # fmt: skip

    def stalls(self) -> dict[str, float]:
        """Seconds that compute has waited so far, by cause (`offload.memory.stalls`); what is under way counts until now."""
        return {cause: seconds - self._stalled[cause] for cause, seconds in self._engine.stalls.seconds().items()}

    def _notes(self) -> list[str]:
        e = self._engine
        notes = [f"instruction set {_core.simd_level()}, {_core.default_threads()} threads"]
        if e.slots.counters.misses:
            notes.append(f"{e.slots.counters.misses} of {e.slots.counters.fetches} fetches of units began only when they were needed")
        if e.space is not None:
            notes += [_swap_note(d) for d in e.space.describe()]
        return notes

    def _moved(self) -> dict[str, int]:
        e = self._engine
        swapped = e.space.counters() if e.space is not None else {}
        among = {k: v - e.moved_before[k] for k, v in e.world.moved.items()} if e.world is not None else {}
        return e.device.moved | {k: int(swapped.get(k, 0)) for k in ("nvme_read", "nvme_write")} | among

    def tier_bytes(self) -> dict[str, int]:
        """Bytes held now by tier."""
        e = self._engine
        held = {t: b.used for t, b in e.budgets.items()}
        if e.device.name != "cuda":
            held["device"] = max(held["device"], resident_bytes() - base_bytes() - held["host"])
        return held

    def reset_counters(self) -> None:
        """Moved bytes and seconds count from here."""
        self._excluded = self._moved()
        self._engine.background.reset_seconds()
        self._since, self._stalled = self._engine.stalls.clock(), self._engine.stalls.seconds()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What moves inside is left out of `moved_bytes`, and its time out of all seconds."""
        self._engine.synchronize()
        before, start, stalled = self._moved(), self._engine.stalls.clock(), self.stalls()
        try:
            yield
        finally:
            self._since += self._engine.stalls.clock() - start
            for cause, seconds in self.stalls().items():
                self._stalled[cause] += seconds - stalled[cause]
            for key, value in self._moved().items():
                self._excluded[key] += value - before[key]

    def trace(self, path: str | os.PathLike[str], *, steps: int | None = None, events: int = EVENTS_MOST) -> Trace:
        """Records a trace from here on, for Perfetto (ui.perfetto.dev); written to `path` (gzip, if it ends in .gz) by its `close()`.

        A context manager. `steps`: the newest so many alone are written. `events`: so many of each source are kept, in memory that no budget counts
        (about 300 B each). ConfigError: `path` cannot be written; or a trace is being recorded.
        """
        return Trace(self._engine, path, self.tier_bytes, steps=steps, most=events)

    def lease(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keeps the unit of `module` on the device with its parameters bound, gradients flowing, while the context lasts."""
        for unit in self._engine.units:
            if any(module is m for top in unit.modules for m in top.modules()):
                return self._engine.streamer.lease(unit.number)
        raise ConfigError(f"this {type(module).__name__} is in no unit of the prepared model")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Of several ranks: backwards inside, those of all micro-batches but a step's last, keep their gradients on their ranks, summed in fp32.

        The next backward outside averages the sums, or else whatever needs them of all ranks: `clip_grad_norm_`, `step()`. Until then `.grad` reads
        this rank's own. At stages 2 and 3, where no rank has room for whole gradients, each micro-batch's are averaged all the same.
        All ranks enter it alike. With one rank it does nothing.
        """
        reduction = self._engine.reduction
        with reduction.apart() if reduction is not None else nullcontext():
            yield

    def start_early(self, units: int, *, keep_gradients: bool = True) -> None:
        """With updates="backward": of how many units, those whose gradients come first, updates start during it; all unless this says less.

        Without `keep_gradients`, a gradient that is to rest on NVMe and that its update takes at once is never written there: nobody can read it
        after the backward, nor add to it after step().
        """
        self._engine.early.units_most, self._engine.early.keep_gradients = units, keep_gradients

    def fill(self) -> None:
        """Gives each parameter that was made on `meta` and has no value yet its first one, which else comes with its first use."""
        for unit in self._engine.units:
            self._engine.initialise(unit.number)

    def digest(self) -> str:
        """A hash of all parameters, moments and steps, by name: the same wherever they rest. With several ranks a collective."""
        if self._engine.job is not None:
            self._engine.job.barrier("digest")
        self._engine.device.make_room(DIGEST_BYTES)
        return self._engine.digest()

    def synchronize(self) -> None:
        """Returns when everything under way is done."""
        self._engine.synchronize()

    def close(self) -> None:
        """Gives back memory, files and threads; the model's parameters cannot be read afterwards."""
        self._engine.close()


def _swap_note(file: dict[str, Any]) -> str:
    how = "direct" if file["direct"] else f"buffered ({file['refusal'] or 'as asked'})"
    return f"swap {file['path']}: {human(int(file['nbytes']))}, {file['engine']}, {how}, depth {file['queue_depth']}"
