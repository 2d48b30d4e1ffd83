"""The public functions, in the order a run meets them: plan, prepare, runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.checkpoint.hub import watch_saves
from offload.config import Precision, Tiers, check_updates, shown
from offload.dist.collectives import alike
from offload.dist.divided import check_backends, mesh_of, part_of
from offload.dist.mesh import equal_rows
from offload.dist.world import World, of_model
from offload.engine.build import Found, discover
from offload.engine.engine import Engine
from offload.engine.registry import check_unprepared, engine_of
from offload.engine.units import Units
from offload.errors import ConfigError, PlanError
from offload.memory.limits import check_environment, host_limits, resident_bytes
from offload.observe.base import base_bytes
from offload.observe.runtime import Runtime
from offload.planner.boundaries import boundaries
from offload.planner.demand import Batch
from offload.planner.form import StateForm
from offload.planner.freed import freed
from offload.planner.layout import UnitSpec
from offload.planner.placement import Plan, gradient_dtypes, human, plan_units
from offload.planner.request import Capacities
from offload.planner.share import ALONE, Share
from offload.transfer.device import CpuDevice, Device, SimDevice

Where = str | torch.device | Device


def _device_kind(device: Where | None) -> Device | type[Device]:
    """The device itself, or its class; `None` picks CUDA where there is one, else the CPU."""
    if isinstance(device, Device):
        return device
    name, _, index = str(device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")
    if index and not (name == "cuda" and torch.cuda.is_available() and index == str(torch.cuda.current_device())):
        raise ConfigError(f'device "{device}": a device has no number here; call torch.cuda.set_device({index}) and give device="cuda"')
    if name == "cuda":
        from offload.transfer.cuda import CudaDevice

        return CudaDevice
    if name not in ("cpu", "sim"):
        raise ConfigError(f'device "{name}" is unknown; use "cuda", "cpu" or "sim"')
    return CpuDevice if name == "cpu" else SimDevice


def make_device(device: Where | None) -> Device:
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
    if isinstance(batch, Batch) or batch is None:
        return batch
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(_is_count(n) for n in batch):
        raise ConfigError(f"batch = {shown(batch)}: give (sequences, tokens a sequence) of a micro-batch, as (8, 2048)")
    return Batch(*batch)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_settings(model: object, tiers: object, precision: object, accumulate: object, seed: object = 0) -> None:
    """ConfigError for what is not of its kind."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__} is no torch.nn.Module; give the model, built")
    if not isinstance(tiers, Tiers):
        raise ConfigError(f'tiers = {shown(tiers)}: give offload.Tiers(device="20GiB", host="96GiB", nvme=[("/mnt/nvme0", "400GiB")])')
    if precision is not None and not isinstance(precision, Precision):
        raise ConfigError(f'precision = {shown(precision)}: give offload.Precision(compute="bf16")')
    if not _is_count(accumulate):
        raise ConfigError(f"accumulate = {shown(accumulate)}: give the number of micro-batches of a step, 1 or more")
    if not _is_count(seed, least=0):
        raise ConfigError(f"seed = {shown(seed)}: give a whole number, 0 or more")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ConfigError(f"parameter {name} has no shape yet: run a forward of the lazy module first, or give it its sizes")


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
    model: nn.Module, tiers: Tiers, *, device: Where | None = None, precision: Precision | None = None, activations: str = "auto",
    units: Units = "auto", place: dict[str, str] | None = None, batch: tuple[int, int] | Batch | None = None, accumulate: int = 1,
    ranks: int = 1, rank: int = 0, stage: int = 3, replicate: int = 1, keep_gradients: bool = True,
) -> Plan:  # fmt: skip
    """What would go where, without allocating anything; a model on the meta device is enough.

    `batch` is (sequences, tokens) of a micro-batch. With `ranks`, the plan of one of them under a `stage`, which divides state within each of
    `replicate` groups; budgets and batch are one rank's.
    Without `keep_gradients`, those of repeated units may pass to their updates through a few places that the units share, where not everything fits
    in memory: for `prepare(updates="backward", plan=...)` of one micro-batch a step, after which nobody reads `.grad`.
    Raises `PlanError` where the state does not fit: which tier, need, have, three ways out.
    """
    _check_settings(model, tiers, precision, accumulate)
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
        share=_share(ranks, rank, stage, replicate),
        keep_gradients=keep_gradients,
    )


def _share(ranks: int, rank: int, stage: int, replicas: int) -> Share:
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} of {ranks} ranks: ranks count from 0")
    equal_rows(ranks, replicas)
    return Share.of(ranks, rank, _checked_stage(stage), replicas)


def _checked_stage(stage: int) -> int:
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"stage = {stage!r}: give 0 (every rank has everything), 1 (optimizer state is divided), 2 (gradients too) or 3 (all is)")
    return stage


def _share_in(world: World | None, stage: int) -> Share:
    _checked_stage(stage)
    return replace(Share.of(world.size, world.rank, stage, world.replicas), rank=world.within.rank) if world is not None else ALONE


