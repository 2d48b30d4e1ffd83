"""Streaming: gradients and losses equal to the bit to plain torch, whatever the shape of the model and wherever its state rests."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import models as M
import offload


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(("segment", "reentrant"), M.SEGMENTS)
def test_checkpoint_segments_two_slots(tmp_path: Path, segment: int, reentrant: bool, activations: str, tier: str, device: str) -> None:
    make = lambda: M.Stack(segment, reentrant)  # noqa: E731
    assert not M.wrong_gradients(make, M.mean_square, M.tiers(tmp_path), device=device, activations=activations, place={"parameter": tier}, slots=2)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_tied_llama(tmp_path: Path, reentrant: bool | None, activations: str, device: str) -> None:
    model, loss = _llama(reentrant)
    assert not M.wrong_gradients(model, loss, M.tiers(tmp_path), device=device, activations=activations, place={"parameter": "nvme"}, slots=2)


def _llama(reentrant: bool | None = None) -> tuple[M.Make, M.Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=211, hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, use_cache=False, tie_word_embeddings=True
    )

    def make() -> nn.Module:
        model = LlamaForCausalLM(config).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    ids = torch.arange(68).view(4, 17) * 37 % 211
    return make, lambda m: m(input_ids=ids, labels=ids).loss


CASES: dict[str, tuple[M.Make, M.Loss]] = {
    "vision": (M.Vision, lambda m: M.mean_square(m, torch.linspace(-1, 1, 2 * 8 * 12).view(2, 8, 12))),
    "language": (M.Language, lambda m: M.mean_square(m, torch.arange(24).view(2, 12) * 101 % 3001)),
    "untied": (lambda: M.Language(tied=False), lambda m: M.mean_square(m, torch.arange(24).view(2, 12) * 101 % 3001)),
    "twice": (M.Twice, lambda m: M.mean_square(m, torch.linspace(-1, 1, 64).view(4, 16))),
    "branches": (M.Branches, lambda m: M.mean_square(m, torch.linspace(-1, 1, 64).view(4, 16))),
    "nested": (M.Nested, lambda m: M.mean_square(m, torch.linspace(-1, 1, 64).view(4, 16))),
    "dropout": (lambda: M.Stack(dropout=0.3, depth=3), M.mean_square),
    "dropout checkpointed": (lambda: M.Stack(2, False, dropout=0.3, depth=4), M.mean_square),
}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "nvme"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_models(tmp_path: Path, case: str, activations: str, tier: str, device: str) -> None:
    make, loss = CASES[case]
    assert not M.wrong_gradients(make, loss, M.tiers(tmp_path), device=device, activations=activations, place={"parameter": tier})


@pytest.mark.parametrize("case", ["vision", "language", "twice", "nested"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_models_in_bf16(tmp_path: Path, case: str, tier: str) -> None:
    """A bf16 run computes what the same model in bf16 computes; gradients read in the parameter's dtype."""
    make, loss = CASES[case]
    floating = {"vision", "twice", "nested"}

    def low() -> nn.Module:
        model = make().bfloat16()
        if case in floating:
            model.register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))
        return model

    value, want = M.plain_gradients(low, loss)
    with M.prepared(M.seeded(make), M.tiers(tmp_path), precision=M.BF16, place={"parameter": tier}) as model:
        got = loss(model)
        got.backward()
        assert torch.equal(got.detach(), value)
        assert not M.differing({n: g.bfloat16() for n, g in M.gradients(model).items()}, want)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("kind", ["tuple", "dict", "named", "dataclass"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_outputs_and_keywords(tmp_path: Path, kind: str, activations: str) -> None:
    x, shift = torch.linspace(-1, 1, 64).view(4, 16), torch.linspace(0, 2, 16)
    loss = lambda m: M.mean_square(m, x, shift=shift, flags={"a": [shift]})  # noqa: E731
    assert not M.wrong_gradients(
        lambda: M.Structured(kind), loss, M.tiers(tmp_path), activations=activations, place={"parameter": "nvme"}, device="sim"
    )


def test_model_outputs(tmp_path: Path) -> None:
    """A root whose output is a ModelOutput, with hidden states kept, gradients through each of them."""
    make, _ = _llama()
    ids = torch.arange(34).view(2, 17)

    def loss(model: nn.Module) -> torch.Tensor:
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        return out["loss"] + sum(h.square().mean() for h in out.hidden_states)

    assert not M.wrong_gradients(make, loss, M.tiers(tmp_path), place={"parameter": "nvme"}, activations="recompute", device="sim")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_any_order_of_units(tmp_path: Path, device: str) -> None:
    """Units run out of order, skipped, and in another order again, step after step."""
    orders = [[0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3], [3, 2, 1, 0, 4], [0, 1, 2, 3, 4], [2]]
    x = torch.linspace(-1, 1, 64).view(4, 16)
    plain = M.seeded(M.Order)
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}, device=device, slots=2) as model:
        for order in orders:
            for m in (plain, model):
                m.order = order
                m.zero_grad()
                M.mean_square(m, x).backward()
            assert not M.differing(M.gradients(model), M.gradients(plain))


