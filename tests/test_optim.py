"""AdamW and Adam against torch's, on the same gradients."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from helpers import (
    BF16,
    FEW,
    FP32,
    SETTINGS,
    SHAPES,
    Bag,
    Prepared,
    bag,
    give,
    ids,
    moments_near,
    near,
    net,
    pairs,
    parameters_near,
    plain,
    same,
)

everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def run(
    prepared: Prepared,
    ours: Make,
    theirs: Make,
    *,
    place: str = "host",
    device: str = "cpu",
    steps: int = 3,
    lr: float = 1e-2,
    shapes: Any = FEW,
    skip: tuple[str, ...] = (),
    **over: Any,
) -> None:
    twin, model = prepared(bag(shapes=shapes), place, device, **over), bag(shapes=shapes)
    a, b = ours(twin), theirs(model)
    for step in range(steps):
        for m, opt in ((twin, a), (model, b)):
            give(m, step, skip)
            opt.step()
            opt.zero_grad()
    parameters_near(twin, model, steps, lr)
    moments_near(a, b, twin, model, steps)


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (offload.optim.AdamW, torch.optim.AdamW, {}),
    "adam": (offload.optim.Adam, torch.optim.Adam, {}),
    "adamw decay": (offload.optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.3}),
    "adamw none": (offload.optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.0}),
    "adam l2": (offload.optim.Adam, torch.optim.Adam, {"weight_decay": 0.3}),
    "betas eps": (offload.optim.AdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-4}),
    "no first moment": (offload.optim.AdamW, torch.optim.AdamW, {"betas": (0.0, 0.9)}),
    "maximize": (offload.optim.AdamW, torch.optim.AdamW, {"maximize": True}),
    "adam maximize l2": (offload.optim.Adam, torch.optim.Adam, {"maximize": True, "weight_decay": 0.1}),
    "lr zero": (offload.optim.AdamW, torch.optim.AdamW, {"lr": 0.0}),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_equals_its_twin(prepared: Prepared, name: str) -> None:
    ours, theirs, over = KINDS[name]
    options = {"lr": 1e-2, **over}
    run(prepared, lambda m: ours(m.parameters(), **options), lambda m: theirs(m.parameters(), **options))


@everywhere
def test_every_placement_equals_torch_and_each_other(prepared: Prepared, device: str, place: str) -> None:
    run(
        prepared,
        lambda m: offload.optim.AdamW(m.parameters(), lr=1e-2),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        place=place,
        device=device,
        shapes=SHAPES,
    )


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_placement_never_changes_a_bit(prepared: Prepared, precision: offload.Precision) -> None:
    seen = set()
    for device, place in SETTINGS:
        twin = prepared(bag(), place, device, precision=precision)
        opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(3):
            give(twin, step, ("cube",) if step == 1 else ())
            offload.clip_grad_norm_(twin, 0.7)
            opt.step()
        seen.add(offload.runtime(twin).digest())
    assert len(seen) == 1


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries({
            "lr": st.sampled_from([0.0, 1e-4, 3e-2]), "weight_decay": st.sampled_from([0.0, 0.1]),
            "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.7, 0.8)]),
            "eps": st.sampled_from([1e-8, 1e-3]), "maximize": st.booleans(),
        }), min_size=1, max_size=3,
    ),
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4), st.booleans(),
)  # fmt: skip
def test_any_groups_with_any_gradients_missing(
    tmp_path_factory: pytest.TempPathFactory, groups: list[dict[str, Any]], present: list[list[bool]], decoupled: bool
) -> None:
    """Groups with settings of their own, and a step count for each parameter: those without a gradient stay behind."""
    with Prepared(tmp_path_factory.mktemp("swap")) as prepared:
        twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
        optimizers = []
        for m, module in ((twin, offload.optim), (model, torch.optim)):
            made: list[dict[str, Any]] = [{"params": [], **copy.deepcopy(g)} for g in groups]
            for i, p in enumerate(m.parameters()):
                made[i % len(made)]["params"].append(p)
            made = [g for g in made if g["params"]]
            optimizers.append((module.AdamW if decoupled else module.Adam)(made, lr=1e-2))
        for step, here in enumerate(present):
            for m, opt in zip((twin, model), optimizers, strict=True):
                give(m, step, tuple(n for n, yes in zip(FEW, here, strict=True) if not yes))
                opt.step()
        parameters_near(twin, model, len(present), 3e-2)
        moments_near(*optimizers, twin, model, len(present))


def test_each_parameter_counts_its_own_steps(prepared: Prepared) -> None:
    twin, model = prepared(bag()), bag()
    a, b = offload.optim.AdamW(twin.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        skip = tuple(n for i, n in enumerate(SHAPES) if step % (i + 1))
        for m, opt in ((twin, a), (model, b)):
            give(m, step, skip)
            opt.step()
    parameters_near(twin, model, 6, 1e-2)
    moments_near(a, b, twin, model, 6)


def test_a_bf16_parameter_keeps_an_fp32_master(prepared: Prepared) -> None:
    """Steps far below a bf16 ulp add up; the value read is the master's, rounded."""
    shapes = {"p": (4097,)}
    twin, master = prepared(bag(torch.bfloat16, shapes=shapes), "nvme", precision=BF16), bag(torch.bfloat16, shapes=shapes).float()
    a, b = offload.optim.AdamW(twin.parameters(), lr=1e-5, weight_decay=0.0), torch.optim.AdamW(master.parameters(), lr=1e-5, weight_decay=0.0)
    for step in range(20):
        give(twin, step)
        master.p.grad = plain(twin.p.grad).float()
        a.step()
        b.step()
    got, want = plain(twin.p), plain(master.p).bfloat16()
    assert float((got != want).float().mean()) < 0.01  # a rounding boundary here and there
    assert not torch.equal(want, bag(torch.bfloat16, shapes=shapes).p)