def _ranks(model: nn.Module, mesh: Any, device: Where | None, updates: str, compute: str) -> tuple[World | None, World | None]:
    """The ranks among which the data is divided, and those over which parameters are already; None where that is one."""
    where = "cuda" if _device_kind(device).name == "cuda" else "cpu"
    tensor = mesh_of(dict(model.named_parameters()))
    if tensor is not None:
        check_backends(tensor)
    world, beside = (World.current(mesh, where), None) if tensor is None else World.beside(mesh, tensor, where)
    found = tuple(w if w is not None and w.size > 1 else None for w in (world, beside))
    if updates == "backward" and any(found):
        raise ConfigError("updates = 'backward' is not available with several ranks yet: give 'forward'")
    if compute == "fp16" and found[1] is not None:
        raise ConfigError("compute = 'fp16' is not available with parameters that are DTensors: give 'bf16' or 'fp32'")
    return found[0], found[1]


def _on_meta(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if part_of(p).is_meta]


def _agree_beside(job: World, model: nn.Module, made: Plan) -> None:
    """ConfigError unless ranks that have other parts of parameters compute the same units again: each calls the model's own collectives then."""
    names = [p.name for unit in made.layouts for p in unit.spec.parameters], _on_meta(model)
    job.agree(hashlib.blake2b(repr(names).encode(), digest_size=6).hexdigest(), "the model (its parameters' names, and which are on meta)")
    facts = {"activations": made.activations, "asked": made.asked, "kept": made.kept, "batch known": made.batch is not None}
    for name, value in facts.items():
        job.agree(value, f"the plan's {name} (budgets and settings are to be the same; say activations=, if parts differ in size)")


def _agree(world: World, model: nn.Module, made: Plan) -> None:
    """ConfigError unless all ranks have the same model and plan: each would wait for what others never do."""
    parameters = [(p.name, p.numel, p.dtype, p.trained) for unit in made.layouts for p in unit.spec.parameters]
    meta = _on_meta(model)
    digest = hashlib.blake2b(repr((parameters, meta)).encode(), digest_size=6).hexdigest()
    world.agree(f"{len(parameters)} parameters ({digest})", "the model (its parameters' names, sizes, dtypes, what is trained and on meta)")
    chunks = [len(u.trained.chunks) for u in made.layouts if u.trained]
    facts = {
        "stage": made.share.stage, "form": repr(made.form), "grad": made.grad, "moves": made.moves, "chunks": chunks, "slots": list(made.slots),
        "activations": made.activations, "asked": made.asked, "kept": made.kept, "batch known": made.batch is not None,
        "parameters on": list(made.parameter),
    }  # fmt: skip
    for name, value in facts.items():
        world.agree(value, f"the plan's {name} (budgets and settings are to be the same)")


