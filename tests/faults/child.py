"""Commands of offload's in processes of their own, each forked from one that has imported everything, some with a fault in them."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 120  # what takes longer hangs
PRELOADED = ["torch", "transformers", "transformers.models.llama.modeling_llama", "offload.train.loop", "offload.cli.train", "hypothesis"]
Harm = Callable[[Connection], None]  # makes something happen later on; the other end is `Child.hear` and `Child.answer`

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (minus the signal that killed it), its error's class, what it printed, the threads that it left."""

    code: int
    error: str
    out: str
    said: str
    left: list[str] = field(default_factory=list)
    told: Any = None


class Child:
    """`offload ARGV`, begun; where it prints to is `stem` with .out and .err."""

    def __init__(self, stem: Path, argv: Sequence[str], harm: Harm | None = None) -> None:
        _processes.set_forkserver_preload(PRELOADED)
        self._stem = stem
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_run, args=(theirs, str(stem), list(argv), harm))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def hear(self) -> Any:
        """What it says next, waiting; EOFError where it has ended."""
        if not self._pipe.poll(PATIENCE_SECONDS):
            os.kill(self.pid, signal.SIGUSR1)  # says where each thread is
            self._process.join(2)
            self.end()
            raise AssertionError(f"it hangs: {self._said('err')}")
        return self._pipe.recv()

    def answer(self) -> None:
        self._pipe.send(None)

    def join(self) -> Outcome:
        """Waits for its end."""
        code, errors, left, told = 0, [""], [], None
        try:
            code, errors, left, told = self.hear()
        except (EOFError, ConnectionResetError):
            code = -1
        self._process.join(PATIENCE_SECONDS)
        exit_code = self._process.exitcode
        if exit_code is None:
            self.end()
            raise AssertionError(f"it does not exit: {self._said('err')}")
        assert code in (exit_code, -1), (code, exit_code)
        return Outcome(exit_code, (errors or [""])[-1], self._said("out"), self._said("err"), left, told)

    def end(self) -> None:
        """Kills it, if it is there."""
        self._process.kill()
        self._process.join()

    def _said(self, which: str) -> str:
        return self._stem.with_suffix(f".{which}").read_text(errors="replace")


def _threads() -> dict[str, str]:
    """By number, the names of all."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            found[task] = file.read().strip()
    return found


def _left(before: dict[str, str]) -> list[str]:
    """Names of threads that were not there `before` and do not go: one that was joined may still be on its way out."""
    until = time.monotonic() + 5
    while True:
        left = [name for task, name in _threads().items() if task not in before]
        if not left or time.monotonic() > until:
            return left + [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        os.sched_yield()


def _run(pipe: Connection, stem: str, argv: list[str], harm: Harm | None) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stem}.{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644), number)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    from offload.cli import app
    from offload.train.loop import Trainer
    from offload.train.model import Toy

    gc.freeze()
    torch.set_num_threads(1)
    # What is measured before a run takes longer than these runs, and changes no bit of them.
    Trainer._measured = lambda *_: None  # type: ignore[method-assign,assignment]
    Toy.step = lambda toy: setattr(toy, "in_chunks", True)  # type: ignore[method-assign,assignment]
    before, errors, fail = _threads(), [], app.fail

    def failing(error: object) -> int:
        errors.append(type(error).__name__)
        return fail(error)

    app.fail = failing
    if harm is not None:
        harm(pipe)
    code = app.main(argv)
    gc.collect()
    pipe.send((code, errors, _left(before), getattr(harm, "told", None)))
    sys.exit(code)