def test_extreme_gradients(prepared: Prepared) -> None:
    shapes = {"p": (64,)}
    for value in (1e-30, 1e-44, 1e18, 0.0):
        twin, model = prepared(bag(shapes=shapes)), bag(shapes=shapes)
        for m, opt in ((twin, offload.optim.AdamW(twin.parameters(), lr=1e-2)), (model, torch.optim.AdamW(model.parameters(), lr=1e-2))):
            for _ in range(2):
                m.p.grad = torch.full((64,), value)
                opt.step()
        parameters_near(twin, model, 2, 1e-2)


# Schedulers, closures, groups

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "onecycle fixed momentum": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=8, cycle_momentum=False),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda s: 0.5**s, lambda s: 1 / (1 + s)]),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=2, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers(prepared: Prepared, name: str, tensor: bool) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    rates = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        own = list(m.parameters())
        lr = [torch.tensor(x) if tensor else x for x in (2e-2, 1e-2)]
        opt = module.AdamW([{"params": own[:2], "lr": lr[0]}, {"params": own[2:], "lr": lr[1]}], lr=1e-3)
        schedule = SCHEDULES[name](opt)
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(6):
                give(m, step)
                opt.step()
                schedule.step(*((1.0,) if name == "plateau" else ()))
                seen.append([(float(g["lr"]), g["betas"]) for g in opt.param_groups])
        rates.append(seen)
        saved = schedule.state_dict()
        schedule.load_state_dict(saved)
    assert rates[0] == rates[1]
    parameters_near(twin, model, 6, 0.1)


def test_lr_set_by_hand_between_steps(prepared: Prepared) -> None:
    def by_hand(module: Any) -> Make:
        def make(m: nn.Module) -> torch.optim.Optimizer:
            opt = module.AdamW(m.parameters(), lr=1.0)
            opt.param_groups[0]["lr"] = 5e-3
            opt.param_groups[0]["weight_decay"] = 0.7
            return opt  # type: ignore[no-any-return]

        return make

    run(prepared, by_hand(offload.optim), by_hand(torch.optim))


def test_closure_runs_first_with_gradients_and_its_loss_is_returned(prepared: Prepared) -> None:
    twin, model = prepared(net()), net()
    losses = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)

        def closure(m: nn.Module = m, opt: torch.optim.Optimizer = opt) -> torch.Tensor:
            opt.zero_grad()
            loss: torch.Tensor = m(ids())
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append([plain(opt.step(closure)) for _ in range(2)])
    same(losses[0][0], losses[1][0])
    near(losses[0][1], losses[1][1], 8)


def test_add_param_group(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    optimizers = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        own = list(m.parameters())
        opt = module.AdamW(own[:2], lr=1e-2)
        optimizers.append(opt)
        give(m, 0)
        opt.step()
        opt.add_param_group({"params": own[2:], "lr": 2e-2, "weight_decay": 0.0})
        with pytest.raises(ValueError, match="more than one"):
            opt.add_param_group({"params": own[:1]})
        for step in (1, 2):
            give(m, step)
            opt.step()
    parameters_near(twin, model, 3, 2e-2)
    moments_near(*optimizers, twin, model, 3)


def test_named_parameters_and_defaults_stay_as_given(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    groups = [{"params": list(twin.named_parameters()), "lr": 1e-2, "mine": "kept"}]
    opt = offload.optim.AdamW(groups, weight_decay=0.2)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.defaults["weight_decay"] == 0.2 and opt.param_groups[0]["mine"] == "kept" and opt.param_groups[0]["param_names"] == list(FEW)
    give(twin, 0)
    opt.step()
    assert opt.param_groups[0]["mine"] == "kept" and opt.param_groups[0]["lr"] == 1e-2
    assert "AdamW" in repr(opt)


def test_step_hooks_run(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters())
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    give(twin, 0)
    opt.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}, {"weight_decay": -1.0}, {"lr": torch.ones(2)}, {"lr": math.nan}],
)
def test_wrong_settings_raise_as_in_torch(prepared: Prepared, wrong: dict[str, Any]) -> None:
    twin = prepared(bag(shapes=FEW))
    for make in (lambda: offload.optim.AdamW(twin.parameters(), **wrong), lambda: torch.optim.AdamW(bag(shapes=FEW).parameters(), **wrong)):
        with pytest.raises(ValueError):
            make()


