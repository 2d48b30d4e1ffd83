"""How long a step of a run may take: this machine's rates and the model's compute, measured before the first step.

Rates come from the machine's profile where `offload bench` has left one; what is not there is measured here, within the budgets and in a few seconds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import statistics
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import _core
from offload.config import Precision, RunConfig, Tiers
from offload.engine.build import discover
from offload.engine.record import DTYPES
from offload.errors import PlanError
from offload.observe import adam, measure, profile
from offload.observe.compute import calls_of, compute_seconds, timed
from offload.planner import cost
from offload.planner.cost import Compute, Rates, Traffic
from offload.planner.freed import freed
from offload.planner.placement import Plan, holding, keeping, keeping_gradients
from offload.planner.schedule import LEAST_GAIN, TRIED, Speeds, Work, choose_early, schedule, taken
from offload.train import loss, model

MIB = 1 << 20
PROBE_BYTES = 512 * MIB
PARAMETERS = 8 * MIB
SHARE = 2  # each measurement takes at most this fraction of the memory it may take
ROUNDS = 3


@dataclass(frozen=True)
class Estimate:
    """What a machine can do for a run: seconds of one micro-batch's compute by unit, the order in which a forward uses them, and rates."""

    units: tuple[Compute, ...]
    order: tuple[int, ...]
    rates: Rates

    def bound(self, traffic: Traffic, *, recomputed: Collection[int], accumulate: int) -> dict[str, Any]:
        """`bound_step_seconds` and `limiting_link` of a step that moves `traffic` and computes these units again."""
        compute = sum(self._compute(recomputed, accumulate), Compute(0.0, 0.0))
        seconds, link = cost.bound(compute, traffic, self.rates)
        return {"bound_step_seconds": seconds, "limiting_link": link}

    def predicted(self, plan: Plan, *, direct: bool, accumulate: int, early: int = 0) -> float:
        """Seconds of a step by the schedule that the runtime keeps, `early` units updated during the backward."""
        speeds, work = self._speeds_and_work(plan, direct, accumulate, early)
        return schedule(plan, self.order, speeds, work, direct, early).seconds

    def early(self, plan: Plan, *, direct: bool, accumulate: int) -> int:
        """How many units are best updated during the backward."""
        speeds, work = self._speeds_and_work(plan, direct, accumulate)
        return choose_early(plan, self.order, speeds, work, direct)

    def fastest(self, planned: Plan, *, direct: bool, accumulate: int, early: bool) -> Plan:
        """Of plans that keep more and more units' activations, the first that takes no longer than any; see [Note: kept units] in the planner. Of it
        and those like it in which fewer units rest whole on a device of its own, for its room to spare others' traffic, the first that takes no
        longer than any. Of one whose gradients pass, and the one like it that keeps them where that fits, the shorter.

        `early`: updates may run during the backward. A plan whose activations were not for the planner to choose keeps those that it has.
        """
        chosen = self._fastest_kept(planned, direct, accumulate, early)
        chosen = self._fastest_whole(chosen, direct, accumulate, early)
        if not chosen.passing:
            return chosen
        try:
            other = keeping_gradients(chosen)
        except PlanError:
            return chosen
        passing, kept = (self._seconds(plan, direct, accumulate, early) for plan in (chosen, other))
        return other if passing > (1 + LEAST_GAIN) * kept else chosen

    def _seconds(self, plan: Plan, direct: bool, accumulate: int, early: bool) -> float:
        """Of a step whose updates are early as far as that pays, if they may be."""
        units = self.early(plan, direct=direct, accumulate=accumulate) if early else 0
        return self.predicted(plan, direct=direct, accumulate=accumulate, early=units)

    def _fastest_kept(self, planned: Plan, direct: bool, accumulate: int, early: bool) -> Plan:
        if planned.asked != "auto" or not planned.recomputed:
            return planned
        repeated = planned.kept + len(planned.recomputed)
        seconds: list[tuple[Plan, float]] = []
        for kept in sorted({planned.kept, *(n for i in range(1, TRIED + 1) if (n := repeated * i // TRIED) > planned.kept)}):
            try:
                plan = keeping(planned, kept) if kept > planned.kept else planned
            except PlanError:
                break
            if plan.activations not in (planned.activations, "keep"):
                continue  # it fits by sending the others' inputs away, whose copies on a CPU no link accounts for
            seconds.append((plan, self._seconds(plan, direct, accumulate, early)))
        least = min(s for _, s in seconds)
        return next(plan for plan, s in seconds if s <= (1 + LEAST_GAIN) * least)

    def _fastest_whole(self, planned: Plan, direct: bool, accumulate: int, early: bool) -> Plan:
        whole = sum(tier == "device" for tier in planned.parameter)
        if direct or not whole or planned.request is None or planned.request.place:
            return planned
        seconds = [(planned, self._seconds(planned, direct, accumulate, early))]
        for fewer in sorted({whole * i // TRIED for i in range(TRIED)} - {whole}, reverse=True):
            try:
                plan = holding(planned, fewer)
            except PlanError:
                break
            seconds.append((plan, self._seconds(plan, direct, accumulate, early)))
        least = min(s for _, s in seconds)
        return next(plan for plan, s in seconds if s <= (1 + LEAST_GAIN) * least)

    def _compute(self, recomputed: Collection[int], accumulate: int) -> list[Compute]:
        return [unit.of_step(number in recomputed, accumulate) for number, unit in enumerate(self.units)]

    def _speeds_and_work(self, plan: Plan, direct: bool, accumulate: int, early: int = 0) -> tuple[Speeds, list[Work]]:
        compute = self._compute(plan.recomputed, accumulate)
        traffic = cost.traffic_of(plan, direct=direct, accumulate=accumulate, taken=taken(plan, self.order, early))
        return cost.speeds(traffic, self.rates), [Work(unit.forward, unit.backward) for unit in compute]


def model_compute(model_config: Any, config: RunConfig, in_chunks: bool, device: torch.device) -> tuple[tuple[Compute, ...], tuple[int, ...]]:
    """Seconds of a micro-batch's forward and backward by unit, not recomputed, and the units in order of use; see observe/compute.py.

    The loss counts with the unit that is used last. What a unit's module does around others that it encloses does not count.
    """
    shape = (config.data.batch_size, config.data.seq_length)
    with FakeTensorMode():
        whole: Any = model.build(model_config, "cpu")
        found = discover(whole, "auto")
        tops = {id(f.modules[0]): number for number, f in enumerate(found)}
        innermost = [f for f in found if not any(id(m) in tops for m in f.modules[0].modules() if m is not f.modules[0])]
        ids = torch.zeros(shape, dtype=torch.int64)
        called = whole.base_model if in_chunks else whole
        calls = calls_of([(f.modules[0], f.repeated) for f in innermost], lambda: called(input_ids=ids, use_cache=False))
    dtype = DTYPES[config.precision.compute]
    units = [Compute(0.0, 0.0)] * len(found)
    order: dict[int, None] = {}
    for call, seconds in zip(calls, compute_seconds(calls, dtype, device), strict=True):
        number = tops[id(call.module)]
        units[number] += seconds
        order[number] = None
    order |= dict.fromkeys(range(len(found)))
    text = model_config.get_text_config()
    sizes = (*shape, int(text.hidden_size), int(text.vocab_size))
    units[next(reversed(order))] += Compute(_loss_seconds(sizes, in_chunks, dtype, device), 0.0)
    return tuple(units), tuple(order)


def _loss_seconds(sizes: tuple[int, int, int, int], in_chunks: bool, dtype: torch.dtype, device: torch.device) -> float:
    """Of the loss and its gradients: from the last hidden state if `in_chunks`, else from all logits."""
    rows, length, width, vocabulary = sizes
    ids = torch.randint(0, vocabulary, (rows, length), device=device)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02).requires_grad_()

    if in_chunks:
        hidden, weight = random(rows, length, width), random(vocabulary, width)
        return timed(lambda: loss.chunked_causal_loss(hidden, weight, ids), device)
    logits = random(rows, length, vocabulary)

    def whole() -> None:
        value = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        torch.autograd.grad(value, logits)

    return timed(whole, device)


def machine_rates(tiers: Tiers, precision: Precision, device: torch.device, room: int, local_ranks: int = 1) -> Rates:
    """This machine's links and updates, measured in `room` bytes of memory. SwapError or ConfigError where a drive cannot be measured.

    Of several ranks on this machine each has its share of drives and cores: of what the profile has an equal part, while what is measured is measured
    by all at once.
    """
    read, write, mixed = _drive_rates(tiers, room, local_ranks)
    updates = _update_rate(precision, room, local_ranks)
    if device.type != "cuda":
        return Rates(read, write, mixed, None, None, updates, shared_cores=True)
    figures = profile.load("copy") or {"gb_per_second": measure.copy_rates(64 * MIB)}
    copies = figures["gb_per_second"]
    h2d, d2h = (copies[name] * 1e9 for name in ("host to device, pinned", "device to host, pinned"))
    return Rates(read, write, mixed, h2d, d2h, updates, shared_cores=False)


def _drive_rates(tiers: Tiers, room: int, local_ranks: int) -> tuple[float, float, float] | tuple[None, None, None]:
    """Bytes a second read, written, and in all while both: of the slowest drive times their number, as state is striped evenly."""
    by_drive: dict[str, tuple[str, int]] = {}
    for directory, nbytes in tiers.nvme:
        by_drive.setdefault(profile.drive(directory), (directory, nbytes))
    found = [_drive_rate(Path(directory), nbytes, room, local_ranks) for directory, nbytes in by_drive.values()]
    if not found:
        return None, None, None
    read, write, mixed = (min(rates) * len(found) * 1e9 for rates in zip(*found, strict=True))
    return read, write, mixed


def _drive_rate(directory: Path, nbytes: int, room: int, local_ranks: int) -> tuple[float, ...]:
    saved = profile.load("swap", where=directory)
    if saved is not None and "SwapFile" in saved.get("gb_per_second", {}):
        return tuple(float(saved["gb_per_second"]["SwapFile"][op]) / local_ranks for op in measure.SWAP_OPS)
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    piece = max(MIB, min(measure.PIECE, room // SHARE // measure.PIECES_IN_FLIGHT // MIB * MIB))
    size = max(piece, min(PROBE_BYTES, nbytes, shutil.disk_usage(directory).free // 2 // local_ranks) // piece * piece)
    try:
        with tempfile.TemporaryDirectory(prefix="offload-probe-", dir=directory) as where:
            rates = measure.swap_rates(Path(where), size, ROUNDS, buffers=measure.random_buffers(piece))
    finally:
        if made:
            with contextlib.suppress(OSError):  # another run may have come to use it
                os.rmdir(directory)
    return tuple(rates[op] for op in measure.SWAP_OPS)


def _update_rate(precision: Precision, room: int, local_ranks: int) -> float:
    """Parameters a second of the run's own form of update."""
    form = adam.form_of(precision)
    for row in (profile.load("adam") or {}).get("rows", []):
        if row.get("form") == form.name:
            return float(row["gb_per_second"]) * 1e9 / form.bytes_per_parameter / local_ranks
    n = max(1 << 16, min(PARAMETERS, room // SHARE // adam.BYTES_A_PARAMETER))
    return n / statistics.median(adam.step_seconds(form, n))


def estimate(model_config: Any, config: RunConfig, plan: Plan, in_chunks: bool, device: torch.device, local_ranks: int = 1) -> Estimate:
    """Measures compute, and what the machine's profile does not have, in the memory that the plan will take."""
    room = plan.peak_bytes["host"] + (config.tiers.device if device.type != "cuda" else 0)
    _core.keep_freed(device.type != "cuda" and freed(plan).kept)  # as the run will: page faults are a fifth of a unit's compute
    try:
        units, order = model_compute(model_config, config, in_chunks, device)
        return Estimate(units, order, machine_rates(config.tiers_value(), config.precision_value(), device, room, local_ranks))
    finally:
        gc.collect()  # a traced model is full of cycles
        _core.keep_freed(False)
        _core.trim()
