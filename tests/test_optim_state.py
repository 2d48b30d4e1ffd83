"""Steps that are skipped, state that is saved and loaded, and the helpers around an optimizer."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch

import offload
from helpers import (
    BF16,
    FEW,
    FILLED,
    PRECISIONS,
    SETTINGS,
    SHAPES,
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
    same_models,
)
from offload.engine import atrest
from offload.engine.sources import MomentSource

everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)


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


def test_a_state_passes_from_one_optimizer_to_the_next(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW), "nvme"), bag(shapes=FEW)
    optimizers, firsts = [], []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        first = module.AdamW(m.parameters(), lr=1e-2)
        give(m, 0, ("odd",))
        first.step()
        second = module.AdamW(m.parameters(), lr=5.0)
        second.load_state_dict(first.state_dict())
        second.load_state_dict(second.state_dict())
        give(m, 1)
        second.step()
        optimizers.append(second)
        firsts.append(first)
    parameters_near(twin, model, 2, 1e-2)
    moments_near(*optimizers, twin, model, 2)
    give(twin, 2)
    with pytest.raises(offload.ConfigError, match="one set"):
        firsts[0].step()
    with pytest.raises(offload.ConfigError, match="one set"):
        optimizers[0].load_state_dict(firsts[0].state_dict())
    optimizers[0].step()


def test_a_state_put_in_by_hand_is_used(prepared: Prepared) -> None:
    twin, model = prepared(bag(shapes=FEW)), bag(shapes=FEW)
    optimizers = []
    for m, module in ((twin, offload.optim), (model, torch.optim)):
        opt = module.AdamW(m.parameters(), lr=1e-2)
        opt.state[m.odd] = {"step": torch.tensor(3.0), "exp_avg": torch.full((4097,), 0.5), "exp_avg_sq": torch.full((4097,), 0.75)}
        give(m, 0)
        opt.step()
        opt.state[m.vector]["exp_avg"] = torch.ones(7)
        opt.state[m.vector]["step"] = torch.tensor(9.0)
        give(m, 1)
        opt.step()
        optimizers.append(opt)
    parameters_near(twin, model, 2, 1e-2)
    moments_near(*optimizers, twin, model, 2)
    optimizers[0].state[twin.odd]["exp_avg"] = torch.ones(2)
    with pytest.raises(offload.ConfigError, match="exp_avg of odd"):
        optimizers[0].step()


def test_loading_hooks_see_the_state_before_and_after(prepared: Prepared) -> None:
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    give(twin, 0)
    opt.step()
    saved = copy.deepcopy(opt.state_dict()) | {"mine": 1}
    seen = []

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append((len(given["state"]), given["mine"]))
        return given | {"state": {3: given["state"][3]}}

    opt.register_load_state_dict_pre_hook(before)
    opt.register_load_state_dict_post_hook(lambda o: seen.append(list(o.state) == [twin.odd]))
    opt.load_state_dict(saved)
    assert seen == [(4, 1), True]
    same(opt.state[twin.odd]["exp_avg"], saved["state"][3]["exp_avg"])


def test_what_a_load_leaves_out_is_fresh_at_once(prepared: Prepared) -> None:
    digests = []
    for early in (False, True):
        twin = prepared(bag(shapes=FEW))
        opt = offload.optim.AdamW(twin.parameters(), lr=0.0)
        fresh = copy.deepcopy(opt.state_dict())
        if early:
            give(twin, 0)
            opt.step()
            opt.load_state_dict(fresh)
        digests.append(offload.runtime(twin).digest())
    assert digests[0] == digests[1]


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
    with pytest.raises(ValueError, match=r"param group|parameter group|size"):
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


def test_a_state_dict_reads_nothing_until_it_is_pickled(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then one moment after another."""
    twin = prepared(bag(shapes=FEW), "nvme", precision=BF16)
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    give(twin, 0)
    opt.step()
    read: list[str] = []
    real = MomentSource.read
    monkeypatch.setattr(MomentSource, "read", lambda self: (read.append(self.describe()), real(self))[1])
    state = opt.state_dict()
    moments = [entry[role] for entry in state["state"].values() for role in ("exp_avg", "exp_avg_sq")]
    assert not read and {m.dtype for m in moments} == {torch.float32}
    torch.save(state, io.BytesIO())
    assert read == [f"{role} of {name}" for name in FEW for role in ("exp_avg", "exp_avg_sq")]
    opt.load_state_dict(state)  # what rests where it belongs
    assert len(read) == 2 * len(FEW)


def test_a_state_dict_that_memory_does_not_hold_is_not_pickled(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pickled stays in memory until the end: each tensor has what those before it left."""
    twin = prepared(bag(shapes=FEW))
    opt = offload.optim.AdamW(twin.parameters(), lr=1e-2)
    give(twin, 0)
    opt.step()
    digest, room, odd = offload.runtime(twin).digest(), [0], 4 * 4097

    class Limits:
        @property
        def room(self) -> int:
            room[0] -= odd
            return room[0] + odd

    monkeypatch.setattr(atrest, "host_limits", Limits)
    room[0] = 100 * odd
    torch.save(opt.state_dict(), io.BytesIO())
    for few in (4, 6):  # moments of three small parameters come first
        room[0] = few * odd
        with pytest.raises(offload.OffloadError, match=r"exp_avg of \w+ does not fit the memory that is left.*use offload\.save, which streams"):
            torch.save(opt.state_dict(), io.BytesIO())
    monkeypatch.undo()
    assert offload.runtime(twin).digest() == digest


def test_moments_of_every_form_read_and_load_as_fp32(prepared: Prepared) -> None:
    for precision in PRECISIONS:
        twin, other = (prepared(bag(seed=seed, shapes=FEW), "nvme", precision=precision) for seed in (3, 9))
        opt, resumed = (offload.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin, other))
        for step in range(2):
            give(twin, step)
            opt.step()
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
        for (name, p), (_, q) in zip(twin.named_parameters(), other.named_parameters(), strict=True):
            for role in ("exp_avg", "exp_avg_sq"):
                saved, back = opt.state[p][role], resumed.state[q][role]
                assert back.dtype == torch.float32
                if precision.moments != "int8":
                    same(back, saved, f"{role} of {name}")
                elif saved.numel():  # rounded again, to the same scale or one next to it
                    assert float((back - saved).abs().max()) <= float(saved.abs().max()) / 200, f"{role} of {name}"


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