def test_what_is_not_supported_is_refused_not_ignored(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    with pytest.raises(offload.ConfigError, match="amsgrad"):
        offload.optim.AdamW(twin.parameters(), amsgrad=True)
    with pytest.raises(offload.ConfigError, match="amsgrad"):
        opt = offload.optim.AdamW([{"params": list(twin.parameters()), "amsgrad": True}])
        give(twin, 0)
        opt.step()
    theirs = torch.optim.AdamW(bag(shapes=FEW).parameters(), amsgrad=True)
    with pytest.raises(offload.ConfigError, match="amsgrad"):
        opt = offload.optim.AdamW(twin.parameters())
        opt.load_state_dict(theirs.state_dict())
        give(twin, 0)
        opt.step()


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "differentiable"])
def test_what_is_not_supported_is_refused_wherever_it_is_asked_for(prepared: Prepared, name: str) -> None:
    twin = prepared(bag(shapes=FEW))
    own = list(twin.parameters())
    with pytest.raises(offload.ConfigError, match=name):
        offload.optim.Adam(own, **{name: True})
    opt = offload.optim.Adam(own[:2])
    with pytest.raises(offload.ConfigError, match=name):
        opt.add_param_group({"params": own[2:], name: True})
    assert len(opt.param_groups) == 1
    saved = opt.state_dict()
    with pytest.raises(offload.ConfigError, match=name):
        opt.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {name: True}]})
    opt.param_groups[0][name] = True
    give(twin, 0)
    with pytest.raises(offload.ConfigError, match=name):
        opt.step()


def test_keywords_that_choose_a_kernel_change_nothing(prepared: Prepared) -> None:
    for over in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": False, "capturable": False, "differentiable": False}):
        for kind in ("AdamW", "Adam"):
            run(
                prepared,
                lambda m, kind=kind, over=over: getattr(offload.optim, kind)(m.parameters(), lr=1e-2, **over),  # type: ignore[misc]
                lambda m, kind=kind, over=over: getattr(torch.optim, kind)(m.parameters(), lr=1e-2, **over),  # type: ignore[misc]
            )


def test_adam_with_decoupled_decay_is_adamw(prepared: Prepared) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.2, "decoupled_weight_decay": True}
    run(prepared, lambda m: offload.optim.Adam(m.parameters(), **options), lambda m: torch.optim.Adam(m.parameters(), **options))


def test_an_optimizer_of_other_parameters_says_so(prepared: Prepared) -> None:
    other = bag(shapes=FEW)
    opt = offload.optim.AdamW(other.parameters())
    opt.step()  # no gradients, nothing to do, as in torch
    give(other, 0)
    with pytest.raises(offload.ConfigError, match="prepare"):
        opt.step()


# Which parameters


def test_made_before_prepare(prepared: Prepared) -> None:
    model, want = bag(shapes=FEW), bag(shapes=FEW)
    opt, other = offload.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(want.parameters(), lr=1e-2)
    prepared(model, "nvme", keep=True)
    for step in range(2):
        for m, o in ((model, opt), (want, other)):
            give(m, step)
            o.step()
    parameters_near(model, want, 2, 1e-2)
    moments_near(opt, other, model, want, 2)


def test_frozen_and_unused_parameters(prepared: Prepared) -> None:
    def model() -> Bag:
        m = bag()
        m.cube.requires_grad_(False)
        m.wide.requires_grad_(False)
        return m

    twin, want = prepared(model()), model()
    optimizers = [module.AdamW(m.parameters(), lr=1e-2) for m, module in ((twin, offload.optim), (want, torch.optim))]
    for step in range(3):
        for m, opt in zip((twin, want), optimizers, strict=True):
            give(m, step, ("matrix",))
            opt.step()
            opt.zero_grad()
    parameters_near(twin, want, 3, 1e-2)
    moments_near(*optimizers, twin, want, 3)
    same(twin.cube, want.cube)
    same(twin.matrix, want.matrix)


