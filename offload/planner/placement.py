"""Where every shard rests, and what the run holds besides. Pure policy: sizes and budgets in, a Plan or a PlanError out.

[Note: placement]
Whatever is free is taken in one order, hottest role first: parameters (read in every pass; by unit, small ones first), gradients (written
and read once a step; by chunk), states (once each a step; by chunk). Tiers are filled in one order: device, host, nvme. What comes later
never rests nearer, so a larger budget never moves anything farther away (see [Note: one memory]).
What the run holds besides could undo that: a larger budget also affords more slots and larger staging buffers. So each way to hold them
serves a range of budgets, above which it uses no more than the range's end; of all ways the one that leaves least on nvme is taken, the
ampler where they are equal. A plan depends on the nvme budget only in whether what rests there fits.

[Note: whole units]
Where the host cannot work on device memory nor the device on the host's (`rests` and not `direct`), what rests on the device is updated there. So
a unit rests there with its parameters, gradients and state or with nothing: small units first, of equal ones those that a forward uses first, since a
backward needs them last and the next forward would wait for their updates. All other units are placed as said above, on host and nvme. With several
ranks none rests there: what is gathered and reduced would have to be in the order of the device's work.

[Note: one memory]
On `cpu` the device's budget and the host's are parts of one memory, and what rests in either is as near. There what need not rest on the device,
for there to be no more on nvme, rests on the host: what the device has left keeps more units' activations, and the pages that compute has freed
for what it allocates next.

[Note: kept units]
Where the treatment is the planner's to choose and not everything can be kept, what the device has left keeps the activations of as many units as fit,
the last ones: a backward needs them first, so they live shortest, and every other unit is computed again. To keep more of them takes room from
state; whether that pays depends on links' speeds, so it is for those who know them to ask for (`keeping`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from offload.config import Precision
from offload.errors import ConfigError, PlanError
from offload.planner import demand
from offload.planner.boundaries import AWAY, STAY, UNKNOWN_SHARE, Boundaries, boundaries, modes
from offload.planner.fill import ROLES, TIERS, Filled, Room, Runs, Short, Sizes, fill, fixed_bytes, leaving_room, moved, sizes_of
from offload.planner.form import StateForm
from offload.planner.layout import DTYPE_BYTES, Chunk, UnitLayout, UnitSpec, lay_out_all, round_up
from offload.planner.leftover import leftover
from offload.planner.passing import KEPT, kinds, places
from offload.planner.request import Capacities, Request
from offload.planner.share import ABSENT, ALONE, Share
from offload.planner.staging import Staging, share_out
from offload.planner.sums import sum_bytes

CHUNKS = tuple((1 << 20) >> i for i in range(7))  # elements a chunk, largest first
FRAMES_MOST, FRAMES_LEAST = 8, 3
STAGING_SHARE = 5  # staging above the least takes at most this fraction of what the host has for it and for state that may rest anywhere
SLOT_SHARE = 2  # as much for slots above the fewest, on a device where state may rest
SLOT_COPIES = 3
FLIGHT = 4  # gradients of the largest size that are computed and in flight at once, where the device has room for them


@dataclass(frozen=True)
class Plan:
    """What goes where. Tiers by unit (parameters) and by unit and chunk of its trained flat (gradients, states); sizes in bytes.

    `share`: the rank that it is for; ABSENT is in place of the tiers of what rests on others. `moves`: the dtype in which gradients are reduced.
    `places`: by unit, the one in whose places its gradients land (planner/passing.py); empty: each has its own.
    """

    layouts: tuple[UnitLayout, ...]
    form: StateForm
    grad: str
    parameter: tuple[str, ...]
    gradient: tuple[tuple[str, ...], ...]
    state: tuple[tuple[str, ...], ...]
    slots: tuple[int, ...]
    frames: int
    frame_bytes: int
    activations: str
    asked: str
    batch: demand.Batch | None
    working: demand.Working
    resting: dict[str, int]
    budgets: dict[str, int]
    boundaries: Boundaries = STAY
    kept: int = 0  # of the repeated units, how many, the last ones, keep their activations though others do not
    request: Request | None = field(default=None, compare=False)  # what it was asked to hold
    share: Share = ALONE
    moves: str = "fp32"
    places: tuple[int, ...] = ()
    accumulate: int = 1  # micro-batches a step
    summed: frozenset[int] = frozenset()  # units whose gradients are summed on the device (planner/sums.py)

    @property
    def compute(self) -> str:
        return self.form.compute

    @cached_property
    def passing(self) -> frozenset[int]:
        """The units whose gradients share places with those of others."""
        shared = {place for unit, place in enumerate(self.places) if place != unit}
        return frozenset(unit for unit, place in enumerate(self.places) if place in shared)

    def borrows(self, unit: int) -> bool:
        """Whether the unit's gradients land in the places of another."""
        return bool(self.places) and self.places[unit] != unit

    @property
    def peak_bytes(self) -> dict[str, int]:
        return {
            "device": self.resting["device"] + sum(self.slots) + self.sum_bytes + self.working.total,
            "host": self.resting["host"] + self.frames * self.frame_bytes + self.boundaries.by_tier["host"],
            "nvme": self.resting["nvme"] + self.boundaries.by_tier["nvme"],
        }

    @property
    def sum_bytes(self) -> int:
        """What sums of gradients take of the device."""
        return sum(sum_bytes(self.layouts[u]) for u in self.summed)

    @property
    def sent(self) -> str:
        """The dtype in which a micro-batch's gradients leave the device."""
        return self.moves if self.share.ranks > 1 else self.compute

    @cached_property
    def staging(self) -> Staging:
        return share_out(self.frames, self.frame_bytes, self.layouts)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The units that are computed again in backward."""
        return frozenset(demand.again([u.spec for u in self.layouts], self.activations, self.kept))

    @property
    def kept_least(self) -> int:
        """How many repeated units were to keep their activations at the least, as `keeping` takes it."""
        assert self.request is not None
        return sum(u.repeated for u in self.request.units) if self.request.activations == "keep" else self.request.kept

    @property
    def free_bytes(self) -> int:
        """What the device budget leaves beside state, slots and sums of gradients."""
        return self.budgets["device"] - self.resting["device"] - sum(self.slots) - self.sum_bytes

    @property
    def activation_bytes(self) -> dict[str, int]:
        """Bytes of activations by tier, at their most."""
        return {"device": self.working.activations} | self.boundaries.by_tier

    @property
    def parameters(self) -> int:
        return sum(u.spec.numel for u in self.layouts)

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel for u in self.layouts for p in u.spec.parameters if p.trained)

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients that have a place, masters and moments, without padding."""
        total = 0
        for u, unit in enumerate(self.layouts):
            for p in unit.spec.parameters:
                kept = DTYPE_BYTES[self.compute] if p.trained else DTYPE_BYTES[p.dtype]
                gradient = 0 if self.borrows(u) else p.numel * DTYPE_BYTES[self.grad]
                total += p.numel * kept + (gradient + self.form.nbytes(p.numel) if p.trained else 0)
        return total

    @property
    def state_bytes_per_rank(self) -> int:
        """Of these, what rests on this rank."""
        share, total = self.share, 0
        for u, unit in enumerate(self.layouts):
            for flat in unit.flats:
                for index in flat.parameters:
                    n = unit.spec.parameters[index].numel
                    total += share.numel(flat, index, n, "parameter") * DTYPE_BYTES[flat.dtype]
                    if flat.trained:
                        total += 0 if self.borrows(u) else share.numel(flat, index, n, "gradient") * DTYPE_BYTES[self.grad]
                        total += self.form.nbytes(share.numel(flat, index, n, "optimizer"))
        return total

    def closed(self, batch: demand.Batch) -> Plan:
        """This plan for a batch that was not known when it was made: activations are chosen and counted now. PlanError where they do not fit."""
        specs = [u.spec for u in self.layouts]
        shorts: list[tuple[int, str, Plan]] = []
        for mode in modes(self.asked, self.budgets["nvme"]):
            work = demand.working(specs, batch, self.compute, self.grad, mode, self.budgets["device"], reduction=self.working.reduction)
            made = replace(self, activations=mode, batch=batch, working=work, boundaries=boundaries(specs, batch, self.compute, mode))
            over = {tier: made.peak_bytes[tier] - self.budgets[tier] for tier in TIERS}
            tier = max(over, key=lambda t: over[t])
            if over[tier] <= 0:
                return _with_leftover(_with_flight(made).with_kept_units(), slots=False)
            shorts.append((over[tier], tier, made))
        raise PlanError(_explain_batch(*min(shorts, key=lambda short: short[0])))

    def with_kept_units(self) -> Plan:
        """This plan with as many units kept as fit in what the device has left; see [Note: kept units]."""
        if self.asked != "auto" or self.batch is None or self.activations == "keep":
            return self
        specs, made = [u.spec for u in self.layouts], self
        for kept in range(self.kept + 1, self.kept + len(self.recomputed)):
            work = replace(self.working, activations=demand.activation_bytes(specs, self.batch, self.compute, self.activations, kept))
            away = boundaries(specs, self.batch, self.compute, self.activations, kept)
            more = replace(self, kept=kept, working=work, boundaries=away)
            if more.peak_bytes["device"] > self.budgets["device"]:
                break
            made = more
        return made

    def describe(self) -> dict[str, dict[str, int]]:
        """Bytes of each role on each tier."""
        out = {role: dict.fromkeys(TIERS, 0) for role in ROLES}
        for u, unit in enumerate(self.layouts):
            out["parameter"][self.parameter[u]] += sum(self.share.parameter_bytes(f) for f in unit.flats)
            for i, chunk in enumerate(chunks_of(unit)):
                if self.gradient[u][i] != ABSENT and not self.borrows(u):
                    out["gradient"][self.gradient[u][i]] += gradient_chunk_bytes(chunk, self.grad)
                if self.state[u][i] != ABSENT:
                    out["optimizer"][self.state[u][i]] += self.form.record_bytes(chunk.numel)
        return out


