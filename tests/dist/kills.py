"""A run on two ranks of which one is killed again and again: torchrun starts both again, and the finished run has the bits of an undisturbed one.

    python tests/dist/kills.py [--kills 20] [--seed 0] [--stage 3]

A rank chosen at random is sent SIGKILL at a random moment: of its start (before ranks are connected and after), between steps, or of a save. Within
SECONDS the other must have ended too, and as soon again both must have been started anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from offload.checkpoint.manifest import verify

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it
from test_train_ranks import LONG, on, start, write

SECONDS = 45.0  # README: "Several ranks" of the command line; torchrun alone takes 30 to end a rank that hears nothing
MOMENTS = ("starting", "connected", "step", "step", "save", "save")
STEPS_MOST = 6  # that one start is left alone for


class Trouble(Exception):
    """What should not be."""


class Job:
    """torchrun and its two ranks; what they say is read by a thread."""

    def __init__(self, run: Path, *args: str, restarts: int) -> None:
        self.said: list[str] = []
        self.process: subprocess.Popen[str] = start(2, run, *args, restarts=restarts)
        self.out = ""
        self._readers = [threading.Thread(target=self._read_err, daemon=True), threading.Thread(target=self._read_out, daemon=True)]
        for reader in self._readers:
            reader.start()

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        self.out = self.process.stdout.read()

    def ranks(self, start: int) -> dict[int, psutil.Process]:
        """Those that live and were started for the `start`-th time, counted from 0."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error, KeyError):
                environment = child.environ()
                if int(environment["TORCHELASTIC_RESTART_COUNT"]) == start and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(environment["RANK"])] = child
        return found

    def steps(self) -> int:
        """Lines of steps said so far."""
        return sum(line.startswith("step ") for line in list(self.said))

    def until(self, true: Callable[[], object], what: str, seconds: float = LONG) -> float:
        """The seconds until `true()`; Trouble where it takes longer, or the job has ended first."""
        begun = time.monotonic()
        while not true():
            if self.process.poll() is not None:
                raise Trouble(f"the job ended with code {self.process.returncode} before {what}\n{''.join(self.said[-30:])}")
            if time.monotonic() - begun > seconds:
                raise Trouble(f"{seconds:.0f} s were not enough for {what}\n{''.join(self.said[-30:])}")
            time.sleep(0.002)
        return time.monotonic() - begun

    def end(self) -> str:
        """What it printed, once it has ended well."""
        if self.process.wait(LONG):
            raise Trouble(f"the job ended with code {self.process.returncode}\n{''.join(self.said[-60:])}")
        for reader in self._readers:
            reader.join()
        return self.out

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _connected(ranks: dict[int, psutil.Process]) -> bool:
    """Whether the two have a connection to each other, as a process group makes them."""
    with contextlib.suppress(psutil.Error):
        ends = [{(c.laddr, c.raddr) for c in p.net_connections(kind="tcp") if c.raddr} for p in ranks.values()]
        return any((there, here) in ends[1] for here, there in ends[0])
    return False


def _moment(job: Job, kind: str, ranks: dict[int, psutil.Process], saving: Path, chance: random.Random) -> None:
    """Returns at a random moment of that kind."""
    if kind == "starting":
        time.sleep(chance.uniform(0, 4))
        return
    if kind == "connected":
        job.until(lambda: _connected(ranks), "ranks were connected")
        time.sleep(chance.uniform(0, 4))
        return
    first, wanted = job.steps(), chance.randint(1, STEPS_MOST)
    job.until(lambda: job.steps() >= first + wanted, "the next steps")
    if kind == "save":
        job.until(lambda: saving.exists() and any(saving.iterdir()), "a save began")
        time.sleep(chance.uniform(0, 0.06))
    else:
        time.sleep(chance.uniform(0, 0.3))


def _over(ranks: dict[int, psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values())


def _started(job: Job, number: int, seconds: float) -> tuple[dict[int, psutil.Process], float]:
    """The ranks of that start, once both are there, and the seconds that it took."""
    taken = job.until(lambda: len(job.ranks(number)) == 2, f"start {number}", seconds)
    return job.ranks(number), taken


def disturbed(run: Path, kills: int, steps: int, chance: random.Random) -> tuple[dict[str, object], list[tuple[str, float, float]]]:
    """The summary of a run, and for each kill the kind of moment and seconds until both ranks had ended, and were there again."""
    saving = run.parent / "out" / ".saving"
    job, found = Job(run, "--resume", "out", "--set", f"train.steps={steps}", restarts=kills), []
    try:
        for number in range(kills):
            ranks, _ = _started(job, number, LONG)
            kind, victim = chance.choice(MOMENTS), chance.randint(0, 1)
            _moment(job, kind, ranks, saving, chance)
            at = job.steps()
            ranks[victim].kill()
            gone = job.until(partial(_over, ranks), "the end of the other rank", SECONDS)
            _, again = _started(job, number + 1, SECONDS)
            print(f"{number + 1:3} {kind:9} rank {victim} after {at:3} lines of steps: down in {gone:4.1f} s, again in {again:4.1f} s", flush=True)
            found.append((kind, gone, again))
        return json.loads(job.end()), found
    finally:
        job.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, default=3)
    given = parser.parse_args()
    steps = 40 + given.kills * (STEPS_MOST + 14)
    with tempfile.TemporaryDirectory(prefix="offload-kills-") as directory:
        where = Path(directory)
        runs = [write(where / name, stage=given.stage, every=2) for name in ("calm", "killed")]
        calm, _ = on(2, runs[0], "--out", "out", "--set", f"train.steps={steps}")
        try:
            summary, found = disturbed(runs[1], given.kills, steps, random.Random(given.seed))
            for key in ("digest", "losses", "eval_loss_first", "eval_loss_last"):
                if summary[key] != calm[key]:
                    raise Trouble(f"{key} is not that of the undisturbed run: {summary[key]!r}, {calm[key]!r}")
            for checkpoint in (where / "killed/out/checkpoints").glob("step-*"):
                verify(checkpoint)
            left = [str(p) for pattern in ("swap/*", "out/.saving/*") for p in (where / "killed").glob(pattern)]
            if left:
                raise Trouble(f"left behind: {left}")
        except Trouble as trouble:
            print(f"FAILED: {trouble}", file=sys.stderr)
            return 1
    kinds = ", ".join(f"{count} at {kind}" for kind, count in Counter(kind for kind, _, _ in found).items())
    down, again = (max(seconds) for seconds in zip(*((gone, again) for _, gone, again in found), strict=True))
    print(f"{given.kills} kills ({kinds}): down in at most {down:.1f} s, and there again in at most {again:.1f} s")
    print(f"the run's digest is that of the undisturbed one: {summary['digest']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