def test_in_place_use_of_an_output(tmp_path: Path) -> None:
    class Root(M.Order):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).mul_(1.5).relu_()
            return x

    assert not M.wrong_gradients(Root, lambda m: M.mean_square(m, torch.ones(2, 16)), M.tiers(tmp_path), place={"parameter": "nvme"}, slots=2)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_output_that_is_a_parameter(tmp_path: Path, device: str, activations: str) -> None:
    """A module may return its parameter, or a view of it; it must hold its value while later units compute."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, n: int) -> torch.Tensor:
            return self.weight[:n]

    class Root(M.Order):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = self.positions(len(x))
            return super().forward(x) + positions

    assert not M.wrong_gradients(
        Root,
        lambda m: M.mean_square(m, torch.ones(4, 16)),
        M.tiers(tmp_path),
        place={"parameter": "nvme"},
        slots=2,
        device=device,
        activations=activations,
    )


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_module_shared_by_two_blocks(tmp_path: Path, activations: str) -> None:
    """A module registered in several blocks is bound and released by each of them."""

    class Shared(nn.Module):
        def __init__(self, common: nn.Module) -> None:
            super().__init__()
            self.common, self.own = common, nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.own(self.common(x).tanh())

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            common = nn.Linear(16, 16)
            self.blocks = nn.ModuleList(Shared(common) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    x = torch.linspace(-1, 1, 64).view(4, 16)
    plain = M.seeded(Root)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with M.prepared(M.seeded(Root), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}, activations=activations) as model:
        for _ in range(2):
            reference.zero_grad()
            M.mean_square(plain, x).backward()
            model.zero_grad()
            M.mean_square(model, x).backward()
            assert not M.differing(M.gradients(model), M.gradients(plain))
            assert M.at_rest(model)


@pytest.mark.parametrize("precision", [M.FP32, M.BF16], ids=["fp32", "bf16"])
def test_parameter_lists_and_dicts(tmp_path: Path, precision: offload.Precision) -> None:
    """Containers of parameters have no forward of their own: the module that holds them binds them."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.rand(16) for _ in range(3))
            self.named = nn.ParameterDict({"w": nn.Parameter(torch.randn(16, 16))})
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for scale in self.scales:
                x = self.linear(x * scale) @ self.named["w"]
            return x

    _same_as_twin(Root, torch.linspace(-1, 1, 64).view(4, 16), precision, tmp_path)


