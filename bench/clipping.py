"""What clipping costs where all state is in the host: steps clipped never, every other time and always, against steps that ask for no norm.

    python bench/clipping.py [--steps 4] [--pairs 15] [--json] [--out bench/results/clipping.json]

One prepared model; stretches of `--steps` steps take turns, and which of a pair comes first alternates. Ratios are by pair, medians.
"""

from __future__ import annotations

import statistics
from typing import Any

import _llama
import _result
import offload

LIMIT = 1.03
ACTIVE, IDLE = 1e-3, 1e6  # norms of this model's gradients lie between


def main() -> None:
    parser = _result.parser(__doc__)
    _llama.add_sizes(parser, width=768, blocks=8, vocabulary=16384, tokens=256)
    parser.add_argument("--steps", type=int, default=4, help="of a stretch; an even number")
    parser.add_argument("--pairs", type=int, default=15)
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
    _result.finish(figures, given)
    if any(row["ratio"] > LIMIT for row in rows):
        raise SystemExit(f"clipping costs more than {LIMIT - 1:.0%}")


if __name__ == "__main__":
    main()
