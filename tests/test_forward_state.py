"""What a forward does besides computing: to buffers, modes and parameters, and where it does not begin at the root."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import models as M
import offload
from offload.engine import activations, buffers
from offload.engine.registry import engine_of

MODES = ["keep", "recompute", "host", "nvme"]
X = torch.linspace(-1, 1, 128).view(8, 16)


@pytest.fixture(autouse=True)
def _small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 1)


class _Normed(nn.Module):
    """Batch norm, and spectral norm, whose vectors its forward iterates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(width, 2 * width))
        self.norm, self.down = nn.BatchNorm1d(2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.norm(self.up(x))))


class _Following(nn.Module):
    """Buffers of a mean that it follows: one that is assigned anew, or changed in place, a count, and a second name of it."""

    def __init__(self, width: int, assigned: bool = True) -> None:
        super().__init__()
        self.linear, self.out, self.assigned = nn.Linear(width, width), nn.Linear(width, width), assigned
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("again", self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            now = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.assigned:
                self.mean = now
            else:
                self.mean.copy_(now)
            self.count += 1
        return torch.tanh(self.out(torch.tanh(self.linear(x - self.mean.clone())) / int(self.again)))


class _Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of two forwards before one backward, which is run twice; and what evaluation then gives."""
    a, b = model(X), model(2 * X)
    loss = (a - b).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    model.eval()
    with torch.no_grad():
        after = model(X)
    model.train()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), after, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [_Normed, _Following, lambda width: _Following(width, False)], ids=["normed", "assigned", "in place"])
def test_buffers_change_once(tmp_path: Path, block: Callable[[int], nn.Module], mode: str, device: str) -> None:
    plain = M.seeded(lambda: _Net(block))
    want = _gradients(plain)
    options: dict[str, Any] = {"precision": M.FP32, "device": device, "accumulate": 2}
    with M.prepared(M.seeded(lambda: _Net(block)), M.tiers(tmp_path), activations="keep", **options) as model:
        kept = _gradients(model)
    with M.prepared(M.seeded(lambda: _Net(block)), M.tiers(tmp_path), activations=mode, **options) as model:
        got = _gradients(model)
        for name, buffer in plain.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
    assert len(got) == len(kept) == len(want)
    for a, b, c in zip(got, kept, want, strict=True):
        assert torch.equal(a, b) and torch.allclose(a, c, rtol=1e-5)  # torch sums the uses within a forward and those of both in one


@pytest.mark.parametrize("mode", MODES)
def test_large_buffers_are_as_they_were_or_refused(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "COPIED_MOST", 8)
    want = _gradients(M.seeded(lambda: _Net(_Following)))
    with M.prepared(M.seeded(lambda: _Net(_Following)), M.tiers(tmp_path), precision=M.FP32, activations=mode, accumulate=2) as model:
        for a, b in zip(_gradients(model), want, strict=True):
            assert torch.equal(a, b)
    changing = M.seeded(lambda: _Net(lambda width: _Following(width, False)))
    with M.prepared(changing, M.tiers(tmp_path), precision=M.FP32, activations=mode, accumulate=2) as model:
        loss = model(X).square().mean()
        if mode == "keep":
            loss.backward()
            return
        with pytest.raises(offload.OffloadError, match=r"buffer mean of a _Following in blocks\.2, 64 B, was changed in place"):
            loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changed_before_the_backward(tmp_path: Path, mode: str) -> None:
    def act(model: nn.Module) -> dict[str, Any]:
        torch.manual_seed(1)
        loss = M.mean_square(model, X)
        model.eval()
        loss.backward()
        assert not any(m.training for m in model.modules())
        return M.gradients(model)

    make = lambda: M.Stack(depth=3, width=16, dropout=0.5)  # noqa: E731
    with M.prepared(M.seeded(make), M.tiers(tmp_path), precision=M.FP32, activations=mode) as model:
        assert not M.differing(act(model), act(M.seeded(make)))


# Writing to parameters


class _Renormed(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, width, max_norm=0.5), nn.Linear(width, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(ids))


class _Clamped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.out(self.linear(x))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
@pytest.mark.parametrize("precision", [M.FP32, M.BF16], ids=["fp32", "bf16"])
def test_writes_in_a_forward_are_refused(tmp_path: Path, precision: offload.Precision, tier: str, device: str) -> None:
    options: dict[str, Any] = {"precision": precision, "place": M.placed(tier), "device": device}
    with M.prepared(M.seeded(_Renormed), M.tiers(tmp_path), **options) as model:
        with torch.no_grad(), pytest.raises(offload.OffloadError, match=r"parameters of embed \(Embedding\) were written to"):
            model(torch.arange(8).view(1, 8))
        with pytest.raises(RuntimeError, match="inplace"):  # autograd's own
            model(torch.arange(8).view(1, 8))
        assert M.at_rest(model)
    with M.prepared(M.seeded(lambda: _Net(_Clamped)), M.tiers(tmp_path), **options) as model:
        before = [p.detach().clone() for p in model.first.parameters()]
        with torch.no_grad(), pytest.raises(offload.OffloadError, match=r"parameters of blocks\.0 \(_Clamped\) were written to"):
            model(X)
        with pytest.raises(RuntimeError, match="inplace"):
            model(X)
        with pytest.raises(offload.OffloadError, match="first"), torch.no_grad(), offload.runtime(model).lease(model.first):
            model.first.weight.zero_()
        assert M.at_rest(model)
        if tier == "nvme":
            assert all(torch.equal(a, b) for a, b in zip(before, model.first.parameters(), strict=True))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_a_write_at_rest_in_a_forward_is_kept(tmp_path: Path, tier: str, device: str) -> None:
    """Through the parameter itself, which a user may hold: as torch has it, where nothing was computed with it before."""
    with M.prepared(M.seeded(lambda: _Net(M.Block)), M.tiers(tmp_path), precision=M.FP32, place=M.placed(tier), device=device) as model:
        held = model.blocks[1].up.weight

        def halve(*_: Any) -> None:
            with torch.no_grad():
                held.mul_(0.5)

        want = held.detach().clone() * 0.5
        model.blocks[1].norm.register_forward_pre_hook(halve)
        with torch.no_grad():
            model(X)
        assert torch.equal(held, want)


# Where the first forward begins


class _Language(M.Language):
    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """As a training step beside forward() has it."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@pytest.mark.parametrize("mode", ["host", "nvme"])
@pytest.mark.parametrize("way", ["rows", "flat", "method"])
def test_activations_are_planned_for_wherever_the_first_forward_begins(tmp_path: Path, way: str, mode: str) -> None:
    ids = torch.arange(24) if way == "flat" else torch.arange(24).view(2, 12)
    with M.prepared(M.seeded(lambda: _Language(64)), M.tiers(tmp_path), precision=M.FP32, activations=mode) as model:
        with torch.no_grad():
            model.loss(ids)
        assert offload.runtime(model).plan.batch is None
        loss = model.loss(ids) if way == "method" else model(ids).float().square().mean()
        batch = offload.runtime(model).plan.batch
        assert batch is not None and (batch.sequences, batch.tokens) == ((1, 24) if way == "flat" else (2, 12))
        assert any(True for _ in engine_of(model).activations._alive())
        loss.backward()


def test_what_does_not_fit_is_refused_wherever_the_first_forward_begins(tmp_path: Path) -> None:
    with M.prepared(M.seeded(lambda: _Language(64)), M.tiers(tmp_path, "1MiB", "1MiB"), precision=M.FP32) as model:
        for call in (model.loss, model):
            with pytest.raises(offload.PlanError, match="batch"):
                call(torch.zeros(4096, 4096, dtype=torch.int64))


# What torch makes where nothing else is said


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
@pytest.mark.parametrize("precision", [M.FP32, offload.Precision("bf16", "bf16", "split", "int8")], ids=["fp32", "split int8"])
def test_defaults_of_torch_change_nothing(tmp_path: Path, precision: offload.Precision, tier: str, device: str) -> None:
    """set_default_device and set_default_dtype are for what users make."""

    def trained(where: Path) -> str:
        options: dict[str, Any] = {"precision": precision, "place": M.placed(tier), "device": device, "accumulate": 2}
        with M.prepared(models.pop(), M.tiers(where), **options) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                for k in (1.0, 2.0):
                    M.mean_square(model, X * k).backward()
                offload.clip_grad_norm_(model, 0.01)
                assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            held = optimizer.state[model.first.weight].values()
            assert {(v.dtype, v.device.type) for v in held} == {(torch.float32, "cpu")}
            offload.save(where / "saved", model, optimizer)
            offload.load(where / "saved", model, optimizer)
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            return offload.runtime(model).digest()

    models = [M.seeded(lambda: M.Stack(depth=3, width=16)) for _ in range(2)]
    want = trained(tmp_path / "a")
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = trained(tmp_path / "b")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert got == want


# Gradients of gradients


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_penalty_with_few_slots(tmp_path: Path, mode: str, tier: str, device: str) -> None:
    """What the first backward saves for the second outlives the slot that it was in."""

    def act(model: nn.Module) -> dict[str, Any]:
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(X).mean() + (grad.norm(dim=1) - 1).square().mean()).backward()
        return M.gradients(model)

    make = lambda: M.Stack(depth=6, width=16)  # noqa: E731
    options: dict[str, Any] = {"precision": M.FP32, "place": M.placed(tier), "device": device, "activations": mode}
    want = act(M.seeded(make))
    with M.prepared(M.seeded(make), M.tiers(tmp_path), slots=None if tier == "device" else 2, **options) as model:
        got = act(model)
        for name, grad in want.items():
            assert torch.allclose(got[name], grad, rtol=1e-4, atol=1e-6), name


