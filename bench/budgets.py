"""Steps under host budgets from the least that fits to everything: NVMe bytes fall to zero in proportion, and more memory never costs time.

    python bench/budgets.py [--points 9] [--rounds 5] [--steps 3] [--path DIR] [--json] [--out bench/results/budgets.json]

The device budget is the least with which all state may be on NVMe. Rounds go through the budgets up and down in turn, a run of `--steps` steps
for each; what a step of one budget takes is compared with the next smaller one's of the same round. `--out` gets a plot beside it, as .svg.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _llama
import _result
import offload
from offload.planner.cost import traffic_of

MIB = 1 << 20
NOISE = 1.05  # a step may take so much of what it took with less memory
ALLOWED = 0.10  # of the most bytes: what staging buffers, which grow with the budget, take from state, and a chunk more or less

Fits = Callable[[int], bool]


def least(fits: Fits, most: int) -> int:
    """The least number of MiB, in bytes, that `fits`; more of them do too."""
    low, high = 0, most // MIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * MIB) else (middle, high)
    return high * MIB


class Sweep:
    """Plans and runs of one model under budgets that differ in the host's alone."""

    def __init__(self, sizes: dict[str, int], directory: Path) -> None:
        self.sizes, self.directory, self._model = sizes, directory, _llama.build(sizes)
        self.state = 20 * sum(p.numel() for p in self._model.parameters())
        ample = self.state + (2 << 30)
        self.device = ample
        everywhere = dict.fromkeys(_llama.HOST, "nvme")
        self.device = least(lambda n: self._plan(ample, n, place=everywhere) is not None, ample)
        self.least = least(lambda n: self._plan(n) is not None, ample)
        self.everything = least(lambda n: self._plan(n) is not None and not self.planned(n), ample)

    def _tiers(self, host: int, device: int | None = None) -> offload.Tiers:
        return offload.Tiers(device or self.device, host, [(str(self.directory), self.state)])

    def _plan(self, host: int, device: int | None = None, **options: Any) -> Any:
        options |= {"device": "cpu", "batch": (1, self.sizes["tokens"]), "activations": "recompute"}
        try:
            return offload.plan(self._model, self._tiers(host, device), **options)
        except offload.PlanError:
            return None

    def planned(self, host: int) -> int:
        """NVMe bytes a step by the plan."""
        traffic = traffic_of(self._plan(host), direct=True)
        return traffic.nvme_read + traffic.nvme_write

    def run(self, host: int, steps: int) -> tuple[float, float]:
        """Seconds and NVMe bytes a step."""
        with _llama.Run(self.sizes, self._tiers(host), device="cpu", activations="recompute") as run:
            run.seconds([1.0] * 2)
            run.runtime.reset_counters()
            seconds = run.seconds([1.0] * steps)
            moved = run.runtime.stats()["moved_bytes"]
            return seconds, (moved["nvme_read"] + moved["nvme_write"]) / steps


def measure(sweep: Sweep, given: argparse.Namespace) -> list[dict[str, Any]]:
    budgets = [sweep.least + (sweep.everything - sweep.least) * i // (given.points - 1) for i in range(given.points)]
    taken: dict[int, list[float]] = {host: [] for host in budgets}
    moved: dict[int, float] = {}
    for i in range(given.rounds):
        for host in budgets[:: 1 if i % 2 == 0 else -1]:
            seconds, moved[host] = sweep.run(host, given.steps)
            taken[host].append(seconds)
            if not given.json:
                print(f"round {i + 1}, host {host // MIB} MiB: {seconds:.3f} s, {moved[host] / 1e6:.0f} MB of NVMe a step", flush=True)
    most = moved[budgets[0]]
    rows = []
    for i, host in enumerate(budgets):
        before = taken[budgets[max(0, i - 1)]]
        rows.append({
            "host_bytes": host, "seconds": round(statistics.median(taken[host]), 4), "all_seconds": [round(t, 4) for t in taken[host]],
            "over_less_memory": round(statistics.median(a / b for a, b in zip(taken[host], before, strict=True)), 4),
            "nvme_bytes": round(moved[host]), "nvme_bytes_planned": sweep.planned(host),
            "nvme_bytes_in_proportion": round(most * (sweep.everything - host) / (sweep.everything - sweep.least)),
        })  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    host = [row["host_bytes"] / MIB for row in rows]
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(6, 6), layout="constrained")
    upper.plot(host, [row["nvme_bytes"] / 1e9 for row in rows], "o-", label="measured")
    upper.plot(host, [row["nvme_bytes_in_proportion"] / 1e9 for row in rows], "--", color="gray", label="in proportion")
    upper.set_ylabel("GB of NVMe a step")
    upper.legend()
    lower.fill_between(host, [min(row["all_seconds"]) for row in rows], [max(row["all_seconds"]) for row in rows], alpha=0.2)
    lower.plot(host, [row["seconds"] for row in rows], "o-")
    lower.set(ylabel="seconds a step", xlabel="host budget, MiB", ylim=(0, None))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = _result.parser(__doc__)
    _llama.add_sizes(parser, width=768, blocks=10, vocabulary=16384, tokens=256)
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"), help="a directory on the drive to swap to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=given.path) as directory:
        sweep = Sweep(_llama.sizes(given), Path(directory))
        rows = measure(sweep, given)
    failed = [f"{row['host_bytes'] // MIB} MiB: {what}" for row in rows for what, wrong in {
        "more NVMe bytes than in proportion": row["nvme_bytes"] > row["nvme_bytes_in_proportion"] + ALLOWED * rows[0]["nvme_bytes"],
        "slower than with less memory": row["over_less_memory"] > NOISE,
    }.items() if wrong]  # fmt: skip
    figures: dict[str, Any] = {"sizes": _llama.sizes(given), "device_bytes": sweep.device, "steps": given.steps, "noise": NOISE, "failed": failed,
                               "rows": rows}  # fmt: skip
    _result.finish(figures, given)
    if given.out:
        plot(rows, given.out.with_suffix(".svg"))
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
