"""What clipping costs where all state is in the host: steps clipped never, every other time and always, against steps that ask for no norm.

    python bench/clipping.py [--steps 4] [--pairs 15] [--json] [--out bench/results/clipping.json]

One prepared model; stretches of `--steps` steps take turns, and which of a pair comes first alternates. Ratios are by pair, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import _llama
import _result
import offload

LIMIT = 1.03
ACTIVE, IDLE = 1e-3, 1e6  # norms of this model's gradients lie between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _llama.add_sizes(parser, width=768, blocks=8, vocabulary=16384, tokens=256)
    parser.add_argument("--steps", type=int, default=4, help="of a stretch; an even number")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result")
    given = parser.parse_args()
    shares = {"0%": [IDLE] * given.steps, "50%": [ACTIVE, IDLE] * (given.steps // 2), "100%": [ACTIVE] * given.steps}
    rows: list[dict[str, Any]] = []
    with _llama.Run(_llama.sizes(given), offload.Tiers("4GiB", "8GiB"), device="cpu", place=_llama.HOST, activations="keep") as run:
        parameters = run.runtime.plan.parameters
        run.seconds([None, ACTIVE, IDLE])
        for share, clips in shares.items():
            pairs = []
            for i in range(given.pairs):
                order = [clips, [None] * given.steps][:: 1 if i % 2 else -1]
                taken = [run.seconds(c) for c in order][:: 1 if i % 2 else -1]
                pairs.append((taken[0], taken[1]))
            clipped, plain = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratios = sorted(a / b for a, b in pairs)
            rows.append({"clipped": share, "seconds": round(clipped, 4), "seconds_without": round(plain, 4),
                         "ratio": round(statistics.median(ratios), 4), "ratios": [round(r, 4) for r in ratios]})  # fmt: skip
            if not given.json:
                print(f"clipped in {share} of steps: {clipped:.3f} s a step, {plain:.3f} without, ratio {rows[-1]['ratio']:.3f}", flush=True)
    figures: dict[str, Any] = {"parameters": parameters, "sizes": _llama.sizes(given), "steps": given.steps, "limit": LIMIT, "rows": rows}
    whole = _result.save(figures, given.out) if given.out else figures
    if given.json:
        print(json.dumps(whole))
    if any(row["ratio"] > LIMIT for row in rows):
        raise SystemExit(f"clipping costs more than {LIMIT - 1:.0%}")


if __name__ == "__main__":
    main()
