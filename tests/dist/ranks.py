"""Ranks as processes, and a store of the test's own, which outlives them and lets it say who goes on when."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
LONG = 300  # seconds that nothing takes


@contextmanager
def job(script: str, ranks: int, *args: str, env: dict[str, str] | None = None) -> Iterator[tuple[list[subprocess.Popen[str]], dist.TCPStore]]:
    """Runs `script` on each rank, and kills what is left of it afterwards."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {**os.environ, **(env or {}), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        yield processes, store
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each; all are read at once, as none may wait for room to write while others wait for it."""
    with ThreadPoolExecutor(len(processes)) as pool:
        said = list(pool.map(lambda process: process.communicate(timeout=LONG), processes))
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, said, strict=True)]


def run(script: str, ranks: int, *args: str, env: dict[str, str] | None = None) -> list[str]:
    """What each rank printed; all must have ended well."""
    with job(script, ranks, *args, env=env) as (processes, _):
        found = ends(processes)
    assert [code for code, _, _ in found] == [0] * ranks, "\n".join(err[-2000:] for _, _, err in found)
    return [out for _, out, _ in found]
