"""`offload verify` and `offload export` of what `offload train` left: weights to the bit; what is damaged is refused in a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import offload
from checkpoints import adam, digest
from helpers import Prepared, flip, ids, plain, same
from offload.checkpoint.content import read_state
from offload.cli import main
from offload.config import RunConfig
from offload.train.model import build, load_config
from runs import SMALL, sizes, summary_of

RUN = SMALL.but(data={"eval_sequences": 0}, tiers={"place": {"optimizer": "nvme"}}, precision={"compute": "bf16"}, checkpoint={"every": 1})
KINDS = {"tied, split, int8": (True, "split", "int8"), "fp32": (False, "fp32", "fp32"), "tied, bf16": (True, "fp32", "bf16")}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("run")
    tied, master, moments = KINDS[request.param]
    model = {"config": sizes(96, 24, 40, heads=2, tie_word_embeddings=tied)}
    RUN.but(model=model, precision={"master": master, "moments": moments}).train(where)
    return where


Said = pytest.CaptureFixture[str]


def test_every_checkpoint_of_a_run_is_verified(run: Path, capsys: Said) -> None:
    newest = [str(run / f"out/checkpoints/step-0000000{n}") for n in (2, 3)]
    assert main(["verify", str(run / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"verified": newest}
    assert main(["verify", newest[0]]) == 0
    assert capsys.readouterr().out == f"{newest[0]}: every byte is as it was written\n"


def test_weights_are_those_of_the_checkpoint(run: Path, prepared: Prepared, tmp_path: Path, capsys: Said) -> None:
    assert main(["export", str(run / "out"), str(tmp_path / "weights"), "--json", "--max-shard-size", "20KB"]) == 0
    said = json.loads(capsys.readouterr().out)
    config = RunConfig.load(run / "out/config.toml")
    checkpoint = run / "out/checkpoints/step-00000003"
    model = prepared(build(load_config(config.model)), None, keep=True, precision=config.precision_value())
    optimizer = adam(model)
    assert offload.load(checkpoint, model, optimizer)["step"] == 3
    assert digest(model) == summary_of(run / "out")["digest"]
    assert said["checkpoint"] == str(checkpoint) and said["parameters"] == sum(p.numel() for p in model.parameters())

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").eval()
    ours = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(again.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, p in theirs.items():
        same(p.detach(), plain(ours[name]), name)
    held = set()
    for name in said["files"]:
        with safe_open(tmp_path / "weights" / name, "pt") as file:
            held |= set(file.keys())
    tied = bool(again.config.tie_word_embeddings)
    assert ("lm_head.weight" in held) != tied and tied == any(p.also for p in read_state(checkpoint).parameters.values())

    twin = build(load_config(config.model), "cpu").eval()
    twin.load_state_dict({name: plain(p) for name, p in ours.items()})
    with torch.no_grad():
        tokens = ids(rows=2, length=8, vocab=96)
        same(again(input_ids=tokens).logits, twin(input_ids=tokens).logits)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the tensors": (lambda d: flip(d / "tensors.safetensors"), "tensors.safetensors is damaged"),
    "a bit of the state": (lambda d: flip(d / "state.json"), "state.json is damaged"),
    "a bit of the manifest": (lambda d: flip(d / "manifest.json"), "manifest.json"),
    "cut": (lambda d: os.truncate(d / "tensors.safetensors", 5000), "tensors.safetensors has 5000 bytes of"),
    "no tensors": (lambda d: (d / "tensors.safetensors").unlink(), "tensors.safetensors is missing"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
    "empty": (lambda d: [p.unlink() for p in d.iterdir()], "has no manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint(run: Path, tmp_path: Path, capsys: Said, name: str) -> None:
    damage, says = DAMAGE[name]
    shutil.copytree(run / "out", tmp_path / "out")
    damage(tmp_path / "out/checkpoints/step-00000003")
    for argv in (["verify", "out"], ["export", "out", "weights"], ["verify", "out/checkpoints/step-00000003", "--json"]):
        assert main([argv[0], *(str(tmp_path / a) if not a.startswith("-") else a for a in argv[1:])]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("error: ") and says in said.err and "step-00000003" in said.err
        before = tmp_path / "out/checkpoints/step-00000002"
        other = f". Whole: {before.name}\n" if argv[0] == "verify" else f". The one before: offload export {before} "
        assert (other in said.err) == (argv[1] == "out")
    assert not (tmp_path / "weights").exists()
    assert main(["verify", str(tmp_path / "out/checkpoints/step-00000002")]) == 0
    assert main(["export", str(tmp_path / "out/checkpoints/step-00000002"), str(tmp_path / "weights")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "weights")


def test_nothing_is_written_into_a_run(run: Path, tmp_path: Path, capsys: Said) -> None:
    """Which could not go on then."""
    shutil.copytree(run / "out", tmp_path / "out")
    shutil.copytree(run / "out/checkpoints/step-00000003", tmp_path / "alone")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    inside = [("out", where) for where in ("out", "out/weights", "out/checkpoints/step-00000003", "link/weights")] + [("alone", "alone")]
    for source, where in inside:
        assert main(["export", str(tmp_path / source), str(tmp_path / where), "--model", str(tmp_path)]) == 2
        assert "which is to have nothing else in it" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "out"), ""]) == 2 and "has no name" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "weights")]) == 0


def test_exit_codes_of_the_process(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "out", tmp_path / "out")
    flip(tmp_path / "out/checkpoints/step-00000003/tensors.safetensors")
    for argv, code in ((["verify", "out"], 2), (["verify", "out/checkpoints/step-00000002"], 0), (["export", "out", "weights"], 2)):
        done = subprocess.run([sys.executable, "-m", "offload", *argv], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert (done.stderr == "") == (code == 0) and (done.stdout == "") == (code != 0)


@pytest.mark.parametrize("where", ["/", "/tmp"])
def test_a_checkpoint_of_no_run(capsys: Said, where: str) -> None:
    assert main(["export", where, "/nowhere/out"]) == 2
    assert "is in no run directory" in capsys.readouterr().err