@pytest.mark.parametrize("precision", [M.FP32, M.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["attention", "recurrent", "functional", "parametrized"])
def test_weights_used_without_their_module(tmp_path: Path, kind: str, precision: offload.Precision) -> None:
    """torch's own attention and recurrent modules, and models that call F.linear with a child's weight, never call the module that holds it."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[None], x[None], x[None], need_weights=False)[0]

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(16, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[None])[0]

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner, self.last = nn.Parameter(torch.rand(16)), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.last(x * self.scale), self.inner.weight)

    def parametrized() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))

    make = {"attention": Attention, "recurrent": Recurrent, "functional": Functional, "parametrized": parametrized}[kind]
    _same_as_twin(make, torch.linspace(-1, 1, 64).view(4, 16), precision, tmp_path)


def _same_as_twin(make: M.Make, x: torch.Tensor, precision: offload.Precision, path: Path) -> None:
    dtype = torch.float32 if precision is M.FP32 else torch.bfloat16
    value, want = M.plain_gradients(lambda: make().to(dtype), lambda m: M.mean_square(m, x.to(dtype)))
    with M.prepared(M.seeded(make), M.tiers(path), precision=precision, place={"parameter": "nvme"}) as model:
        out = model(x)
        assert out.dtype == dtype
        loss = out.float().square().mean()
        loss.backward()
        assert torch.equal(loss.detach(), value)
        assert not M.differing(
            {n: g.to(dtype) for n, g in M.gradients(model).items() if g is not None}, {n: g for n, g in want.items() if g is not None}
        )


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_pre_hook_registered_after_prepare(tmp_path: Path, activations: str) -> None:
    """A hook of the user's that changes a block's input counts in the recomputation too."""
    x = torch.linspace(-1, 1, 64).view(4, 16)

    def hooked(model: nn.Module) -> torch.Tensor:
        handles = [b.register_forward_pre_hook(lambda m, a: (a[0] * 2,)) for b in model.blocks]
        handles += [b.register_forward_hook(lambda m, a, o: o * 0.5) for b in model.blocks]
        out = M.mean_square(model, x)
        for handle in handles:
            handle.remove()
        return out

    assert not M.wrong_gradients(M.Order, hooked, M.tiers(tmp_path), activations=activations, place={"parameter": "nvme"}, slots=2)


def test_inputs_in_containers(tmp_path: Path) -> None:
    """Floating inputs reach the compute dtype in any container torch's users pass; integer ones keep theirs; gradients reach the input."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, pair: M.Pair, ordered: Any, *, more: list[Any]) -> torch.Tensor:
            seen.append((pair.first.dtype, ordered["b"].dtype, more[0][0].dtype, more[1].dtype))
            return self.linear(pair.first + ordered["b"] + more[0][0]) * more[1]

    seen: list[Any] = []
    x = torch.ones(2, 16, requires_grad=True)
    with M.prepared(M.seeded(Root), M.tiers(tmp_path), precision=M.BF16) as model:
        model(M.Pair(x, x), OrderedDict(b=torch.ones(16)), more=[(torch.ones(16),), torch.arange(16)]).float().sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int64)]
    assert x.grad is not None and x.grad.dtype == torch.float32 and bool(x.grad.any())


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_evaluation(tmp_path: Path, tier: str, device: str) -> None:
    """Outputs under eval, no_grad and inference_mode are plain torch's, between training steps too."""
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32)
    plain = M.seeded(lambda: M.Stack(dropout=0.2, depth=3))
    with M.prepared(
        M.seeded(lambda: M.Stack(dropout=0.2, depth=3)), M.tiers(tmp_path), precision=M.FP32, place={"parameter": tier}, device=device, slots=2
    ) as model:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for m in (plain, model):
                m.eval()
            with mode():
                assert torch.equal(model(x), plain(x))
            for m in (plain, model):
                m.train()
                m.zero_grad()
                torch.manual_seed(1)
                M.mean_square(m, x).backward()
            assert not M.differing(M.gradients(model), M.gradients(plain))


def test_generate(tmp_path: Path) -> None:
    make, _ = _llama()
    ids = torch.arange(6).view(2, 3) + 5
    arguments = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    want = M.seeded(make).eval().generate(ids, **arguments)
    with M.prepared(M.seeded(make).eval(), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}, device="sim", slots=2) as model:
        assert torch.equal(model.generate(ids, **arguments), want)
        assert torch.equal(
            model.generate(ids, **(arguments | {"num_beams": 2})), M.seeded(make).eval().generate(ids, **(arguments | {"num_beams": 2}))
        )


class _Boom(Exception):
    pass


def _breaking(model: nn.Module, at: nn.Module, error: BaseException) -> Any:
    kind = type(error)

    def raises(*_: Any) -> None:
        raise kind  # a new one, whose traceback keeps no frame alive afterwards

    return at.register_forward_pre_hook(raises)