def gradient_chunk_bytes(chunk: Chunk, grad: str) -> int:
    return chunk.numel * DTYPE_BYTES[grad]


def chunks_of(unit: UnitLayout) -> tuple[Chunk, ...]:
    return unit.trained.chunks if unit.trained else ()


def human(n: int, rounding: Callable[[float], float] = round) -> str:
    size, name, digits = (1 << 30, "GiB", 2) if n >= 1 << 30 else (1 << 20, "MiB", 1)
    return f"{rounding(n / size * 10**digits) / 10**digits:.{digits}f} {name}"


def _explain_working(work: demand.Working) -> str:
    parts = f"activations {human(work.activations)}, logits {human(work.logits)}, gradients {human(work.gradients)}"
    return parts + f", allocator's slack {human(work.slack)}"


def _explain_batch(over: int, tier: str, plan: Plan) -> str:
    """A plan that was made without a batch is `over` bytes short on one tier with this one."""
    work, batch = plan.working, plan.batch
    assert batch is not None
    if tier == "device":
        need, beside = work.total, "state and slots"
        parts = _explain_working(work)
    else:
        need, beside = plan.boundaries.by_tier[tier], "state" if tier == "nvme" else "state and staging buffers"
        parts = f'boundary activations under activations = "{plan.activations}"'
    return (
        f"the {tier} tier is short for this batch of {batch.sequences} x {batch.tokens}: need {human(need)} ({parts}); "
        f"have {human(need - over)} beside {beside}. Ways out: give prepare(batch=({batch.sequences}, {batch.tokens})), "
        f"so that less rests on the {tier}; use a smaller batch; raise the {tier} budget."
    )