def prepare(
    model: nn.Module, tiers: Tiers, *, device: Where | None = None, precision: Precision | None = None,
    activations: str = "auto", units: Units = "auto", place: dict[str, str] | None = None, batch: tuple[int, int] | Batch | None = None,
    accumulate: int = 1, updates: str = "forward", mesh: Any = None, stage: int = 3, plan: Plan | None = None, seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Moves the model's training state to its tiers, in place, and streams it through the device from then on. Returns the same object.

    Parameters keep their objects, names, shapes and dtypes and rest on the device `cpu`. A model on the meta device is initialised
    unit by unit by its own rules, seeded by `seed` and each parameter's name, unless weights are loaded first; so is the random rounding
    of moments kept in fewer bits. `place` fixes roles' tiers: {"parameter" | "gradient" | "optimizer": "device" | "host" | "nvme"}.
    fp16 compute wants the trained parameters in fp32. `updates`: "forward", or "backward": the backward of the last of `accumulate`
    micro-batches starts updates as gradients come to rest, to the same bits; what would come between it and step() is then refused.
    `batch` is (sequences, tokens) of a micro-batch, so that activations are planned for. A `plan` that was made before settles all of these but
    `updates`: ConfigError for one given beside it that is another.

    Under torchrun, or with a `mesh`, all ranks call this with the same model; values are rank 0's. Gradients are means over ranks.
    `stage`: what is divided among them: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Names, shapes and values at rest stay whole:
    to read what is divided is a collective, which all ranks call in one order; what is written is given alike on all. Budgets are each rank's.
    `mesh`: a DeviceMesh of one dimension, or of two, (replicate, shard): state is divided along the second and the same along the first.
    Raises `ConfigError`, `PlanError` before anything is allocated, `SwapError`; `RankError` when another rank is gone.
    """
    check_environment()
    _check_settings(model, tiers, precision, accumulate, seed)
    if plan is not None:
        precision, accumulate = _agreed(plan, precision, place, _batch(batch), activations, accumulate)
    precision = precision or Precision()
    check_updates(updates, precision)
    check_unprepared(model)
    world, beside = _ranks(model, mesh, device, updates, precision.compute)
    found = discover(model, units)
    if not any(f.members for f in found):
        raise ConfigError(f"{type(model).__name__} has no parameters to prepare")
    share = _share_in(world, stage)
    target = make_device(device)
    job = world if beside is None else beside.home
    try:
        with alike(job, "planning"):
            specs = _specs(found, precision)
            made = plan or plan_units(
                specs,
                _capacities(tiers, target, specs, _batch(batch), precision.compute),
                precision,
                place=place,
                batch=_batch(batch),
                activations=activations,
                accumulate=accumulate,
                share=share,
            )
            _check_plan(made, specs, share, updates, accumulate)
        if beside is not None:
            _agree_beside(beside.home, model, made)
        if world is not None:
            _agree(world, model, made)
        own = _own_bytes(model)
        with alike(job, "looking for memory"):
            _check_machine(own, made, target, job)
        target.in_flight_bytes_most, target.gradient_bytes_most = made.working.in_flight, made.working.largest
        target.resident_bytes_most = base_bytes(unknown=own) + made.peak_bytes["host"] + tiers.device
        target.keep(*freed(made))
        world = of_model(world) if world is not None else None
        Engine(model, found, made, tiers, target, seed, accumulate if updates == "backward" else 0, world, beside)
    except BaseException:
        target.close()
        raise
    watch_saves(model)
    return model


def _agreed(
    made: Plan, precision: Precision | None, place: dict[str, str] | None, batch: Batch | None, activations: str, accumulate: int
) -> tuple[Precision, int]:  # fmt: skip
    """The precision of a plan and its micro-batches a step. ConfigError for a setting given beside it with which it was not made."""
    form, dtypes = made.form, (made.grad, made.moves)
    agrees = {
        "precision": precision is None or (StateForm.of(precision), gradient_dtypes(precision, made.accumulate)) == (form, dtypes),
        "place": place is None or made.request is None or place.items() <= made.request.place.items(),
        "batch": batch is None or batch == made.batch,
        "activations": activations in ("auto", made.asked),
        "accumulate": accumulate in (1, made.accumulate) or bool(made.passing),
    }
    for setting, good in agrees.items():
        if not good:
            raise ConfigError(f"{setting} is not what the plan was made with: give it to offload.plan(), and leave it out where the plan is given")
    own = Precision(form.compute, made.grad, "split" if form.master == "split" else "fp32", form.moments)  # type: ignore[arg-type]
    return precision or own, made.accumulate if accumulate == 1 else accumulate


def _parameters(specs: Sequence[UnitSpec]) -> dict[tuple[str, str], tuple[int, str, bool]]:
    return {(u.name, p.name): (p.numel, p.dtype, p.trained) for u in specs for p in u.parameters}


def _check_plan(made: Plan, specs: Sequence[UnitSpec], share: Share, updates: str, accumulate: int) -> None:
    known, found = _parameters([u.spec for u in made.layouts]), _parameters(specs)
    if known != found:
        unit, name = next(key for key in (*found, *known) if known.get(key) != found.get(key))
        raise ConfigError(
            f"the plan is of another model, or of other units: parameter {name} in unit {unit} is not in both with one size, dtype and "
            "requires_grad; make it of this model with offload.plan()"
        )
    if made.share != share:
        raise ConfigError(f"plan is for {made.share.text}, and this is {share.text}: make it with plan(..., ranks=, rank=, stage=, replicate=)")
    if made.passing and (updates != "backward" or accumulate > 1):
        raise ConfigError(
            'plan was made with keep_gradients=False, which wants updates="backward" and accumulate=1: gradients pass to their updates and '
            "cannot wait for step() nor be summed. Give these, or make the plan with keep_gradients=True"
        )


def _own_bytes(model: nn.Module) -> int:
    """This process's resident memory but for the model's own, which is given back as it is taken over."""
    return max(0, resident_bytes() - sum(part_of(p).nbytes for p in model.parameters() if p.device.type == "cpu"))


def _check_machine(own: int, made: Plan, device: Device, world: World | None) -> None:
    """Refuses before allocating what this machine or its container cannot hold beside the process's `own` bytes, or all its ranks' together."""
    limits = host_limits()
    peak, usable, whose = made.peak_bytes, limits.usable, "this process's own"
    need = peak["host"] + (peak["device"] if device.name != "cuda" else 0) + max(own, base_bytes(unknown=0))
    if world is not None:  # all have looked before any allocates
        held = resident_bytes()
        told = world.share([need, held], "memory needed")
        need, usable = world.of_machine([n for n, _ in told]), usable + world.of_machine([n for _, n in told]) - held
        usable = min(usable, limits.cgroup) if limits.cgroup is not None else usable
        whose = f"its {world.local_size} processes' own"
    if need > usable:
        raise PlanError(
            f"the machine is short: the plan's memory and {whose} come to {human(need)}; usable here are {human(usable)}"
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
