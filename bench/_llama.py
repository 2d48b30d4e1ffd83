"""A Llama with seeded random weights, prepared, and steps of it: what several benches measure."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    import offload  # where it runs it is imported late: the peers' interpreter need not have it

HOST = {"parameter": "host", "gradient": "host", "optimizer": "host"}


def add_sizes(parser: argparse.ArgumentParser, *, width: int, blocks: int, vocabulary: int, tokens: int) -> None:
    for name, value in {"width": width, "blocks": blocks, "vocabulary": vocabulary, "tokens": tokens}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of the model or its batch of one sequence; {value} if not given")


def sizes(given: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(given, name) for name in ("width", "blocks", "vocabulary", "tokens")}


def build(sizes: dict[str, int], device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["width"], intermediate_size=sizes["width"] * 11 // 4, num_hidden_layers=sizes["blocks"],
        num_attention_heads=max(1, sizes["width"] // 64), use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device) if device != "cpu" else nullcontext():
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(previous)


def batch(sizes: dict[str, int], rank: int = 0) -> torch.Tensor:
    """Token ids [1, tokens], those of a rank."""
    return torch.randint(0, sizes["vocabulary"], (1, sizes["tokens"]), generator=torch.Generator().manual_seed(1 + rank))


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return value


class Run(AbstractContextManager["Run"]):
    """A prepared Llama and its AdamW; closed at the end."""

    def __init__(self, sizes: dict[str, int], tiers: offload.Tiers, **options: Any) -> None:
        import offload

        self._clip = offload.clip_grad_norm_
        self.model: Any = offload.prepare(build(sizes), tiers, batch=(1, sizes["tokens"]), **options)
        self.runtime = offload.runtime(self.model)
        self.optimizer = offload.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.ids = batch(sizes)

    def step(self, clip: float | None = None) -> None:
        loss(self.model, self.ids).backward()
        if clip is not None:
            self._clip(self.model, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, clips: Sequence[float | None]) -> float:
        """Seconds a step of as many steps as there are values to clip at (None: not at all), from rest to rest."""
        start = time.perf_counter()
        for clip in clips:
            self.step(clip)
        self.runtime.synchronize()
        return (time.perf_counter() - start) / len(clips)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.runtime.close()
