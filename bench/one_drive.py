"""How ranks whose swap files lie on one drive share it: each reads and writes through a `SwapFile` of its own for as long as the others do.

    python bench/one_drive.py [--path DIR] [--ranks 2] [--seconds 5] [--rounds 3] [--json] [--out bench/results/one_drive.json]

Processes with the engine, depth and block that runs have. A round is the bytes that each moved between two moments that are the same for all; the
figure is the least of them over the greatest, and what they moved together over what one moves alone.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

import _result
from offload.memory.swap import SwapFile

LIMIT = 0.8
SIZE, PIECE, IN_FLIGHT = 512 << 20, 16 << 20, 4
OPS = ("read", "write", "mixed")


def moved(path: Path, op: str, seconds: float, together: Any, results: Any, rank: int) -> None:
    """Puts the bytes that were moved within `seconds` of when all had come `together`."""
    buffers = [torch.empty(PIECE, dtype=torch.uint8).random_(0, 255) for _ in range(IN_FLIGHT)]
    with SwapFile(path, SIZE, delete=True) as file:
        for offset in range(0, SIZE, PIECE):
            file.write(offset, buffers[0]).wait()
        together.wait()
        end, nbytes, number = time.monotonic() + seconds, 0, 0
        pending: deque[Any] = deque()
        while time.monotonic() < end:
            if len(pending) == IN_FLIGHT:
                pending.popleft().wait()
                nbytes += PIECE * (time.monotonic() < end)
            act = file.read if op == "read" or (op == "mixed" and number % 2) else file.write
            pending.append(act(number * PIECE % SIZE, buffers[number % IN_FLIGHT]))
            number += 1
        for transfer in pending:
            transfer.wait()
    results.put((rank, nbytes))


def at_once(ranks: int, op: str, seconds: float, where: Path) -> list[int]:
    """Bytes of each."""
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(ranks), context.Queue()
    with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=where) as directory:
        processes = [
            context.Process(target=moved, args=(Path(directory) / f"rank{rank}", op, seconds, together, results, rank)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=60 + 10 * seconds) for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(ranks)]


def main() -> None:
    parser = _result.parser(__doc__)
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"), help="a directory on the drive")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    for op in OPS:
        alone, all_rounds = [], []
        for _ in range(given.rounds):
            alone.append(at_once(1, op, given.seconds, given.path)[0])
            all_rounds.append(at_once(given.ranks, op, given.seconds, given.path))
        shares = [min(each) / max(each) for each in all_rounds]
        rates = [[round(nbytes / given.seconds / 2**20) for nbytes in each] for each in all_rounds]
        of_one = statistics.median(sum(each) / one for each, one in zip(all_rounds, alone, strict=True))
        rows.append({"op": op, "least_over_greatest": round(statistics.median(shares), 3), "mib_per_second": rates,
                     "together_over_alone": round(of_one, 3)})  # fmt: skip
        if not given.json:
            print(f"{op:6} least over greatest {rows[-1]['least_over_greatest']:.2f}, together {of_one:.2f} x one alone; MiB/s {rates}", flush=True)
    whole: dict[str, Any] = {"ranks": given.ranks, "seconds": given.seconds, "rounds": given.rounds, "rows": rows, "limit": LIMIT,
                             "holds": all(row["least_over_greatest"] >= LIMIT for row in rows)}  # fmt: skip
    _result.finish(whole, given)
    if not given.json:
        print(f"at least {LIMIT} {'holds' if whole['holds'] else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
