"""Gradients: what they are, what may be done to them, and how they add up, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from helpers import BF16, SETTINGS, Bag, Prepared, bag, both, clip, ids, near, net, noise, pairs, plain, same, same_gradients
from offload.engine.registry import engine_of

everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)
Touch = Callable[[nn.Module], Any]


# What a gradient is


@everywhere
def test_gradients_equal_torchs_to_the_bit(prepared: Prepared, device: str, place: str) -> None:
    twin, want = both(prepared, lambda m: m(ids()).backward(), place, device)
    for _, p, q in pairs(twin, want):
        assert p.grad is not None and q.grad is not None
        assert (p.grad.shape, p.grad.dtype, p.grad.device, p.grad.requires_grad, p.grad.is_leaf) == (
            q.grad.shape,
            q.grad.dtype,
            q.grad.device,
            False,
            True,
        )


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_each_gradient_lands_before_the_rest_of_its_unit_is_computed(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, device: str, activations: str
) -> None:
    """So that no more than one is on the device, as is planned for; several would be as much as the whole unit."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                if x.requires_grad:
                    x.register_hook(lambda g: events.append("backward"))
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layers() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    events: list[str] = []
    model = prepared(Model(), "host", device=device, activations=activations, batch=(1, 4))
    engine = engine_of(model)
    land = engine.gradients.land
    monkeypatch.setattr(engine.gradients, "land", lambda record, *a: (events.append(record.name), land(record, *a))[1])
    loss = model(torch.ones(1, 4, 8))
    events.clear()
    loss.backward()
    want = [e for b in (1, 0) for i in (3, 2, 1, 0) for e in ("backward", f"blocks.{b}.layers.{i}.weight")]
    assert events == want


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_gradient_has_the_parameters_dtype_whatever_moves(prepared: Prepared, own: torch.dtype, place: str) -> None:
    twin, same_compute = prepared(net().to(own), place, precision=BF16), net().bfloat16()
    twin(ids()).backward()
    same_compute(ids()).backward()
    for name, p, q in pairs(twin, same_compute):
        assert p.grad.dtype == own
        same(p.grad.bfloat16(), q.grad, name)


def test_unused_and_frozen_parameters_have_none(prepared: Prepared) -> None:
    def model() -> nn.Module:
        m = net(tied=False)
        m.spare = nn.Linear(3, 3)
        nn.init.ones_(m.spare.weight)
        nn.init.ones_(m.spare.bias)
        m.blocks[0].up.weight.requires_grad_(False)
        m.embed.weight.requires_grad_(False)
        return m

    twin, _ = both(prepared, lambda m: m(ids()).backward(), model=model)
    assert twin.spare.weight.grad is None and twin.blocks[0].up.weight.grad is None and twin.blocks[0].up.bias.grad is not None


def test_a_gradient_from_awkward_parameters(prepared: Prepared) -> None:
    def act(m: nn.Module) -> None:
        sum((p * p).sum() * (i + 1) for i, p in enumerate(m.parameters())).backward()

    for place in ("host", "nvme"):
        both(prepared, act, place, model=bag)


# In-place writes, replacement, absence

TOUCHES: dict[str, Callable[[nn.Module], Any]] = {
    "mul_": lambda m: m.embed.weight.grad.mul_(0.5),
    "iadd": lambda m: m.embed.weight.grad.add_(m.embed.weight.detach(), alpha=0.1),
    "view": lambda m: m.blocks[0].up.weight.grad.view(-1)[::2].zero_(),
    "setitem": lambda m: m.embed.weight.grad.__setitem__(slice(2, 4), 0.0),
    "data": lambda m: m.embed.weight.grad.data.clamp_(-0.01, 0.01),
    "foreach": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 0.1),
    "copy_": lambda m: m.embed.weight.grad.copy_(noise(m.embed.weight.shape, 3)),
    "nan_to_num_": lambda m: m.embed.weight.grad.nan_to_num_(0.0),
    "replace": lambda m: setattr(m.blocks[1].down.weight, "grad", noise(m.blocks[1].down.weight.shape, 4)),
    "replace by own double": lambda m: setattr(m.embed.weight, "grad", m.embed.weight.grad * 2),
    "replace by another's": lambda m: setattr(m.blocks[0].down.weight, "grad", m.blocks[1].down.weight.grad),
    "replace by another's view": lambda m: setattr(m.blocks[0].down.weight, "grad", m.blocks[1].down.weight.grad[:]),
    "replace by its detached self": lambda m: setattr(m.embed.weight, "grad", m.embed.weight.grad.detach()),
    "swap two": lambda m: _swap(m.blocks[0].down.weight, m.blocks[1].down.weight),
    "none": lambda m: setattr(m.blocks[0].up.bias, "grad", None),
    "none all": lambda m: m.zero_grad(),
    "zero": lambda m: m.zero_grad(set_to_none=False),
    "non-contiguous": lambda m: setattr(m.blocks[0].down.weight, "grad", noise(m.blocks[0].down.weight.shape[::-1], 4).t()),
    "expanded": lambda m: setattr(m.blocks[0].down.weight, "grad", torch.ones(()).expand(m.blocks[0].down.weight.shape)),
    "the parameter itself": lambda m: setattr(m.blocks[0].down.weight, "grad", m.blocks[0].down.weight.detach()),
    "another parameter's value": lambda m: setattr(m.blocks[0].down.weight, "grad", m.blocks[1].down.weight.detach()),
}


