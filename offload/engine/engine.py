"""The engine of one prepared model: owns its tiers, its state and its hooks."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import torch
import xxhash
from torch import nn

from offload import _core
from offload.config import Tiers
from offload.dist.collectives import alike, same
from offload.dist.divided import is_divided, part_of
from offload.dist.world import World, leave
from offload.engine.activations import Activations, Pool
from offload.engine.agreement import agree_on_step
from offload.engine.atrest import ATTRIBUTES as AT_REST
from offload.engine.atrest import AtRest
from offload.engine.averaging import Averaging
from offload.engine.background import Background
from offload.engine.build import Found, arena_bytes, make_records, make_shards
from offload.engine.early import Early
from offload.engine.gradients import Gradients
from offload.engine.graph import expected
from offload.engine.initialise import fill_buffers, initial_values
from offload.engine.passing import Passing
from offload.engine.places import Places
from offload.engine.record import CODES, DTYPES, Record, Unit
from offload.engine.reduction import Reduction
from offload.engine.refresh import Refresh
from offload.engine.resident import Resident
from offload.engine.slots import Slots
from offload.engine.sources import MomentSource, ValueSource
from offload.engine.state import READERS, State, ahead
from offload.engine.streamer import Streamer, scaled, watch_scalers
from offload.engine.update import Updates
from offload.errors import BudgetError, ConfigError, OffloadError, RankError
from offload.memory.arena import Arena, reserve
from offload.memory.budget import Budget
from offload.memory.shard import Shard, check_process
from offload.memory.stalls import RANKS
from offload.memory.swap import Extent, SwapSpace
from offload.planner.boundaries import Boundaries
from offload.planner.demand import Batch
from offload.planner.freed import freed
from offload.planner.placement import Plan, human
from offload.planner.sums import sum_bytes
from offload.transfer.device import Device
from offload.transfer.frames import FramePool

log = logging.getLogger("offload")


class Engine:
    """Everything behind one prepared model. Built by `prepare`; `close()` gives all of it back."""

    def __init__(
        self, model: nn.Module, found: Sequence[Found], plan: Plan, tiers: Tiers, device: Device, seed: int, updates_after: int = 0,
        world: World | None = None, beside: World | None = None,
    ) -> None:  # fmt: skip
        """`updates_after`: how many backwards a step has, in the last of which updates start; 0: they start at step(). `world`: several ranks, as
        many as the plan is for. `beside`: those over which parameters are divided already."""
        self.world, self.beside = world, beside
        self.job = world if beside is None else beside.home
        self.model, self.plan, self.tiers, self.device, self.seed = model, plan, tiers, device, seed
        self.stalls = device.stalls
        self._updates_after = updates_after
        self.budgets = {tier: Budget(tier, n) for tier, n in tiers.budget_bytes().items()}
        self.closed = False
        self._owner = os.getpid()
        weakref.finalize(self, device.close)  # its threads end with a model that is dropped without close()
        self.runtime: object = None
        self.skipped = 0
        self.reduction: Reduction | None = None
        self.refresh: Refresh | None = None
        self.space: SwapSpace | None = None
        self._held = [
            self.budgets[tier].reserve(n, "state, slots and staging") for tier, n in (arena_bytes(plan) | {"nvme": plan.peak_bytes["nvme"]}).items()
        ]
        self._held.append(self.budgets["host"].reserve(tiers.checksum_bytes(plan.peak_bytes["nvme"]), "checksums"))
        self._further: list[Arena] = []
        self.activations = Activations(device, lambda x: self.slots.unit_at(x.untyped_storage().data_ptr()) is not None)
        self.units, self.records = make_records(found, plan)
        try:
            with alike(self.job, "opening tiers"):
                check_takeable(self.records, self.units)
                self._open_tiers(tiers, plan)
                self._build(plan)
            self._take_over()
        except BaseException as error:
            try:
                if isinstance(error, Exception) and not isinstance(error, RankError):  # else other ranks may not be there to give their parts
                    self._give_back()
            finally:
                self._close_tiers()
            raise
        self.moved_before = dict(world.moved) if world is not None else {}  # among ranks, by others and by preparing

    def _open_tiers(self, tiers: Tiers, plan: Plan) -> None:
        sizes = arena_bytes(plan)
        if plan.peak_bytes["nvme"]:
            self.space = self._swap_space()
        self.host = Arena("host", sizes["host"])
        self.device.register(self.host)
        self.arena = self.device.memory(sizes["device"])
        make_shards(self.units, plan, self.host, self.arena, self.space)
        self._open_sums(plan)
        staging = plan.staging
        self.update_frames = [self.host.take(staging.frame_bytes) for _ in range(staging.updates)]
        self.frames = FramePool(self.host.take(staging.frame_bytes), staging.parts, staging.part_bytes, self.stalls) if staging.parts else None
        if plan.boundaries.nbytes:
            self._open_activations(plan.boundaries, self.host)
        if self.space is not None:
            self.space.open()

    def _open_sums(self, plan: Plan) -> None:
        """Gives the units that the plan says room on the device for the sums of their gradients."""
        if not plan.summed:
            return
        if not self._can_sum:
            raise ConfigError(
                "the plan has gradients summed on the device, which this device does not do; give prepare() a plan that was made for this device"
            )
        self._held.append(self.budgets["device"].reserve(plan.sum_bytes, "sums of gradients"))
        self._further.append(self.device.memory(plan.sum_bytes))
        for unit in (self.units[u] for u in sorted(plan.summed)):
            unit.sums = self._further[-1].take(sum_bytes(unit.layout)).view(torch.float32)

    @property
    def _can_sum(self) -> bool:
        return self.device.rests and not self.device.direct

    def _swap_space(self) -> SwapSpace:
        rank = self.job.name(self.job.rank) if self.job is not None else None
        return SwapSpace(self.tiers.nvme, checksum=self.tiers.checksum, stalls=self.stalls, rank=rank)

    def _build(self, plan: Plan) -> None:
        compute = DTYPES[plan.compute]
        ranks = self.world.within if self.world is not None else None, plan.share
        self.resident = Resident(self.units, plan.form, DTYPES[plan.grad], self.device)
        self.background = Background(self.units, self._make_updates(DTYPES[plan.grad]), self.resident, self.stalls)
        self.state = State(self.units, plan.form, self._before_access, self.background, self._refresh, *ranks)
        self.slots = Slots(self.units, plan.slots, self.device, compute, self.frames, self.arena.take, self.background, *ranks)
        self.places = Places(self.units, DTYPES[plan.grad], self.device, self.frames, self.resident)
        self.gradients = Gradients(self.units, self.records, self.places, self.device, self.resident, plan.accumulate)
        self.passing = Passing(plan.places, plan.passing, self.background.let_go)
        self.places.let_go = self.passing.let_go
        if self.world is not None:
            self._build_shared(plan, self.world)
        self.values = [ValueSource(r, self) for r in self.records]

    def _build_shared(self, plan: Plan, world: World) -> None:
        """What several ranks need besides."""
        self.reduction = self.gradients.share(plan.share, DTYPES[plan.moves], world)
        self.reduction.average = Averaging(self.gradients, world, self.reduction.queue).start
        if plan.share.divides("optimizer") and not plan.share.divides("parameter"):
            background = self.background
            self.refresh = Refresh(
                self.units, plan.share, world.within, self.frames, self.stalls, lambda unit: background.wait_unit(unit, tell=False, own=True)
            )
            self.background.jobs.others = self.refresh

    def _make_updates(self, grad: torch.dtype) -> Updates:
        plan, lent = self.plan, self.frames.all if self.frames is not None else ()
        return Updates(
            self.units, self.records, plan.form, grad, self.update_frames, plan.staging.frame_bytes, self.seed, self.device.direct,
            self.resident.numbers, lent, plan.share,
        )  # fmt: skip

    def _take_over(self) -> None:
        """Values go to their shards, and parameters become tensors at rest, unit by unit."""
        for unit in self.units:
            unit.initialised = not any(part_of(r.parameter).is_meta for r in unit.records)
            trouble: Exception | None = None
            for record in unit.records:
                value = part_of(record.parameter)
                if not value.is_meta:
                    value = self._first_rank(value, record.name, record.divided is not None and record.divided.counted_once)
                    try:
                        if trouble is None:
                            self.state.write_value(record, value, ready=False)
                    except Exception as error:  # ranks take values together, to the last
                        trouble = error
            with alike(self.job, f"taking the parameters of {unit.name}"):
                if trouble is not None:
                    raise trouble
                for record in unit.records:
                    _exchange(record, AtRest(self.values[record.number]))
        with alike(self.job, "making buffers"):
            fill_buffers(self.model, self.seed)
        if self.job is not None:
            with torch.no_grad():
                for name, held in self.model.named_buffers():
                    part_of(held).copy_(self._first_rank(part_of(held), name, is_divided(held)))
        if self.device.compute.type != "cpu":
            for module in self.model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = buffer.to(self.device.compute)
        self.streamer = Streamer(
            self.model, self.units, self.records, self.slots, self.gradients, self.activations, self.plan.recomputed, self.initialise
        )
        self.early = Early(
            self.units, self.gradients, self.background, self.slots.uses, self.streamer.order.forward, self._updates_after, self.passing,
            self._keep_gradients,
        )  # fmt: skip
        self.streamer.early = self.early
        if self._updates_after:
            watch_scalers()
        self.state.give_up = self.slots.give_up
        self.state.guard = lambda record: self.early.guard_use(record.unit)
        self.gradients.guard, self.gradients.came, self.gradients.claim = self.early.guard, self.early.came, self.early.claim
        self.places.takes = self.early.takes
        if self.reduction is not None:
            self.gradients.came = self.reduction.came
            self.streamer.after_backward = self._after_backward
        self.streamer.on_root, self.streamer.unplanned = self._close_plan, self.plan.batch is None
        self.streamer.before_backward = self._before_backward
        self.gradients.before_sums = self.widen_gradients

    def _first_rank(self, value: torch.Tensor, name: str, divided: bool) -> torch.Tensor:
        """The first rank's value; of what is a part of a tensor that ranks have divided already, that of the first with this part. A collective."""
        if self.beside is not None and not divided:
            value = same(self.beside, value, name)
        return value if self.world is None else same(self.world, value, name)

    def _give_back(self) -> None:
        """After a failed prepare(): parameters are plain tensors again. A collective: another rank may have taken more of them than this."""
        own = [r.number for r in self.records if isinstance(part_of(r.parameter), AtRest)]
        taken = own if self.job is None else sorted(set().union(*self.job.share(own, "what a failed prepare() has taken")))
        for record in (self.records[number] for number in taken):
            made = self.units[record.unit].initialised
            value = self.state.read_value(record) if made else torch.empty(record.shape, dtype=record.dtype, device="meta")
            if record.number in own:
                _exchange(record, value)

    def _close_plan(self, inputs: list[torch.Tensor]) -> None:
        """At the first forward of a plan made without a batch: activations are planned for now, or refused before anything is computed."""
        first = next((x for x in inputs if x.ndim > 1), next((x for x in inputs if x.ndim == 1), None))
        if self.plan.batch is None and first is not None and torch.is_grad_enabled():
            rows = first.shape[:-1].numel() if first.is_floating_point() else first.numel()  # features are no tokens
            sequences = first.shape[0] if first.ndim > 1 else 1
            batch = sequences, max(1, rows // max(1, sequences))
            if self.job is not None:
                told = self.job.share(batch, "shape of the batch")
                batch = max(b[0] for b in told), max(b[1] for b in told)
            made = self.plan.closed(Batch(*batch))
            if self.job is not None:
                self.job.agree([made.activations, made.kept], "the treatment of activations (budgets are to be the same)")
            if made.summed and (self.gradients.entries.any_came() or not self._can_sum):
                made = replace(made, summed=frozenset())  # some are summed elsewhere already
            if made.boundaries.nbytes:
                self._reserve_boundaries(made.boundaries)
            if made.summed:
                self._open_sums(made)
                self.resident.replace(self.places.dtype)
            self.device.in_flight_bytes_most = made.working.in_flight
            self.device.keep(*freed(made))
            self.plan, self.streamer.recomputed, self.streamer.unplanned = made, made.recomputed, False

    def _reserve_boundaries(self, boundaries: Boundaries) -> None:
        """For a plan that is closed late. BudgetError or SwapError before anything else has happened."""
        needs = boundaries.by_tier
        needs["host"] += self.tiers.checksum_bytes(needs["nvme"])
        with ExitStack() as undo:
            for tier, nbytes in needs.items():
                self._held.append(undo.enter_context(self.budgets[tier].reserve(nbytes, "boundary activations")))
            opening = self.space is None and needs["nvme"] > 0
            if opening:
                self.space = self._swap_space()
                undo.callback(self._drop_space)
            self._open_activations(boundaries, self._further_memory(boundaries.by_tier["host"]))
            if opening and self.space is not None:
                self.space.open()
            undo.pop_all()
        self.device.resident_bytes_most += needs["host"]

    def _drop_space(self) -> None:
        """A swap space that could not be opened is none."""
        space, self.space = self.space, None
        if space is not None:
            space.close()

    def _open_activations(self, boundaries: Boundaries, arena: Arena) -> None:
        pool = Pool(self._more_for_boundaries, self.activations.settle, self.space)
        if boundaries.tier == "host":
            pool.add(arena.take(boundaries.nbytes))
        elif self.space is not None:
            for nbytes in filter(None, boundaries.sizes):
                pool.add(self.space.allocate(nbytes))
        self.activations.open(pool, [arena.take(boundaries.buffer_bytes) for _ in range(boundaries.buffers)])

    def _further_memory(self, nbytes: int) -> Arena:
        self._further.append(Arena("activations", nbytes))
        self.device.register(self._further[-1])
        return self._further[-1]

    def _more_for_boundaries(self, nbytes: int) -> torch.Tensor | Extent:
        """More is alive at once than was planned for (several forwards before a backward, wider inputs): it stays within the budget."""
        tier, what = str(self.plan.boundaries.tier), "one more boundary activation than planned"
        self._held.append(self.budgets[tier].reserve(nbytes, what))
        if tier == "host":
            return self._further_memory(nbytes).take(nbytes)
        assert self.space is not None
        self._held.append(self.budgets["host"].reserve(self.tiers.checksum_bytes(nbytes), f"checksums of {what}"))
        return self.space.allocate(nbytes)

    # Values

    def initialise(self, number: int) -> None:
        """Gives those of a unit's parameters that have no value theirs, by the architecture's rules. ConfigError if one has no rule."""
        unit = self.units[number]
        if unit.initialised:
            return
        missing = [r for r in unit.records if not r.written]
        if missing:
            values = initial_values(self.model, missing, self.seed)
            for record in missing:
                made = values.pop(record.name)
                self.state.write_parts(record, made if record.divided is None else record.divided.parts(made), ready=False)
        unit.initialised = True

    def _before_access(self, record: Record, reading: bool) -> None:
        if self.closed:
            raise OffloadError(f"the runtime that holds {record.name} was closed")
        self.state.guard(record)
        if reading and not record.written:
            self.initialise(record.unit)

    def _refresh(self, record: Record, start: int, stored: torch.Tensor) -> None:
        """A part of a value, from element `start` on, was written at rest: a copy in a slot follows."""
        if record.unit in self.slots.where:
            flat = self.slots.resident(record.unit)[record.flat]
            flat[record.offset + start : record.offset + start + stored.numel()].copy_(stored)

    # Gradients

    def _before_backward(self) -> None:
        if self.closed:
            raise OffloadError("the runtime of this model was closed; prepare the model again")
        self.gradients.entries.check_addends(self.records)
        if self.places.dtype != torch.float32 and any(self.gradients.entries.earlier(r) for r in self.records if r.trained):
            self.early.refuse("a further backward")
            self.widen_gradients()
        self.early.begin(scaled())
        self.background.read_ahead(self.early.order())
        if self.reduction is not None:
            own = expected(self.records)
            if own is not None:
                self.reduction.begin(own)

    def _after_backward(self, whole: bool) -> None:
        assert self.reduction is not None
        if whole:
            self.reduction.finish()
        else:
            self.reduction.abandon()

    def widen_gradients(self) -> None:
        """A backward adds to gradients kept in fewer bits: sums are fp32 from here on, or BudgetError before anything is computed."""
        if self.passing.units:
            raise BudgetError(
                "a second backward before the step sums gradients, for which this plan (keep_gradients=False) has no place. Declare it with "
                "accumulate=N, make the plan with keep_gradients=True, or call zero_grad() between"
            )
        need, there = (sum(2 * s.nbytes for u in self.units for s in u.gradients if self.resident.has(u.number) == rests) for rests in (False, True))
        tier = next((t for t in ("host", "nvme") if self._can_take(t, need)), None)
        room = self.plan.working.room(self.budgets["device"].free)
        if tier is None or (there and there > room):
            raise BudgetError(
                f"a second backward before the step keeps sums in fp32, which needs {human(need)}"
                f"{f' and {human(there)} on the device' if there else ''}; the host tier has {human(self.budgets['host'].free)} left, "
                f"nvme {human(self.budgets['nvme'].free)}{f', the device {human(max(0, room))}' if there else ''}. "
                "Declare it with prepare(..., accumulate=N), raise a budget, or call zero_grad() between"
            )
        further = self._further_shards(tier, need, "fp32 sums of gradients")
        self._held.append(self.budgets["device"].reserve(there, "fp32 sums of gradients"))
        self.plan = replace(self.plan, working=self.plan.working.beside(there, room))
        self.device.in_flight_bytes_most = self.plan.working.in_flight
        self.background.synchronize()
        self.background.drop()
        self.gradients.flush()  # what was in flight has given way
        device = [self.device.memory(there)] if there else []
        self._further += device

        def reshard(unit: Unit, chunk: int) -> Shard:
            nbytes = 2 * unit.gradients[chunk].nbytes
            return Shard("device", nbytes, memory=device[0].take(nbytes)) if device and self.resident.has(unit.number) else further(nbytes)

        self.places.widen(reshard)
        self.resident.replace(torch.float32)
        self.background.replace(self._make_updates(torch.float32))

    def _keep_gradients(self, units: Sequence[int]) -> None:
        """Gives units whose gradients would pass places of their own: BudgetError, before any comes, where budgets have none left."""
        need = sum(s.nbytes for u in units for s in self.units[u].gradients)
        tier = next((t for t in ("host", "nvme") if self._can_take(t, need)), None)
        if tier is None:
            which = self.units[units[0]].name + (f" and {len(units) - 1} more units" if len(units) > 1 else "")
            raise BudgetError(
                f"gradients of {which} have to wait for step(), as not all parameters of a unit get one in this backward, or no optimizer would step "
                f"them all, and this plan (keep_gradients=False) has no place for them: need {human(need)}; the host tier has "
                f"{human(self.budgets['host'].free)} left, nvme {human(self.budgets['nvme'].free)}. "
                'Raise a budget, or keep gradients, as with updates="forward"'
            )
        further = self._further_shards(tier, need, "gradients that wait for the step")
        self.background.synchronize()
        self.background.drop()
        for u in units:
            self.units[u].gradients = [further(s.nbytes) for s in self.units[u].gradients]
            self.passing.leave(u)
        self.background.replace(self._make_updates(self.places.dtype))

    def _further_shards(self, tier: str, nbytes: int, what: str) -> Callable[[int], Shard]:
        """So many bytes of a budget that has them, beside what was planned; gives what cuts shards from them."""
        sums = self.tiers.checksum_bytes(nbytes) if tier == "nvme" else 0
        self._held.append(self.budgets["host"].reserve(sums, f"checksums of {what}"))  # refused, if it is, before anything else is taken
        self._held.append(self.budgets[tier].reserve(nbytes, what))
        memory, at = reserve(nbytes) if tier == "host" else None, 0

        def cut(part: int) -> Shard:
            nonlocal at
            at += part
            if memory is not None:
                return Shard("host", part, memory=memory[at - part : at])
            assert self.space is not None
            return Shard("nvme", part, extent=self.space.allocate(part), space=self.space)

        return cut

    def _can_take(self, tier: str, nbytes: int) -> bool:
        return self.budgets[tier].free >= nbytes and (tier == "host" or (self.space is not None and self.frames is not None))

    def norm(self, records: Iterable[Record] | None = None) -> float:
        """The 2-norm of all gradients as they read."""
        present = self.gradients.adopt(self.records if records is None else records)
        self.gradients.settle()
        if self.beside is None:
            return math.sqrt(math.fsum(self.gradients.norm_squared(r) for r in present))
        own = [0.0, 0.0]  # of what is on all of those ranks, and of parts
        for record in present:
            own[record.divided is not None and record.divided.counted_once] += self.gradients.norm_squared(record)
        told = self.beside.share(own, "sums of squares of gradients")
        return math.sqrt(math.fsum([told[0][0], *(parts for _, parts in told)]))

    def not_finite(self, records: Iterable[Record]) -> Record | None:
        """Of these, which all ranks give, one whose gradient is not finite."""
        self.gradients.settle()
        bad = next((r.number for r in records if not math.isfinite(self.gradients.norm_squared(r))), None)
        if self.beside is not None:
            bad = next((number for number in self.beside.share(bad, "what is not finite") if number is not None), None)
        return None if bad is None else self.records[bad]

    # Updates

    def update(self, hypers: dict[int, dict[str, float | int | bool]]) -> None:
        """Starts updating the parameters whose numbers have hyperparameters (fields of ops.HYPER); their gradients have come to rest.

        SwapError if an earlier update is known to have failed; ConfigError where ranks would not update alike.
        """
        check_process(self._owner)
        self.stalls.computing()
        if self.stalls.recorder is not None:
            self.stalls.recorder.stepped()
        self.background.check()
        order = agreed = self.streamer.order.forward()
        if self.job is not None:
            with self.stalls.waiting(RANKS):
                agreed = agree_on_step(self.job, self.records, hypers, {n: self.gradients.entries[n].scale for n in hypers}, order)
        self.gradients.flush()
        self.device.settle()
        self.slots.settle()
        entries, left = self.gradients.entries, [n for n in hypers if not self.early.opened(self.records[n])]
        for number in left:
            entries.check_kept(self.records[number])
        table = self.background.hyper()
        for number in left:
            for key, value in hypers[number].items():
                table[number][key] = value
            table[number]["grad_scale"] *= entries[number].scale
            table[number]["active"] = 1
            self.records[number].version += 1
        if self.refresh is not None:
            self.refresh.settle()
        self.background.start(table, order)
        if self.refresh is not None:
            changed = {self.records[number].unit for number in hypers}
            self.refresh.start([unit for unit in agreed if unit in changed])
        self.early.reset()
        self.slots.forget()
        for unit, use in enumerate(self.slots.uses):
            if use.firm or use.soft:  # a step inside a forward or a backward
                self.background.wait_unit(unit)

    def moment(self, record: Record, role: str) -> torch.Tensor:
        return record.whole(AtRest(MomentSource(record, self.state, role)))

    # Whole

    def digest(self) -> str:
        """A hash, by name, of fp32 master values, moments and steps; frozen parameters by value. With several ranks a collective, alike on all."""
        whole = xxhash.xxh3_128()
        with ThreadPoolExecutor(READERS, "offload-digest") as pool:
            for record in sorted(self.records, key=lambda r: r.name):
                whole.update(f"{record.name} {record.step} ".encode())
                for role in ("master", "exp_avg", "exp_avg_sq") if record.trained else ("value",):
                    for part in ahead(pool if self.world is None else None, self.state.pieces(record, role)):
                        whole.update((part.float() if part.dtype in CODES else part).view(torch.uint8).numpy().data)
        if self.beside is not None:
            whole = xxhash.xxh3_128("".join(self.beside.share(whole.hexdigest(), "digests of parts")).encode())
        return whole.hexdigest()

    def synchronize(self) -> None:
        if self.closed:
            raise OffloadError("the runtime of this model was closed")
        self.gradients.settle()
        self.device.settle()
        self.background.synchronize()
        if self.refresh is not None:
            self.refresh.settle()

    def close(self) -> None:
        """Gives back memory, files and threads. Parameters cannot be read afterwards."""
        if self.closed:
            return
        try:
            self.streamer.close()
            self.gradients.settle(again=False)
            if self.refresh is not None:
                self.refresh.settle()
            self.background.finish()
        finally:
            self.closed = True
            self._close_tiers()

    def _close_tiers(self) -> None:
        self.device.close()
        for name in ("refresh", "slots", "gradients", "background", "activations"):
            if self.__dict__.get(name) is not None:
                getattr(self, name).close()
        if self.world is not None:
            leave(self.world)
        self.frames, self.update_frames = None, []
        for record in self.records:
            if record.parameter.grad is not None and isinstance(part_of(record.parameter.grad), AtRest):
                record.parameter.grad = None
        for unit in self.units:
            unit.parameters, unit.gradients, unit.states, unit.sums = [], [], [], None
        if self.space is not None:
            self.space.close()
        for arena in (getattr(self, "host", None), getattr(self, "arena", None), *self._further):
            if arena is not None:
                arena.close()
        for held in self._held:
            held.release()
        _core.trim()


def check_takeable(records: Iterable[Record], units: Sequence[Unit]) -> None:
    """ConfigError for parameters that cannot become tensors at rest, before any has."""
    for record in records:
        p = record.parameter
        if p.grad is not None:
            raise ConfigError(f"parameter {record.name} has a gradient already; call prepare() before the first backward, or set .grad = None")
        if weakref.getweakrefs(p):
            raise ConfigError(f"parameter {record.name} is weakly referenced by something, so it cannot be prepared; drop the weak reference first")
        if not vars(p).keys().isdisjoint(AT_REST):
            raise ConfigError(f"parameter {record.name} has an attribute {' or '.join(AT_REST)}, which has another meaning once prepared; rename it")
    for unit in units:
        meta = [r for r in unit.records if part_of(r.parameter).is_meta]
        if meta and len(meta) < len(unit.records):
            raise ConfigError(f"unit {unit.name} is partly on the meta device: {meta[0].name} is, others are not")


def _exchange(record: Record, value: torch.Tensor) -> None:
    """Puts `value` behind the parameter's object; hooks that were registered on it stay, and so does what users have hung on it."""
    p = record.parameter
    hooks, after, made = p._backward_hooks, p._post_accumulate_grad_hooks, nn.Parameter(record.whole(value), requires_grad=p.requires_grad)
    hung = {key: held for key, held in vars(p).items() if key not in AT_REST and key not in vars(made)}
    try:
        torch.utils.swap_tensors(p, made)
    except RuntimeError as error:
        raise ConfigError(
            f"parameter {record.name} cannot be prepared, as something else holds it (the graph of an earlier forward, or a weak reference): {error}"
        ) from None
    vars(p).update(hung)
    if hooks:
        p._backward_hooks = hooks
    if after:
        p._post_accumulate_grad_hooks = after
