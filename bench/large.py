"""The largest Llama that this machine trains: sized to its memory and its free disk, a few steps of it, against budgets and the bound.

    .venv/bin/python bench/large.py [--form exact] [--params 300e6] [--steps 3] [--tokens 64] [--where DIR] [--json] [--out bench/results/large.json]

Two forms of state, both with a split master (the bf16 parameter and the other half of it): "exact" has fp32 moments, 12 bytes a parameter;
"compact" has int8 moments, 6. Gradients of layers pass to their updates and rest nowhere. Layers are 4096 wide unless `--params` asks for a small
model; their number is the largest whose plan fits `--device`, `--host` and what the disk has free but for a reserve. Runs `offload train` on random
data: one sequence of `--tokens` a step, one held-out sequence before (which is when weights are made) and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _result
from offload.config import parse_size, toml_text
from offload.memory.limits import host_limits

GIB = 1 << 30
BASE = GIB * 3 // 4  # what a run may have resident beside its budgets
RESERVE = 6 * GIB  # of the disk, left to others
MARGIN = 2 * GIB  # of the memory
BOUND_LEAST = 0.85
FORMS = {"exact": "fp32", "compact": "int8"}
VOCABULARY = 32000
WIDTHS = {8e9: (4096, 11008), 1e9: (2048, 5632), 0: (1024, 2816)}  # hidden and inner, by parameters from which on
KEPT = ("parameters", "state_bytes", "step_seconds_median", "bound_step_seconds", "predicted_step_seconds", "limiting_link", "peak_bytes",
        "budget_bytes", "base_bytes", "stall_seconds", "compute_seconds", "moved_bytes", "placement", "activations", "losses", "eval_loss_first",
        "eval_loss_last", "tokens_per_second", "digest")  # fmt: skip


def shape(layers: int, width: int, inner: int) -> dict[str, int]:
    heads = {"num_attention_heads": width // 128, "num_key_value_heads": width // 128}
    return {"vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, **heads}


def per_layer(width: int, inner: int) -> int:
    return 4 * width * width + 3 * width * inner + 2 * width


def run_file(config: dict[str, int], form: str, given: argparse.Namespace, where: Path, nvme: int) -> str:
    """The run as TOML."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"type": "llama", "config": config},
        "data": {"source": "random", "seq_length": given.tokens, "batch_size": 1, "eval_sequences": 1},
        "tiers": {"device": given.device, "host": given.host, "nvme": [[str(where / "swap"), str(nvme)]]},
        "precision": {"master": "split", "moments": FORMS[form]},
        "optimizer": {"lr": 1e-4},
        "train": {"steps": given.steps, "device": "cpu", "activations": "recompute"},
    }
    return toml_text(tables)


