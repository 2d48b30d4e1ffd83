"""SmolLM2 fine-tuned within the demo's budgets and all in memory: the same losses to the bit, and steps near their bound.

    python bench/exact.py [--steps 200] [--json] [--out bench/results/exact.json]

Needs the demo's model (`make demo`, or examples/prepare_smollm2.py). 200 steps of both take about 25 minutes on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import _result
import _train

LIMIT = 1.3
KEPT = ("step_seconds_median", "bound_step_seconds", "predicted_step_seconds", "limiting_link", "eval_loss_first", "eval_loss_last", "digest",
        "stall_seconds", "moved_bytes", "peak_bytes", "budget_bytes", "losses")  # fmt: skip


def main() -> None:
    parser = _result.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, settings in {"within budgets": {}, "in memory": _train.IN_MEMORY}.items():
        with tempfile.TemporaryDirectory(prefix="offload-bench-") as out:
            summary = _train.train({"train.steps": given.steps} | settings, Path(out) / "run")
        rows[name] = {key: summary[key] for key in KEPT}
    ours, memory = rows.values()
    differing = [step + 1 for step, (a, b) in enumerate(zip(ours["losses"], memory["losses"], strict=True)) if a != b]
    equal = not differing and all(ours[key] == memory[key] for key in ("digest", "eval_loss_first", "eval_loss_last"))
    over = ours["step_seconds_median"] / ours["bound_step_seconds"]
    figures = {"steps": given.steps, "equal": equal, "differing_steps": differing, "over_bound": round(over, 4), "limit": LIMIT, "runs": rows}
    _result.finish(figures, given)
    if not given.json:
        print(f"{given.steps} steps: losses, evaluations and digest {'equal' if equal else 'DIFFER'}")
        print(f"median step {ours['step_seconds_median']:.3f} s, {over:.2f} of its bound; in memory {memory['step_seconds_median']:.3f} s")
    if not equal or over > LIMIT:
        raise SystemExit("the bits differ" if not equal else f"a step takes more than {LIMIT} times its bound")


if __name__ == "__main__":
    main()
