"""`offload plan`: placement of a run, or ZeRO's arithmetic for a number of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offload.cli.app import emit
from offload.config import Precision, RunConfig, format_count, format_size, precision_of
from offload.errors import ConfigError

_WEAR = 100 * 10**12  # bytes: drives are rated for some hundreds of terabytes written


def _arithmetic(params: float, ranks: int, stage: int, replicate: int, precision: Precision) -> dict[str, Any]:
    """Bytes of state, and on each of `ranks` when `stage` divides optimizer state (1), gradients too (2), parameters too (3) (arXiv:1910.02054)
    within each of `replicate` groups."""
    from offload.dist.mesh import equal_rows
    from offload.planner.form import StateForm
    from offload.planner.layout import DTYPE_BYTES

    if not math.isfinite(params) or params < 1:
        raise ConfigError(f"--params {params}: give a number of 1 or more, as 70e9")
    count = int(params)
    parameter, gradient, optimizer = (
        count * DTYPE_BYTES[precision.compute], count * DTYPE_BYTES[precision.grad], StateForm.of(precision).nbytes(count)
    )  # fmt: skip
    of = len(equal_rows(ranks, replicate)[0])
    shares = (nbytes / (of if stage >= least else 1) for nbytes, least in ((optimizer, 1), (gradient, 2), (parameter, 3)))
    return {
        "parameters": count,
        "ranks": ranks,
        "stage": stage,
        "replicate": replicate,
        "state_bytes": parameter + gradient + optimizer,
        "state_bytes_per_rank": int(sum(shares)),
        "written_bytes_per_step": (optimizer + parameter) // of,  # all on NVMe
    }


def _placement(run: str, overrides: Sequence[str], ranks: int) -> dict[str, Any]:
    config = RunConfig.load(run, overrides)
    import torch

    from offload.memory.limits import check_environment
    from offload.observe.base import measure as measure_base
    from offload.planner.cost import traffic_of
    from offload.planner.leftover import fetches, slots_of
    from offload.planner.schedule import taken
    from offload.train import model
    from offload.train.estimate import estimate
    from offload.train.loop import compute_device

    check_environment()
    model_config = model.load_config(config.model)
    toy = model.Toy(model_config)
    measure_base(toy.step)
    device = compute_device(config.train.device)
    made = model.plan(model_config, config, device, toy.in_chunks, ranks=ranks)
    direct, accumulate = device == "cpu", config.data.accumulate
    found = estimate(model_config, config, made, toy.in_chunks, torch.device("cuda" if device == "cuda" else "cpu"))
    base = measure_base()  # as a run does
    backward = config.updates_value(ranks) == "backward"
    made = found.fastest(made, direct=direct, accumulate=accumulate, early=backward)
    early = found.early(made, direct=direct, accumulate=accumulate) if backward else 0
    traffic = traffic_of(made, direct=direct, accumulate=accumulate, taken=taken(made, found.order, early))
    bound = found.bound(traffic, recomputed=made.recomputed, accumulate=accumulate)
    in_memory = ("device", "host") if device != "cuda" else ("host",)
    return {
        "parameters": made.parameters,
        "predicted_step_seconds": found.predicted(made, direct=direct, accumulate=accumulate, early=early),
        **bound,
        "would_help": _would_help(bound["limiting_link"], made, config.precision),
        "written_bytes_per_step": traffic.nvme_write,
        "steps_per_100_tb_written": _WEAR // traffic.nvme_write if traffic.nvme_write else None,
        "state_bytes": made.state_bytes,
        "state_bytes_per_rank": made.state_bytes_per_rank,
        **({"ranks": ranks, "stage": config.train.stage, "replicate": config.train.replicate} if ranks > 1 else {}),
        "budget_bytes": config.tiers_value().budget_bytes(),
        "peak_bytes": made.peak_bytes | {"rss": base + sum(made.peak_bytes[tier] for tier in in_memory)},
        "activations": made.activations,
        "activation_bytes": made.activation_bytes,
        "recomputed_units": len(made.recomputed),
        "passing_units": len(made.passing),
        "summed_units": len(made.summed),
        "sum_bytes": made.sum_bytes,
        "slots": len(made.slots),
        "slot_bytes": sum(made.slots),
        "fetches_per_step": sum(map(sum, fetches(slots_of(made, direct), made.slots, accumulate))),
        "placement": made.describe(),
    }


def _would_help(link: str, made: Any, precision: Any) -> list[str]:
    """What would make a step shorter that is held by `link`; empty where only a faster machine would."""
    ways = []
    request, away = made.request, made.boundaries.by_tier["nvme"]
    if link == "nvme":
        there = request.fixed("nvme") + (away if made.asked == "nvme" else 0)
        if made.peak_bytes["nvme"] > there:
            more, but = format_size(made.peak_bytes["nvme"] - there), " but what is placed there" if there else ""
            ways.append(f"{more} more in tiers.host, so that nothing rests on NVMe{but}; each byte there is one less to move")
        ways += [f"{role} placed elsewhere than on NVMe (tiers.place)" for role, tier in request.place.items() if tier == "nvme"]
        if made.asked == "nvme":
            ways.append('train.activations = "auto"')
        if precision.moments == "fp32" and made.peak_bytes["nvme"] > away:
            split = ' and precision.master = "split"' if precision.compute == "bf16" and precision.master != "split" else ""
            ways.append(f'precision.moments = "int8"{split}, for smaller state')
    elif link in ("h2d", "d2h"):
        if request.may_stay or request.may_sum:
            ways.append("more in tiers.device, so that more units stay there")
    elif link == "compute" and made.recomputed:
        fewer = f"so that fewer than {len(made.recomputed)} units are computed again"
        ways.append(f"more in tiers.device, {fewer}" if made.asked == "auto" else f'train.activations = "auto", {fewer}')
    return ways


def _text(result: dict[str, Any]) -> str:
    lines = [f"{format_count(result['parameters'])} parameters, state {format_size(result['state_bytes'])}"]
    if result.get("ranks", 1) > 1:
        groups = f", in {result['replicate']} groups that have the same" if result["replicate"] > 1 else ""
        lines.append(f"{format_size(result['state_bytes_per_rank'])} a rank on {result['ranks']} at stage {result['stage']}{groups}")
    if "placement" not in result:
        each = " and rank" if result["ranks"] > 1 else ""
        lines.append(f"up to {format_size(result['written_bytes_per_step'])} written a step{each}, where all of it rests on NVMe")
        return "\n".join(lines)
    lines += [f"{tier}: {format_size(result['peak_bytes'][tier])} of {format_size(have)}" for tier, have in result["budget_bytes"].items()]
    lines += [f"{role}: " + ", ".join(f"{format_size(n)} {tier}" for tier, n in tiers.items() if n) for role, tiers in result["placement"].items()]
    if result["passing_units"]:
        lines.append(f"gradients of {result['passing_units']} units pass to their updates through places that these share")
    if result["slots"]:
        fetched = f"{result['fetches_per_step']} fetches of units a step"
        lines.append(f"parameters pass through {result['slots']} slots on the device ({format_size(result['slot_bytes'])}), by {fetched}")
    if result["summed_units"]:
        size = format_size(result["sum_bytes"])
        lines.append(f"gradients of {result['summed_units']} units are summed on the device ({size}) and leave it once a step")
    held = ", ".join(f"{format_size(n)} {tier}" for tier, n in result["activation_bytes"].items() if n)
    again = f", {result['recomputed_units']} units computed again" if result["recomputed_units"] else ""
    lines.append(f"activations: {result['activations']}{again}" + (f" ({held})" if held else ""))
    lines.append(f"a step is expected to take {result['predicted_step_seconds']:.3g} s")
    lines.append(f"it takes at least {result['bound_step_seconds']:.3g} s, held by {result['limiting_link']}")
    if result["would_help"]:
        lines.append("it would help to have " + ", or ".join(result["would_help"]))
    steps = result["steps_per_100_tb_written"]
    wear = f": {steps:.3g} steps take 100 TB of its rated endurance (TBW)" if steps is not None else ""
    lines.append(f"{format_size(result['written_bytes_per_step'])} written to NVMe a step{wear}")
    return "\n".join(lines)


def plan_command(
    run: str | None, overrides: Sequence[str], params: float | None, ranks: int, stage: int | None, replicate: int | None, as_json: bool
) -> int:  # fmt: skip
    """Prints the plan of a run file, of one of so many ranks, or arithmetic for `params`, with `overrides` of precision."""
    if run is not None and params is not None and "=" in run:
        overrides, run = [*overrides, run], None  # `--set a=1 b=2`: the second is no run file
    if (run is None) == (params is None):
        raise ConfigError("give either a run file or --params")
    if run is not None:
        given = {"stage": stage, "replicate": replicate}
        result = _placement(run, [*overrides, *(f"train.{key}={value}" for key, value in given.items() if value is not None)], ranks)
    else:
        result = _arithmetic(float(params or 0), ranks, 3 if stage is None else stage, replicate or 1, precision_of(overrides))
    emit(result, as_json, _text)
    return 0
