"""AdamW and Adam against torch's, on the same gradients."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BF16, FP32, SETTINGS, SHAPES, Bag, Prepared, bag, ids, near, net, noise, pairs, plain, same, same_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload

ULPS = 4  # of the larger of the value and lr, and a step: what differently ordered fp32 operations may come to


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Prepared]:
    with Prepared(tmp_path) as make:
        yield make


everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)
Make = Callable[[nn.Module], torch.optim.Optimizer]
FILLED = {k: v for k, v in SHAPES.items() if "empty" not in k}
FEW = {"scalar": (), "empty": (0,), "vector": (7,), "odd": (4097,)}


def give(model: nn.Module, seed: int, skip: tuple[str, ...] = (), scale: float = 1.0) -> None:
    """The same seeded gradients for any model of the same names."""
    for i, (name, p) in enumerate(model.named_parameters()):
        p.grad = None if name in skip or not p.requires_grad else (noise(p.shape, 1000 * seed + i) * scale).to(p.dtype)


def moments_near(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, got: nn.Module, want: nn.Module, steps: int) -> None:
    for name, p, q in pairs(got, want):
        assert (p in ours.state) == (q in theirs.state), name
        if q not in theirs.state:
            continue
        mine, other = ours.state[p], theirs.state[q]
        assert float(mine["step"]) == float(other["step"]), name
        for role in ("exp_avg", "exp_avg_sq"):
            assert mine[role].dtype == torch.float32
            near(mine[role], other[role].float(), ULPS * steps, float(other[role].abs().max()) if other[role].numel() else 0.0, f"{role} of {name}")


def parameters_near(got: nn.Module, want: nn.Module, steps: int, lr: float) -> None:
    for name, p, q in pairs(got, want):
        near(p, q, ULPS * steps, lr, name)


def run(prepared: Prepared, ours: Make, theirs: Make, *, place: str = "host", device: str = "cpu", steps: int = 3, lr: float = 1e-2, shapes: Any = FEW, skip: tuple[str, ...] = (), **over: Any) -> None:
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
        prepared, lambda m: offload.optim.AdamW(m.parameters(), lr=1e-2), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), place=place, device=device, shapes=SHAPES
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
            "lr": st.sampled_from([0.0, 1e-4, 3e-2]), "weight_decay": st.sampled_from([0.0, 0.1]), "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.7, 0.8)]),
            "eps": st.sampled_from([1e-8, 1e-3]), "maximize": st.booleans(),
        }), min_size=1, max_size=3,
    ),
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4), st.booleans(),
)  # fmt: skip
def test_any_groups_with_any_gradients_missing(tmp_path_factory: pytest.TempPathFactory, groups: list[dict[str, Any]], present: list[list[bool]], decoupled: bool) -> None:
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


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}, {"weight_decay": -1.0}, {"lr": torch.ones(2)}, {"lr": math.nan}])
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


# A gradient that is not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@everywhere
def test_a_gradient_that_is_not_finite_skips_the_step_whole(prepared: Prepared, device: str, place: str, bad: float) -> None:
    twin = prepared(bag(), place, device)
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    give(twin, 0)
    opt.step()
    before, digest = {n: plain(p) for n, p in twin.named_parameters()}, offload.runtime(twin).digest()
    give(twin, 1)
    with torch.no_grad():
        twin.odd.grad[4096] = bad
    with pytest.warns(RuntimeWarning, match="odd"):
        opt.step()
    assert opt.skipped == 1 and offload.runtime(twin).digest() == digest
    for name, p in twin.named_parameters():
        same(p, before[name], name)
    give(twin, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert opt.skipped == 1 and offload.runtime(twin).digest() != digest


def test_not_finite_in_one_of_two_models_skips_both(prepared: Prepared) -> None:
    twins = [prepared(bag(seed=1, shapes=FEW)), prepared(bag(seed=9, shapes=FEW))]
    opt = offload.optim.AdamW([p for m in twins for p in m.parameters()], lr=1e-2)
    for m in twins:
        give(m, 0)
    twins[1].vector.grad[3] = math.nan
    with pytest.warns(RuntimeWarning, match="vector"):
        opt.step()
    assert opt.skipped == 1
    same_models(twins[0], bag(seed=1, shapes=FEW))
    same_models(twins[1], bag(seed=9, shapes=FEW))


def test_clipping_by_a_norm_that_is_not_finite_still_skips(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    for clip in (lambda: offload.clip_grad_norm_(twin, 1.0), lambda: torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)):
        give(twin, 0)
        twin.vector.grad[3] = math.inf
        assert not math.isfinite(float(clip()))
        with pytest.warns(RuntimeWarning):
            opt.step()
        same_models(twin, bag(shapes=FEW))


def test_a_parameter_that_is_not_in_the_optimizer_does_not_skip_it(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW([twin.odd], lr=1e-2)
    give(twin, 0)
    twin.vector.grad[0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert opt.skipped == 0 and not torch.equal(twin.odd, bag(shapes=FEW).odd)


def test_finite_gradients_whose_squares_overflow_are_used(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes={"p": (5,)})), bag(shapes={"p": (5,)})
    for m, opt in ((twin, offload.optim.AdamW(twin.parameters(), lr=1e-2)), (model, torch.optim.AdamW(model.parameters(), lr=1e-2))):
        m.p.grad = torch.full((5,), 3e38)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step()
    parameters_near(twin, model, 1, 1e-2)


# State


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_state_goes_through_a_file_and_back_to_the_bit(prepared: Prepared, own: torch.dtype, place: str) -> None:
    twin = prepared(bag(own), place, precision=BF16)
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(2):
        give(twin, step, ("cube",) if step else ("vector",))
        opt.step()
    buffer = io.BytesIO()
    torch.save({"model": twin.state_dict(), "optimizer": opt.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for i, entry in loaded["optimizer"]["state"].items():
        name = list(SHAPES)[i]
        for role in ("exp_avg", "exp_avg_sq"):
            assert type(entry[role]) is torch.Tensor and entry[role].dtype == torch.float32 and entry[role].shape == SHAPES[name]
            same(opt.state[getattr(twin, name)][role], entry[role], f"{role} of {name}")
        assert float(entry["step"]) == (1.0 if name in ("cube", "vector") else 2.0)
    other = prepared(bag(own, seed=50), "host", precision=BF16)
    resumed = offload.optim.AdamW(other.parameters(), lr=9.0)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.param_groups[0]["lr"] == 1e-2
    if own == torch.float32:
        assert offload.runtime(other).digest() == offload.runtime(twin).digest()
        for m, o in ((twin, opt), (other, resumed)):
            give(m, 7)
            o.step()
        assert offload.runtime(other).digest() == offload.runtime(twin).digest()


def test_state_dict_has_the_form_of_torchs(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FILLED)), bag(shapes=FILLED)
    a, b = offload.optim.AdamW(twin.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert a.state_dict()["state"] == {} and not a.state
    for m, opt in ((twin, a), (model, b)):
        give(m, 0, ("cube",))
        opt.step()
    ours, theirs = a.state_dict(), b.state_dict()
    assert set(ours) == set(theirs) and set(ours["state"]) == set(theirs["state"])
    for i, entry in theirs["state"].items():
        assert set(ours["state"][i]) == set(entry)
        assert {k: (v.shape, v.dtype) for k, v in ours["state"][i].items()} == {k: (v.shape, v.dtype) for k, v in entry.items()}
    assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
    assert {"lr", "betas", "eps", "weight_decay", "maximize"} <= set(ours["param_groups"][0])


@pytest.mark.parametrize("towards_torch", [False, True])
def test_state_moves_between_torch_and_here(prepared: Prepared, towards_torch: bool) -> None:
    twin, model = prepared(bag(shapes=FILLED), "nvme"), bag(shapes=FILLED)
    a, b = offload.optim.AdamW(twin.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    source, target = ((twin, a), (model, b)) if towards_torch else ((model, b), (twin, a))
    for step in range(2):
        give(source[0], step, ("cube",))
        source[1].step()
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
    same_models(twin, model)
    for m, opt in ((twin, a), (model, b)):
        give(m, 5)
        opt.step()
    parameters_near(twin, model, 1, 1e-2)
    moments_near(a, b, twin, model, 1)


def test_loading_an_empty_state_starts_afresh(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    optimizers = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        optimizers.append(opt)
        fresh = copy.deepcopy(opt.state_dict())
        give(m, 0)
        opt.step()
        opt.load_state_dict(fresh)
        assert not opt.state
        give(m, 1)
        opt.step()
    parameters_near(twin, model, 2, 1e-2)
    moments_near(*optimizers, twin, model, 2)


def test_loading_a_state_without_some_parameters_starts_those_afresh(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    optimizers = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        optimizers.append(opt)
        give(m, 0, ("odd",))
        opt.step()
        early = copy.deepcopy(opt.state_dict())
        give(m, 1)
        opt.step()
        opt.load_state_dict(early)
        give(m, 2)
        opt.step()
    parameters_near(twin, model, 3, 1e-2)
    moments_near(*optimizers, twin, model, 3)


def test_clearing_the_state_starts_afresh(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        give(m, 0)
        opt.step()
        opt.state.clear()
        give(m, 1)
        opt.step()
    parameters_near(twin, model, 2, 1e-2)


def test_moments_can_be_written_to(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW), "nvme"), bag(shapes=FEW)
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        give(m, 0)
        opt.step()
        opt.state[m.odd]["exp_avg"].mul_(0.5)
        opt.state[m.odd]["exp_avg_sq"][:100].zero_()
        torch._foreach_mul_([opt.state[p]["exp_avg"] for p in m.parameters()], 0.25)
        give(m, 1)
        opt.step()
    parameters_near(twin, model, 2, 1e-2)


def test_wrong_states_are_refused_in_words(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    give(twin, 0)
    opt.step()
    digest = offload.runtime(twin).digest()
    good = copy.deepcopy(opt.state_dict())
    fewer = torch.optim.AdamW(list(bag(shapes=FEW).parameters())[:2]).state_dict()
    with pytest.raises(ValueError, match="param group|parameter group|size"):
        opt.load_state_dict(fewer)
    shape = copy.deepcopy(good)
    shape["state"][3]["exp_avg"] = torch.zeros(3)
    with pytest.raises(offload.ConfigError, match="odd"):
        opt.load_state_dict(shape)
    lacking = copy.deepcopy(good)
    del lacking["state"][3]["exp_avg_sq"]
    with pytest.raises(offload.ConfigError, match="odd"):
        opt.load_state_dict(lacking)
    assert offload.runtime(twin).digest() == digest
    opt.load_state_dict(good)
    assert offload.runtime(twin).digest() == digest


def test_deepcopy_and_pickle_of_a_state_dict_are_plain(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    give(twin, 0)
    opt.step()
    copied = copy.deepcopy(opt.state_dict())
    assert all(type(t) is torch.Tensor for entry in copied["state"].values() for t in entry.values())
    value = plain(copied["state"][3]["exp_avg"])
    give(twin, 1)
    opt.step()
    same(copied["state"][3]["exp_avg"], value)


# The helpers around


def test_grad_scaler(prepared: Prepared) -> None:
    twin, model = prepared(net()), net()
    scales = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt, scaler = module.AdamW(m.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        seen = []
        for step in range(4):
            loss = m(ids(step))
            scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
            if step == 1:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            seen.append(scaler.get_scale())
        scales.append(seen)
    assert scales[0] == scales[1]
    for name, p, q in pairs(twin, model):
        near(p, q, 400, 1e-2, name)


def test_step_in_backward_hooks(prepared: Prepared) -> None:
    """The tutorial's optimizer step in backward: an optimizer a parameter, stepped as its gradient arrives."""
    twin, model = prepared(net(tied=False)), net(tied=False)
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        optimizers = {p: module.AdamW([p], lr=1e-2) for p in m.parameters()}

        def update(p: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(update)
        m(ids()).backward()
        assert all(p.grad is None for p in m.parameters())
    parameters_near(twin, model, 1, 1e-2)


def test_training_against_torch_for_several_steps(prepared: Prepared) -> None:
    twin, model = prepared(net(), "nvme"), net()
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-3)
        for step in range(5):
            m(ids(step)).backward()
            opt.step()
            opt.zero_grad()
    for name, p, q in pairs(twin, model):
        near(p, q, 600, 1e-3, name)
