"""Small models of transformers, such as directories of the Hugging Face hub hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from runs import sizes

SIZES = sizes(96, 24, 40, heads=2, max_position_embeddings=32)
EXPERTS = {"num_key_value_heads": 2, "head_dim": 12, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(vocab_size=96, n_positions=32, n_embd=24, n_layer=2, n_head=2),
    "mixtral": lambda: MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "qwen3 moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=24, num_experts=4),
}


def hub(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype).eval()  # type: ignore[no-any-return]
