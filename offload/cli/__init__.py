"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def _open_streams() -> None:
    """Opens standard streams that came closed: files opened later would take their numbers, and what is said would go into them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. Also where Ctrl-C comes while the command line itself is imported."""
    try:
        _open_streams()
        from offload.cli.app import main as run

        return run(argv)
    except KeyboardInterrupt:
        return 130


__all__ = ["main"]
