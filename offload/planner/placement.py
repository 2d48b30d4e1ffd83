"""Where every shard rests, and what the run holds besides. Pure policy: sizes and budgets in, a Plan or a PlanError out.

The device is filled first, then the host, then NVMe, the hottest role first: parameters (read in every pass), gradients
(written and read once a step), then states (once each a step). Parameters are placed by unit, gradients and states by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.config import Precision
from offload.errors import ConfigError, PlanError
from offload.planner import demand
from offload.planner.layout import DTYPE_BYTES, Chunk, UnitLayout, UnitSpec, lay_out, round_up, slot_bytes

PAGE = 4096
TIERS = ("device", "host", "nvme")
CHUNKS = tuple((1 << 20) >> i for i in range(7))  # elements a chunk, largest first
FRAMES_MOST, FRAMES_LEAST = 8, 3
FRAMES_SHARE = 5  # at most this fraction of the host budget is staging, where a smaller chunk allows it


@dataclass(frozen=True)
class Capacities:
    """Budgets in bytes. `rests`: state may rest in device memory and be updated there. `direct`: the device computes from host memory."""

    device: int
    host: int
    nvme: int
    rests: bool
    direct: bool


@dataclass(frozen=True)
class Plan:
    """What goes where. Tiers by unit (parameters) and by unit and chunk of its trained flat (gradients, states); sizes in bytes."""

    layouts: tuple[UnitLayout, ...]
    compute: str
    grad: str
    own_master: bool
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

    @property
    def peak_bytes(self) -> dict[str, int]:
        return {
            "device": self.resting["device"] + sum(self.slots) + self.working.total,
            "host": self.resting["host"] + self.frames * self.frame_bytes,
            "nvme": self.resting["nvme"],
        }

    @property
    def parameters(self) -> int:
        return sum(u.spec.numel for u in self.layouts)

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients, masters and moments, without padding."""
        total = 0
        for unit in self.layouts:
            for p in unit.spec.parameters:
                kept = DTYPE_BYTES[self.compute] if p.trained else DTYPE_BYTES[p.dtype]
                total += p.numel * (kept + (DTYPE_BYTES[self.grad] + state_element_bytes(self.own_master) if p.trained else 0))
        return total

    def closed(self, batch: demand.Batch) -> Plan:
        """This plan for a batch that was not known when it was made: activations are chosen and counted now. PlanError where they do not fit."""
        specs = [u.spec for u in self.layouts]
        left = self.budgets["device"] - self.resting["device"] - sum(self.slots)
        work = self.working
        for mode in ("keep", "recompute") if self.asked == "auto" else (self.asked,):
            work = demand.working(specs, batch, self.compute, self.grad, mode, self.budgets["device"])
            if work.total <= left:
                return replace(self, activations=mode, batch=batch, working=work)
        parts = f"activations {human(work.activations)}, logits {human(work.logits)}, gradients {human(work.gradients)}"
        raise PlanError(
            f"the device tier is short for this batch of {batch.sequences} x {batch.tokens}: need {human(work.total)} ({parts}); "
            f"have {human(left)} beside state and slots. Ways out: give prepare(batch=({batch.sequences}, {batch.tokens})), "
            "so that less rests on the device; use a smaller batch; raise the device budget."
        )

    def describe(self) -> dict[str, dict[str, int]]:
        """Bytes of each role on each tier."""
        out = {role: dict.fromkeys(TIERS, 0) for role in ("parameter", "gradient", "optimizer")}
        for u, unit in enumerate(self.layouts):
            out["parameter"][self.parameter[u]] += sum(f.nbytes for f in unit.flats)
            for i, chunk in enumerate(chunks_of(unit)):
                out["gradient"][self.gradient[u][i]] += gradient_chunk_bytes(chunk, self.grad)
                out["optimizer"][self.state[u][i]] += state_chunk_bytes(chunk, self.own_master)
        return out


def state_element_bytes(own_master: bool) -> int:
    return 8 if own_master else 12


def state_chunk_bytes(chunk: Chunk, own_master: bool) -> int:
    return chunk.numel * state_element_bytes(own_master)


def gradient_chunk_bytes(chunk: Chunk, grad: str) -> int:
    return chunk.numel * DTYPE_BYTES[grad]


def chunks_of(unit: UnitLayout) -> tuple[Chunk, ...]:
    return unit.trained.chunks if unit.trained else ()


