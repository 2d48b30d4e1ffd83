"""Gradient clipping by the global norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from offload.engine.registry import engine_of
from offload.errors import ConfigError


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clips the gradients of a prepared model to a global 2-norm of `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    The norm was taken as gradients came to rest, and the factor is applied by the update and by whatever reads `.grad`, so nothing moves.
    Returns the norm before clipping, an fp32 scalar on the CPU. A norm that is not finite clips nothing: the step is skipped whole.
    OffloadError where updates have started during the backward.
    """
    engine = engine_of(model)
    if not float(max_norm) >= 0.0:
        raise ConfigError(f"max_norm = {float(max_norm)}: give a number, 0 or more")
    engine.early.refuse("clipping the gradients")
    total = engine.norm()
    norm = torch.tensor(total, dtype=torch.float32, device="cpu")
    if math.isfinite(total):
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        if factor < 1.0:
            engine.gradients.scale((r for r in engine.records if r.trained and r.parameter.grad is not None), factor)
    return norm
