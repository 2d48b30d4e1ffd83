"""From a model and a plan to units, records and shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offload.dist.divided import Divided, part_of
from offload.engine.binding import let_go
from offload.engine.record import DTYPE_NAMES, Record, Unit, flat_slices
from offload.engine.units import Units, depths, find_units
from offload.errors import ConfigError
from offload.memory.arena import Arena
from offload.memory.shard import Shard
from offload.memory.swap import SwapSpace
from offload.planner.layout import ParameterSpec, UnitSpec
from offload.planner.placement import Plan, chunks_of, gradient_chunk_bytes
from offload.planner.share import ABSENT


@dataclass
class Member:
    """A parameter of a unit, with every module and attribute that holds it."""

    name: str
    parameter: nn.Parameter
    uses: list[tuple[nn.Module, str]]


@dataclass
class Found:
    """A unit before it is planned: its module and those that ride with it. A parameter belongs to the first unit that holds it.

    `borrows` counts the units whose parameters it binds, or a unit around it does, beyond one for each of these.
    """

    name: str
    modules: list[nn.Module]
    repeated: bool
    depth: int
    members: list[Member]
    borrows: int = 0

    def spec(self) -> UnitSpec:
        return UnitSpec(self.name, tuple(_spec(m) for m in self.members), self.depth, self.repeated, self.borrows)


def _spec(member: Member) -> ParameterSpec:
    Divided.of(member.name, member.parameter)
    p = part_of(member.parameter)
    if p.dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"parameter {member.name} is {p.dtype}, which is not supported: give {', '.join(map(str, DTYPE_NAMES))}, or make it a buffer"
        )
    if member.parameter.requires_grad and p.dtype == torch.float64:
        raise ConfigError(f"parameter {member.name} is float64; masters are fp32: convert it before prepare(), or freeze it")
    trained, inner = member.parameter.requires_grad, p.shape[-1] if p.ndim > 1 else 0
    return ParameterSpec(member.name, p.numel(), DTYPE_NAMES[p.dtype], trained, len(member.uses), inner)


def discover(model: nn.Module, units: Units) -> list[Found]:
    """The model's units in order, each parameter in exactly one."""
    found = find_units(model, units)
    names = {id(p): n for n, p in model.named_parameters()}
    tops = {id(part.module) for part in found}
    seen: dict[int, Member] = {}
    out: list[Found] = []
    owners: list[set[int]] = []  # of each unit, the units whose parameters it binds
    home: dict[int, int] = {}
    for part, depth in zip(found, depths(found), strict=True):
        members: list[Member] = []
        owners.append(set())
        for sub in _own_modules(part.module, tops):
            for key, p in sub._parameters.items():
                if p is None:
                    continue
                if id(p) not in seen:
                    seen[id(p)] = Member(names[id(p)], p, [])
                    members.append(seen[id(p)])
                    home[id(p)] = len(out)
                owners[-1].add(home[id(p)])
                if not any(m is sub and k == key for m, k in seen[id(p)].uses):  # a module shared by several units is met again
                    seen[id(p)].uses.append((sub, key))
        out.append(Found(part.name, [part.module, *part.riders], part.repeated, depth, members))
    inside = [{id(m) for m in part.module.modules()} for part in found]
    for unit, part in zip(out, found, strict=True):
        around = [own for own, modules in zip(owners, inside, strict=True) if id(part.module) in modules]
        unit.borrows = max(0, len(set().union(*around)) - len(around))
    return out


def _own_modules(top: nn.Module, tops: set[int]) -> list[nn.Module]:
    out: list[nn.Module] = []
    seen: set[int] = set()

    def walk(module: nn.Module) -> None:
        if id(module) in seen or (module is not top and id(module) in tops):
            return
        seen.add(id(module))
        out.append(module)
        for child in module.children():
            walk(child)

    walk(top)
    return out


def make_records(found: Sequence[Found], plan: Plan) -> tuple[list[Unit], list[Record]]:
    units: list[Unit] = []
    records: list[Record] = []
    for number, (part, layout) in enumerate(zip(found, plan.layouts, strict=True)):
        own: list[Record] = []
        for f, flat in enumerate(layout.flats):
            for index, offset in zip(flat.parameters, flat.offsets, strict=True):
                m = part.members[index]
                p = part_of(m.parameter)
                for module, _ in m.uses:
                    let_go(module)
                slices, divided = flat_slices(layout, f, index), Divided.of(m.name, m.parameter)
                own.append(
                    Record(0, m.name, p.shape, p.dtype, flat.trained, number, f, offset, slices, m.parameter, m.uses, divided=divided)
                )
        own.sort(key=lambda r: [m.name for m in part.members].index(r.name))
        units.append(Unit(number, part.name, layout, own, part.modules, repeated=part.repeated))
        records += own
    for number, record in enumerate(records):
        record.number = number
    return units, records


def make_shards(units: Sequence[Unit], plan: Plan, host: Arena, device: Arena, space: SwapSpace | None) -> None:
    """Takes every shard's bytes from its tier; what rests on another rank is `Shard.absent()`, and units whose gradients pass share theirs."""

    def take(tier: str, nbytes: int) -> Shard:
        if tier == ABSENT:
            return Shard.absent()
        if tier == "nvme":
            assert space is not None
            return Shard(tier, nbytes, extent=space.allocate(nbytes), space=space)
        return Shard(tier, nbytes, memory=(host if tier == "host" else device).take(nbytes))

    for u, unit in enumerate(units):
        unit.parameters = [take(plan.parameter[u], plan.share.parameter_bytes(f)) for f in unit.layout.flats]
        chunks = chunks_of(unit.layout)
        if plan.borrows(u):
            unit.gradients = list(units[plan.places[u]].gradients)
        else:
            unit.gradients = [take(t, gradient_chunk_bytes(c, plan.grad)) for t, c in zip(plan.gradient[u], chunks, strict=True)]
        unit.states = [take(t, plan.form.record_bytes(c.numel)) for t, c in zip(plan.state[u], chunks, strict=True)]


def arena_bytes(plan: Plan) -> dict[str, int]:
    """What each arena holds: state at rest, and slots, or staging buffers and boundary activations."""
    return {"device": plan.resting["device"] + sum(plan.slots), "host": plan.peak_bytes["host"]}