@pytest.mark.parametrize("error", [_Boom(), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("segment", [0, 3])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_forward_that_raises(tmp_path: Path, device: str, segment: int, activations: str, error: BaseException) -> None:
    """What was bound is at rest again, values read right at once, and training goes on as if it had not been."""
    make = lambda: M.Stack(segment, depth=4)  # noqa: E731
    _, want = M.plain_gradients(make, M.mean_square)
    with M.prepared(
        M.seeded(make), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}, device=device, activations=activations, slots=2
    ) as model:
        before = M.values(M.seeded(make))
        M.mean_square(model).backward()
        handle = _breaking(model, model.blocks[2].down, error)
        with pytest.raises(type(error)):
            M.mean_square(model)
        handle.remove()
        model.zero_grad()  # reaches the parameters, not what was bound
        assert not M.differing({n: v.clone() for n, v in model.state_dict().items()}, before)
        assert not M.differing(M.values(model), before)
        assert torch.equal(model.first.weight.detach().clone(), before["first.weight"])
        assert M.at_rest(model)
        M.mean_square(model).backward()
        assert not M.differing(M.gradients(model), want)
        assert M.at_rest(model)


def test_interrupt_leaves_no_hooks_behind(tmp_path: Path) -> None:
    """Autograd of other tensors is not touched by a forward that was interrupted."""
    from torch._C import _autograd

    with M.prepared(M.seeded(lambda: M.Stack(2, depth=4)), M.tiers(tmp_path), precision=M.FP32, activations="recompute") as model:
        handle = _breaking(model, model.blocks[1].down, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            M.mean_square(model)
        handle.remove()
        M.mean_square(model).backward()
        assert _autograd._top_saved_tensors_default_hooks(False) is None
    x = torch.ones(3, requires_grad=True)
    x.exp().sum().backward()
    assert torch.equal(x.grad, torch.ones(3).exp())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("segment", [(0, False), (2, False), (2, True)])
def test_backward_that_raises(tmp_path: Path, segment: tuple[int, bool], device: str, activations: str) -> None:
    make = lambda: M.Stack(*segment, depth=4)  # noqa: E731
    _, want = M.plain_gradients(make, M.mean_square)
    with M.prepared(
        M.seeded(make), M.tiers(tmp_path), precision=M.FP32, place=M.placed("nvme"), device=device, activations=activations, slots=2
    ) as model:
        before = M.values(M.seeded(make))

        def raises(grad: torch.Tensor) -> None:
            raise _Boom

        first = M.mean_square(model)
        second = M.mean_square(model)
        handle = model.blocks[1].down.weight.register_hook(raises)
        with pytest.raises(_Boom):
            first.backward()
        handle.remove()
        assert not M.differing({n: v.clone() for n, v in model.state_dict().items()}, before)
        model.zero_grad()
        second.backward()  # of a forward made before
        assert not M.differing(M.gradients(model), want)
        assert M.at_rest(model)
        model.zero_grad()
        M.mean_square(model).backward()
        assert not M.differing(M.gradients(model), want)
        assert M.at_rest(model)
        model.zero_grad()
        losses = M.train(model, M.mean_square)
    with M.prepared(M.seeded(make), M.tiers(tmp_path), precision=M.FP32, device="cpu") as model:
        assert M.train(model, M.mean_square) == losses


def test_several_models_interleaved(tmp_path: Path) -> None:
    """Forwards and backwards of several models in any order, one feeding another."""
    x = torch.linspace(-1, 1, 64).view(4, 16)
    plain = [M.seeded(M.Twice, 1), M.seeded(M.Nested, 2), M.seeded(M.Order, 4)]
    made = [offload.prepare(copy.deepcopy(p), M.tiers(tmp_path), precision=M.FP32, place={"parameter": t}, device=d) for p, t, d in
            zip(plain, ("nvme", "host", "nvme"), ("sim", "cpu", "cpu"), strict=True)]  # fmt: skip
    try:
        for models in (plain, made):
            a, b, c = models
            h = a(x)
            first = c(b(h)).square().mean()
            second = b(x).square().mean()
            third = a(x).sin().mean()
            second.backward()
            first.backward()
            third.backward()
        for p, m in zip(plain, made, strict=True):
            for name, g in M.gradients(p).items():
                assert torch.allclose(g, m.get_parameter(name).grad.clone(), rtol=1e-5, atol=1e-7), name
            assert M.at_rest(m)
            m.zero_grad()
        alone = [M.run_and_digest(lambda p=p: copy.deepcopy(p), lambda m: M.mean_square(m, x), M.tiers(tmp_path), precision=M.FP32)[1] for p in plain]
        optimizers = [offload.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in made]
        for _ in range(3):
            losses = [M.mean_square(m, x) for m in made]
            for loss in reversed(losses):
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert [offload.runtime(m).digest() for m in made] == alone
    finally:
        for m in made:
            offload.runtime(m).close()


def test_deepcopy(tmp_path: Path) -> None:
    """A copy is a plain model with the same values, that trains by itself, and can be prepared in its turn."""
    ids = torch.arange(24).view(2, 12) * 101 % 3001
    loss = lambda m: M.mean_square(m, ids)  # noqa: E731
    with M.prepared(M.seeded(M.Language), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}) as model:
        M.train(model, loss, 1)
        copied = copy.deepcopy(model)
        assert not M.differing(M.values(copied), M.values(model))
        assert copied.head.weight is copied.embed.weight
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        loss(model).backward()
        loss(copied).backward()
        assert not M.differing(M.gradients(copied), M.gradients(model))
        copied.zero_grad()
        model.zero_grad()
        before = M.values(model)
        torch.optim.SGD(copied.parameters(), lr=1.0).step()
        with torch.no_grad():
            for p in copied.parameters():
                p.add_(1.0)
        assert not M.differing(M.values(model), before)
        with M.prepared(copied, M.tiers(tmp_path), precision=M.FP32, device="sim") as second:
            assert M.train(second, loss, 2) != M.train(model, loss, 2)
            offload.runtime(model).synchronize()
        loss(model).backward()
        assert M.at_rest(model)


def test_autograd_grad_leaves_gradients_alone(tmp_path: Path) -> None:
    ids = torch.arange(24).view(2, 12) * 101 % 3001
    plain = M.seeded(M.Language)
    with M.prepared(M.seeded(M.Language), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}, device="sim") as model:
        loss = lambda m: M.mean_square(m, ids)  # noqa: E731
        want = torch.autograd.grad(loss(plain), list(plain.parameters()))
        first = torch.autograd.grad(loss(model), list(model.parameters()))
        second = torch.autograd.grad(loss(model) * 2, list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(a.clone(), b) for a, b in zip(first, want, strict=True))
        assert all(torch.equal(a.clone(), b * 2) for a, b in zip(second, want, strict=True))


