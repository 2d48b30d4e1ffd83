"""What a run says while it goes, on standard error: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from offload.config import format_size


def occupancy(now: Mapping[str, int], budget: Mapping[str, int]) -> str:
    """Each tier's bytes in use and budget."""
    return "  ".join(f"{tier} {format_size(now.get(tier, 0))}/{format_size(budget[tier])}" for tier in budget if budget[tier])


def describe(record: Mapping[str, Any]) -> str:
    """The figures of a step in one line."""
    norm = "" if record["grad_norm"] is None else f"  norm {record['grad_norm']:.3g}"
    scale = "" if record.get("loss_scale") is None else f"  scale {record['loss_scale']:g}"
    skipped = f"  skipped {record['skipped']}" if record["skipped"] else ""
    speed = f"{record['seconds']:.2f} s  {record['tokens_per_second']:.0f} tok/s"
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
    return f"loss {loss}  lr {record['lr']:.2e}{norm}  {speed}{scale}{skipped}"


class _Heard:
    """A stream that whoever reads it may leave: what a closed terminal or pipe does not take is not said, and ends no run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Reporter:
    """Notes and steps of a run of `steps` steps; `silent` for ranks that leave the telling to another."""

    def __init__(self, steps: int, silent: bool = False) -> None:
        heard: Any = _Heard(sys.stderr or io.StringIO())  # there is none where a run was started without
        self._console = Console(file=heard, highlight=False, quiet=silent or sys.stderr is None)
        self._steps = steps
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal and not silent else None

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any], budget: Mapping[str, int]) -> None:
        """Shows a finished step."""
        step = f"step {record['step']}/{self._steps}  {describe(record)}"
        tiers = occupancy(record["tier_bytes"], budget)
        if self._live is None:
            self.note(f"{step}  {tiers}")
            return
        self._live.start()
        self._live.update(Group(ProgressBar(self._steps, record["step"], width=60), Text(step), Text(tiers)), refresh=True)

    def close(self) -> None:
        """Ends the live lines; the last ones stay."""
        if self._live is not None:
            self._live.stop()