def _swap(p: nn.Parameter, q: nn.Parameter) -> None:
    p.grad, q.grad = q.grad, p.grad


@pytest.mark.parametrize("name", TOUCHES)
def test_what_is_done_to_gradients_is_seen_by_reads_and_by_the_step(prepared: Prepared, name: str) -> None:
    twin, want = prepared(net(), "nvme" if len(name) % 2 else "host"), net()
    optimizers = []
    for m, module in ((twin, offload.optim), (want, torch.optim)):
        m(ids()).backward()
        with torch.no_grad():
            TOUCHES[name](m)
        optimizers.append(module.AdamW(m.parameters(), lr=1e-2))
    same_gradients(twin, want)
    for opt in optimizers:
        opt.step()
    if "parameter" not in name:  # torch's aliases the value and changes with it
        same_gradients(twin, want)
    for n, p, q in pairs(twin, want):
        near(p, q, 4, 1e-2, n)


def test_a_wrong_replacement_raises_as_in_torch(prepared: Prepared) -> None:
    twin, want = prepared(net()), net()
    for wrong in (torch.ones(2, 2), torch.ones(61, 12, dtype=torch.float64), torch.ones(61, 12, device="meta"), 3.0):
        outcomes = []
        for m in (twin, want):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                m.embed.weight.grad = wrong
            outcomes.append(caught.type)
            assert m.embed.weight.grad is None
        assert outcomes[0] is outcomes[1]


def test_a_kept_gradient_is_not_another_backwards(prepared: Prepared) -> None:
    """What is read from a reference to an older gradient is the older one, or an error; never silently the newer."""
    twin, want = prepared(net()), net()
    kept = []
    for m in (twin, want):
        m(ids(1)).backward()
        kept.append(m.embed.weight.grad)
        m.zero_grad()
        m(ids(2)).backward()
    try:
        same(kept[0], kept[1])
    except offload.OffloadError as error:
        assert "clone" in str(error)
    same_gradients(twin, want)


def test_a_gradient_put_back_later(prepared: Prepared) -> None:
    """Kept copies of two micro-batches, as in gradient surgery: added by hand and put back."""

    def act(m: nn.Module) -> None:
        kept = []
        for seed in (1, 2):
            m(ids(seed)).backward()
            kept.append([p.grad.clone() for p in m.parameters()])
            m.zero_grad()
        for p, a, b in zip(m.parameters(), *kept, strict=True):
            p.grad = a + 0.5 * b

    for place in ("host", "nvme"):
        both(prepared, act, place)