def test_lease(tmp_path: Path) -> None:
    """A leased unit's parameters are plain device tensors whose gradients flow, inside and around forwards."""
    ids = torch.arange(24).view(2, 12) * 101 % 3001

    def loss(model: nn.Module) -> torch.Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x = block(x)
        return (x @ model.head.weight.T).square().mean()

    plain = M.seeded(M.Language)
    loss(plain).backward()
    with M.prepared(M.seeded(M.Language), M.tiers(tmp_path), precision=M.FP32, place={"parameter": "nvme"}, device="sim") as model:
        with offload.runtime(model).lease(model.head):
            value = loss(model)
        value.backward()
        assert not M.differing(M.gradients(model), M.gradients(plain))
        assert M.at_rest(model)
        with pytest.raises(offload.ConfigError), offload.runtime(model).lease(nn.Linear(2, 2)):
            pass


def test_reentrant_over_the_whole_model(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
    loss = lambda m: checkpoint(m, x, use_reentrant=True).square().mean()  # noqa: E731
    for make in (M.Twice, M.Nested):
        assert not M.wrong_gradients(make, loss, M.tiers(tmp_path), place={"parameter": "nvme"}, device="sim", activations="recompute")


def test_replaced_parameter_is_refused(tmp_path: Path) -> None:
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path)) as model:
        model.blocks[0].up.weight = nn.Parameter(torch.zeros(48, 16))
        with pytest.raises(offload.ConfigError, match=r"blocks\.0\.up\.weight"):
            model(torch.ones(2, 16))


def test_unit_with_parameters_of_several_others(tmp_path: Path) -> None:
    """A unit bound to several units' parameters at once runs with the fewest slots that the planner gives."""

    class Tied(nn.Module):
        def __init__(self, *tied: nn.Parameter) -> None:
            super().__init__()
            self.weights = nn.ParameterList(tied)
            self.own = nn.Parameter(torch.rand(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for w in self.weights:
                x = x @ w
            return x * self.own

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
            self.second = nn.ModuleList([nn.ModuleList([Tied(*(f.weight for f in self.first))])])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for f in self.first:
                x = f(x).tanh()
            return self.second[0][0](x)

    where = offload.Tiers("110KiB", "32MiB", [(str(tmp_path / "swap"), "64MiB")])
    loss = lambda m: M.mean_square(m, torch.ones(2, 64))  # noqa: E731
    assert not M.wrong_gradients(Root, loss, where, place={"parameter": "nvme"}, device="sim", units=[nn.Linear, Tied])
