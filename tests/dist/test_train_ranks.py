"""Training runs on several ranks under torchrun: the losses of one rank at as large a batch, what the run directory has, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import LONG, ROOT
from ranks import run as on_each

from runs import SMALL, RunFile, records_of, sizes, summary_of

SIZES = sizes(128, 64, 96)
RUN = SMALL.but(
    model={"config": SIZES},
    data={"eval_sequences": 3},
    tiers={"host": "48MiB", "place": {"optimizer": "nvme"}},
    precision={"compute": "fp32", "grad": "fp32"},
    optimizer={"clip": 1.0},
    train={"steps": 4, "activations": "recompute"},
)


def run_file(*, batch_size: int = 2, accumulate: int = 1, stage: int = 3, every: int | None = None) -> RunFile:
    return RUN.but(data={"batch_size": batch_size, "accumulate": accumulate}, train={"stage": stage}, checkpoint={"every": every})


def write(where: Path, **how: int) -> Path:
    return run_file(**how).write(where)


def start(ranks: int, run: Path, *args: str, restarts: int = 0) -> subprocess.Popen[str]:
    """torchrun, on a port that it finds itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command += ["-m", "offload", "train", str(run)]
    return subprocess.Popen(
        [*command, "--json", *args],
        cwd=run.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def on(ranks: int, run: Path, *args: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The summary and what was said on standard error."""
    process = start(ranks, run, *args)
    try:
        out, err = process.communicate(timeout=LONG)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, err[-3000:]
    return (json.loads(out) if code == 0 else {}), err


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank with the batches of two."""
    where = tmp_path_factory.mktemp("alone")
    return run_file(batch_size=4).train(where)


def close(a: Any, b: Any) -> bool:
    return bool(a == pytest.approx(b, rel=1e-4))


def test_groups_of_ranks_train_as_one_rank_does_and_go_on_without_groups(alone: dict[str, Any], tmp_path: Path) -> None:
    run = write(tmp_path, batch_size=1, stage=2, every=2)
    summary, _ = on(4, run, "--out", "out", "--set", "train.replicate=2", "train.steps=2")
    assert (summary["ranks"], summary["replicate"]) == (4, 2) and summary["state_bytes_per_rank"][:2] == summary["state_bytes_per_rank"][2:]
    whole, _ = on(2, write(tmp_path, batch_size=2, stage=3, every=2), "--resume", "out")
    assert whole["losses"][:2] == summary["losses"] and whole["replicate"] == 1
    for key in ("losses", "eval_loss_first", "eval_loss_last"):
        assert close(whole[key], alone[key]), key
    _, err = on(2, run, "--out", "other", "--set", "train.replicate=3", code=1)
    assert "2 ranks cannot be 3 equal groups" in err, err


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_train_as_one_does_on_the_same_sequences(alone: dict[str, Any], tmp_path: Path, stage: int) -> None:
    summary, _ = on(2, write(tmp_path, stage=stage), "--out", "out")
    for key in ("losses", "eval_loss_first", "eval_loss_last", "loss_last"):
        assert close(summary[key], alone[key]), key
    assert summary["tokens"] == alone["tokens"] == 4 * 4 * 16 and summary["ranks"] == 2 and summary["stage"] == stage
    parameters = alone["parameters"]
    share = {0: 16, 1: 12, 2: 10, 3: 8}[stage]  # fp32: parameter 4, gradient 4, moments 8
    assert len(summary["state_bytes_per_rank"]) == 2
    held = summary["state_bytes_per_rank"]
    assert sum(held) == 2 * parameters * share and min(held) > 0.7 * parameters * share, (
        held
    )  # units are small, and cut at multiples of 4096 elements
    assert all(summary["peak_bytes"][tier] <= most for tier, most in summary["budget_bytes"].items()), summary["peak_bytes"]
    moved = summary["moved_bytes"]
    assert (moved["all_gather"] > 0) == (stage > 0) and (moved["reduce_scatter"] > 0) == (stage > 1), moved
    out = tmp_path / "out"
    assert summary_of(out) == summary
    lines = records_of(out)
    assert [line["loss"] for line in lines] == summary["losses"] and all(line["tokens"] == 64 for line in lines)
    assert not set(os.listdir(out)) - {"config.toml", "metrics.jsonl", "summary.json", "trace.json.gz", ".lock"}
    assert not list((tmp_path / "swap").glob("*"))


def test_texts_are_tokenized_once_for_all(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / f"texts/{number}.txt").write_text(" ".join(f"w{(7 * i * number + i) % 128}" for i in range(600)))
    model = tmp_path / "model"
    model.mkdir()
    made.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}))
    save_weights(model)
    summaries = []
    for name, ranks, size in (("one", 1, 4), ("two", 2, 2)):
        texts = run_file(batch_size=size).but(model={"type": None, "config": None, "path": "model"}, data={"source": "texts/*.txt"})
        run = texts.write(tmp_path)
        summaries.append(on(ranks, run, "--out", name, "--set", "train.steps=2")[0])
    assert close(summaries[0]["losses"], summaries[1]["losses"]) and close(summaries[0]["eval_loss_last"], summaries[1]["eval_loss_last"])


