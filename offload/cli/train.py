"""`offload train`."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from offload.cli.app import emit, fail
from offload.config import RunConfig, format_size
from offload.errors import OffloadError, RankError


def _rank() -> int | None:
    """This process's among several that torchrun has started; None where it is alone."""
    return int(os.environ.get("RANK") or 0) if os.environ.get("WORLD_SIZE", "") not in ("", "0", "1") else None


class _Signals:
    """SIGINT, SIGTERM and SIGHUP end the run after the step under way, a second one at once, by KeyboardInterrupt.

    A SIGHUP is no second one, as a terminal that closes sends two: its shell's, and the kernel's as the shell ends.

    Until steps begin the first one ends it at once too, where nothing is there to save and an earlier run may still be as it was; not with
    `patient`: of several ranks, which end together, and of a run that goes on, whose end is that of its checkpoint.
    """

    def __init__(self, patient: bool) -> None:
        self.came = 0  # the first one's number
        self.hung_up = False  # the terminal closed, so what it is told goes nowhere
        self._patient = patient

    def stepping(self) -> bool:
        """Whether none came; asked before each step."""
        self._patient = True
        return not self.came

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.hung_up = self.hung_up or number == signal.SIGHUP
        if self.came and number == signal.SIGHUP:
            return
        at_once = b"stopping at once\n" if self.came else b"" if self._patient else b"stopping before the first step\n"
        self.came = self.came or number  # first of all: the next one may interrupt this
        if not _rank():
            with suppress(OSError):  # not print(): the thread that this interrupts may be within one
                os.write(2, at_once or b"stopping after this step; once more to stop at once\n")
        if at_once:
            raise KeyboardInterrupt

    @contextmanager
    def heard(self) -> Iterator[None]:
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which is what nohup asks for
            ending.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in ending}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _text(summary: dict[str, Any]) -> str:
    def change(first: float | None, last: float | None) -> str:
        return " -> ".join("-" if x is None else f"{x:.4f}" for x in (first, last))

    peak, budget = summary["peak_bytes"], summary["budget_bytes"]
    tiers = ", ".join(f"{tier} {format_size(peak[tier])} of {format_size(budget[tier])}" for tier in budget)
    rate = f"{summary['step_seconds_median']:.3f} s a step, {summary['tokens_per_second']:.0f} tokens/s" if summary["steps"] else "no step"
    skipped = f", {summary['skipped']} of them skipped" if summary["skipped"] else ""
    saved = f"; `--resume` goes on from {summary['checkpoint']}" if summary["interrupted"] and summary["checkpoint"] else ""
    return "\n".join(
        [
            f"{summary['steps']} steps{' (interrupted)' if summary['interrupted'] else ''}{skipped}, {summary['tokens']} tokens, {rate}{saved}",
            f"loss {change(summary['loss_first'], summary['loss_last'])}, held out {change(summary['eval_loss_first'], summary['eval_loss_last'])}",
            f"state {format_size(summary['state_bytes'])}; peaks: {tiers}, resident {format_size(peak['rss'])}",
            f"digest {summary['digest']}",
        ]
    )


def _saved(summary: dict[str, Any]) -> bool:
    """Whether a checkpoint has all of the run's steps."""
    return bool(summary["checkpoint"] == f"step-{summary['steps']:08d}")


def _say(error: BaseException) -> None:
    """What ends this rank of several, before the others hear of it and torchrun ends this one; those that were told leave the telling to it."""
    if isinstance(error, RankError) and error.told:
        return
    if isinstance(error, OffloadError):
        fail(f"rank {_rank()}: {error}")
    elif isinstance(error, Exception):
        with suppress(OSError):  # as in fail()
            traceback.print_exception(error)


def train_command(run: str, overrides: Sequence[str], out: str | None, resume: str | None, as_json: bool) -> int:
    """Trains as the run file says; the exit code is 0, or 128 + the signal that ended the run before its last step was saved.

    Of several ranks each trains its part, and the first alone says what came of it.
    """
    from offload.memory.limits import check_environment

    config, rank = RunConfig.load(run, overrides), _rank()
    check_environment()
    signals = _Signals(patient=rank is not None or resume is not None)
    with signals.heard():
        try:
            return _trained(config, run, out, resume, as_json, signals, rank)
        except KeyboardInterrupt:
            return 128 + (signals.came or signal.SIGINT)


def _trained(config: RunConfig, run: str, out: str | None, resume: str | None, as_json: bool, signals: _Signals, rank: int | None) -> int:
    import transformers

    from offload.train.loop import train

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning)
    if rank is not None and signals.came:  # before ranks are connected nobody waits for word of it
        return 128 + signals.came
    where = resume or out or str(Path("runs") / Path(run).stem)
    if rank is None:
        summary = train(config, where, resume=resume is not None, stopped=lambda: not signals.stepping())
    else:
        try:
            summary = train(config, where, resume=resume is not None, stopped=lambda: not signals.stepping(), failing=_say)
        except Exception as error:
            return 2 if isinstance(error, OffloadError) else 1
    if not rank:
        emit(summary, as_json, _text, lambda: signals.hung_up)
    return 128 + (signals.came or signal.SIGTERM) if summary["interrupted"] and not _saved(summary) else 0
