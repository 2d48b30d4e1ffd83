"""What a bench is asked for and what becomes of its figures: a file says machine, versions, commit, command, and what else ran, besides them."""

from __future__ import annotations

import argparse
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


def parser(description: str | None, default: str | None = None, out: str = "a file for the result") -> argparse.ArgumentParser:
    """With --json and --out, which is the result `default` unless given."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true")
    made.add_argument("--out", type=Path, default=RESULTS / default if default else None, help=out)
    return made


def finish(figures: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Saves and prints what the arguments say; returns all that was saved."""
    whole = save(figures, given.out) if given.out else figures
    if given.json:
        print(json.dumps(whole))
    return whole
