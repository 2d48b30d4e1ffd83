"""The public functions, in the order a run meets them: plan, prepare, runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from offload import _core
from offload.config import Precision, Tiers, refuse_later
from offload.engine.build import discover
from offload.engine.engine import Engine
from offload.engine.registry import engine_of, forget, is_prepared, register
from offload.engine.units import Units
from offload.errors import ConfigError, PlanError
from offload.memory.limits import host_limits, resident_bytes, resident_bytes_max
from offload.observe.base import base_bytes
from offload.planner.demand import Batch
from offload.planner.placement import Capacities, Plan, human, plan_units
from offload.transfer.device import CpuDevice, Device, SimDevice

BASE_BYTES_MOST = 768 << 20  # the interpreter with everything imported, where it was not measured


def make_device(device: str | Device | None) -> Device:
    """`None` picks CUDA where there is one, else the CPU."""
    if isinstance(device, Device):
        return device
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return CpuDevice()
    if name == "sim":
        return SimDevice()
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError('device "cuda": torch sees no CUDA device here; use "cpu", or install a CUDA build of torch')
        from offload.transfer.cuda import CudaDevice

        return CudaDevice()
    raise ConfigError(f'device "{name}" is unknown; use "cuda", "cpu" or "sim"')


def _capacities(tiers: Tiers, device: Device) -> Capacities:
    return Capacities(tiers.device, tiers.host, tiers.nvme_bytes, device.rests, device.direct)


def _batch(batch: tuple[int, int] | Batch | None) -> Batch | None:
    return batch if isinstance(batch, Batch) or batch is None else Batch(*batch)


def plan(
    model: nn.Module, tiers: Tiers, *, device: str | None = None, precision: Precision | None = None, activations: str = "auto", units: Units = "auto",
    place: dict[str, str] | None = None, batch: tuple[int, int] | Batch | None = None, accumulate: int = 1,
) -> Plan:  # fmt: skip
    """What would go where, without allocating anything; a model on the meta device is enough.

    `batch` is (sequences, tokens) of a micro-batch. Raises `PlanError` where the state does not fit: which tier, need, have, three ways out.
    """
    precision = precision or Precision()
    refuse_later(precision=precision, activations=activations)
    chosen = CpuDevice if device in (None, "cpu") and not (device is None and torch.cuda.is_available()) else SimDevice if device == "sim" else None
    capacities = Capacities(tiers.device, tiers.host, tiers.nvme_bytes, chosen.rests if chosen else False, chosen.direct if chosen else False)
    return plan_units([f.spec() for f in discover(model, units)], capacities, precision, place=place, batch=_batch(batch), activations=activations, accumulate=accumulate)


def prepare(
    model: nn.Module, tiers: Tiers, *, device: str | Device | None = None, precision: Precision | None = None, activations: str = "auto", units: Units = "auto",
    place: dict[str, str] | None = None, batch: tuple[int, int] | Batch | None = None, accumulate: int = 1, updates: str = "forward", mesh: Any = None,
    stage: int = 3, plan: Plan | None = None, seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Moves the model's training state to its tiers, in place, and streams it through the device from then on. Returns the same object.

    Parameters keep their objects, names, shapes and dtypes and rest on the device `cpu`. A model on the meta device is initialised unit by unit by its own
    rules, seeded by `seed` and each parameter's name, unless weights are loaded first. `place` fixes roles' tiers: {"parameter" | "gradient" | "optimizer":
    "device" | "host" | "nvme"}. Raises `ConfigError`, `PlanError` before anything is allocated, `SwapError`.
    """
    precision = precision or Precision()
    refuse_later(precision=precision, activations=activations, updates=updates, stage=stage)
    if mesh is not None:
        raise ConfigError("mesh: several ranks are not available in this version; leave it out")
    if is_prepared(model):
        raise ConfigError(f"this {type(model).__name__} is prepared already; close it first: offload.runtime(model).close()")
    found = discover(model, units)
    if not any(f.members for f in found):
        raise ConfigError(f"{type(model).__name__} has no parameters to prepare")
    target = make_device(device)
    try:
        made = plan or plan_units(
            [f.spec() for f in found], _capacities(tiers, target), precision, place=place, batch=_batch(batch), activations=activations, accumulate=accumulate
        )
        _check_machine(made, target)
        _core.tune_malloc()
        engine = Engine(model, found, made, tiers, target, seed)
    except BaseException:
        target.close()
        raise
    register(model, engine)
    return model


