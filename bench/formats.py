"""SmolLM2 fine-tuned with each format of optimizer state: do moments in fewer bits, and split masters, end where fp32 state ends?

    .venv/bin/python bench/formats.py [--steps 200] [--seq-length 256] [--only int8] [--out bench/results/formats.json]

Needs the demo's model (`make demo`, or examples/prepare_smollm2.py). Every run sees the same data in the same order; all state is in memory.
Prints each format's held-out loss, before and after, and its distance from fp32 moments.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import _result
import _train

FORMATS = {
    "fp32 moments": {},
    "bf16 moments": {"moments": "bf16"},
    "int8 moments": {"moments": "int8"},
    "split master, int8 moments": {"master": "split", "moments": "int8"},
}
LIMITS = {"bf16 moments": 0.005, "int8 moments": 0.01, "split master, int8 moments": 0.01}  # of fp32 moments' final held-out loss


def train(settings: dict[str, str], given: argparse.Namespace, out: Path) -> dict[str, Any]:
    shape = {"train.steps": given.steps, "data.seq_length": given.seq_length, "data.eval_sequences": given.eval_sequences}
    return _train.train(shape | _train.IN_MEMORY | {f"precision.{key}": value for key, value in settings.items()}, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--eval-sequences", type=int, default=32)
    parser.add_argument("--only", action="append", choices=list(FORMATS), help="one of the formats, beside fp32 moments; may be given again")
    parser.add_argument("--out", type=Path, default=_result.RESULTS / "formats.json")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, settings in FORMATS.items():
        if rows and given.only and name not in given.only:
            continue
        with tempfile.TemporaryDirectory(prefix="offload-bench-") as out:
            summary = train(settings, given, Path(out) / "run")
        rows[name] = {key: summary[key] for key in ("eval_loss_first", "eval_loss_last", "state_bytes", "losses")}
        final = rows["fp32 moments"]["eval_loss_last"]
        rows[name]["distance"] = rows[name]["eval_loss_last"] / final - 1
        rows[name]["limit"] = LIMITS.get(name)
        print(f"{name}: held-out {summary['eval_loss_first']:.4f} -> {summary['eval_loss_last']:.4f}, {rows[name]['distance']:+.3%}", flush=True)
        _result.save({"steps": given.steps, "seq_length": given.seq_length, "formats": rows}, given.out)
    late = [name for name, row in rows.items() if row["limit"] is not None and abs(row["distance"]) > row["limit"]]
    if late:
        raise SystemExit(f"too far from fp32 moments: {', '.join(late)}")


if __name__ == "__main__":
    main()