def test_a_step_without_gradients_between(prepared: Prepared) -> None:
    twin, want = prepared(net()), net()
    for m, module in ((twin, offload.optim), (want, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        opt.step()
        m(ids()).backward()
        opt.step()
        opt.step()  # the same gradients again
        m.zero_grad()
        opt.step()
    for n, p, q in pairs(twin, want):
        near(p, q, 8, 1e-2, n)


# Hooks


@everywhere
def test_hooks_see_and_change_gradients(prepared: Prepared, device: str, place: str) -> None:
    def act(m: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        m.embed.weight.register_hook(lambda g: seen.append(plain(g)))
        m.blocks[0].up.weight.register_hook(lambda g: g * 0.25)
        m.blocks[0].up.bias.register_hook(lambda g: None)
        m.blocks[1].down.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        m.blocks[1].up.bias.register_hook(lambda g: torch.zeros_like(g))
        m.blocks[1].norm.weight.register_hook(lambda g: g.clone().mul_(3))
        m(ids()).backward()
        return seen

    both(prepared, act, place, device)


def test_post_accumulate_hooks_see_the_finished_gradient(prepared: Prepared) -> None:
    def act(m: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def after(p: torch.Tensor) -> None:
            seen.append(plain(p.grad))
            p.grad.mul_(0.5)

        def clear(p: torch.Tensor) -> None:
            p.grad = None

        m.embed.weight.register_post_accumulate_grad_hook(after)
        m.blocks[0].up.weight.register_post_accumulate_grad_hook(clear)
        m.blocks[0].down.weight.register_post_accumulate_grad_hook(after)
        for seed in (1, 2):
            m(ids(seed)).backward()
        return seen

    for place in ("host", "nvme"):
        both(prepared, act, place)


def test_hooks_can_be_removed(prepared: Prepared) -> None:
    def act(m: nn.Module) -> None:
        handles = [p.register_hook(lambda g: g * 2) for p in m.parameters()]
        for h in handles[::2]:
            h.remove()
        m(ids()).backward()

    both(prepared, act)


# Terms beside the forward, and other ways to differentiate


def _penalty(m: nn.Module) -> torch.Tensor:
    return 1e-2 * sum((p**2).sum() for p in m.parameters())  # type: ignore[return-value]


@everywhere
def test_terms_computed_from_parameters_outside_the_forward(prepared: Prepared, device: str, place: str) -> None:
    both(prepared, lambda m: (m(ids()) + _penalty(m)).backward(), place, device)


def test_penalties_of_many_kinds(prepared: Prepared) -> None:
    def act(m: nn.Module) -> None:
        loss = m(ids())
        loss = (
            loss
            + m.embed.weight.abs().mean()
            + m.blocks[0].up.weight.view(-1)[::3].norm()
            + (m.blocks[0].down.weight - m.blocks[1].down.weight).pow(2).sum()
        )
        loss = loss + torch.linalg.vector_norm(m.blocks[1].up.weight) + torch.cat([p.flatten() for p in m.blocks[0].parameters()]).sum() * 1e-3
        loss.backward()

    both(prepared, act)


def test_a_penalty_alone_and_then_a_loss(prepared: Prepared) -> None:
    def act(m: nn.Module) -> None:
        _penalty(m).backward()
        m(ids()).backward()

    both(prepared, act)


@pytest.mark.parametrize("tied", [False, True])
@everywhere
def test_autograd_grad_returns_and_leaves_grad_alone(prepared: Prepared, device: str, place: str, tied: bool) -> None:
    def act(m: nn.Module) -> list[torch.Tensor]:
        wanted = list(m.parameters())
        first = torch.autograd.grad(m(ids(1)), wanted)
        assert all(p.grad is None for p in wanted)
        second = torch.autograd.grad(m(ids(2)), wanted)
        m(ids(3)).backward()
        third = torch.autograd.grad(m(ids(4)), wanted[:2])
        return [plain(g) for g in (*first, *second, *third)]

    both(prepared, act, place, device, model=lambda: net(tied=tied))


def test_gradients_added_by_hand_from_autograd_grad(prepared: Prepared) -> None:
    def act(m: nn.Module) -> None:
        for seed in (1, 2):
            for p, g in zip(m.parameters(), torch.autograd.grad(m(ids(seed)), list(m.parameters())), strict=True):
                p.grad = g if p.grad is None else p.grad + g

    both(prepared, act)


def test_what_autograd_grad_gave_is_added_in_the_parameters_dtype(prepared: Prepared) -> None:
    """Gradients that were computed in bf16 read as fp32, and so do their sums, in place or not."""
    twin = prepared(net(), precision=BF16)
    wanted = list(twin.parameters())
    first, second = (torch.autograd.grad(twin(ids(seed)), wanted) for seed in (1, 2))
    for a, b in zip(first, second, strict=True):
        want = a.clone() + b.clone()
        assert torch.equal(a + b, want)
        assert torch.equal(a.add_(b), want)
        assert torch.equal(a.div_(3), want / 3)


def test_autograd_grad_of_unused_parameters(prepared: Prepared) -> None:
    twin = prepared(Bag(a=nn.Parameter(noise((3,))), b=nn.Parameter(noise((3,)))))
    a, b = torch.autograd.grad(twin.a.sum(), [twin.a, twin.b], allow_unused=True)
    same(a, torch.ones(3))
    assert b is None


def test_backward_with_inputs(prepared: Prepared) -> None:
    both(prepared, lambda m: m(ids()).backward(inputs=[m.embed.weight, m.blocks[1].up.bias]))


@everywhere
def test_a_second_backward_over_a_retained_graph_adds(prepared: Prepared, device: str, place: str) -> None:
    def act(m: nn.Module) -> None:
        loss = m(ids())
        loss.backward(retain_graph=True)
        loss.backward()

    both(prepared, act, place, device)


def test_two_losses_over_one_forward(prepared: Prepared) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = net(tied=False)
            self.extra = nn.Linear(12, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.trunk.embed(x)
            for b in self.trunk.blocks:
                h = b(h)
            return self.trunk.head(h).pow(2).mean(), self.extra(h).pow(2).mean()

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return Two()

    def act(m: nn.Module) -> None:
        a, b = m(ids())
        a.backward(retain_graph=True)
        b.backward()

    both(prepared, act, model=model)
    both(prepared, lambda m: sum(m(ids())).backward(), model=model)


def test_a_gradient_penalty_differentiates_twice(prepared: Prepared) -> None:
    """grad of the input with create_graph, then backward through it, as in WGAN-GP."""

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def act(m: nn.Module) -> None:
        x = noise((4, 5)).requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (m(x).mean() + (g.norm(dim=1) - 1).pow(2).mean()).backward()

    twin, want = prepared(model(), "device"), model()
    for m in (twin, want):
        act(m)
    for name, p, q in pairs(twin, want):
        near(p.grad, q.grad, 16, 1e-2, name)


def test_grad_of_parameters_with_create_graph_is_right_or_refused(prepared: Prepared) -> None:
    def act(m: nn.Module) -> list[torch.Tensor]:
        wanted = list(m.parameters())
        gs = torch.autograd.grad(m(ids()), wanted, create_graph=True)
        sum(g.pow(2).sum() for g in gs).backward()
        return [plain(p.grad) for p in wanted]

    twin, want = prepared(net()), net()
    try:
        ours = act(twin)
    except (offload.OffloadError, RuntimeError):
        return
    for a, b in zip(ours, act(want), strict=True):
        near(a, b, 64, float(b.abs().max()))


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
@pytest.mark.parametrize("change", ["step", "write", "load_state_dict"])
def test_a_backward_over_changed_weights_raises_as_in_torch(prepared: Prepared, change: str, place: str) -> None:
    """A loss computed before a step and differentiated after it would get the gradient of neither: torch refuses."""
    for m, module in ((net(tied=False), torch.optim), (prepared(net(tied=False), place), offload.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-1)
        m(ids(1)).backward()
        late = m(ids(2))
        if change == "step":
            opt.step()
        elif change == "write":
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(2)
        else:
            m.load_state_dict(net(seed=3, tied=False).state_dict())
        opt.zero_grad()
        with pytest.raises((RuntimeError, offload.OffloadError)):
            late.backward()


def test_sparse_gradients_are_refused_in_words(prepared: Prepared) -> None:
    twin = prepared(nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 3)))
    opt = offload.optim.AdamW(twin.parameters())
    with pytest.raises((offload.OffloadError, RuntimeError), match="sparse"):
        twin(torch.tensor([1, 2])).sum().backward()
        opt.step()


# Accumulation


@everywhere
@pytest.mark.parametrize("declared", [1, 4])
def test_micro_batches_add_up_to_the_bit(prepared: Prepared, device: str, place: str, declared: int) -> None:
    def act(m: nn.Module) -> None:
        for seed in range(4):
            (m(ids(seed)) / 4).backward()

    both(prepared, act, place, device, accumulate=declared)


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_declared_sums_are_fp32_in_micro_batch_order(prepared: Prepared, device: str, place: str) -> None:
    """Under bf16, each micro-batch's gradient is added in fp32: nothing is lost to bf16 sums."""
    twin, parts = prepared(net(), place, device, precision=BF16, accumulate=4), net().bfloat16()
    sums = {n: torch.zeros(p.shape) for n, p in parts.named_parameters()}
    for seed in range(4):
        (twin(ids(seed)) / 4).backward()
        (parts(ids(seed)) / 4).backward()
        for n, p in parts.named_parameters():
            sums[n] += p.grad.float()
        parts.zero_grad()
    for n, p in twin.named_parameters():
        same(p.grad, sums[n], n)


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_undeclared_sums_widen_to_the_same_bits(prepared: Prepared, device: str, place: str) -> None:
    sums = []
    for declared in (4, 1):
        twin = prepared(net(), place, device, precision=BF16, accumulate=declared)
        opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
        for _ in range(2):
            for seed in range(3):
                twin(ids(seed)).backward()
            sums.append({n: plain(p.grad) for n, p in twin.named_parameters()})
            opt.step()
            opt.zero_grad()
        sums.append({"digest": offload.runtime(twin).digest()})
    for a, b in zip(sums[:2], sums[3:5], strict=True):
        for name in a:
            same(b[name], a[name], name)
    assert sums[2] == sums[5]


@pytest.mark.parametrize("retained", [False, True])
def test_an_undeclared_sum_that_does_not_fit_is_refused_before_computing(prepared: Prepared, retained: bool) -> None:
    model = net(width=32, depth=3, tied=False)
    need = offload.plan(
        model,
        offload.Tiers(device="64MiB", host="64MiB"),
        device="cpu",
        precision=BF16,
        place=dict.fromkeys(("parameter", "gradient", "optimizer"), "host"),
    )
    twin = prepared(model, "host", precision=BF16, tiers=offload.Tiers(device="64MiB", host=need.peak_bytes["host"] + 4096))
    loss = twin(ids())
    loss.backward(retain_graph=retained)
    before = {n: plain(p.grad) for n, p in twin.named_parameters()}
    with pytest.raises(offload.BudgetError, match="accumulate"):
        (loss if retained else twin(ids(2))).backward()
    for n, p in twin.named_parameters():
        same(p.grad, before[n], n)
    twin.zero_grad()
    twin(ids()).backward()
    for n, p in twin.named_parameters():
        same(p.grad, before[n], n)


def test_zeroed_gradients_are_not_a_fresh_start_but_add_to_zero(prepared: Prepared) -> None:
    def act(m: nn.Module) -> None:
        for seed in range(3):
            m.zero_grad(set_to_none=False)
            m(ids(seed)).backward()

    for place in ("host", "nvme"):
        both(prepared, act, place)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["backward", "none", "zero", "half", "clip", "torch clip", "replace", "some none", "read", "penalty", "value"]),
        min_size=1,
        max_size=7,
    )
)
def test_any_sequence_of_gradient_operations(tmp_path_factory: pytest.TempPathFactory, actions: list[str]) -> None:
    with Prepared(tmp_path_factory.mktemp("swap")) as prepared:
        twin, want = prepared(net(depth=1), "nvme"), net(depth=1)
        for i, action in enumerate(actions):
            for m in (twin, want):
                _act(m, action, i)
            for name, p, q in pairs(twin, want):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    near(p.grad, q.grad, 8 * (i + 1), float(q.grad.abs().max()), f"{name}.grad after {actions[: i + 1]}")


def _act(m: nn.Module, action: str, seed: int) -> None:
    present = [p for p in m.parameters() if p.grad is not None]
    if action == "backward":
        m(ids(seed)).backward()
    elif action == "penalty":
        _penalty(m).backward()
    elif action == "none":
        m.zero_grad()
    elif action == "some none":
        for p in list(m.parameters())[::2]:
            p.grad = None
    elif action == "zero":
        m.zero_grad(set_to_none=False)
    elif action == "half":
        torch._foreach_mul_([p.grad for p in present], 0.5) if present else None
    elif action == "value":
        torch.nn.utils.clip_grad_value_(m.parameters(), 1e-2) if present else None
    elif action == "replace":
        for p in list(m.parameters())[::3]:
            p.grad = noise(p.shape, seed)
    elif action == "read":
        for p in present:
            p.grad.sum().item()
    elif action == "torch clip":
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3)
    else:
        clip(m, 0.3)
