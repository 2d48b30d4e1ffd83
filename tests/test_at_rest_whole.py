"""Copies, pickles, state dicts, moves and layouts of prepared models, and what prepare() itself leaves behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from helpers import (
    BF16,
    FP32,
    SETTINGS,
    Bag,
    Net,
    Prepared,
    bag,
    bits,
    ids,
    net,
    noise,
    plain,
    same,
    same_gradients,
    same_models,
)
from offload.engine.registry import engine_of

everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)


# Copies, pickles and state dicts


@everywhere
def test_deepcopy_gives_plain_tensors_of_their_own(prepared: Prepared, device: str, place: str) -> None:
    twin, model = prepared(net(), place, device), net()
    p = copy.deepcopy(twin.embed.weight)
    assert type(p) is nn.Parameter and p.requires_grad
    copied = copy.deepcopy(twin)
    assert copied.head.weight is copied.embed.weight and type(copied.embed.weight) is nn.Parameter
    with torch.no_grad():
        copied.embed.weight.zero_()
    same_models(twin, model)
    copied.load_state_dict(model.state_dict())
    same(copied(ids()), model(ids()))
    copied(ids()).backward()
    model(ids()).backward()
    same_gradients(copied, model)
    assert twin.embed.weight.grad is None
    same(twin(ids()), model(ids()))
    ready = prepared(copied, place, keep=True) if copied.embed.weight.grad is None else copied
    same_models(ready, model)


def test_deepcopy_of_a_part_and_of_a_trained_model(prepared: Prepared) -> None:
    twin, model = prepared(net()), net()
    for m in (twin, model):
        m(ids()).backward()
    part = copy.deepcopy(twin.blocks[0])
    x = noise((2, 3, 12))
    same(part(x), model.blocks[0](x))
    same(copy.deepcopy(twin.blocks[0].up.weight.grad), model.blocks[0].up.weight.grad)


def test_a_copy_does_not_copy_or_keep_the_runtime(prepared: Prepared) -> None:
    twin = prepared(net())
    copied = copy.deepcopy(twin)
    offload.runtime(twin).close()
    same_models(copied, net())
    same(copied(ids()), net()(ids()))
    with pytest.raises(offload.ConfigError, match="not prepared"):
        offload.runtime(copied)


@everywhere
def test_a_pickled_model_is_plain(prepared: Prepared, device: str, place: str) -> None:
    """`torch.save(model)`, of the model or of a copy that is an average of its weights, is a model that needs no runtime."""
    twin, model = prepared(net(), place, device), net()
    for saved in (twin, copy.deepcopy(twin), torch.optim.swa_utils.AveragedModel(twin).module):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert loaded.head.weight is loaded.embed.weight and type(loaded.embed.weight) is nn.Parameter
        same_models(loaded, model)
        same(loaded(ids()), model(ids()))
        loaded(ids()).backward()
        assert loaded.embed.weight.grad is not None and twin.embed.weight.grad is None
    same(twin(ids()), model(ids()))


def test_a_copy_does_not_keep_the_runtime_alive(prepared: Prepared) -> None:
    twin = offload.prepare(net(), prepared.tiers(), device="cpu", precision=FP32)
    there = weakref.ref(engine_of(twin))
    copied = copy.deepcopy(twin)
    offload.runtime(twin).close()
    del twin
    gc.collect()
    assert there() is None
    same_models(copied, net())


@everywhere
def test_torch_save_is_plain_and_weights_only(prepared: Prepared, device: str, place: str) -> None:
    twin, model = prepared(net(), place, device), net()
    buffer = io.BytesIO()
    torch.save(twin.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert list(loaded) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert type(loaded[name]) is torch.Tensor
        same(loaded[name], value, name)


def test_pickles_of_parameters_gradients_views_and_modules(prepared: Prepared) -> None:
    twin, model = prepared(net()), net()
    for m in (twin, model):
        m(ids()).backward()
    p = pickle.loads(pickle.dumps(twin.embed.weight))
    assert type(p) is nn.Parameter and p.requires_grad
    same(p, model.embed.weight)
    same(pickle.loads(pickle.dumps(twin.embed.weight.grad)), model.embed.weight.grad)
    same(pickle.loads(pickle.dumps(twin.embed.weight.detach()[2:, ::3])), model.embed.weight.detach()[2:, ::3])
    buffer = io.BytesIO()
    torch.save({"p": twin.embed.weight, "g": twin.embed.weight.grad}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded["p"]) is nn.Parameter
    same(loaded["p"], model.embed.weight)
    same(loaded["g"], model.embed.weight.grad)


def test_saving_one_view_does_not_fail_and_loads(prepared: Prepared) -> None:
    twin, model = prepared(bag()), bag()
    for view in (lambda m: m.wide.detach()[1, 5:9], lambda m: m.cube.data.transpose(0, 2), lambda m: m.empty.detach()):
        buffer = io.BytesIO()
        torch.save(view(twin), buffer)
        buffer.seek(0)
        same(torch.load(buffer, weights_only=True), view(model))


@everywhere
def test_state_dict_round_trips(prepared: Prepared, device: str, place: str) -> None:
    other = net(seed=5)
    twin, model = prepared(net(), place, device), net()
    weight = twin.embed.weight
    assert list(twin.state_dict()) == list(model.state_dict())
    for assign in (False, True):
        for source in (other.state_dict(), net().state_dict()):
            result = twin.load_state_dict(source, assign=assign)
            model.load_state_dict(source)
            assert not result.missing_keys and not result.unexpected_keys
            assert twin.embed.weight is weight and twin.head.weight is weight
            same_models(twin, model)
            same(twin(ids()), model(ids()))
    for tensor in twin.state_dict().values():
        assert not tensor.requires_grad
    before = {k: plain(v) for k, v in twin.state_dict().items()}
    twin.load_state_dict(twin.state_dict())
    for name, value in twin.state_dict().items():
        same(value, before[name], name)
    model.load_state_dict(twin.state_dict())
    same_models(model, twin)


def test_state_dicts_between_two_prepared_models(prepared: Prepared) -> None:
    a, b = prepared(net(seed=1), "nvme", precision=BF16), prepared(net(seed=2), "host")
    b.load_state_dict(a.state_dict())
    same_models(b, net(seed=1))
    with torch.no_grad():
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            q.mul_(2)
            p.copy_(q)
    same_models(a, b)


def test_load_state_dict_strictness_and_wrong_shapes(prepared: Prepared) -> None:
    twin, model = prepared(net()), net()
    state = net(seed=5).state_dict()
    lacking = {k: v for k, v in state.items() if k != "blocks.0.up.weight"}
    for wrong, message in (
        (lacking, "Missing key"),
        (state | {"none": torch.ones(1)}, "Unexpected key"),
        ({k: v * 2 for k, v in state.items()} | {"blocks.0.up.weight": torch.ones(2, 2)}, "size mismatch"),
    ):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=message):
                twin.load_state_dict(wrong, assign=assign)
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict(wrong)
            same_models(twin, model)
    assert twin.load_state_dict(lacking | {"none": torch.ones(1)}, strict=False).missing_keys == ["blocks.0.up.weight"]


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_casts_as_torch_and_refreshes_masters(prepared: Prepared, assign: bool) -> None:
    twin, model = prepared(net(), precision=BF16), net()
    for dtype in (torch.float64, torch.bfloat16):
        state = {k: v.to(dtype) for k, v in net(seed=4).state_dict().items()}
        twin.load_state_dict(state, assign=assign)
        model.load_state_dict(state)
        same_models(twin, model)
    opt = offload.optim.AdamW(twin.parameters(), lr=0.0, weight_decay=0.0)
    twin(ids()).backward()
    opt.step()
    same_models(twin, model)


# Moves and changes of dtype

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "to dtype": lambda m: m.to(torch.float16),
    "to device and dtype": lambda m: m.to("cpu", torch.float64),
    "to other": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    "type": lambda m: m.type(torch.float64),
    "a child's half": lambda m: m.linear.half(),
}


class Buffered(nn.Module):
    """Buffers before and after the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Module()
        self.scale.register_buffer("factor", torch.ones(3))
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale.factor