# Caches of keys and values


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_transformer_that_caches_by_default(tmp_path: Path, kind: str, mode: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ids = torch.arange(24).view(2, 12)

    def make() -> nn.Module:
        if kind == "gpt2":
            return GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4, n_positions=64))
        sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(**sizes))

    def act(model: Any) -> dict[str, Any]:
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids).loss.backward()
        return M.gradients(model)

    assert make().config.use_cache
    with M.prepared(M.seeded(make), M.tiers(tmp_path), precision=M.FP32, activations=mode) as model:
        assert not M.differing(act(model), act(M.seeded(make)))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_through_a_cache(tmp_path: Path, mode: str) -> None:
    """A second forward goes on from the keys and values of a first one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = torch.arange(24).view(2, 12)
    name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"  # as it was called before

    def act(model: Any) -> dict[str, Any]:
        first = model(input_ids=ids[:, :5], use_cache=True)
        second = model(input_ids=ids[:, 5:], **{name: getattr(first, name)})
        (first.logits.square().mean() + second.logits.square().mean()).backward()
        assert getattr(second, name).get_seq_length() == 12
        return M.gradients(model)

    make = lambda: LlamaForCausalLM(LlamaConfig(**sizes))  # noqa: E731
    with M.prepared(M.seeded(make), M.tiers(tmp_path), precision=M.FP32, activations=mode) as model:
        assert not M.differing(act(model), act(M.seeded(make)))


# Compiled models


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "nvme"])
@pytest.mark.parametrize("way", ["the model", "the model before", "in place", "its blocks", "its blocks before"])
def test_compiled_models(tmp_path: Path, way: str, mode: str, device: str) -> None:
    """Graphs break where parameters move, and what is computed again is run as it was."""
    torch._dynamo.reset()
    compiled = torch.compile(M.seeded(lambda: M.Stack(depth=3, width=16, dropout=0.1)), backend="aot_eager")
    model: nn.Module = compiled if way == "the model before" else compiled._orig_mod

    def compile_parts() -> None:
        for part in model.blocks if "blocks" in way else [model]:
            part.compile(backend="aot_eager")

    def losses(m: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        torch.manual_seed(1)
        found = []
        for k in (1.0, 2.0, 3.0):
            loss = m(X * k).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    plain = M.seeded(lambda: M.Stack(depth=3, width=16, dropout=0.1))
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    if way in ("in place", "its blocks before"):
        compile_parts()
    with M.prepared(model, M.tiers(tmp_path), precision=M.FP32, activations=mode, device=device, place=M.placed("nvme")) as model:
        if way == "its blocks":
            compile_parts()
        got = losses(compiled if way == "the model" else model, offload.optim.AdamW(model.parameters(), lr=1e-2))
        assert got == pytest.approx(want, rel=1e-5)
        assert M.at_rest(model)


@dataclasses.dataclass
class _Plain:
    table: torch.Tensor
    more: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Slotted:
    table: torch.Tensor
    more: Any = None


class _Named(dict[str, Any]):
    pass


class _Listed(list[Any]):
    pass


class _Fixed(tuple[Any, ...]):
    pass


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "data class": (_Plain, lambda out: out.table),
    "frozen with slots": (_Slotted, lambda out: out.table),
    "inside": (lambda x: {"a": _Slotted(x[:0], [_Plain(x)])}, lambda out: out["a"].more[0].table),
    "dict": (lambda x: _Named(table=x), lambda out: out["table"]),
    "list": (lambda x: _Listed([x]), lambda out: out[0]),
    "fixed": (lambda x: _Fixed([x]), lambda out: out[0]),
}


class _Returning(nn.Module):
    """Its first module returns a view of its parameter in what `put` makes; `get` finds it there."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.table, (put, self.get) = nn.Linear(16, 16), HOLDERS[holder]
        self.table.forward = lambda x: put(self.table.weight[: len(x)])  # type: ignore[method-assign]
        self.blocks = M.Order()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.table(x)
        return self.blocks(x) + self.get(out)


