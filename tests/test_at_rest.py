"""Parameters at rest: read, written and refused as torch's own, wherever they rest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from helpers import BF16, FP32, SETTINGS, SHAPES, Bag, Prepared, bag, ids, net, noise, same, same_gradients, same_models

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
            "f64": torch.float64, "f16": torch.float16, "b16": torch.bfloat16, "f32": torch.float32, "i8": torch.int8, "u8": torch.uint8,
            "i16": torch.int16,
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
    "numpy force": lambda p: torch.from_numpy(np.array(p.numpy(force=True))),
    "numpy function": lambda p: torch.from_numpy(np.array(np.exp(np.asarray(p.detach(), dtype=np.float64)))),
    "detach_": lambda p: p.detach().detach_(),
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
    "assign own data": lambda p: setattr(p, "data", p.data),
    "assign data from itself": lambda p: setattr(p, "data", p.data.flip(0)),
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
    "storage": lambda p: p.storage(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "numpy dlpack": lambda p: np.from_dlpack(p.detach()),
    "numpy with grad": lambda p: p.numpy(),
    "numpy without a copy": lambda p: np.array(p.detach(), copy=False),
    "resize_": lambda p: p.resize_(3, 3),
    "resize_as_": lambda p: p.resize_as_(torch.ones(3, 3)),
    "resized by out": lambda p: torch.add(torch.ones(7, 9), 1.0, out=p),
    "view resized by out": lambda p: torch.add(torch.ones(7, 9), 1.0, out=p[0]),
    "another's set_": lambda p: torch.ones(5, 9).set_(p),
    "set_": lambda p: p.set_(torch.ones(5, 9)),
    "transpose_": lambda p: p.t_(),
    "unsqueeze_": lambda p: p.detach().unsqueeze_(0),
    "assign data of a view": lambda p: setattr(p[0], "data", torch.ones(9)),
    "assign data of another shape": lambda p: setattr(p, "data", torch.ones(2, 2)),
    "assign data of another dtype": lambda p: setattr(p, "data", torch.ones(5, 9, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_raises_and_changes_nothing(prepared: Prepared, name: str) -> None:
    shapes = {"matrix": SHAPES["matrix"]}
    twin = prepared(bag(shapes=shapes))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((offload.OffloadError, RuntimeError, NotImplementedError, TypeError, ValueError)):
            REFUSED[name](twin.matrix)
    assert twin.matrix.shape == (5, 9) and twin.matrix.dtype == torch.float32
    same_models(twin, bag(shapes=shapes))


@pytest.mark.parametrize(
    "call", [lambda m: m.matrix.share_memory_(), lambda m: m.share_memory(), lambda m: m.matrix.detach().untyped_storage().fill_(0)]
)
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
