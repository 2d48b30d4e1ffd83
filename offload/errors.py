"""The errors users see; each message names what, where and the way out."""

from __future__ import annotations

SHOWN_MOST = 200  # characters of what comes from a file


def named(name: str) -> str:
    """A name that comes from a file, and so may be anything, as part of a message of one line."""
    return name if name.isprintable() and 0 < len(name) <= SHOWN_MOST else f"{name[:SHOWN_MOST]!r}"


class OffloadError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A setting or a use that cannot be honoured: which, where it was given and what to give instead."""


class PlanError(OffloadError):
    """The state does not fit its tiers: which tier, need, have, and three ways out."""


class BudgetError(OffloadError):
    """A tier's budget would be exceeded by something asked for after the plan was made."""


class StepError(OffloadError):
    """A step was applied in part before it was known that it must not be: why, and where to go on from. The model can only be closed."""


class SwapError(OffloadError, OSError):
    """I/O on a swap file failed: which file, which extent, what the kernel said."""


class CheckpointError(OffloadError):
    """A checkpoint or a weights file is damaged, missing or does not match the model."""


class RankError(OffloadError):
    """Another rank has failed, is gone or has not come: which, to what, and how long it was waited for.

    `told`: the other rank has said itself what happened to it.
    """

    told = False
