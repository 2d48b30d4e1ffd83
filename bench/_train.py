"""Runs of `offload train` on the demo's model, which `make demo` or examples/prepare_smollm2.py prepares."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN = Path(__file__).parent.parent / "examples" / "smollm2.toml"
IN_MEMORY = {"train.activations": "keep", "tiers.device": "3GiB", "tiers.host": "4GiB", "tiers.nvme": "[]"}


def train(settings: Mapping[str, object], out: Path) -> dict[str, Any]:
    """The summary of a run whose file is the demo's but for `settings`, by dotted key."""
    command = [sys.executable, "-m", "offload", "train", str(RUN), "--out", str(out), "--json"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
