"""What a result file says besides its figures: machine, versions, commit, command, and what else ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from offload.observe import profile

RESULTS = Path(__file__).parent / "results"
_load = os.getloadavg()[0]  # of before the measurement, as this is imported first


def describe() -> dict[str, Any]:
    said = [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv]  # where things lie is this machine's alone
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()
    return {"machine": profile.machine(), "versions": profile.versions(), "commit": commit, "command": " ".join(["python", *said]),
            "load_before_and_after": [round(_load, 2), round(os.getloadavg()[0], 2)]}  # fmt: skip


def save(figures: dict[str, Any], path: Path) -> dict[str, Any]:
    """Writes the figures with what goes before them; returns all of it."""
    whole = describe() | figures
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole
