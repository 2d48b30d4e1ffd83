"""What a run says while it goes, on standard error: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from offload.config import format_size


def occupancy(now: Mapping[str, int], budget: Mapping[str, int]) -> str:
    """Each tier's bytes in use and budget."""
    return "  ".join(f"{tier} {format_size(now.get(tier, 0))}/{format_size(budget[tier])}" for tier in budget if budget[tier])


def describe(record: Mapping[str, Any]) -> str:
    """The figures of a step in one line."""
    norm = "" if record["grad_norm"] is None else f"  norm {record['grad_norm']:.3g}"
    skipped = f"  skipped {record['skipped']}" if record["skipped"] else ""
    return f"loss {record['loss']:.4f}  lr {record['lr']:.2e}{norm}  {record['seconds']:.2f} s  {record['tokens_per_second']:.0f} tok/s{skipped}"


class Reporter:
    """Notes and steps of a run."""

    def __init__(self, steps: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._steps = steps
        self._live: Progress | None = None
        self._task: Any = None
        if self._console.is_terminal:
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(16), TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._live.add_task("", total=steps)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any], budget: Mapping[str, int]) -> None:
        """Shows a finished step."""
        line = f"{describe(record)}  {occupancy(record['tier_bytes'], budget)}"
        if self._live is None:
            self.note(f"step {record['step']}/{self._steps}  {line}")
            return
        self._live.start()
        self._live.update(self._task, completed=record["step"], description=line, refresh=True)

    def close(self) -> None:
        """Ends the live line."""
        if self._live is not None:
            self._live.stop()
