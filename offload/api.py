"""The public functions, in the order a run meets them: plan, prepare, runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.config import Precision, Tiers, check_updates, refuse_later
from offload.engine.build import Found, discover
from offload.engine.engine import Engine
from offload.engine.registry import check_unprepared, engine_of
from offload.engine.units import Units
from offload.errors import ConfigError, PlanError
from offload.memory.limits import host_limits, resident_bytes
from offload.observe.base import base_bytes
from offload.observe.runtime import Runtime
from offload.planner.boundaries import boundaries
from offload.planner.demand import Batch
from offload.planner.layout import UnitSpec
from offload.planner.placement import Capacities, Plan, human, plan_units
from offload.transfer.device import CpuDevice, Device, SimDevice


def _device_kind(device: str | Device | None) -> Device | type[Device]:
    """The device itself, or its class; `None` picks CUDA where there is one, else the CPU."""
    if isinstance(device, Device):
        return device
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        from offload.transfer.cuda import CudaDevice

        return CudaDevice
    if name not in ("cpu", "sim"):
        raise ConfigError(f'device "{name}" is unknown; use "cuda", "cpu" or "sim"')
    return CpuDevice if name == "cpu" else SimDevice


def make_device(device: str | Device | None) -> Device:
    """The device of that name, made now; one that exists is given back."""
    kind = _device_kind(device)
    if isinstance(kind, Device):
        return kind
    if kind.name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device "cuda": torch sees no CUDA device here; use "cpu", or install a CUDA build of torch')
    return kind()


MOST_BYTES = 20  # of state a parameter, padding included


def _capacities(tiers: Tiers, device: Device | type[Device], specs: Sequence[UnitSpec], batch: Batch | None, compute: str) -> Capacities:
    """What may be planned with; host memory for checksums of all that might rest on nvme is left out."""
    most = MOST_BYTES * sum(s.numel for s in specs) + boundaries(specs, batch, compute, "nvme").nbytes
    sums = tiers.checksum_bytes(min(tiers.nvme_bytes, most))
    return Capacities(tiers.device, max(0, tiers.host - sums), tiers.nvme_bytes, device.rests, device.direct, tuple(size for _, size in tiers.nvme))


def _batch(batch: tuple[int, int] | Batch | None) -> Batch | None:
    return batch if isinstance(batch, Batch) or batch is None else Batch(*batch)


def _specs(found: Sequence[Found], precision: Precision) -> list[UnitSpec]:
    """What the planner knows of the units; ConfigError where gradients would have the dtype that no GradScaler unscales."""
    specs = [f.spec() for f in found]
    narrow = next((p for s in specs for p in s.parameters if p.trained and p.dtype != "fp32"), None)
    if precision.compute == "fp16" and narrow is not None:
        raise ConfigError(
            f"parameter {narrow.name} is {narrow.dtype}: fp16 compute wants fp32 parameters, as torch.amp.GradScaler does. "
            'Call model.float() before prepare() (they are computed with in fp16 all the same), or choose Precision(compute="bf16")'
        )
    return specs


def plan(
    model: nn.Module, tiers: Tiers, *, device: str | Device | None = None, precision: Precision | None = None, activations: str = "auto",
    units: Units = "auto", place: dict[str, str] | None = None, batch: tuple[int, int] | Batch | None = None, accumulate: int = 1,
) -> Plan:  # fmt: skip
    """What would go where, without allocating anything; a model on the meta device is enough.

    `batch` is (sequences, tokens) of a micro-batch. Raises `PlanError` where the state does not fit: which tier, need, have, three ways out.
    """
    precision = precision or Precision()
    specs = _specs(discover(model, units), precision)
    return plan_units(
        specs,
        _capacities(tiers, _device_kind(device), specs, _batch(batch), precision.compute),
        precision,
        place=place,
        batch=_batch(batch),
        activations=activations,
        accumulate=accumulate,
    )


def prepare(
    model: nn.Module, tiers: Tiers, *, device: str | Device | None = None, precision: Precision | None = None,
    activations: str = "auto", units: Units = "auto", place: dict[str, str] | None = None, batch: tuple[int, int] | Batch | None = None,
    accumulate: int = 1, updates: str = "forward", mesh: Any = None, stage: int = 3, plan: Plan | None = None, seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Moves the model's training state to its tiers, in place, and streams it through the device from then on. Returns the same object.

    Parameters keep their objects, names, shapes and dtypes and rest on the device `cpu`. A model on the meta device is initialised
    unit by unit by its own rules, seeded by `seed` and each parameter's name, unless weights are loaded first; so is the random rounding
    of moments kept in fewer bits. `place` fixes roles' tiers: {"parameter" | "gradient" | "optimizer": "device" | "host" | "nvme"}.
    fp16 compute wants the trained parameters in fp32. `updates`: "forward", or "backward": the backward of the last of `accumulate`
    micro-batches starts updates as gradients come to rest, to the same bits; what would come between it and step() is then refused.
    `batch` is (sequences, tokens) of a micro-batch, so that activations are planned for. Raises `ConfigError`, `PlanError` before anything
    is allocated, `SwapError`.
    """
    precision = precision or Precision()
    refuse_later(stage=stage)
    check_updates(updates, precision)
    if mesh is not None:
        raise ConfigError("mesh: several ranks are not available in this version; leave it out")
    check_unprepared(model)
    found = discover(model, units)
    if not any(f.members for f in found):
        raise ConfigError(f"{type(model).__name__} has no parameters to prepare")
    target = make_device(device)
    try:
        specs = _specs(found, precision)
        made = plan or plan_units(
            specs,
            _capacities(tiers, target, specs, _batch(batch), precision.compute),
            precision,
            place=place,
            batch=_batch(batch),
            activations=activations,
            accumulate=accumulate,
        )
        own = _own_bytes(model)
        _check_machine(own, made, target)
        target.in_flight_bytes_most = made.working.in_flight
        target.resident_bytes_most = base_bytes(unknown=own) + made.peak_bytes["host"] + tiers.device
        target.keep(made.surge_bytes, made.free_bytes)
        Engine(model, found, made, tiers, target, seed, accumulate if updates == "backward" else 0)
    except BaseException:
        target.close()
        raise
    return model


def _own_bytes(model: nn.Module) -> int:
    """This process's resident memory but for the model's own, which is given back as it is taken over."""
    return max(0, resident_bytes() - sum(p.nbytes for p in model.parameters() if p.device.type == "cpu"))


def _check_machine(own: int, made: Plan, device: Device) -> None:
    """Refuses before allocating what this machine or its container cannot hold beside the process's `own` bytes."""
    limits = host_limits()
    peak = made.peak_bytes
    need = peak["host"] + (peak["device"] if device.name != "cuda" else 0) + max(own, base_bytes(unknown=0))
    if need > limits.usable:
        raise PlanError(
            f"the machine is short: the plan's memory and this process's own come to {human(need)}; usable here are {human(limits.usable)}"
            f"{' (memory cgroup)' if limits.cgroup is not None and limits.cgroup <= limits.available else ''}. "
            "Ways out: lower the host budget and name a directory under tiers.nvme; use a smaller batch "
            'or activations = "recompute"; free memory or raise the limit.'
        )


def runtime(model: nn.Module) -> Runtime:
    """The runtime of a prepared model; `ConfigError` for any other."""
    engine = engine_of(model)
    if not isinstance(engine.runtime, Runtime):
        engine.runtime = Runtime(engine)
    return engine.runtime