def _check_machine(made: Plan, device: Device) -> None:
    """Refuses before allocating what this machine or its container cannot hold."""
    limits = host_limits()
    peak = made.peak_bytes
    need = peak["host"] + (peak["device"] if device.name != "cuda" else 0) + (base_bytes() or resident_bytes())
    if need > limits.usable:
        raise PlanError(
            f"the machine is short: the plan's host and device memory and this process's own come to {human(need)}; usable here are {human(limits.usable)}"
            f"{' (memory cgroup)' if limits.cgroup is not None and limits.cgroup <= limits.available else ''}. "
            "Ways out: lower the host budget and name a directory under tiers.nvme; use a smaller batch or activations = \"recompute\"; free memory or raise the limit."
        )


class Runtime:
    """What runs behind one prepared model: counters, digest, synchronisation. A context manager that closes."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._excluded: dict[str, int] = dict.fromkeys(("h2d", "d2h", "nvme_read", "nvme_write"), 0)

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
        base = base_bytes() or BASE_BYTES_MOST
        held = {t: b.peak for t, b in e.budgets.items()}
        peak_rss = resident_bytes_max()
        if e.device.name != "cuda":
            held["device"] = max(held["device"], peak_rss - base - held["host"])
        else:
            held["device"] = max(held["device"], torch.cuda.max_memory_reserved(e.device.compute))
        waits = e.update_seconds
        return {
            "parameters": e.plan.parameters,
            "state_bytes": e.plan.state_bytes,
            "base_bytes": base,
            "budget_bytes": {t: b.capacity for t, b in e.budgets.items()},
            "peak_bytes": held | {"rss": peak_rss},
            "moved_bytes": {k: v - self._excluded[k] for k, v in self._moved().items()},
            "stall_seconds": {
                "fetch": e.slots.counters.stall_seconds["fetch"], "nvme_read": waits.get("read_wait", 0.0),
                "nvme_write": waits.get("write_wait", 0.0), "update": waits.get("compute", 0.0),
            },
            "placement": e.plan.describe(),
            "activations": e.plan.activations,
            "fetches": e.slots.counters.fetches,
            "prefetch_misses": e.slots.counters.misses,
            "skipped": e.skipped,
            "notes": self._notes(),
        }  # fmt: skip

    def _notes(self) -> list[str]:
        e = self._engine
        notes = [f"instruction set {_core.simd_level()}, {_core.default_threads()} threads"]
        if e.space is not None:
            notes += [str(d) for d in e.space.describe()]
        return notes

    def _moved(self) -> dict[str, int]:
        e = self._engine
        swapped = e.space.counters() if e.space is not None else {}
        return e.device.moved | {k: int(swapped.get(k, 0)) for k in ("nvme_read", "nvme_write")}

    def tier_bytes(self) -> dict[str, int]:
        """Bytes held now by tier."""
        e = self._engine
        held = {t: b.used for t, b in e.budgets.items()}
        if e.device.name != "cuda":
            held["device"] = max(held["device"], resident_bytes() - (base_bytes() or BASE_BYTES_MOST) - held["host"])
        return held

    def reset_counters(self) -> None:
        """Moved bytes and stalls count from here."""
        self._excluded = self._moved()
        self._engine.update_seconds.clear()
        self._engine.slots.counters.stall_seconds["fetch"] = 0.0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What moves inside is left out of `moved_bytes`."""
        before = self._moved()
        try:
            yield
        finally:
            for key, value in self._moved().items():
                self._excluded[key] += value - before[key]

    def lease(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keeps the unit of `module` on the device with its parameters bound, gradients flowing, while the context lasts."""
        for unit in self._engine.units:
            if any(module is m for top in unit.modules for m in top.modules()):
                return self._engine.streamer.lease(unit.number)
        raise ConfigError(f"this {type(module).__name__} is in no unit of the prepared model")

    def digest(self) -> str:
        """A hash of all parameters, moments and steps, by name: the same wherever they rest."""
        return self._engine.digest()

    def synchronize(self) -> None:
        """Returns when everything under way is done."""
        self._engine.synchronize()

    def close(self) -> None:
        """Gives back memory, files and threads; the model's parameters cannot be read afterwards."""
        self._engine.close()
        forget(self._model)


_runtimes: dict[int, Runtime] = {}


def runtime(model: nn.Module) -> Runtime:
    """The runtime of a prepared model; `ConfigError` for any other."""
    engine = engine_of(model)
    found = getattr(engine, "runtime", None)
    if found is None:
        found = Runtime(model, engine)
        engine.runtime = found
    return found