@pytest.mark.parametrize("name", CASTS)
def test_a_change_of_dtype_is_refused_whole(prepared: Prepared, name: str) -> None:
    twin = prepared(Buffered())
    with pytest.raises(offload.ConfigError, match="dtype"):
        CASTS[name](twin)
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert {b.dtype for b in twin.buffers()} == {torch.float32, torch.int64}
    assert twin(torch.ones(2, 3)).dtype == torch.float32


@everywhere
def test_moves_that_keep_the_dtype_move_nothing(prepared: Prepared, device: str, place: str) -> None:
    twin, model = prepared(net(), place, device), net()
    weight = twin.embed.weight
    twin(ids()).backward()
    model(ids()).backward()
    for move in (
        lambda m: m.to("cpu"),
        lambda m: m.float(),
        lambda m: m.to(torch.float32),
        lambda m: m.cpu(),
        lambda m: m.to(torch.device("cpu"), non_blocking=True),
    ):
        assert move(twin) is twin
        assert twin.embed.weight is weight
        same_models(twin, model)
        same_gradients(twin, model)
    same(twin(ids()), model(ids()))
    with torch.no_grad():
        twin.embed.weight.mul_(2)
        model.embed.weight.mul_(2)
    same(twin(ids()), model(ids()))


def test_a_model_around_a_prepared_one_is_refused_whole_too(prepared: Prepared) -> None:
    outer = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), prepared(Buffered()))
    with pytest.raises(offload.ConfigError, match="dtype"):
        outer.double()
    with pytest.raises(offload.OffloadError, match="shared"):
        outer.share_memory()
    assert {t.dtype for t in outer.state_dict().values()} == {torch.float32, torch.int64}
    assert not any(b.is_shared() for b in outer.buffers())
    outer[:2].double()
    assert outer[1].weight.dtype == torch.float64


