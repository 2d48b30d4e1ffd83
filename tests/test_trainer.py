"""transformers' Trainer with a prepared model: it trains, saves, and goes on from what it has saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import offload
from helpers import BF16, Prepared, ids, plain, same

pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS, SAVED = 4, 2


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = ids(index, rows=1, vocab=61)[0]
        return {"input_ids": row, "labels": row}


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, tie_word_embeddings=True, **heads)
    return LlamaForCausalLM(config)  # in fp32


def trainer(model: Any, where: Path, optimizer: torch.optim.Optimizer) -> Trainer:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    arguments = TrainingArguments(
        str(where), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS, save_steps=SAVED, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, seed=1, max_grad_norm=0.5, dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Tokens(), optimizers=(optimizer, schedule))


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_it_saves_and_goes_on(prepared: Prepared, tmp_path: Path, place: str) -> None:
    """To the bit where the parameter is its own master."""
    calm = prepared(llama(), place, keep=True, accumulate=2)
    whole = trainer(calm, tmp_path / "out", offload.optim.AdamW(calm.parameters(), lr=1e-2))
    whole.train()
    saved = tmp_path / f"out/checkpoint-{SAVED}"
    assert {"model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= set(os.listdir(saved))

    model = prepared(llama(5), place, keep=True, accumulate=2)
    further = trainer(model, tmp_path / "out", offload.optim.AdamW(model.parameters(), lr=1e-2))
    further.train(resume_from_checkpoint=str(saved))
    assert losses(further) == losses(whole)
    assert offload.runtime(model).digest() == offload.runtime(calm).digest()

    loaded = LlamaForCausalLM.from_pretrained(tmp_path / f"out/checkpoint-{STEPS}")
    for (name, got), want in zip(loaded.named_parameters(), calm.parameters(), strict=True):
        same(got.detach(), plain(want), name)


def test_what_transformers_saves_of_a_prepared_model(prepared: Prepared, tmp_path: Path) -> None:
    """Its own weights, whole; other tensors, and other models, as ever; and what offload's does not do is refused."""
    other = llama(3)
    model = prepared(llama(), precision=BF16, keep=True)
    model.save_pretrained(tmp_path / "own", max_shard_size="5KB")
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    for where in ("own", "given"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / where)
        for (name, got), want in zip(loaded.named_parameters(), model.parameters(), strict=True):
            same(got.detach(), plain(want), name)
    assert len(list((tmp_path / "own").glob("model-*.safetensors"))) > 1
    model.save_pretrained(tmp_path / "nothing", is_main_process=False)
    assert not (tmp_path / "nothing").exists()

    model.save_pretrained(tmp_path / "theirs", state_dict=other.state_dict())
    other.save_pretrained(tmp_path / "other")
    for where in ("theirs", "other"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / where)
        same(loaded.lm_head.weight.detach(), other.lm_head.weight.detach())

    for refused in ({"variant": "fp16"}, {"push_to_hub": True}):
        with pytest.raises(offload.ConfigError, match="is not there for a prepared model"):
            model.save_pretrained(tmp_path / "refused", **refused)
    model._hf_peft_config_loaded = True
    with pytest.raises(offload.ConfigError, match="does not know adapters"):
        model.save_pretrained(tmp_path / "refused")
    model._hf_peft_config_loaded = False
    offload.runtime(model).close()
    with pytest.raises(offload.ConfigError, match="was closed"):
        model.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


class Counted(LlamaForCausalLM):
    """With a buffer that files of weights have."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(3))


def test_only_a_models_own_tensors_are_saved_as_it(prepared: Prepared, tmp_path: Path) -> None:
    """Others are transformers' to save, which says of those that are at rest that it cannot."""
    model, other = (prepared(Counted(llama().config), precision=BF16, keep=True) for _ in range(2))
    for state in (other.state_dict(), {**model.state_dict(), "seen": torch.ones(3)}):
        with pytest.raises(offload.OffloadError, match="rests outside memory"):
            model.save_pretrained(tmp_path / "refused", state_dict=state)
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    assert torch.equal(Counted.from_pretrained(tmp_path / "given").lm_head.weight.detach(), plain(model.lm_head.weight))
