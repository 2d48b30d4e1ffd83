"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. Also where Ctrl-C comes while the command line itself is imported."""
    try:
        from offload.cli.app import main as run

        return run(argv)
    except KeyboardInterrupt:
        return 130


__all__ = ["main"]