@pytest.mark.parametrize("holder", [h for h in HOLDERS if h != "fixed"])
def test_view_of_a_parameter_in_an_output_of_any_class(tmp_path: Path, holder: str) -> None:
    """What a module returns outlives its slot, also in a class that torch's pytree takes for a leaf."""
    loss = lambda m: M.mean_square(m, X)  # noqa: E731
    assert not M.wrong_gradients(lambda: _Returning(holder), loss, M.tiers(tmp_path), place={"parameter": "nvme"}, device="sim", slots=1)


def test_view_of_a_parameter_in_what_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    with (
        M.prepared(M.seeded(lambda: _Returning("fixed")), M.tiers(tmp_path), place={"parameter": "nvme"}, device="sim") as model,
        pytest.raises(offload.OffloadError, match="a _Fixed, where no copy"),
    ):
        model(X)


def test_a_leaf_that_units_hand_on_keeps_its_hooks(tmp_path: Path) -> None:
    """An input that needs a gradient and is returned as it came gets no hook at each forward."""

    class Handing(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x), x

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Handing(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, x = self.first(x)
            return self.second(y) + x

    x, plain = X.clone().requires_grad_(), M.seeded(Root)
    want = torch.autograd.grad(M.mean_square(plain, x), x)[0]
    with M.prepared(M.seeded(Root), M.tiers(tmp_path), precision=M.FP32) as model:
        for _ in range(3):
            x.grad = None
            M.mean_square(model, x).backward()
            assert torch.equal(x.grad, want) and not x._backward_hooks