def test_frozen_after_prepare_stays_as_it_is(prepared: Prepared) -> None:
    twin, model = prepared(net()), net()
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        m.embed.weight.requires_grad_(False)
        m(ids()).backward()
        opt.step()
        opt.zero_grad()
        assert m.embed.weight.grad is None
        m.embed.weight.requires_grad_(True)
        m(ids()).backward()
        opt.step()
    for name, p, q in pairs(twin, model):
        near(p, q, 400, 1e-2, name)


def test_thawing_what_was_frozen_at_prepare_is_refused_in_words(prepared: Prepared) -> None:
    model = net()
    model.blocks[0].up.weight.requires_grad_(False)
    twin = prepared(model)
    opt = offload.optim.AdamW(twin.parameters())
    twin.blocks[0].up.weight.requires_grad_(True)
    with pytest.raises(offload.OffloadError, match=r"blocks\.0\.up\.weight was frozen"):
        twin(ids()).backward()
        opt.step()


def test_two_optimizers_share_a_model(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        own = list(m.parameters())
        first, second = module.AdamW(own[::2], lr=1e-2), module.Adam(own[1::2], lr=2e-2, weight_decay=0.1)
        for step in range(4):
            give(m, step)
            (first if step % 2 else second).step()
            if step == 2:
                first.step()
    parameters_near(twin, model, 4, 2e-2)


def test_a_new_optimizer_starts_afresh(prepared: Prepared) -> None:
    """As in torch: moments and step counts belong to the optimizer that made them."""
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    optimizers: list[torch.optim.Optimizer] = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        for phase in range(2):
            opt = module.AdamW(m.parameters(), lr=1e-2)
            for step in range(2):
                give(m, 10 * phase + step)
                opt.step()
        optimizers.append(opt)
    parameters_near(twin, model, 4, 1e-2)
    moments_near(*optimizers, twin, model, 4)


def test_two_optimizers_over_the_same_parameters_are_right_or_refused(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    try:
        for m, module in ((twin, offload.optim), (model, torch.optim)):
            first, second = module.AdamW(m.parameters(), lr=1e-2), module.AdamW(m.parameters(), lr=2e-2)
            for step in range(4):
                give(m, step)
                (second if step % 2 else first).step()
    except offload.OffloadError:
        return
    parameters_near(twin, model, 4, 2e-2)


def test_an_optimizer_whose_moments_another_took_is_refused(prepared: Prepared) -> None:
    """One after the other is right, both alive or not; back to the first is refused, for its moments are gone, and says so when read."""
    twin, model = prepared(bag(shapes=FEW), "nvme"), bag(shapes=FEW)
    last, kept = [], []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        first, second = module.AdamW(m.parameters(), lr=1e-2), module.AdamW(m.parameters(), lr=2e-2)
        for step in range(4):
            give(m, step)
            (second if step > 1 else first).step()
        last.append(second)
        kept.append(first)
    parameters_near(twin, model, 4, 2e-2)
    moments_near(*last, twin, model, 4)
    digest = offload.runtime(twin).digest()
    with pytest.raises(offload.ConfigError, match=r"exp_avg of scalar .* one set"):
        kept[0].step()
    with pytest.raises(offload.OffloadError, match="exp_avg of odd gave way"):
        plain(kept[0].state[twin.odd]["exp_avg"])
    assert offload.runtime(twin).digest() == digest


def test_stepping_after_close_says_so(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters())
    offload.runtime(twin).close()
    give(twin, 0)
    with pytest.raises(offload.OffloadError, match="closed"):
        opt.step()


def test_one_optimizer_over_two_models(prepared: Prepared) -> None:
    twins = [prepared(bag(seed=1, shapes=FEW)), prepared(bag(seed=9, shapes=FEW), "nvme", "sim")]
    models = [bag(seed=1, shapes=FEW), bag(seed=9, shapes=FEW)]
    for pair, module in ((twins, offload.optim), (models, torch.optim)):
        opt = module.AdamW([{"params": list(m.parameters()), "lr": 1e-2 * (i + 1)} for i, m in enumerate(pair)])
        for step in range(3):
            for i, m in enumerate(pair):
                give(m, step + 10 * i)
            opt.step()
    for twin, model in zip(twins, models, strict=True):
        parameters_near(twin, model, 3, 2e-2)


@everywhere
def test_a_graph_over_a_parameter_at_rest_notices_a_step(prepared: Prepared, device: str, place: str) -> None:
    """As with torch, whose step changes what the graph has saved: its gradient would be that of other values."""
    for model, make in ((net(), torch.optim.AdamW), (prepared(net(), place, device), offload.optim.AdamW)):
        opt = make(model.parameters())
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        (model(ids()) + penalty).backward(retain_graph=True)
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
        opt.zero_grad()
        torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
        opt.step()
