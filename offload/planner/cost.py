"""What a step costs: its bytes by link, and the least time in which this machine can do it. Pure.

[Note: bound]
No schedule beats the slowest of: compute, each link by itself, and the update. Where the device is the machine's CPU, compute and the update share
its cores and their times add up. A drive reads at R, writes at W, and moves X in all while it does both, so its time is the greatest of read / R,
write / W and (read + write) / X.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from offload.planner.layout import DTYPE_BYTES, UnitLayout
from offload.planner.leftover import fetches, slots_of
from offload.planner.placement import Plan, chunks_of
from offload.planner.schedule import Place, Speeds
from offload.planner.share import ABSENT
from offload.planner.sums import link_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes a step by link, and trained parameters that the host updates in it."""

    nvme_read: int
    nvme_write: int
    h2d: int
    d2h: int
    updated: int


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of the drives (all together), reading, writing, and both at once; of the links to a device; None where there is none.

    `updates`: trained parameters a second. `shared_cores`: whether compute and updates share the CPU.
    """

    read: float | None
    write: float | None
    mixed: float | None
    h2d: float | None
    d2h: float | None
    updates: float
    shared_cores: bool


@dataclass(frozen=True)
class Compute:
    """Seconds of forward and backward passes; `again`: of that part of forward which recomputation repeats in backward."""

    forward: float
    backward: float
    again: float = 0.0

    def of_step(self, recompute: bool, accumulate: int = 1) -> Compute:
        """Of all micro-batches of a step, recomputation counted in backward."""
        return Compute(accumulate * self.forward, accumulate * (self.backward + (self.again if recompute else 0.0)))

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Compute) -> Compute:
        return Compute(self.forward + other.forward, self.backward + other.backward, self.again + other.again)


def nvme_seconds(read: float, write: float, rates: Rates) -> float:
    """The least time in which the drives read and write so many bytes."""
    if rates.read is None or rates.write is None or rates.mixed is None:
        return 0.0
    return max(read / rates.read, write / rates.write, (read + write) / rates.mixed)


def parts(compute: Compute, traffic: Traffic, rates: Rates) -> dict[str, float]:
    """Seconds of each thing that cannot be divided further: "compute", "update", "nvme", "h2d", "d2h"; "compute" has the update in it
    where they share cores."""
    update = traffic.updated / rates.updates
    seconds = {"compute": compute.total + (update if rates.shared_cores else 0.0), "nvme": nvme_seconds(traffic.nvme_read, traffic.nvme_write, rates)}
    if not rates.shared_cores:
        seconds["update"] = update
    for link, rate in (("h2d", rates.h2d), ("d2h", rates.d2h)):
        if rate is not None:
            seconds[link] = getattr(traffic, link) / rate
    return seconds


def bound(compute: Compute, traffic: Traffic, rates: Rates) -> tuple[float, str]:
    """The least seconds a step can take, and what holds it; see [Note: bound]."""
    seconds = parts(compute, traffic, rates)
    link = max(seconds, key=lambda name: seconds[name])
    return seconds[link], link


def speeds(traffic: Traffic, rates: Rates) -> Speeds:
    """What each link does while all that uses it runs: a drive that reads and writes divides its mixed rate between them as they need it."""
    read = write = math.inf
    moved = traffic.nvme_read + traffic.nvme_write
    if rates.read is not None and rates.write is not None and rates.mixed is not None and moved:
        read = min(rates.read, max(1.0, rates.mixed * traffic.nvme_read / moved))
        write = min(rates.write, max(1.0, rates.mixed * traffic.nvme_write / moved))
    return Speeds(rates.h2d or math.inf, rates.d2h or math.inf, read, write, rates.updates)


def traffic_of(plan: Plan, *, direct: bool, accumulate: int = 1, taken: Collection[Place] = ()) -> Traffic:
    """What a plan moves in a step of `accumulate` micro-batches: a unit's parameters are fetched for each pass that finds them in no slot, gradients
    go once for each micro-batch and come back for the sum and for the update, state comes and goes once. Sums that stay on the device go once.

    Boundary activations that leave the device go and come back once for each micro-batch.
    `direct`: the device computes from host memory, so that nothing goes over a link to it. `taken`: chunks (schedule.taken) whose gradients' last
    sum is neither written to nvme nor read. Of several ranks, what one moves over links of its own.
    """
    away = accumulate * plan.boundaries.nbytes
    read = write = away if plan.boundaries.tier == "nvme" else 0
    h2d = d2h = 0 if direct else away
    updated = 0
    fetched = fetches(slots_of(plan, direct), plan.slots, accumulate)
    for u, unit in enumerate(plan.layouts):
        nbytes = sum(plan.share.parameter_bytes(f) for f in unit.flats)
        kept, updates = (_numel(plan, unit, role) * DTYPE_BYTES[plan.form.compute] for role in ("parameter", "optimizer"))
        times = sum(fetched[u])
        if plan.parameter[u] == "nvme":
            read += times * nbytes + (updates if plan.form.value_is_master else 0)
            write += kept
        if plan.parameter[u] != "device" and not direct:
            h2d += times * nbytes
        for i, chunk in enumerate(chunks_of(unit)):
            if plan.state[u][i] != ABSENT and (direct or plan.state[u][i] != "device"):
                updated += sum(s.stop - s.start for s in chunk.slices)
            gradient = chunk.numel * DTYPE_BYTES[plan.grad]
            if not direct and plan.gradient[u][i] not in ("device", ABSENT):
                d2h += link_bytes(chunk.numel, plan.sent, accumulate, u in plan.summed)
            if plan.gradient[u][i] == "nvme":
                times = (1 if u in plan.summed else accumulate) - ((u, i) in taken)
                write += times * gradient
                read += times * gradient  # for the next sum, and at last for the update
            if plan.state[u][i] == "nvme":
                read += plan.form.record_bytes(chunk.numel)
                write += plan.form.record_bytes(chunk.numel)
    return Traffic(read, write, h2d, d2h, updated)


def _numel(plan: Plan, unit: UnitLayout, role: str) -> int:
    """Elements of a unit's trained flat that rest on the plan's rank."""
    first, stop = plan.share.span(unit.trained, role) if unit.trained else (0, 0)
    return stop - first
