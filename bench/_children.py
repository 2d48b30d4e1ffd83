"""Processes that measure something for a bench, one contender or one rank each: a line of theirs that begins with @ has what they found, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any


def tell(found: Any) -> None:
    """As such a process."""
    print("@" + json.dumps(found), flush=True)


def _found(code: int, out: str, err: str) -> dict[str, Any] | str:
    line = next((line for line in out.splitlines() if line.startswith("@")), None)
    if code or line is None:
        return (err.strip().splitlines() or [f"exit {code}"])[-1]
    found: dict[str, Any] = json.loads(line[1:])
    return found


def alone(command: list[str]) -> dict[str, Any] | str:
    """What it found, or the last that it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return _found(done.returncode, done.stdout, done.stderr)


def ranks(count: int, command: Callable[[int], list[str]], **more: Callable[[int], str]) -> list[dict[str, Any]] | str:
    """What each of `count` ranks found, or the last that one of them said; each has an equal part of the cores.

    `more`: variables of the environment by rank, MASTER_ADDR and MASTER_PORT among them.
    """
    cores = str(max(1, len(os.sched_getaffinity(0)) // count))
    processes = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": cores}
        own |= {name: of(rank) for name, of in more.items()}
        processes.append(subprocess.Popen(command(rank), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **own}))
    said = [process.communicate() for process in processes]
    found = [_found(process.returncode, *words) for process, words in zip(processes, said, strict=True)]
    failed = next((one for one in found if isinstance(one, str)), None)
    return [one for one in found if not isinstance(one, str)] if failed is None else failed