def test_what_a_module_applies_is_applied_once(prepared: Prepared) -> None:
    twin, model = prepared(Buffered(), keep=True), Buffered()
    model.load_state_dict(twin.state_dict())
    for m in (twin, model):
        m._apply(lambda t: t.mul_(2))
        m._apply(lambda t: t + 1)
    same_models(twin, model)


def test_bf16_parameters_under_every_compute(prepared: Prepared) -> None:
    twin = prepared(net().bfloat16(), precision=BF16)
    twin.bfloat16()
    with pytest.raises(offload.ConfigError):
        twin.float()
    same_models(twin, net().bfloat16())


def test_a_parameter_converted_by_itself_is_a_plain_copy(prepared: Prepared) -> None:
    twin, model = prepared(bag()), bag()
    for convert in (lambda p: p.half(), lambda p: p.to(torch.float64), lambda p: p.bfloat16(), lambda p: p.to(torch.float32, copy=True)):
        out = convert(twin.matrix)
        same(out, convert(model.matrix))
        with torch.no_grad():
            out.zero_()
    same_models(twin, model)


# Layouts


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_non_contiguous_parameters_read_and_train_right(prepared: Prepared, place: str) -> None:
    def model() -> Bag:
        base = noise((6, 8), 1)
        return Bag(
            t=nn.Parameter(base.t()),
            strided=nn.Parameter(noise((6, 8), 2)[:, ::2]),
            last=nn.Parameter(noise((2, 3, 4, 4), 3).to(memory_format=torch.channels_last)),
        )

    twin, want = prepared(model(), place, precision=BF16, keep=True), model()
    same_models(twin, want)
    for m in (twin, want):
        with torch.no_grad():
            m.t[1].zero_()
            m.strided.mul_(2)
            m.last[:, 1].fill_(3.0)
            m.last.copy_(m.last * 2)
    same_models(twin, want)


