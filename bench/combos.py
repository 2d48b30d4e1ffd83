"""Every combination of what overlaps, with every seed of delays, against one thing after another: the bits must be equal.

    python bench/combos.py [--seeds 50] [--json] [--out bench/results/combos.json]

The combinations are those of tests/overlap.py: where updates run, accumulation, clipping, where activations go, on `cpu` and on `sim`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _result

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import overlap


def main() -> None:
    parser = _result.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    given = parser.parse_args()
    references: dict[Any, Any] = {}
    rows, wrong = [], []
    for which in overlap.COMBINATIONS:
        for device in ("cpu", "sim"):
            start = time.perf_counter()
            for seed in range(given.seeds):
                with tempfile.TemporaryDirectory(prefix="offload-bench-") as directory:
                    wrong += filter(None, [overlap.wrong(Path(directory), which, device, seed, references)])
            seconds = round(time.perf_counter() - start, 1)
            rows.append({**which._asdict(), "device": device, "seeds": given.seeds, "seconds": seconds})
            if not given.json:
                print(f"{which} on {device}: {given.seeds} seeds, {seconds} s", flush=True)
    figures = {"runs": len(rows) * given.seeds, "wrong": wrong, "rows": rows}
    _result.finish(figures, given)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
