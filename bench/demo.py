"""The demo's step against the sum of its parts, each measured here: plain torch's forward and backward, Adam, and the disk.

    make demo && .venv/bin/python bench/demo.py [--run runs/demo] [--json]

Compute is plain torch on the same weights, batch, loss in chunks and recomputation of each block; Adam is 28 bytes a parameter at
40 GB/s; NVMe is the run's own bytes a step over what fio (else
this package's swap engine) reads and writes on the same file system. Nothing overlaps in this sum.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import _result
from offload.observe import measure, peers

ADAM_BYTES_PER_SECOND = 40e9


def compute_seconds(config: dict[str, Any], steps: int) -> float:
    """Median seconds of a forward and backward in plain torch, blocks recomputed."""
    from transformers import AutoModelForCausalLM

    from offload.train.loss import chunked_causal_loss

    model: Any = AutoModelForCausalLM.from_pretrained(config["model"]["path"], dtype=torch.bfloat16).train()
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    if config["train"]["activations"] == "recompute":
        for block in blocks:
            block.forward = _recomputed(block.forward)
    shape = (config["data"]["batch_size"], config["data"]["seq_length"])
    seconds = []
    for _ in range(steps + 2):
        ids = torch.randint(0, model.config.vocab_size, shape)
        start = time.perf_counter()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        chunked_causal_loss(hidden, model.lm_head.weight, ids).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _recomputed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def disk_bytes_per_second(directory: Path, size: int = 1 << 30) -> tuple[dict[str, float], str]:
    """Bytes a second read and written, and by what they were measured."""
    seconds = {op: peers.fio_seconds(directory / "fio", op, size, depth=32, block=1 << 20) for op in ("write", "read")}
    by_fio = {op: size / s for op, s in seconds.items() if s is not None}
    if len(by_fio) == len(seconds):
        return by_fio, "fio"
    return {op: 1e9 * rate for op, rate in measure.swap_rates(directory, size).items()}, "offload.SwapFile"


def main() -> None:
    parser = _result.parser(__doc__, "demo.json")
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    summary = json.loads((args.run / "summary.json").read_text())
    config = tomllib.loads((args.run / "config.toml").read_text())
    compute = compute_seconds(config, args.steps)
    swap = Path(config["tiers"]["nvme"][0][0])
    with tempfile.TemporaryDirectory(dir=swap.parent) as scratch:
        rates, tool = disk_bytes_per_second(Path(scratch))
    moved = {k: summary["moved_bytes"][k] / summary["steps"] for k in ("nvme_read", "nvme_write")}
    adam = 28 * summary["parameters"] / ADAM_BYTES_PER_SECOND
    disk = moved["nvme_read"] / rates["read"] + moved["nvme_write"] / rates["write"]
    total = compute + adam + disk
    result = {
        "step_seconds_median": summary["step_seconds_median"], "sum_of_parts_seconds": total, "ratio": summary["step_seconds_median"] / total,
        "compute_seconds": compute, "adam_seconds": adam, "nvme_seconds": disk, "nvme_bytes_per_step": moved, "disk_bytes_per_second": rates,
        "disk_measured_by": tool, "peak_bytes": summary["peak_bytes"], "budget_bytes": summary["budget_bytes"], "state_bytes": summary["state_bytes"],
        "eval_loss_first": summary["eval_loss_first"], "eval_loss_last": summary["eval_loss_last"],
        "threads": torch.get_num_threads(), "before": "make demo",
    }  # fmt: skip
    _result.finish(result, args)
    if not args.json:
        print(f"step {result['step_seconds_median']:.3f} s, ratio {result['ratio']:.2f} to the sum of its parts:")
        print(f"compute {compute:.3f} + Adam {adam:.3f} + NVMe {disk:.3f} = {total:.3f} s")


if __name__ == "__main__":
    main()