def test_zero_and_no_dimensions(prepared: Prepared) -> None:
    twin, model = prepared(bag(), "nvme", precision=BF16), bag()
    with torch.no_grad():
        for m in (twin, model):
            m.empty.fill_(1)
            m.empty2.mul_(2)
            m.scalar.add_(1)
            m.scalar.view(1)[0] = m.scalar * 2
            m.one[...] = m.scalar
    same_models(twin, model)
    assert twin.empty.sum().item() == 0 and float(twin.scalar) == float(model.scalar)


def test_a_model_of_empty_parameters_alone(prepared: Prepared) -> None:
    twin = prepared(bag(shapes={"empty": (0,), "empty2": (2, 0, 3)}))
    opt = offload.optim.AdamW(twin.parameters())
    for p in twin.parameters():
        p.grad = torch.zeros(p.shape)
    opt.step()
    assert offload.clip_grad_norm_(twin, 1.0) == 0


def test_bits_that_no_arithmetic_keeps(prepared: Prepared) -> None:
    """NaN payloads, infinities, denormals and negative zeros are values like any other."""
    raw = torch.tensor([0x7FC12345, 0x7F800001, -0x80000000, 1, 0x007FFFFF, 0x7F800000], dtype=torch.int64).to(torch.int32)
    for place in ("host", "nvme"):
        twin = prepared(Bag(p=nn.Parameter(torch.zeros(6))), place)
        with torch.no_grad():
            twin.p.copy_(raw.view(torch.float32))
        assert torch.equal(bits(twin.p).view(torch.int32), raw)


def test_several_models_keep_apart(prepared: Prepared) -> None:
    twins = [prepared(net(seed=i), place) for i, place in enumerate(("host", "nvme", "device"))]
    with torch.no_grad():
        twins[1].embed.weight.zero_()
    same_models(twins[0], net(seed=0))
    same_models(twins[2], net(seed=2))
    offload.runtime(twins[1]).close()
    same(twins[2](ids()), net(seed=2)(ids()))


# prepare() itself: refused whole


def _with_gradient(m: Net) -> None:
    m.blocks[1].down.weight.grad = torch.ones_like(m.blocks[1].down.weight)


def _double(m: Net) -> None:
    m.blocks[1].down.weight = nn.Parameter(m.blocks[1].down.weight.double())


def _complex(m: Net) -> None:
    m.blocks[1].down.weight = nn.Parameter(m.blocks[1].down.weight.to(torch.complex64))


def _partly_meta(m: Net) -> None:
    m.blocks[1].down.weight = nn.Parameter(m.blocks[1].down.weight.to("meta"))


@pytest.mark.parametrize("spoil", [_with_gradient, _double, _complex, _partly_meta])
def test_a_refused_prepare_leaves_the_model_as_it_was(prepared: Prepared, spoil: Callable[[Net], None]) -> None:
    model = net()
    spoil(model)
    objects = {n: (p, type(p)) for n, p in model.named_parameters()}
    with pytest.raises(offload.ConfigError, match=r"blocks\.1"):
        prepared(model, keep=True)
    for name, p in model.named_parameters():
        assert p is objects[name][0] and type(p) is objects[name][1]
    same(model.embed.weight, net().embed.weight)
    model.blocks[1].down.weight = net().blocks[1].down.weight
    prepared(model, keep=True)
    same_models(model, net())


def test_prepare_of_a_model_that_does_not_fit_leaves_it_as_it_was(prepared: Prepared) -> None:
    model = net()
    with pytest.raises(offload.PlanError):
        prepared(model, None, keep=True, tiers=offload.Tiers(device=4096, host=4096))
    same(model(ids()), net()(ids()))
    assert type(model.embed.weight) is nn.Parameter


