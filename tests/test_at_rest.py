"""Parameters at rest: read, written and refused as torch's own, wherever they rest."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BF16, FP32, SETTINGS, SHAPES, Bag, Net, Prepared, bag, bits, ids, net, noise, plain, same, same_gradients, same_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Prepared]:
    with Prepared(tmp_path) as make:
        yield make


everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)
DTYPES = [torch.float32, torch.bfloat16]


# Identity and reading


@everywhere
def test_a_parameter_keeps_object_name_shape_dtype_and_value(prepared: Prepared, device: str, place: str) -> None:
    model, before = bag(), bag()
    objects = dict(model.named_parameters())
    frozen = model.cube
    frozen.requires_grad_(False)
    prepared(model, place, device, keep=True)
    assert list(dict(model.named_parameters())) == list(SHAPES)
    for name, p in model.named_parameters():
        want = getattr(before, name)
        assert p is objects[name]
        assert isinstance(p, nn.Parameter)
        assert (p.shape, p.dtype, p.device, p.layout) == (want.shape, want.dtype, torch.device("cpu"), torch.strided)
        assert (p.ndim, p.numel(), p.element_size(), p.stride()) == (want.ndim, want.numel(), want.element_size(), want.stride())
        assert p.is_leaf and p.grad is None and p.requires_grad == (p is not frozen) and p.is_contiguous() and not p.is_meta
        same(p, want, name)
        same(p.detach(), want, name)
        same(p.data, want, name)


@pytest.mark.parametrize("own", DTYPES)
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_values_read_whole_whatever_computes(prepared: Prepared, own: torch.dtype, precision: offload.Precision, place: str) -> None:
    """An fp32 parameter under bf16 compute reads its master, every bit of it."""
    same_models(prepared(bag(own), place, precision=precision), bag(own))


def test_frozen_parameters_of_every_dtype(prepared: Prepared) -> None:
    def model() -> Bag:
        kinds = {
            "f64": torch.float64, "f16": torch.float16, "b16": torch.bfloat16, "f32": torch.float32, "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16,
            "i32": torch.int32, "i64": torch.int64, "flag": torch.bool,
        }  # fmt: skip
        frozen = {k: nn.Parameter((noise((3, 7), i) * 50).abs().to(d), requires_grad=False) for i, (k, d) in enumerate(kinds.items())}
        return Bag(trained=nn.Parameter(noise((5, 5))), **frozen)

    for place, precision in (("host", FP32), ("host", BF16), ("nvme", BF16)):
        twin = prepared(model(), place, precision=precision)
        same_models(twin, model())
        with torch.no_grad():
            twin.i64.add_(2**40)
            twin.flag.logical_not_()
        want = model()
        want.i64.add_(2**40)
        want.flag.logical_not_()
        same_models(twin, want)
        assert not twin.i64.requires_grad


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "item": lambda p: torch.tensor(p.reshape(-1)[0].item()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "numpy": lambda p: torch.from_numpy(np.array(p.detach().numpy())),
    "asarray": lambda p: torch.from_numpy(np.array(np.asarray(p.detach()))),
    "iterate": lambda p: torch.stack([row.sum() for row in p]),
    "index": lambda p: p[1:, ::2],
    "mask": lambda p: p[p > 0],
    "gather": lambda p: p[torch.tensor([0, 2, 2])],
    "t": lambda p: p.t(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p.detach()]),
    "double": lambda p: p.double(),
    "half": lambda p: p.to(torch.float16),
    "clone": lambda p: p.clone(),
    "zeros_like": lambda p: torch.zeros_like(p),
    "where": lambda p: torch.where(p > 0, p, -p),
    "matmul": lambda p: p @ p.t(),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, 9), p),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "sort": lambda p: p.sort().values,
    "max": lambda p: p.max(dim=0).values,
    "topk": lambda p: p.topk(2).indices,
    "equal": lambda p: torch.tensor([torch.equal(p, p), torch.allclose(p, p), bool((p == p).all())]),
    "length": lambda p: torch.tensor(len(p)),
    "view dtype": lambda p: p.detach().view(torch.int32),
    "flatten": lambda p: torch.nn.utils.parameters_to_vector([p, p]),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "diagonal": lambda p: p.diagonal(),
    "as_strided": lambda p: p.as_strided((3,), (2,), 1),
    "unfold": lambda p: p.unfold(1, 3, 2),
    "expand": lambda p: p.expand(2, 5, 9),
    "contiguous": lambda p: p.t().contiguous(),
    "foreach norm": lambda p: torch.stack(torch._foreach_norm([p, p])),
    "foreach add": lambda p: torch.stack(torch._foreach_add([p, p], [p.detach(), p.detach()])),
    "python": lambda p: torch.tensor(float(p[1, 1]) + int(p[0, 0])),
    "format": lambda p: torch.tensor(float(f"{p[1, 1]:.3f}")),
}


@pytest.mark.parametrize("name", READS)
def test_reading_operations(prepared: Prepared, name: str) -> None:
    shapes = {"matrix": SHAPES["matrix"]}
    twin, model = prepared(bag(shapes=shapes), "nvme"), bag(shapes=shapes)
    same(READS[name](twin.matrix), READS[name](model.matrix), name)
    same(twin.matrix, model.matrix)


def test_repr_shows_the_value_and_is_short_for_large_ones(prepared: Prepared) -> None:
    twin = prepared(bag())
    assert f"{float(twin.one[0]):.4f}" in repr(twin.one)
    assert len(repr(twin.block)) < 300 and "block" in repr(twin.block)
    assert repr(twin) and str(twin.scalar)


# Writing

_new = noise((5, 9), 99)
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(2.5),
    "mul_": lambda p: p.mul_(3),
    "iadd": lambda p: p.__iadd__(_new),
    "copy_": lambda p: p.copy_(_new),
    "copy_ broadcast": lambda p: p.copy_(_new[0]),
    "copy_ double": lambda p: p.copy_(_new.double() * 3),
    "copy_ own transpose": lambda p: p[:, :5].copy_(p[:, :5].t().clone()),
    "copy_ to slice from itself": lambda p: p[1:].copy_(p[:-1].clone()),
    "row": lambda p: p[0].zero_(),
    "setitem row": lambda p: p.__setitem__(0, 1.5),
    "setitem slice": lambda p: p.__setitem__((slice(1, 3), slice(None, None, 2)), 7.0),
    "setitem tensor": lambda p: p.__setitem__((slice(None), 2), torch.arange(5.0)),
    "setitem mask": lambda p: p.__setitem__(p > 0, 0.25),
    "setitem index": lambda p: p.__setitem__((torch.tensor([0, 3]), torch.tensor([1, 8])), torch.tensor([5.0, 6.0])),
    "setitem ellipsis": lambda p: p.__setitem__(..., -1.0),
    "index_put_": lambda p: p.index_put_((torch.tensor([1, 1]),), torch.ones(9), accumulate=True),
    "masked_fill_": lambda p: p.masked_fill_(p < 0, 9.0),
    "scatter_": lambda p: p.scatter_(1, torch.zeros(5, 1, dtype=torch.int64), 4.0),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 9)),
    "data setitem": lambda p: p.data.__setitem__(1, 0.0),
    "data mul_": lambda p: p.data.mul_(0.5),
    "data copy_": lambda p: p.data.copy_(_new),
    "data slice of slice": lambda p: p.data[1:4][1][::3].fill_(8.0),
    "detach": lambda p: p.detach().add_(1),
    "detach view": lambda p: p.detach().view(-1)[3:7].neg_(),
    "view": lambda p: p.view(-1).fill_(3.0),
    "view of view": lambda p: p.view(45).view(9, 5)[2].t().mul_(2),
    "transpose": lambda p: p.t()[0].add_(torch.arange(5.0)),
    "permute": lambda p: p.permute(1, 0).select(0, 4).zero_(),
    "flatten": lambda p: p.flatten()[10:20].zero_(),
    "reshape": lambda p: p.reshape(3, 15)[1].zero_(),
    "unsqueeze": lambda p: p.unsqueeze(0)[0, 2].zero_(),
    "narrow": lambda p: p.narrow(0, 1, 2).narrow(1, 3, 3).fill_(6.0),
    "diagonal": lambda p: p.diagonal().fill_(1.0),
    "as_strided": lambda p: p.as_strided((4,), (3,), 2).fill_(-2.0),
    "split": lambda p: p.split(2)[1].zero_(),
    "split sizes": lambda p: p.split([4, 5], dim=1)[0].zero_(),
    "chunk": lambda p: p.chunk(3, dim=1)[2].mul_(10),
    "unbind": lambda p: p.unbind(0)[3].zero_(),
    "unbind of split": lambda p: p.split(3)[0].unbind(1)[2].fill_(1.0),
    "tensor_split": lambda p: p.tensor_split(2)[0].zero_(),
    "hsplit": lambda p: p.hsplit(3)[1].zero_(),
    "rows": lambda p: [row.mul_(i) for i, row in enumerate(p)],
    "expand_as": lambda p: p[0].expand(1, 9)[0, 2].zero_(),
    "view dtype": lambda p: p.view(torch.int32)[0].zero_(),
    "unfold": lambda p: p.unfold(0, 1, 2).fill_(5.0),
    "swapaxes": lambda p: p.swapaxes(0, 1)[8].zero_(),
    "squeeze": lambda p: p[2:3].squeeze(0).zero_(),
    "two views": lambda p: p[0].copy_(p[1]),
    "overlapping views": lambda p: p[0].add_(p[0]).add_(p[:, 0].sum()),
    "two outputs": lambda p: [x.add_(i) for i, x in enumerate(p.unbind(0))],
    "add out": lambda p: torch.add(_new, 1.0, out=p),
    "mul out view": lambda p: torch.mul(_new[0], 2.0, out=p[2]),
    "matmul out": lambda p: torch.mm(_new[:, :5], _new, out=p),
    "sort out": lambda p: torch.sort(_new, out=(p, torch.empty(0, dtype=torch.int64))),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "lerp_": lambda p: p.lerp_(_new, 0.3),
    "addcdiv_": lambda p: p.addcdiv_(_new, _new.abs() + 1, value=-0.1),
    "nan_to_num_": lambda p: p.nan_to_num_(0.0),
    "renorm_": lambda p: p.renorm_(2, 0, 1.0),
    "clamp_ positional": lambda p: torch.clamp_(p, max=0.0),
    "foreach_mul_": lambda p: torch._foreach_mul_([p], 0.5),
    "foreach_mul_ scalars": lambda p: torch._foreach_mul_([p], [0.5]),
    "foreach_mul_ tensor": lambda p: torch._foreach_mul_([p], torch.tensor(0.5)),
    "foreach_add_ alpha": lambda p: torch._foreach_add_([p], [_new], alpha=-0.5),
    "foreach_copy_": lambda p: torch._foreach_copy_([p], [_new]),
    "foreach_zero_": lambda p: torch._foreach_zero_([p]),
    "foreach_lerp_": lambda p: torch._foreach_lerp_([p], [_new], 0.25),
    "foreach_addcdiv_": lambda p: torch._foreach_addcdiv_([p], [_new], [_new.abs() + 1], [-0.3]),
    "foreach of views": lambda p: torch._foreach_mul_([p[0], p[1]], [2.0, 3.0]),
    "foreach unbind": lambda p: torch._foreach_add_(list(p.unbind(0)), [1.0, 2.0, 3.0, 4.0, 5.0]),
    "foreach one into another": lambda p: torch._foreach_copy_([p[0], p[1]], [p[2], p[3]]),
    "vector_to_parameters": lambda p: torch.nn.utils.vector_to_parameters(_new.flatten(), [p]),
    "assign data": lambda p: setattr(p, "data", _new.clone()),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "init.uniform_": lambda p: nn.init.uniform_(p),
    "init.normal_": lambda p: nn.init.normal_(p, 0.0, 0.02),
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.7, a=-0.5, b=0.5),
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "init.kaiming_normal_": lambda p: nn.init.kaiming_normal_(p),
    "init.orthogonal_": lambda p: nn.init.orthogonal_(p),
    "init.eye_": lambda p: nn.init.eye_(p),
    "init.sparse_": lambda p: nn.init.sparse_(p, 0.4),
    "init.constant_ view": lambda p: nn.init.constant_(p[:, 1], 4.0),
    "init.normal_ data": lambda p: nn.init.normal_(p.data),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "random_": lambda p: p.random_(0, 9),
    "exponential_": lambda p: p.exponential_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_operations_reach_the_master(prepared: Prepared, name: str) -> None:
    """Everything that writes in torch writes here; nothing else changes."""
    shapes = {"before": (3,), "matrix": SHAPES["matrix"], "after": (3,)}
    for place, device, precision in (("host", "cpu", FP32), ("nvme", "cpu", BF16)):
        twin, model = prepared(bag(shapes=shapes), place, device, precision=precision), bag(shapes=shapes)
        for m in (twin, model):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(11)
                WRITES[name](m.matrix)
        same_models(twin, model)
        assert twin.matrix.requires_grad and twin.matrix.is_leaf


@everywhere
def test_writes_are_seen_by_the_next_forward(prepared: Prepared, device: str, place: str) -> None:
    twin, model = prepared(net(), place, device), net()
    with torch.no_grad():
        same(twin(ids()), model(ids()))
        for m in (twin, model):
            m.embed.weight[3:5] *= 2
            m.blocks[1].up.weight.data.view(-1)[::3] = 0.01
            torch._foreach_mul_(list(m.parameters()), 1.125)
            nn.init.orthogonal_(m.blocks[0].down.weight, generator=torch.Generator().manual_seed(4))
            m.blocks[0].norm.weight.copy_(m.blocks[1].norm.weight + 1)
            m.blocks[0].up.bias.copy_(m.blocks[1].up.bias)
        same(twin(ids()), model(ids()))
    same_models(twin, model)
    for m in (twin, model):
        m(ids()).backward()
    same_gradients(twin, model)


@st.composite
def _path(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    steps = st.sampled_from(["select", "slice", "transpose", "flatten", "split", "unbind", "chunk", "unsqueeze", "diagonal", "step", "reshape"])
    return draw(st.lists(st.tuples(steps, st.integers(0, 5), st.integers(0, 5)), max_size=5))


def _follow(t: torch.Tensor, path: list[tuple[str, int, int]]) -> torch.Tensor:
    """A view of a view of …; steps that do not apply are left out."""
    for kind, a, b in path:
        if kind == "unsqueeze" and t.ndim < 4:
            t = t.unsqueeze(a % (t.ndim + 1))
        if t.ndim == 0:
            continue
        d = a % t.ndim
        n = t.shape[d]
        if kind == "select" and n:
            t = t.select(d, b % n)
        elif kind == "slice" and n:
            t = t.narrow(d, b % n, n - b % n)
        elif kind == "transpose":
            t = t.transpose(d, b % t.ndim)
        elif kind == "flatten" and t.is_contiguous():
            t = t.view(-1)
        elif kind == "split" and n:
            parts = t.split(1 + b, d)
            t = parts[b % len(parts)]
        elif kind == "unbind" and n:
            t = t.unbind(d)[b % n]
        elif kind == "chunk" and n:
            parts = t.chunk(1 + b, d)
            t = parts[-1]
        elif kind == "diagonal" and t.ndim > 1 and d != b % t.ndim:
            t = t.diagonal(0, d, b % t.ndim)
        elif kind == "step":
            t = t[(slice(None),) * d + (slice(b % 2, None, 1 + b),)]
        elif kind == "reshape" and t.is_contiguous() and t.numel() % 2 == 0:
            t = t.view(2, -1)
    return t


def test_any_view_of_views_reads_and_writes(prepared: Prepared) -> None:
    shapes = {"first": (4, 6, 5), "second": (7,), "third": (2, 3, 4, 2)}
    twin, model = prepared(bag(shapes=shapes), "host", precision=BF16), bag(shapes=shapes)

    @settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.sampled_from(list(shapes)), _path(), st.sampled_from(["mul", "fill", "copy", "add", "data"]))
    def check(name: str, path: list[tuple[str, int, int]], how: str) -> None:
        with torch.no_grad():
            ours, theirs = (_follow(getattr(m, name), path) for m in (twin, model))
            assert (ours.shape, ours.dtype, ours.is_contiguous()) == (theirs.shape, theirs.dtype, theirs.is_contiguous())
            same(ours, theirs)
            for t in (ours, theirs):
                if how == "mul":
                    t.mul_(-1.5)
                elif how == "fill":
                    t.fill_(0.375)
                elif how == "copy":
                    t.copy_(noise(t.shape, 5))
                elif how == "add":
                    t += 0.5
                else:
                    t.data.clamp_(-1, 1)
            same(ours, theirs)
            same_models(twin, model)

    check()


def test_views_stay_windows_on_the_current_value(prepared: Prepared) -> None:
    twin, model = prepared(bag()), bag()
    windows = [(m.cube[1], m.cube.data, m.cube.view(-1)[7:9], m.cube.detach().unbind(2)[0]) for m in (twin, model)]
    with torch.no_grad():
        for m in (twin, model):
            m.cube.mul_(4)
    for ours, theirs in zip(*windows, strict=True):
        same(ours, theirs)


def test_a_write_in_grad_mode_to_a_leaf_raises_as_in_torch(prepared: Prepared) -> None:
    twin = prepared(bag())
    for write in (lambda p: p.add_(1), lambda p: p[0].zero_(), lambda p: p.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            write(twin.vector)
    same_models(twin, bag())


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda p: p.data_ptr(),
    "view data_ptr": lambda p: p[1:].data_ptr(),
    "detached data_ptr": lambda p: p.detach().data_ptr(),
    "untyped_storage data_ptr": lambda p: p.untyped_storage().data_ptr(),
    "resize_": lambda p: p.resize_(3, 3),
    "set_": lambda p: p.set_(torch.ones(5, 9)),
    "transpose_": lambda p: p.t_(),
    "unsqueeze_": lambda p: p.detach().unsqueeze_(0),
    "assign data of another shape": lambda p: setattr(p, "data", torch.ones(2, 2)),
    "assign data of another dtype": lambda p: setattr(p, "data", torch.ones(5, 9, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_raises_and_changes_nothing(prepared: Prepared, name: str) -> None:
    shapes = {"matrix": SHAPES["matrix"]}
    twin = prepared(bag(shapes=shapes))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((offload.OffloadError, RuntimeError, NotImplementedError, TypeError)):
            REFUSED[name](twin.matrix)
    assert twin.matrix.shape == (5, 9) and twin.matrix.dtype == torch.float32
    same_models(twin, bag(shapes=shapes))


@pytest.mark.parametrize("call", [lambda m: m.matrix.share_memory_(), lambda m: m.share_memory(), lambda m: m.matrix.detach().untyped_storage().fill_(0)])
def test_sharing_or_touching_its_storage_is_refused_and_never_crashes(prepared: Prepared, call: Callable[[Any], Any]) -> None:
    """In a child of its own, for what reaches for memory that is not there may die."""
    twin = prepared(bag())
    child = os.fork()
    if child == 0:
        try:
            call(twin)
        except (offload.OffloadError, RuntimeError, NotImplementedError, TypeError):
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_writing_to_numpy_never_goes_to_nowhere(prepared: Prepared) -> None:
    """`p.detach().numpy()` is memory shared with the parameter in torch: writes arrive, or it is refused."""
    twin = prepared(bag())
    try:
        array = twin.matrix.detach().numpy()
    except (RuntimeError, TypeError, offload.OffloadError):
        return
    same(torch.from_numpy(array.copy()), bag().matrix.detach())
    if array.flags.writeable:
        array[0, 0] = 42.0
        assert float(twin.matrix[0, 0]) == 42.0


def test_reading_and_writing_after_close_raise(prepared: Prepared) -> None:
    twin = prepared(bag(), "nvme")
    offload.runtime(twin).close()
    with pytest.raises(offload.OffloadError, match="closed"):
        twin.matrix.sum()
    with pytest.raises(offload.OffloadError, match="closed"), torch.no_grad():
        twin.matrix.zero_()


# torch's own optimizers write to parameters at rest


@pytest.mark.parametrize("kind", ["foreach", "fused", "forloop", "sgd", "adafactor"])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_torch_optimizers_update_the_master(prepared: Prepared, kind: str, place: str) -> None:
    makes: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
        "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        "forloop": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
        "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9, nesterov=True, foreach=True),
        "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2, foreach=False),
    }
    shapes = {k: v for k, v in SHAPES.items() if "empty" not in k}
    twin, model = prepared(bag(shapes=shapes), place), bag(shapes=shapes)
    optimizers = [makes[kind](list(m.parameters())) for m in (twin, model)]
    for step in range(3):
        for m, opt in zip((twin, model), optimizers, strict=True):
            for i, p in enumerate(m.parameters()):
                p.grad = noise(p.shape, 100 * step + i)
            opt.step()
    same_models(twin, model)


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
    for move in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.to(torch.float32), lambda m: m.cpu(), lambda m: m.to(torch.device("cpu"), non_blocking=True)):
        assert move(twin) is twin
        assert twin.embed.weight is weight
        same_models(twin, model)
        same_gradients(twin, model)
    same(twin(ids()), model(ids()))
    with torch.no_grad():
        twin.embed.weight.mul_(2)
        model.embed.weight.mul_(2)
    same(twin(ids()), model(ids()))


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
        return Bag(t=nn.Parameter(base.t()), strided=nn.Parameter(noise((6, 8), 2)[:, ::2]), last=nn.Parameter(noise((2, 3, 4, 4), 3).to(memory_format=torch.channels_last)))

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
