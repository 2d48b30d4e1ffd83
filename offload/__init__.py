"""offload: trains PyTorch models whose state does not fit the GPU, through GPU memory, RAM and NVMe, within budgets, exactly.

Names are resolved on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offload.errors import BudgetError, CheckpointError, ConfigError, OffloadError, PlanError, RankError, StepError, SwapError

if TYPE_CHECKING:
    from offload import ops, optim
    from offload.api import plan, prepare, runtime
    from offload.checkpoint.export import save_pretrained
    from offload.checkpoint.load import load
    from offload.checkpoint.save import save
    from offload.checkpoint.weights import load_pretrained
    from offload.config import Precision, Tiers
    from offload.memory.swap import SwapFile
    from offload.optim import clip_grad_norm_

__version__ = "0.1.0"
__all__ = [
    "BudgetError", "CheckpointError", "ConfigError", "OffloadError", "PlanError", "Precision", "RankError", "StepError", "SwapError",
    "SwapFile", "Tiers", "clip_grad_norm_", "load", "load_pretrained", "ops", "optim", "plan", "prepare", "runtime", "save", "save_pretrained",
]  # fmt: skip

_LAZY = {
    "Precision": "offload.config",
    "SwapFile": "offload.memory.swap",
    "Tiers": "offload.config",
    "clip_grad_norm_": "offload.optim",
    "load": "offload.checkpoint.load",
    "load_pretrained": "offload.checkpoint.weights",
    "plan": "offload.api",
    "prepare": "offload.api",
    "runtime": "offload.api",
    "save": "offload.checkpoint.save",
    "save_pretrained": "offload.checkpoint.export",
}


def __getattr__(name: str) -> Any:
    if name in ("ops", "optim"):
        return importlib.import_module(f"offload.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