def planned(path: Path) -> dict[str, Any] | None:
    """What `offload plan` says of a run; None where it does not fit."""
    done = subprocess.run([sys.executable, "-m", "offload", "plan", str(path), "--json"], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1][:300], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sized(form: str, given: argparse.Namespace, where: Path) -> tuple[Path, dict[str, int], dict[str, Any]]:
    """The run file of the largest model that fits, or of `--params`, its shape and its plan."""
    nvme = shutil.disk_usage(where).free - RESERVE
    room = nvme + (parse_size(given.host) + parse_size(given.device) // 4) * 95 // 100
    bytes_each = {"exact": 12, "compact": 6.03}[form]
    count = given.params or room / bytes_each
    width, inner = next(sizes for least, sizes in WIDTHS.items() if count >= least or least == 0)
    if not given.params:
        width, inner = WIDTHS[8e9]
    layers = max(1, int((count - 2 * VOCABULARY * width) / per_layer(width, inner)))
    path = where / "run.toml"
    while layers:
        config = shape(layers, width, inner)
        path.write_text(run_file(config, form, given, where, nvme))
        plan = planned(path)
        if plan is not None:
            return path, config, plan
        if given.params:
            raise SystemExit(f"{given.params:.3g} parameters do not fit; leave --params out for the most that do")
        layers -= 1
    raise SystemExit("no layer fits; give more of --host, or make room on the disk")


def trained(path: Path, out: Path) -> tuple[dict[str, Any], int]:
    """The summary of a run, and the most memory it had resident as the kernel counted it."""
    process = subprocess.Popen([sys.executable, "-m", "offload", "train", str(path), "--out", str(out)], stdout=subprocess.DEVNULL)
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the run exited with {process.returncode}")
    return json.loads((out / "summary.json").read_text()), usage.ru_maxrss * 1024


def row(form: str, given: argparse.Namespace, where: Path) -> dict[str, Any]:
    path, config, plan = sized(form, given, where)
    moved = plan["placement"]["parameter"]["nvme"] + plan["placement"]["optimizer"]["nvme"]
    print(f"{form}: {plan['parameters'] / 1e9:.2f}e9 parameters, {moved / 1e9:.0f} GB of them and their state on NVMe; "
          f"a step is expected to take {plan['predicted_step_seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    start = time.perf_counter()
    summary, resident = trained(path, where / "run")
    whole = time.perf_counter() - start
    steps = [json.loads(line)["seconds"] for line in (where / "run/metrics.jsonl").read_text().splitlines()]
    limit = parse_size(given.device) + parse_size(given.host) + BASE
    return {
        "figures": {key: summary[key] for key in KEPT}, "model": config, "step_seconds": steps, "seconds_beside_steps": whole - sum(steps),
        "bytes_a_parameter": summary["state_bytes"] / summary["parameters"], "resident": resident,
        "resident_limit": limit, "within_memory": resident <= limit, "share_of_bound": summary["bound_step_seconds"] / summary["step_seconds_median"],
        "stall_share": sum(summary["stall_seconds"].values()) / sum(steps),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    memory = max(2 * GIB, host_limits().available - BASE - MARGIN)
    device = min(3 * GIB, memory // 4)
    parser = _result.parser(__doc__, out="a file for the result; the other form that it has stays")
    parser.add_argument("--form", choices=list(FORMS), help="one of the forms")
    parser.add_argument("--params", type=float, default=0.0, help="parameters, about; the most that fit unless given")
    parser.add_argument("--device", default=f"{device // GIB or 1}GiB", help="budget")
    parser.add_argument("--host", default=f"{(memory - device) // GIB or 1}GiB", help="budget; most of what is free unless given")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--where", type=Path, default=Path("/var/tmp"), help="a directory on the drive")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    rows: dict[str, dict[str, Any]] = {}
    if given.out and given.out.exists():
        rows = json.loads(given.out.read_text())["forms"]
    for form in [given.form] if given.form else list(FORMS):
        with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=given.where) as scratch:
            rows[form] = row(form, given, Path(scratch))
        result = {"tokens": given.tokens, "bound_least": BOUND_LEAST, "forms": rows}
        whole = _result.save(result, given.out) if given.out else result
        if not given.json:
            show(form, rows[form])
    if given.json:
        print(json.dumps(whole))
    short = [form for form, r in rows.items() if not r["within_memory"] or r["share_of_bound"] < BOUND_LEAST]
    if short:
        raise SystemExit(f"over its memory, or a step takes more than {1 / BOUND_LEAST:.2f} times its bound: {', '.join(short)}")


def show(form: str, r: dict[str, Any]) -> None:
    f = r["figures"]
    losses = ", ".join("not finite" if x is None else f"{x:.2f}" for x in f["losses"])
    print(f"{form}: {f['parameters'] / 1e9:.2f}e9 parameters, {f['state_bytes'] / 1e9:.0f} GB of state; "
          f"resident {r['resident'] / GIB:.2f} of at most {r['resident_limit'] / GIB:.2f} GiB")  # fmt: skip
    print(f"  step {f['step_seconds_median']:.1f} s, bound {f['bound_step_seconds']:.1f} s ({f['limiting_link']}): {r['share_of_bound']:.2f} of it; "
          f"{r['seconds_beside_steps']:.0f} s beside the steps; losses {losses}")  # fmt: skip
    stalls = {cause: seconds for cause, seconds in f["stall_seconds"].items() if seconds > 0.05 * sum(r["step_seconds"])}
    print(f"  stalls of {sum(r['step_seconds']):.0f} s: " + (", ".join(f"{c} {s:.0f}" for c, s in stalls.items()) or "none over 5%"))


if __name__ == "__main__":
    main()