def nvme_extents(plan: Plan) -> Iterator[int]:
    """Bytes of each shard on nvme, in the order in which they are allocated."""
    for u, unit in enumerate(plan.layouts):
        if plan.parameter[u] == "nvme":
            yield from (plan.share.parameter_bytes(f) for f in unit.flats)
        chunks = chunks_of(unit)
        yield from (gradient_chunk_bytes(c, plan.grad) for c, tier in zip(chunks, plan.gradient[u], strict=True) if tier == "nvme")
        yield from (plan.form.record_bytes(c.numel) for c, tier in zip(chunks, plan.state[u], strict=True) if tier == "nvme")
    if plan.boundaries.tier == "nvme":
        yield from (n for n in plan.boundaries.sizes if n)


@dataclass(frozen=True)
class _Staging:
    """How traffic with nvme is staged (no frames: there is none), and what this way may use of the host: its buffers and state at rest."""

    chunk: int
    frames: int
    frame_bytes: int
    host: int

    @property
    def nbytes(self) -> int:
        return self.frames * self.frame_bytes


@dataclass(frozen=True)
class _Refusal:
    tier: str
    need: int
    work: demand.Working
    slots: tuple[int, ...]
    boundaries: Boundaries = STAY


def check_place(place: dict[str, str] | None, capacities: Capacities) -> dict[str, str]:
    for role, tier in (place or {}).items():
        if role not in ROLES:
            raise ConfigError(f'place: unknown role "{role}"; roles are parameter, gradient, optimizer')
        if tier not in TIERS:
            raise ConfigError(f'place.{role}: unknown tier "{tier}"; tiers are device, host, nvme')
        if tier == "nvme" and not capacities.nvme:
            raise ConfigError(f"place.{role} is nvme, but tiers.nvme names no directory; name one, or place it on the host")
        if tier == "device" and not capacities.rests:
            raise ConfigError(f"place.{role} is device, which has no kernels here that update what rests there; use host or nvme")
    if "device" in (place or {}).values() and not capacities.direct:
        for role, tier in (place or {}).items():
            if tier != "device":
                raise ConfigError(
                    f"place.{role} is {tier}, and another role is on the device: this device updates there what rests there, which takes all of a "
                    "unit's roles; place all of them on the device, or none"
                )
        return dict.fromkeys(ROLES, "device")
    return dict(place or {})