@pytest.mark.parametrize("held", ["weak reference", "live graph"])
def test_a_parameter_that_something_holds_is_prepared_or_refused_whole(prepared: Prepared, held: str) -> None:
    model = net()
    holder = weakref.ref(model.blocks[1].down.weight) if held == "weak reference" else model.blocks[1](torch.ones(1, 12))
    try:
        prepared(model, keep=True)
    except offload.ConfigError as error:
        assert "blocks.1" in str(error)
    same_models(model, net())
    same(model(ids()), net()(ids()))
    assert holder is not None


def test_user_hooks_and_references_from_before_prepare_stay(prepared: Prepared) -> None:
    seen: list[str] = []
    results = []
    for ready in (False, True):
        model = net()
        held = [model.embed.weight, model.blocks[0].up.weight]
        model.blocks[0].up.weight.register_hook(lambda g: g * 2)
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
        opt = offload.optim.AdamW(model.parameters(), lr=1e-2) if ready else torch.optim.AdamW(model.parameters(), lr=1e-2)
        if ready:
            prepared(model, keep=True)
        assert held[0] is model.embed.weight and held[1] is model.blocks[0].up.weight
        model(ids()).backward()
        results.append([plain(p.grad) for p in model.parameters() if p.grad is not None])
        opt.step()
    assert len(seen) == 2
    for ours, theirs in zip(*results, strict=True):
        same(ours, theirs)


def test_what_is_hung_on_a_parameter_stays(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts mark those without weight decay."""

    def marked() -> Net:
        model = net()
        model.embed.weight.no_decay = True
        model.blocks[1].up.bias.group = ["late"]
        return model

    model, broken = prepared(marked(), keep=True), marked()
    assert model.embed.weight.no_decay and model.blocks[1].up.bias.group == ["late"] and not hasattr(model.blocks[0].up.bias, "group")
    real, calls = torch.utils.swap_tensors, iter(range(100))

    def swap(a: torch.Tensor, b: torch.Tensor) -> None:
        if next(calls) == len(list(broken.parameters())) - 1:
            raise RuntimeError("something holds it")
        real(a, b)

    with monkeypatch.context() as patch, pytest.raises(offload.ConfigError, match="something holds it"):
        patch.setattr(torch.utils, "swap_tensors", swap)
        prepared(broken, keep=True)
    assert broken.embed.weight.no_decay and broken.blocks[1].up.bias.group == ["late"]
    assert not any(hasattr(p, "source") for p in broken.parameters())
    same_models(broken, net())
    broken.blocks[0].up.weight.source = "a file"
    with pytest.raises(offload.ConfigError, match=r"blocks\.0\.up\.weight has an attribute source or chain"):
        prepared(broken, keep=True)


def test_prepare_after_a_plain_forward_and_backward(prepared: Prepared) -> None:
    model = net()
    loss = model(ids())
    loss.backward()
    model.zero_grad()
    prepared(model, keep=True)
    same(model(ids()), net()(ids()))
    del loss
    gc.collect()


def test_used_outside_any_forward(prepared: Prepared) -> None:
    """A parent that uses a child's weight, and lists of parameters, without calling their modules."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.many = nn.ParameterList([nn.Parameter(noise((4, 4), i)) for i in range(2)])
            self.named = nn.ParameterDict({"a": nn.Parameter(noise((4,), 9))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)
            for w in self.many:
                x = x @ w
            return (x * self.named["a"]).sum()

    torch.manual_seed(0)
    model = Odd()
    for precision in (FP32, BF16):
        twin, want = prepared(model, precision=precision), copy.deepcopy(model)
        x = noise((3, 4))
        ours = twin(x)
        ours.backward()
        if precision is FP32:
            want(x).backward()
            same_gradients(twin, want)
        assert all(p.grad is not None for p in twin.parameters())
