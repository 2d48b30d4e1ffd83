"""What the runtime's Python costs: microseconds a unit and pass, of a model whose units are too small for anything else to matter.

    .venv/bin/python bench/overhead.py [--units 64] [--steps 40] [--json]

Forward and backward of `--units` blocks of one 8 x 8 layer in a prepared model, less those in plain torch; half of the difference over the number of
units is a pass. On `sim` each unit is fetched and each gradient moved by threads that take turns with the compute thread at the interpreter, and
their Python counts too. Updates run outside of what is timed. Then one wait that counts as a stall, with nothing to wait for, and one recorded span.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import _result
import offload
from offload.memory.recorder import Recorder
from offload.memory.stalls import FETCH, Stalls

CALLS = 100_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)


def seconds(model: nn.Module, steps: int, after: Any = None) -> float:
    """Median seconds of a forward and backward; `after` follows each and is not timed."""
    x = torch.ones(1, 8)
    taken = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        model(x).sum().backward()
        taken.append(time.perf_counter() - start)
        if after is not None:
            after()
        for p in model.parameters():
            p.grad = None
    return statistics.median(taken[3:])


def pass_us(units: int, steps: int, where: Path, device: str, traced: bool) -> float:
    """Microseconds a unit and pass over plain torch."""
    plain = seconds(nn.Sequential(*[Block() for _ in range(units)]), steps)
    precision = offload.Precision(compute="fp32", grad="fp32")
    place = dict.fromkeys(("parameter", "gradient", "optimizer"), "host")
    model = nn.Sequential(*[Block() for _ in range(units)])
    tiers = offload.Tiers(device="256MiB", host="256MiB", nvme=[])
    offload.prepare(model, tiers, device=device, precision=precision, place=place, units=[Block], activations="keep")
    with offload.runtime(model) as runtime:
        trace = runtime.trace(where / "trace.json.gz") if traced else None
        taken = seconds(model, steps, runtime.synchronize)
        if trace is not None:
            trace.close()
    return (taken - plain) / (2 * units) * 1e6


def call_us(call: Any) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = _result.parser(__doc__, "overhead.json")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stalls, recorder = Stalls(), Recorder()

    def wait() -> None:
        with stalls.waiting(FETCH):
            pass

    with tempfile.TemporaryDirectory() as scratch:
        passes = {
            f"{device}{', traced' if traced else ''}": pass_us(args.units, args.steps, Path(scratch), device, traced)
            for device in ("cpu", "sim")
            for traced in (False, True)
        }
    figures = {"units": args.units, "steps": args.steps, "unit_pass_us": passes, "wait_us": call_us(wait),
               "span_us": call_us(lambda: recorder.span("compute", "x", 0.0))}  # fmt: skip
    _result.finish(figures, args)
    if not args.json:
        for name, us in passes.items():
            print(f"{name}: {us:.0f} us a unit and pass")
        print(f"a wait {figures['wait_us']:.2f} us, a span {figures['span_us']:.2f} us")


if __name__ == "__main__":
    main()
