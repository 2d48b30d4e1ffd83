"""Clipping, torch's and ours, and what a failed backward leaves behind."""

from __future__ import annotations

import copy
import math
import warnings
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
    Prepared,
    bag,
    both,
    clip,
    ids,
    near,
    net,
    noise,
    pairs,
    plain,
    same,
    same_gradients,
)

Touch = Callable[[nn.Module], Any]


everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)


# Clipping


@everywhere
@pytest.mark.parametrize("most", [0.1, 1e3])
def test_torchs_clip_works_unchanged(prepared: Prepared, device: str, place: str, most: float) -> None:
    def act(m: nn.Module) -> torch.Tensor:
        m(ids()).backward()
        return torch.nn.utils.clip_grad_norm_(m.parameters(), most)

    both(prepared, act, place, device)


@pytest.mark.parametrize("kind", ["inf norm", "one norm", "foreach", "value", "value foreach", "get total norm", "generator", "error"])
def test_other_forms_of_torchs_clipping(prepared: Prepared, kind: str) -> None:
    forms: dict[str, Touch] = {
        "inf norm": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type=math.inf),
        "one norm": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type=1.0),
        "foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True),
        "value": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
        "value foreach": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=True),
        "get total norm": lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]),
        "generator": lambda m: torch.nn.utils.clip_grad_norm_((p for p in m.parameters()), 0.1),
        "error": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, error_if_nonfinite=True),
    }

    def act(m: nn.Module) -> Any:
        m(ids()).backward()
        return forms[kind](m)

    both(prepared, act)


@everywhere
@pytest.mark.parametrize("most", [0.1, 1e3])
def test_our_clip_reads_clipped_and_steps_clipped(prepared: Prepared, device: str, place: str, most: float) -> None:
    twin, want = prepared(net(), place, device), net()
    norms, optimizers = [], []
    for m, module in ((twin, offload.optim), (want, torch.optim)):
        m(ids()).backward()
        norms.append(clip(m, most))
        optimizers.append(module.AdamW(m.parameters(), lr=1e-2, eps=1e-3))
    assert norms[0].shape == () and norms[0].dtype == torch.float32 and not norms[0].requires_grad
    near(norms[0], norms[1], 2)
    for name, p, q in pairs(twin, want):
        near(p.grad, q.grad, 3, 0.0, name)
    for opt in optimizers:
        opt.step()
    for name, p, q in pairs(twin, want):
        near(p, q, 8, 1e-2, name)
        near(p.grad, q.grad, 3, 0.0, name)


def test_clip_twice_then_write_then_accumulate(prepared: Prepared) -> None:
    twin, want = prepared(net(), "nvme"), net()
    optimizers = []
    for m, module in ((twin, offload.optim), (want, torch.optim)):
        optimizers.append(module.AdamW(m.parameters(), lr=1e-2))
        m(ids(1)).backward()
        clip(m, 0.5)
        clip(m, 0.2)
        m.embed.weight.grad[3].mul_(2)
        m(ids(2)).backward()
        clip(m, 0.3)
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        clip(m, 0.05)
    for name, p, q in pairs(twin, want):
        near(p.grad, q.grad, 30, 1e-3, name)
    for opt in optimizers:
        opt.step()
    for name, p, q in pairs(twin, want):
        near(p, q, 100, 1e-2, name)


def test_our_clip_is_undone_by_a_fresh_start(prepared: Prepared) -> None:
    twin, want = prepared(net()), net()
    for m in (twin, want):
        m(ids(1)).backward()
        clip(m, 1e-3)
        m.zero_grad()
        m(ids(2)).backward()
    same_gradients(twin, want)


def test_our_clip_counts_replaced_and_written_gradients_and_no_absent_ones(prepared: Prepared) -> None:
    twin, want = prepared(net()), net()
    norms = []
    for m in (twin, want):
        m(ids()).backward()
        m.embed.weight.grad = noise(m.embed.weight.shape, 1)
        m.blocks[0].up.weight.grad.mul_(100)
        m.blocks[1].down.weight.grad = None
        norms.append(clip(m, 1.0))
    near(norms[0], norms[1], 4)
    for name, p, q in pairs(twin, want):
        if q.grad is not None:
            near(p.grad, q.grad, 4, 0.0, name)
    assert twin.blocks[1].down.weight.grad is None


def test_norms_do_not_depend_on_where_gradients_rest(prepared: Prepared) -> None:
    seen = set()
    for device, place in SETTINGS:
        twin = prepared(net(width=40), place, device, precision=BF16)
        twin(ids()).backward()
        seen.add((float(offload.clip_grad_norm_(twin, 0.1)), float(twin.embed.weight.grad.sum())))
    assert len(seen) == 1


def test_our_clip_without_gradients_and_of_other_models(prepared: Prepared) -> None:
    twin = prepared(net())
    assert float(offload.clip_grad_norm_(twin, 1.0)) == 0.0
    with pytest.raises(offload.ConfigError, match="prepare"):
        offload.clip_grad_norm_(net(), 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_our_clip_of_a_norm_that_is_not_finite_changes_nothing(prepared: Prepared, bad: float) -> None:
    twin = prepared(net())
    twin(ids()).backward()
    with torch.no_grad():
        twin.embed.weight.grad[0, 0] = bad
    before = {n: plain(p.grad) for n, p in twin.named_parameters()}
    norm = float(offload.clip_grad_norm_(twin, 1.0))
    assert norm == bad or (math.isnan(bad) and math.isnan(norm))
    for n, p in twin.named_parameters():
        same(p.grad, before[n], n)


def test_our_clip_of_large_finite_gradients(prepared: Prepared) -> None:
    """Squares beyond fp32, as torch cannot: still a finite norm, still clipped."""
    twin = prepared(bag(shapes={"p": (5,)}))
    twin.p.grad = torch.full((5,), 1e25)
    assert math.isclose(float(offload.clip_grad_norm_(twin, 1.0)), 1e25 * math.sqrt(5), rel_tol=1e-6)
    assert math.isclose(float(twin.p.grad.norm()), 1.0, rel_tol=1e-4)


# Around a failure


def test_an_exception_in_forward_or_backward_leaves_a_usable_model(prepared: Prepared) -> None:
    twin, want = prepared(net(), "nvme", "sim"), net()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for m in (twin, want):
        handle = m.blocks[1].up.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            m(ids(1))
        handle.remove()
        late = m.blocks[0].up.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            m(ids(1)).backward()
        late.remove()
        m.zero_grad()
        m(ids(2)).backward()
    same_gradients(twin, want)


def test_deepcopied_gradients_and_no_grad_forwards_between(prepared: Prepared) -> None:
    def act(m: nn.Module) -> list[torch.Tensor]:
        m(ids(1)).backward()
        kept = copy.deepcopy(m.embed.weight.grad)
        with torch.no_grad():
            m(ids(3))
        with torch.inference_mode():
            m(ids(4))
        m(ids(2)).backward()
        return [kept]

    both(prepared, act, "nvme")


def test_nothing_warns_in_an_ordinary_step(prepared: Prepared) -> None:
    twin = prepared(net(), "nvme")
    opt = offload.optim.AdamW(twin.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            twin(ids(seed)).backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    assert FP32.compute == "fp32"