def test_ranks_exchange_the_gradients_of_several_micro_batches_once(alone: dict[str, Any], tmp_path: Path) -> None:
    summary, _ = on(2, write(tmp_path, batch_size=1, accumulate=2, stage=1), "--out", "out")
    assert close(summary["losses"], alone["losses"]) and close(summary["eval_loss_last"], alone["eval_loss_last"])
    moved = summary["moved_bytes"]
    assert moved["all_reduce"] == 2 * moved["all_gather"] and moved["reduce_scatter"] == 0, moved  # parameters too are gathered once a step


def save_weights(directory: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory)).save_pretrained(directory)


def test_what_one_rank_refuses_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stranger").touch()
    _, err = on(2, write(tmp_path), "--out", "out", code=1)
    assert err.count("which is no part of a run that may be replaced") == 1 and "error: rank 0: out holds" in err, err
    assert os.listdir(tmp_path / "out") == ["stranger"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_with_the_same_step_saved(tmp_path: Path, number: signal.Signals) -> None:
    run = write(tmp_path, every=1000)
    process = start(2, run, "--out", "out", "--set", "train.steps=100000")
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("step 3/"):
                break
        process.send_signal(number)
        process.communicate(timeout=LONG)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    summary = summary_of(tmp_path / "out")
    assert summary["interrupted"] and summary["steps"] >= 3 and summary["checkpoint"] == f"step-{summary['steps']:08d}"
    assert os.listdir(tmp_path / "out/checkpoints") == [summary["checkpoint"]]
    assert not list((tmp_path / "swap").glob("*"))


def test_checkpoints_go_on_under_another_number_of_ranks_and_another_stage(alone: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = on(2, write(tmp_path, every=2), "--out", "whole")
    on(2, write(tmp_path, every=2), "--out", "out", "--set", "train.steps=2")
    one = write(tmp_path, batch_size=4, stage=1, every=2)
    first, _ = on(1, one, "--resume", "out", "--set", "train.steps=3")
    assert first["losses"][:2] == whole["losses"][:2] and close(first["losses"], alone["losses"][:3])
    two, _ = on(2, write(tmp_path, stage=2, every=2), "--resume", "out")
    assert two["losses"][:3] == first["losses"] and close(two["losses"], alone["losses"])
    _, err = on(2, write(tmp_path, batch_size=4, every=2), "--resume", "whole", "--set", "train.steps=6", code=1)
    assert "data.batch_size is 4 and was 2" in err
    _, err = on(1, write(tmp_path, batch_size=2, every=2), "--resume", "whole", "--set", "train.steps=6", code=1)
    assert "2 ranks x data.batch_size 2 x data.accumulate 1" in err


def test_a_killed_rank_ends_the_others_and_a_restart_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    calm, _ = on(2, write(tmp_path / "calm", every=2), "--out", "out", "--set", "train.steps=40")
    run = write(tmp_path / "killed", every=2)
    process = start(2, run, "--resume", "out", "--set", "train.steps=40", restarts=1)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if line.startswith("step 5/"):
                break
        (ours,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
        ours.kill()
        out, err = process.communicate(timeout=LONG)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-3000:]
    summary = json.loads(out)
    assert summary["digest"] == calm["digest"] and summary["losses"] == calm["losses"]
    assert "rank 0: rank 0 has lost its connection to rank 1" in err and "goes on from" in err, err
    assert not list((run.parent / "swap").glob("*"))


KEPT = """
import os, sys
from offload.config import RunConfig
from offload.planner.placement import keeping
from offload.train.estimate import Estimate
from offload.train.loop import Trainer, train

def fastest(estimate, planned, **how):
    assert os.environ["RANK"] == "0"  # no other rank chooses
    return keeping(planned, 1)

def trains(trainer, stopped, run=Trainer.run):
    plan = trainer._runtime.plan
    chosen.append((plan.activations, plan.kept, len(plan.recomputed)))
    return run(trainer, stopped)

chosen, Estimate.fastest, Trainer.run = [], fastest, trains
summary = train(RunConfig.load(sys.argv[1], ["train.activations=auto"]), sys.argv[2])
print(*chosen, summary["digest"])
"""


def test_all_ranks_compute_those_units_again_that_the_first_chose(tmp_path: Path) -> None:
    own, others = on_each(KEPT, 2, str(write(tmp_path)), str(tmp_path / "out"))
    want, _ = on(2, write(tmp_path / "all"), "--out", "out")
    assert own == others == f"('recompute', 1, 1) {want['digest']}\n"
