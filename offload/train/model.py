"""The model of a run: its configuration, checked; the model on `meta`; and a toy of the same kind."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import offload
from offload.config import ModelTable, RunConfig, shown
from offload.errors import ConfigError, named
from offload.planner.demand import Batch
from offload.planner.placement import Plan
from offload.train import loss

LOGIT_BYTES = 14  # what the plan counts for an element of the logits, all its forms together

# what makes a model small, by the names that architectures give it
_TOY_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_embd": 64,
    "n_inner": 128,
    "n_layer": 2,
    "n_head": 4,
}
_TOY_IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}


def load_config(table: ModelTable) -> Any:
    """The transformers configuration that `[model]` asks for; `ConfigError` for what is not there or not known."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    except ImportError:
        raise ConfigError("[model] needs transformers: pip install 'offload[hf]'") from None
    if table.path is not None:
        if not os.path.isfile(Path(table.path) / "config.json"):  # Path's own raises where a name is too long
            raise ConfigError(f"model.path: no config.json in {named(table.path)}; give a Hugging Face model directory")
        try:
            config = AutoConfig.from_pretrained(table.path)
        except Exception as error:  # as below
            raise ConfigError(f"model.path: {named(table.path)} has a config.json that transformers does not take: {_line(error)}") from None
    else:
        kind = str(table.type)
        if kind not in CONFIG_MAPPING:
            raise ConfigError(f"model.type = {shown(kind)}: transformers has no such type{_near(kind, CONFIG_MAPPING.keys())}")
        known = AutoConfig.for_model(kind)
        if type(known) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(f"model.type = {kind!r} is no causal language model in transformers")
        for key in table.config:
            if not hasattr(known, key):
                raise ConfigError(f"model.config.{named(key)} is no setting of {kind}{_near(key, known.to_dict())}")
        try:
            config = AutoConfig.for_model(kind, **table.config)
        except Exception as error:  # configurations check themselves with errors of many kinds
            raise ConfigError(f"model.config: {_line(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model.path: {config.model_type} in {named(str(table.path))} is no causal language model in transformers")
    config.use_cache = False
    return config


def _line(error: Exception) -> str:
    """What an error of others' says, as part of a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" (nearest: {close[0]})" if close else ""


def build(config: Any, device: str = "meta", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal language model of `config` in training mode, parameters of `dtype` on `device`; ConfigError where there is no such model."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except Exception as error:  # sizes that do not go together fail in as many ways as there are architectures
        raise ConfigError(f"transformers cannot make a {config.model_type} of this configuration: {_line(error)}") from error
    return model.train()


def planned_batch(config: Any, sequences: int, tokens: int, in_chunks: bool) -> Batch:
    """A micro-batch as the plan counts it: with a loss in chunks, few tokens' logits live at once."""
    width = int(config.get_text_config().hidden_size)
    return Batch(sequences, tokens, loss.planned_tokens(width, LOGIT_BYTES) if in_chunks else None)


def passes(config: RunConfig, ranks: int) -> bool:
    """Whether a gradient is for its update alone, which can start under the backward: a run reads none."""
    return config.updates_value(ranks) == "backward" and config.data.accumulate == 1


def plan(model_config: Any, config: RunConfig, device: str, in_chunks: bool, *, ranks: int = 1, rank: int = 0) -> Plan:
    """What of a run goes where on a device, its loss `in_chunks` or not; of several ranks on one of them. PlanError where it does not fit."""
    return offload.plan(
        build(model_config),
        config.tiers_value(),
        device=device,
        precision=config.precision_value(),
        activations=config.train.activations,
        place=config.place_value(),
        batch=planned_batch(model_config, config.data.batch_size, config.data.seq_length, in_chunks),
        accumulate=config.data.accumulate,
        ranks=ranks,
        rank=rank,
        stage=config.train.stage,
        keep_gradients=not passes(config, ranks),
    )


def _prepared_step(toy: nn.Module, ids: torch.Tensor) -> None:
    """One step as a run makes them, so that what it imports and keeps is part of the base."""
    tiers = offload.Tiers(device="64MiB", host="64MiB")
    with offload.runtime(offload.prepare(toy, tiers, device="cpu", activations="recompute")):
        optimizer = offload.optim.AdamW(toy.parameters(), lr=1e-4)
        torch.autograd.backward(loss.full_causal_loss(toy, ids))
        offload.clip_grad_norm_(toy, 1.0)
        optimizer.step()


def toy_config(config: Any) -> Any | None:
    """`config` with a small model's sizes, or None where the architecture resists."""
    given = config.to_dict()
    small = {k: v for k, v in (_TOY_SIZES | _TOY_IDS).items() if given.get(k) is not None}
    if small.get("num_key_value_heads") and given["num_key_value_heads"] == given.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    toy = copy.deepcopy(config)
    try:
        for key, value in small.items():
            setattr(toy, key, value)
        if getattr(toy, "layer_types", None):
            toy.layer_types = toy.layer_types[:2]
    except (AttributeError, TypeError, ValueError):
        return None
    return toy


class Toy:
    """A small model of a run's kind: a probe of what the architecture allows, and what makes libraries import and keep what they will.

    After `step()`: `in_chunks`, whether the loss can be taken in chunks; `trouble`, what went wrong with the toy, empty if nothing did.
    """

    def __init__(self, config: Any, narrow: torch.dtype = torch.bfloat16) -> None:
        self._config, self._narrow = config, narrow
        self.in_chunks = False
        self.trouble = ""

    def step(self) -> None:
        """Trains toys in fp32 and in `narrow`, plain and prepared. An architecture of which no toy can be made has its loss taken whole."""
        toy = toy_config(self._config)
        if toy is None:
            self.trouble = "its sizes cannot be changed"
            return
        with torch.random.fork_rng(devices=[]):
            try:
                self._train(toy)
            except Exception as error:  # whatever the toy cannot do, the model itself will say
                self.in_chunks = False
                self.trouble = f"{type(error).__name__}: {error}"

    def _train(self, toy: Any) -> None:
        plain = False
        ids = torch.arange(64)[None] % toy.vocab_size
        for dtype in (torch.float32, self._narrow):
            model = build(toy, "cpu", dtype)
            torch.autograd.backward(loss.full_causal_loss(model, ids))
            torch.optim.AdamW(model.parameters(), lr=1e-4).step()
            if dtype == torch.float32:
                plain = loss.head_is_plain(model.eval())
        with FakeTensorMode():  # as compute is measured, see train/estimate.py
            build(toy, "cpu")(input_ids=torch.zeros((1, 8), dtype=torch.int64))
        _prepared_step(build(toy, "cpu", torch.float32), ids)
        self.in_chunks = plain
