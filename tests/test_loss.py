"""The loss in chunks against the loss from all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig

from offload.train import loss
from offload.train.model import Toy


def inputs(dtype: torch.dtype, rows: int, length: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * length + width)
    hidden = torch.randn(rows, length, width, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab, width, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows, length), generator=generator)


def whole(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = (hidden[:, :-1] @ weight.t()).float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None and b is not None and a.dtype == b.dtype
    return float((a.double() - b.double()).norm() / b.double().norm())


# 2 tokens; one chunk exactly; a chunk and a token; several groups with a ragged end; wider than the tokens are many
@pytest.mark.parametrize(("rows", "length", "width"), [(1, 2, 8), (1, loss.CHUNK + 1, 16), (1, loss.CHUNK + 2, 16), (3, 301, 300), (1, 40, 512)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
def test_equal_to_the_whole_loss(dtype: torch.dtype, close: float, rows: int, length: int, width: int) -> None:
    hidden, weight, ids = inputs(dtype, rows, length, width, 257)
    value = loss.chunked_causal_loss(hidden, weight, ids)
    value.backward()
    got = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    expected = whole(hidden, weight, ids)
    expected.backward()
    assert value.dtype == torch.float32 and abs(float(value.detach() / expected.detach()) - 1) < close * 0.1
    assert distance(got[0], hidden.grad) < close and distance(got[1], weight.grad) < close


def test_the_scale_is_applied_once_and_upstream_gradients_are() -> None:
    hidden, weight, ids = inputs(torch.float32, 2, 50, 32, 99)
    (2 * loss.chunked_causal_loss(hidden, weight, ids, 0.25)).backward()
    got = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    (0.5 * whole(hidden, weight, ids)).backward()
    assert distance(got[0], hidden.grad) < 1e-5 and distance(got[1], weight.grad) < 1e-5


def test_a_loss_scale_enters_before_gradients_are_narrowed() -> None:
    """Gradients of logits of 1/60 of what fp16 can hold: without a scale they vanish, with one they are right."""
    hidden, weight, ids = inputs(torch.float16, 1, 300, 32, 99)
    whole(hidden.float(), weight.float(), ids).backward()
    expected = hidden.grad
    for scale, close in ((1e-9, False), (1e-9 * 2.0**24, True)):
        hidden.grad = None
        loss.chunked_causal_loss(hidden, weight, ids, scale).backward()
        assert hidden.grad is not None and expected is not None
        assert (distance(hidden.grad.float() / scale, expected.float()) < 5e-3) is close


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(frozen: int) -> None:
    hidden, weight, ids = inputs(torch.float32, 2, 50, 32, 99)
    pair = (hidden, weight)
    pair[frozen].requires_grad_(False)
    loss.chunked_causal_loss(hidden, weight, ids).backward()
    assert pair[frozen].grad is None and pair[1 - frozen].grad is not None


def test_the_same_value_without_gradients() -> None:
    hidden, weight, ids = inputs(torch.bfloat16, 1, 300, 32, 99)
    with torch.no_grad():
        value = loss.chunked_causal_loss(hidden, weight, ids)
    assert not value.requires_grad and torch.equal(value, loss.chunked_causal_loss(hidden, weight, ids).detach())


def test_large_logits_and_nan() -> None:
    hidden, weight, ids = inputs(torch.float32, 1, 20, 32, 99)
    value = loss.chunked_causal_loss(hidden * 1e4, weight, ids)
    assert torch.isfinite(value) and abs(float(value.detach()) / float(whole(hidden * 1e4, weight, ids).detach()) - 1) < 1e-5
    with torch.no_grad():
        hidden[0, 3, 3] = float("nan")
    assert torch.isnan(loss.chunked_causal_loss(hidden, weight, ids))


def test_only_once() -> None:
    hidden, weight, ids = inputs(torch.float32, 1, 20, 32, 99)
    value = loss.chunked_causal_loss(hidden, weight, ids)
    torch.autograd.backward(value, retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.backward(value)


transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "plain"),
    [
        ("llama", {}, True),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gemma2", {"head_dim": 16}, False),
        ("granite", {"logits_scaling": 8.0}, False),
    ],
)
def test_heads_that_do_more_are_found_out(kind: str, changes: dict[str, object], plain: bool) -> None:
    config = transformers.AutoConfig.for_model(kind, **SMALL, num_key_value_heads=4, pad_token_id=None, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert loss.head_is_plain(model) is plain


def test_a_toy_tells_what_its_architecture_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what went wrong with it, rather than nothing."""
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False)
    toy = Toy(config)
    toy.step()
    assert toy.in_chunks and toy.trouble == ""

    def refuses(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("offload.train.model.build", refuses)
    toy = Toy(config)
    toy.step()
    assert not toy.in_chunks and toy.trouble == "ValueError: no such thing"