def human(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB" if n >= 1 << 30 else f"{n / (1 << 20):.1f} MiB"


class _Filler:
    """Hands out what is left of each tier; a role fixed to a tier takes from that tier alone."""

    def __init__(self, left: dict[str, int]) -> None:
        self.left = left
        self.taken = dict.fromkeys(TIERS, 0)

    def put(self, nbytes: int, what: str, allowed: Sequence[str]) -> str:
        size = round_up(nbytes, PAGE)
        for tier in allowed:
            if size <= self.left[tier]:
                self.left[tier] -= size
                self.taken[tier] += size
                return tier
        raise _Short(allowed[-1], what, size)


class _Short(Exception):
    def __init__(self, tier: str, what: str, nbytes: int) -> None:
        super().__init__(what)
        self.tier, self.what, self.nbytes = tier, what, nbytes


@dataclass(frozen=True)
class _Request:
    units: tuple[UnitSpec, ...]
    capacities: Capacities
    compute: str
    grad: str
    place: dict[str, str]
    activations: str
    batch: demand.Batch | None

    def allowed(self, role: str) -> tuple[str, ...]:
        fixed = self.place.get(role)
        if fixed is not None:
            return (fixed,)
        return TIERS if self.capacities.rests else TIERS[1:]

    @property
    def own_master(self) -> bool:
        return self.compute == "fp32"


@dataclass(frozen=True)
class _Staging:
    """What is tried: how activations are treated, what that needs of the device, and how NVMe traffic is staged."""

    mode: str
    work: demand.Working
    chunk: int
    frames: int


def check_place(place: dict[str, str] | None, capacities: Capacities) -> dict[str, str]:
    for role, tier in (place or {}).items():
        if role not in ("parameter", "gradient", "optimizer"):
            raise ConfigError(f'place: unknown role "{role}"; roles are parameter, gradient, optimizer')
        if tier not in TIERS:
            raise ConfigError(f'place.{role}: unknown tier "{tier}"; tiers are device, host, nvme')
        if tier == "nvme" and not capacities.nvme:
            raise ConfigError(f"place.{role} is nvme, but tiers.nvme names no directory")
        if tier == "device" and not capacities.rests:
            raise ConfigError(f"place.{role} is device, which this device does not support yet; use host or nvme")
    return dict(place or {})


def frame_element_bytes(request: _Request) -> int:
    return state_element_bytes(request.own_master) + 4 + DTYPE_BYTES[request.compute]  # gradients as sums, fp32


def _attempt(request: _Request, how: _Staging, slots: tuple[int, ...], bindable: bool) -> Plan:
    """One way to lay everything out; raises _Short where it does not fit."""
    cap, frames = request.capacities, how.frames
    budgets = {"device": cap.device, "host": cap.host, "nvme": cap.nvme}
    frame_bytes = round_up(how.chunk * frame_element_bytes(request), PAGE) if frames else 0
    left = {"device": cap.device - how.work.total - sum(slots), "host": cap.host - frames * frame_bytes, "nvme": cap.nvme}
    if left["device"] < 0:
        raise _Short("device", "slots, activations, logits and gradients in flight", -left["device"])
    if left["host"] < 0:
        raise _Short("host", f"{frames} staging buffers", -left["host"])
    if request.batch is None:  # activations are still to come
        left["device"] = min(left["device"], cap.device // 2)
    fill = _Filler(left)
    layouts = tuple(lay_out(u, request.compute, how.chunk) for u in request.units)
    resident = _bindable_tiers(request) if bindable else ()
    parameter = []
    for unit in layouts:
        size = sum(f.nbytes for f in unit.flats)
        parameter.append(fill.put(size, f"the parameters of {unit.spec.name}", resident or request.allowed("parameter")))
    gradient = tuple(
        tuple(fill.put(gradient_chunk_bytes(c, request.grad), f"gradients of {u.spec.name}", request.allowed("gradient")) for c in chunks_of(u))
        for u in layouts
    )
    state = tuple(
        tuple(
            fill.put(state_chunk_bytes(c, request.own_master), f"optimizer state of {u.spec.name}", request.allowed("optimizer"))
            for c in chunks_of(u)
        )
        for u in layouts
    )
    if not frames and fill.taken["nvme"]:
        raise _Short("host", "staging buffers for what rests on nvme", 0)
    return Plan(
        layouts=layouts, compute=request.compute, grad=request.grad, own_master=request.own_master,
        parameter=tuple(parameter), gradient=gradient, state=state, slots=slots, frames=frames, frame_bytes=frame_bytes,
        activations=how.mode, asked=request.activations, batch=request.batch, working=how.work, resting=fill.taken, budgets=budgets,
    )  # fmt: skip


def _bindable_tiers(request: _Request) -> tuple[str, ...]:
    return tuple(t for t in request.allowed("parameter") if t == "device" or (t == "host" and request.capacities.direct))


def binds_in_place(layout: UnitLayout, tier: str, compute: str, direct: bool) -> bool:
    """Whether the device computes from where the unit's parameters rest, with no slot."""
    plain = all(f.dtype == compute or f.dtype not in ("fp32", "bf16", "fp16", "fp64") for f in layout.flats)
    return plain and (tier == "device" or (tier == "host" and direct))


def _with_slots(request: _Request, how: _Staging) -> Plan:
    """Tries without slots (all parameters where the device computes from them), then with ample ones, then with the fewest."""
    depth = 1 + max((u.depth for u in request.units), default=0)
    sizes = [slot_bytes(lay_out(u, request.compute, how.chunk), request.compute) for u in request.units]

    def moved(tiers: Sequence[str], direct: bool) -> list[int]:
        layouts = [lay_out(u, request.compute, how.chunk) for u in request.units]
        return [s for s, unit, tier in zip(sizes, layouts, tiers, strict=True) if not binds_in_place(unit, tier, request.compute, direct)]

    if _bindable_tiers(request):
        try:
            converted = moved(["device"] * len(sizes), True)
            return _attempt(request, how, demand.slot_sizes(converted, depth, 2), bindable=True)
        except _Short:
            pass
    try:
        plan = _attempt(request, how, demand.slot_sizes(sizes, depth, 3), bindable=False)
    except _Short:
        plan = _attempt(request, how, demand.fewest_slots(sizes, depth), bindable=False)
    still = moved(plan.parameter, request.capacities.direct)
    if len(still) < len(sizes):  # some rest where they compute: their slots are not needed
        plan = replace(plan, slots=min((demand.slot_sizes(still, depth, 3), plan.slots), key=sum))
    return plan


def plan_units(
    units: Sequence[UnitSpec],
    capacities: Capacities,
    precision: Precision,
    *,
    place: dict[str, str] | None = None,
    batch: demand.Batch | None = None,
    activations: str = "auto",
    accumulate: int = 1,
) -> Plan:
    """The plan for these units under these budgets; PlanError says which tier is short, of what, by how much, and three ways out."""
    grad = "fp32" if accumulate > 1 else precision.grad
    request = _Request(tuple(units), capacities, precision.compute, grad, check_place(place, capacities), activations, batch)
    modes = ("keep", "recompute") if activations == "auto" else (activations,)
    short: _Short | None = None
    best: Plan | None = None
    for mode in modes:
        work = demand.working(request.units, batch, precision.compute, grad, mode, capacities.device)
        for chunk, frames in _stagings(request):
            try:
                plan = _with_slots(request, _Staging(mode, work, chunk, frames))
            except _Short as e:
                short = e
                continue
            if best is None or plan.resting["nvme"] < best.resting["nvme"]:
                best = plan
            break
    if best is not None:
        return best
    if short is None:
        raise PlanError("there is nothing to plan")
    raise PlanError(_explain(request, short, batch, activations))


def _stagings(request: _Request) -> list[tuple[int, int]]:
    """(chunk elements, frames) worth trying, best first: no staging at all, then large chunks while staging stays a small share."""
    largest = max((u.numel for u in request.units), default=1)
    chunks = [c for c in CHUNKS if c <= max(round_up(largest, CHUNKS[-1]), CHUNKS[-1])] or [CHUNKS[-1]]
    tries = [] if "nvme" in request.place.values() else [(chunks[0], 0)]
    if not request.capacities.nvme:
        return tries
    size = frame_element_bytes(request)
    for share in (FRAMES_SHARE, 2, 1):
        for chunk in chunks:
            for frames in range(FRAMES_MOST, FRAMES_LEAST - 1, -1):
                if frames * chunk * size <= request.capacities.host // share and (frames >= 5 or chunk <= chunks[-1] * 2 or share < FRAMES_SHARE):
                    tries.append((chunk, frames))
                    break
    return tries or [(chunks[-1], FRAMES_LEAST)]


def _explain(request: _Request, short: _Short, batch: demand.Batch | None, activations: str) -> str:
    cap = request.capacities
    have = {"device": cap.device, "host": cap.host, "nvme": cap.nvme}
    element = state_element_bytes(request.own_master) + DTYPE_BYTES[request.grad] + DTYPE_BYTES[request.compute]
    total = sum(p.numel * (element if p.trained else DTYPE_BYTES[p.dtype]) for u in request.units for p in u.parameters)
    slots = sum(
        demand.fewest_slots([slot_bytes(lay_out(u, request.compute, CHUNKS[0]), request.compute) for u in request.units], 1 + max((u.depth for u in request.units), default=0))
    )
    work = demand.working(request.units, batch, request.compute, request.grad, "recompute" if activations == "auto" else activations, cap.device)
    if short.tier == "device":
        parts = f"slots {human(slots)}, activations {human(work.activations)}, logits {human(work.logits)}, gradients {human(work.gradients)}"
        need = f"{human(work.total + slots)} ({parts})"
        less = "freeze or split the largest parameters" if activations != "keep" else 'set activations = "recompute"'
        ways = ("raise the device budget", "use a smaller batch or shorter sequences", less)
    elif short.tier == "host":
        need = f"{human(have['host'] + short.nbytes)} or more, for {short.what}"
        ways = ("raise the host budget", "name a directory under tiers.nvme", "let the planner choose (no place)")
    else:
        need = f"{human(have['nvme'] + short.nbytes)} or more, for {short.what}"
        ways = ("raise the nvme budget or add a directory under tiers.nvme", "raise the host budget", "train fewer parameters (freeze some)")
    return (
        f"the {short.tier} tier is short: need {need}; have {human(have[short.tier])}. The whole state is {human(total)}; "
        f"device + host + nvme are {human(cap.device)} + {human(cap.host)} + {human(cap.nvme)}. "
        f"Ways out: {ways[0]}; {ways[1]}; {ways[2]}."
    )
