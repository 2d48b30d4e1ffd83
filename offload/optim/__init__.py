"""Optimizers: torch's interface and results, with state at rest on its tiers."""

from offload.optim.adam import Adam, AdamW
from offload.optim.clip import clip_grad_norm_

__all__ = ["Adam", "AdamW", "clip_grad_norm_"]