def _stagings(request: Request, host: int) -> list[_Staging]:
    """The ways to stage within so much of the host, ampler first: none at all, then with buffers."""
    fixed = request.fixed("host")
    beside = 4 + DTYPE_BYTES[request.compute]  # an element's gradient, as a sum in fp32, and parameter
    largest = max((u.numel for u in request.units), default=1)
    chunks = [c for c in CHUNKS if c <= round_up(largest, CHUNKS[-1])] or [CHUNKS[-1]]
    ways = [(c, max(FRAMES_LEAST, frames)) for c in chunks for frames in (FRAMES_MOST, FRAMES_MOST * 3 // 4)]
    ways += [(chunks[-1], max(FRAMES_LEAST, frames)) for frames in (FRAMES_MOST // 2, FRAMES_LEAST)]
    ways = sorted(set(ways), key=lambda way: -way[0] * way[1])
    out = [_Staging(c, 0, 0, host) for c in chunks]
    ceiling = host
    for chunk, frames in ways:
        frame_bytes = request.form.record_bytes(chunk) + chunk * beside
        if fixed + STAGING_SHARE * frames * frame_bytes <= host or (chunk, frames) == ways[-1]:
            out.append(_Staging(chunk, frames, frame_bytes, min(host, ceiling)))
        ceiling = fixed + STAGING_SHARE * frames * frame_bytes - 1
    return out


class _Search:
    """The best of all ways to hold slots and staging."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._cuts: dict[int, tuple[tuple[UnitLayout, ...], Sizes]] = {}
        self.best: tuple[_Staging, str, demand.Working, Filled] | None = None
        self._boundaries = STAY
        self.refusals: list[_Refusal] = []

    def run(self, mode: str) -> None:
        """Tries every way for one treatment of activations; one that cannot leave less on nvme than the best so far is left out."""
        request = self._request
        device = request.capacities.device
        work = demand.working(request.units, request.batch, request.compute, request.grad, mode, device, request.kept, request.reduction)
        resting_most = max(0, device - work.total) // request.share if request.capacities.rests else 0
        self._boundaries = away = boundaries(request.units, request.batch, request.compute, mode, request.kept)
        host = request.capacities.host - away.by_tier["host"]
        if away.nbytes and work.total > device:
            self.refusals.append(_Refusal("device", demand.budget_for(work.total - work.slack), work, ()))
            return
        if host < 0:
            self.refusals.append(_Refusal("host", away.by_tier["host"] + request.fixed("host"), work, (), away))
            return
        stagings = _stagings(request, host - (host // UNKNOWN_SHARE[mode] if mode in AWAY and request.batch is None else 0))
        if not self._try(stagings[0], mode, work):
            return  # with nothing staged and the largest chunks everything needs least
        for staging in stagings[1:]:
            host = staging.host - staging.nbytes
            if host < request.fixed("host"):
                self.refusals.append(self._refusal(Short("host", request.fixed("host")), staging, work))
                continue
            least = max(request.fixed("nvme"), sum(request.role_bytes.values()) - resting_most - host)
            if least < self.on_nvme and (staging.frames or not least):
                self._try(staging, mode, work)

    @property
    def on_nvme(self) -> float:
        """Bytes that the best way leaves there."""
        return self.best[3].taken["nvme"] if self.best is not None else math.inf

    @property
    def kinds(self) -> tuple[int, ...]:
        return self._request.kinds

    def cut(self, chunk: int) -> tuple[tuple[UnitLayout, ...], Sizes]:
        if chunk not in self._cuts:
            request = self._request
            layouts = lay_out_all(request.units, request.compute, chunk, request.part.ranks)
            self._cuts[chunk] = layouts, sizes_of(layouts, request.grad, request.form, request.part, request.kinds)
        return self._cuts[chunk]

    def _try(self, staging: _Staging, mode: str, work: demand.Working) -> bool:
        """Whether device and host have room for what must be there."""
        request, (_, sizes) = self._request, self.cut(staging.chunk)
        possible = False
        for slots_for, most, in_reach in self._slot_ways(sizes, request.capacities.device - work.total):
            room = Room(most, request.share, staging.host - staging.nbytes)
            try:
                filled = fill(sizes, request.load, room, slots_for, in_reach)
            except Short as short:
                self.refusals.append(self._refusal(short, staging, work))
                continue
            possible = possible or filled is not None
            if filled is not None and filled.taken["nvme"] < self.on_nvme and (staging.frames or not filled.taken["nvme"]):
                self.best = staging, mode, work, leaving_room(filled, sizes, request.load, room, slots_for, in_reach)
        return possible

    def _slot_ways(self, sizes: Sizes, left: int) -> Iterator[tuple[Callable[[Sequence[int]], tuple[int, ...]], int, bool]]:
        """(slots for units of such sizes, what they and state may take of the device, whether parameters must rest in reach), ampler first."""
        request = self._request
        load, at_once = request.load, request.at_once
        ample = partial(demand.slot_sizes, at_once=at_once, copies=SLOT_COPIES)
        fewest = partial(demand.fewest_slots, at_once=at_once)
        fixed = request.share * fixed_bytes(sizes, load)["device"]
        share = SLOT_SHARE if load.rests else 1
        near = "device" if load.rests else "host" if load.direct else None
        for tier in [load.place["parameter"]] if "parameter" in load.place else [near, "nvme"] if near else ["nvme"]:
            moving = moved(sizes, load, [tier] * len(sizes.slot))
            affordable_at = fixed + share * sum(ample(moving))
            if affordable_at <= left:
                yield ample, left, tier == near
            if moving or affordable_at > left:
                yield fewest, min(left, affordable_at - 1), tier == near

    def _refusal(self, short: Short, staging: _Staging, work: demand.Working) -> _Refusal:
        if short.tier == "host":
            away = self._boundaries
            return _Refusal("host", short.nbytes + staging.nbytes + away.by_tier["host"], work, (), away)
        return _Refusal("device", demand.budget_for(work.total - work.slack + short.nbytes), work, short.slots)


def gradient_dtypes(precision: Precision, accumulate: int) -> tuple[str, str]:
    """Those in which gradients of a step of so many micro-batches rest, and are reduced: sums of fp16 overflow."""
    return "fp32" if accumulate > 1 else precision.grad, "fp32" if precision.grad == "fp16" else precision.grad


def plan_units(
    units: Sequence[UnitSpec],
    capacities: Capacities,
    precision: Precision,
    *,
    place: dict[str, str] | None = None,
    batch: demand.Batch | None = None,
    activations: str = "auto",
    accumulate: int = 1,
    share: Share = ALONE,
    keep_gradients: bool = True,
) -> Plan:
    """The plan for these units under these budgets; PlanError says which tier is short, of what, by how much, and three ways out.

    `share`: the rank and stage that it is for; budgets are that rank's. All ranks' plans are alike but for which chunks are theirs.
    Without `keep_gradients`, those of units alike may pass through places that they share, where that leaves less on nvme.
    """
    if share.ranks > 1 and not capacities.direct:
        if "device" in (place or {}).values():
            raise ConfigError("place: with several ranks no state rests on this device yet; use host or nvme")
        capacities = replace(capacities, rests=False)
    grad, moves = gradient_dtypes(precision, accumulate)
    place, form = check_place(place, capacities), StateForm.of(precision)
    may_pass = not keep_gradients and accumulate == 1 and share.ranks == 1 and "gradient" not in place
    return _plan(
        Request(
            tuple(units), capacities, form, grad, place, activations, batch, part=share, moves=moves, accumulate=accumulate,
            kinds=kinds(units) if may_pass else (),
        )
    )  # fmt: skip


def keeping(plan: Plan, kept: int) -> Plan:
    """What would go where if at least the last `kept` repeated units kept their activations (as many as there are: all); as `plan_units` does."""
    assert plan.request is not None
    if kept >= sum(u.repeated for u in plan.request.units):
        return _plan(replace(plan.request, activations="keep"))
    return _plan(replace(plan.request, kept=kept))


def keeping_gradients(plan: Plan) -> Plan:
    """What would go where if every gradient had a place of its own; as `plan_units` does."""
    assert plan.request is not None
    return _plan(replace(plan.request, kinds=()))


def holding(plan: Plan, whole: int) -> Plan:
    """What would go where if no more than so many units rested whole on the device; as `plan_units` does."""
    assert plan.request is not None
    return _plan(replace(plan.request, whole=whole))


def _searched(request: Request) -> _Search:
    search = _Search(request)
    for mode in modes(request.activations, request.capacities.nvme):
        if (search.best is None or mode not in AWAY) and not (request.kept and mode == "keep"):
            search.run(mode)
    return search


def _plan(request: Request) -> Plan:
    capacities, activations, batch, share = request.capacities, request.activations, request.batch, request.part
    search = _searched(replace(request, kinds=()))
    if search.on_nvme and max(request.kinds, default=KEPT) != KEPT:
        passing = _searched(request)
        search = passing if passing.on_nvme < search.on_nvme else search
    if search.best is None:
        have = capacities.by_tier
        raise PlanError(_explain(request, min(search.refusals, key=lambda r: r.need - have[r.tier])))
    staging, mode, work, filled = search.best
    passes = [k if filled.parameter[u] != "device" or capacities.direct else KEPT for u, k in enumerate(search.kinds)]
    layouts = search.cut(staging.chunk)[0]
    plan = Plan(
        layouts=layouts, form=request.form, grad=request.grad, parameter=filled.parameter,
        gradient=_expanded(filled.gradient, layouts, share, "gradient"), state=_expanded(filled.state, layouts, share, "optimizer"),
        slots=filled.slots, frames=staging.frames, frame_bytes=staging.frame_bytes, activations=mode, asked=activations, batch=batch,
        working=work, resting=filled.taken, budgets=capacities.by_tier,
        boundaries=boundaries(request.units, batch, request.compute, mode, request.kept), kept=request.kept, request=request,
        share=share, moves=request.moves, places=places(passes) if any(k != KEPT for k in passes) else (),
        accumulate=request.accumulate,
    )  # fmt: skip
    unplaced = _unplaced(plan, capacities)
    if unplaced:
        raise PlanError(_explain(request, _Refusal("nvme", capacities.nvme + unplaced, work, filled.slots)))
    return _with_leftover(_with_flight(plan).with_kept_units(), slots=True)


def _expanded(runs: Sequence[Runs], layouts: Sequence[UnitLayout], share: Share, role: str) -> tuple[tuple[str, ...], ...]:
    out = []
    for unit, layout in zip(runs, layouts, strict=True):
        own, count = share.chunks(layout.trained, role), len(chunks_of(layout))
        tiers = tuple(tier for tier, chunks in unit for _ in range(chunks))
        out.append((ABSENT,) * own.start + tiers + (ABSENT,) * (count - own.stop))
    return tuple(out)


def _unplaced(plan: Plan, capacities: Capacities) -> int:
    """Bytes that find no place on nvme, where each shard goes whole to the next drive in turn that has room."""
    if len(capacities.drives) <= 1:
        return max(0, plan.peak_bytes["nvme"] - capacities.nvme)
    left, turn, unplaced = list(capacities.drives), 0, 0
    for nbytes in nvme_extents(plan):
        drive = next((d % len(left) for d in range(turn, turn + len(left)) if left[d % len(left)] >= nbytes), None)
        if drive is None:
            unplaced += nbytes
            continue
        left[drive] -= nbytes
        turn = drive + 1
    return unplaced


def _with_flight(plan: Plan) -> Plan:
    """What is left of the device lets more gradients be in flight at once, where they are moved while others are computed."""
    if plan.batch is None or plan.request is None or plan.request.capacities.direct:
        return plan
    spare = min(plan.budgets["device"] - plan.peak_bytes["device"], (FLIGHT - 1) * plan.working.in_flight)
    work = plan.working
    return replace(plan, working=replace(work, gradients=work.gradients + spare, in_flight=work.in_flight + spare))


def _with_leftover(plan: Plan, slots: bool) -> Plan:
    """With what the device has left in use, for further `slots` too; see [Note: left over] in planner/leftover.py."""
    found = leftover(plan, slots)
    return replace(plan, slots=tuple(sorted((*plan.slots, *found.slots), reverse=True)), summed=found.summed)


def _explain(request: Request, short: _Refusal) -> str:
    cap, work = request.capacities, short.work
    have = cap.by_tier
    if short.tier == "device":
        parts = f"slots {human(sum(short.slots))}, {_explain_working(work)}"
        if request.fixed("device"):
            parts += f", state placed there {human(request.fixed('device'))}"
        what = f" ({parts})"
        less = 'set activations = "recompute"' if request.activations == "keep" else "freeze or split the largest parameters"
        ways = ("raise the device budget", "use a smaller batch or shorter sequences", less)
    elif short.tier == "host":
        fixed, away = request.fixed("host"), short.boundaries.by_tier["host"]
        parts = "staging buffers" + (f", boundary activations {human(away)}" if away else "") + (
            f" and state placed there, {human(fixed)}" if fixed else ""
        )
        what = f" ({parts})"
        nvme = "place less on the host" if cap.nvme else "name a directory under tiers.nvme"
        ways = ("raise the host budget", nvme, "let the planner choose (no place)" if fixed else "raise the device budget")
    else:
        what = " for what fits neither device nor host" if not request.fixed("nvme") else " for what is placed there or fits nowhere else"
        if cap.drives and short.need - cap.nvme < sum(cap.drives):
            what += ", each shard whole on one drive" if len(cap.drives) > 1 else ""
        more = "raise the nvme budget or add a directory under tiers.nvme" if cap.nvme else "name a directory under tiers.nvme"
        ways = (more, "raise the host budget", "train fewer parameters (freeze some)")
    return (
        f"the {short.tier} tier is short: need {human(short.need, math.ceil)}{what}; have {human(have[short.tier], math.floor)}. "
        f"The whole state is {human(sum(request.role_bytes.values()))}; "
        f"device + host + nvme are {human(cap.device)} + {human(cap.host)} + {human(cap.nvme)}. "
        f"Ways out: {ways[0]}; {ways[1]}; {ways[2]}."
    )
