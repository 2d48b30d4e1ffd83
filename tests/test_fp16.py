"""fp16: gradients and steps against plain torch with a halved copy and fp32 masters, GradScaler as it is, overflow found and skipped."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import offload
from helpers import (
    FP32,
    SETTINGS,
    Bag,
    Net,
    Prepared,
    bag,
    give,
    ids,
    moments_near,
    near,
    net,
    noise,
    pairs,
    parameters_near,
    plain,
    same,
    same_models,
)
from offload.engine.gradients import Gradients
from offload.engine.places import Places
from runs import SMALL, records_of, sizes

FP16 = offload.Precision(compute="fp16", grad="fp16")
TO_FP16 = offload.Precision(compute="fp32", grad="fp16")


everywhere = pytest.mark.parametrize(("device", "place"), SETTINGS)


def scaler(init_scale: float = 1024.0, **over: Any) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=init_scale, **over)
    made.scale(torch.ones(()))  # it makes its tensors only now
    return made


class Masters:
    """Plain torch: a halved copy computes, its gradients are summed in the fp32 masters, and the masters are copied back."""

    def __init__(self, masters: nn.Module, half: nn.Module) -> None:
        self.masters, self.half = masters, half.half()
        self.refresh()

    def refresh(self) -> None:
        with torch.no_grad():
            for p, q in zip(self.half.parameters(), self.masters.parameters(), strict=True):
                p.copy_(q)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        for p, q in zip(self.half.parameters(), self.masters.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.float() if q.grad is None else q.grad + p.grad.float()
            p.grad = None


# Forward and backward


@everywhere
@pytest.mark.parametrize("grad", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_are_those_of_a_halved_model(prepared: Prepared, device: str, place: str, grad: str, activations: str) -> None:
    twin = prepared(net(width=40), place, device, precision=offload.Precision("fp16", grad), activations=activations)  # type: ignore[arg-type]
    half = net(width=40).half()
    values = [m(ids()) * 1024 for m in (twin, half)]
    same(*values)
    for value in values:
        torch.autograd.backward(value)
    for name, p, q in pairs(twin, half):
        assert p.dtype == torch.float32 and p.grad is not None and q.grad is not None
        same(p.grad, (q.grad.bfloat16() if grad == "bf16" else q.grad).float(), name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers(prepared: Prepared, kind: str, attention: str) -> None:
    """Everything in their blocks has fp16 kernels on the CPU, forward and backward."""
    sizes = {
        "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    }[kind]
    config = AutoConfig.for_model(kind, **sizes, vocab_size=61, pad_token_id=None, bos_token_id=1, eos_token_id=2, attn_implementation=attention)
    torch.manual_seed(0)
    model, half = (AutoModelForCausalLM.from_config(config, dtype=dtype) for dtype in (torch.float32, torch.float16))
    half.load_state_dict(model.state_dict())
    twin = prepared(model, "nvme", "sim", precision=FP16, activations="recompute")
    values = [m(input_ids=ids(), labels=ids(), use_cache=False).loss * 1024 for m in (twin, half)]
    same(*values)
    for value in values:
        torch.autograd.backward(value)
    for name, p, q in pairs(twin, half):
        same(p.grad, q.grad.float(), name)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_loaded_weights_and_evaluation(prepared: Prepared, tmp_path: Path, place: str) -> None:
    want = net(seed=5)
    (tmp_path / "w").mkdir()
    save_file({n: plain(v) for n, v in want.state_dict().items() if n != "head.weight"}, tmp_path / "w" / "model.safetensors")
    with torch.device("meta"):
        made = Net()
    twin = prepared(made, place, precision=FP16, keep=True).eval()
    offload.load_pretrained(twin, tmp_path / "w")
    same_models(twin, want)
    with torch.no_grad():
        same(twin(ids()), net(seed=5).half().eval()(ids()))


def test_frozen_parameters_of_other_dtypes(prepared: Prepared) -> None:
    model = net()
    for p in model.blocks[0].parameters():
        p.data, p.requires_grad = p.data.bfloat16(), False
    twin = prepared(model, "nvme", precision=FP16)
    torch.autograd.backward(twin(ids()) * 1024)
    assert all((p.grad is None) == (not p.requires_grad) for p in twin.parameters())


@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16])
def test_parameters_want_fp32(prepared: Prepared, own: torch.dtype) -> None:
    for act in (lambda m: prepared(m, precision=FP16), lambda m: offload.plan(m, prepared.tiers(), precision=FP16)):
        with pytest.raises(offload.ConfigError, match=r"embed\.weight.*fp32.*model\.float\(\)"):
            act(net().to(own))
        act(net().to(own).float())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plan_counts_two_bytes(prepared: Prepared, accumulate: int) -> None:
    plans = [offload.plan(net(), prepared.tiers(), precision=p, accumulate=accumulate) for p in (FP16, offload.Precision())]
    assert plans[0].state_bytes == plans[1].state_bytes == (2 + 2 * accumulate + 12) * sum(p.numel() for p in net().parameters())
    assert plans[0].peak_bytes == plans[1].peak_bytes


# GradScaler


def run(
    m: Any, opt: torch.optim.Optimizer, backward: Callable[[torch.Tensor], None], steps: int, micros: int, bad: dict[int, float], clip: float | None,
    unscale: bool, init_scale: float, where: str,
) -> list[float]:  # fmt: skip
    """A user's loop; the scales it went through. `bad`: what spoils the gradients of a step."""
    amp = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    seen = []
    for step in range(steps):
        for micro in range(micros):
            loss = m(ids(10 * step + micro)) / micros
            backward(amp.scale(loss * bad[step] if step in bad and where == "loss" else loss))
        parameters = [p for g in opt.param_groups for p in g["params"]]
        if step in bad and where == "gradient":
            with torch.no_grad():
                parameters[3].grad.view(-1)[1] = bad[step]
        if unscale or clip is not None:
            amp.unscale_(opt)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        amp.step(opt)
        amp.update()
        opt.zero_grad()
        seen.append(amp.get_scale())
    return seen


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    setting=st.sampled_from(SETTINGS),
    precision=st.sampled_from([FP16, offload.Precision("fp16", "fp32"), offload.Precision("fp16", "fp16", moments="bf16")]),
    micros=st.integers(1, 2),
    bad=st.dictionaries(st.integers(0, 3), st.sampled_from([math.inf, -math.inf, math.nan]), max_size=3),
    clip=st.sampled_from([None, 0.05, 1e3]),
    unscale=st.booleans(),
    init_scale=st.sampled_from([2.0**6, 2.0**16, 2.0**22]),
    where=st.sampled_from(["loss", "gradient"]),
)
@example(("sim", "nvme"), FP16, 2, {0: math.inf, 2: math.nan}, 0.05, True, 2.0**16, "gradient")
@example(("cpu", "nvme"), FP16, 1, {}, None, False, 2.0**22, "loss")
def test_grad_scaler_as_with_torch(
    prepared: Prepared, setting: tuple[str, str], precision: offload.Precision, micros: int, bad: dict[int, float], clip: float | None,
    unscale: bool, init_scale: float, where: str,
) -> None:  # fmt: skip
    device, place = setting
    digests, twins, scales, lr = [], [], [], 1e-2
    rest = (4, micros, bad, clip, unscale, init_scale, where)
    for d, p in ((device, place), ("cpu", "device")):
        twin = prepared(net(), p, d, precision=precision, accumulate=micros)
        opt = offload.optim.AdamW(twin.parameters(), lr=lr, eps=1e-3)  # small gradients do not decide a step's sign
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scales.append(run(twin, opt, torch.autograd.backward, *rest))
        digests.append(offload.runtime(twin).digest())
        twins.append((twin, opt))
    both = Masters(net(), net())
    theirs = torch.optim.AdamW(both.masters.parameters(), lr=lr, eps=1e-3)
    theirs.register_step_post_hook(lambda *_: both.refresh())
    want = run(both.half, theirs, both.backward, *rest)
    twin, opt = twins[0]
    taken = 4 - opt.skipped
    assert digests[0] == digests[1] and scales[0] == scales[1] == want
    for name, p, q in pairs(twin, both.masters):
        assert (p in opt.state) == (q in theirs.state)
        if taken:
            assert float(opt.state[p]["step"]) == float(theirs.state[q]["step"]) == taken
        loose = {"fp32": 40_000, "bf16": 200_000}[precision.moments]  # forwards differ in fp16's last bit once parameters do in fp32's
        near(p, q, loose if taken > 1 else 32, lr, name)


@everywhere
@pytest.mark.parametrize("clip", [None, 0.1, 1e6])
def test_given_the_same_gradients_steps_are_torchs(prepared: Prepared, device: str, place: str, clip: float | None) -> None:
    twin, model = prepared(bag(), place, device, precision=FP16), bag()
    made = [module.AdamW(m.parameters(), lr=1e-2) for m, module in ((twin, offload.optim), (model, torch.optim))]
    for m, opt in zip((twin, model), made, strict=True):
        amp = scaler(2.0**10)
        for step in range(4):
            give(m, step)
            for p in m.parameters():
                p.grad = (p.grad * 1024).half().float()
            if step == 1:
                m.odd.grad[7] = math.inf
            if m is twin:
                offload.clip_grad_norm_(m, math.inf)  # they come to rest, so that what follows does not round them
            amp.unscale_(opt)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
            amp.step(opt)
            amp.update()
    parameters_near(twin, model, 3, 1e-2)
    moments_near(*made, twin, model, 3)


@everywhere
def test_unscaling_reads_and_stores_nothing(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, device: str, place: str) -> None:
    """What does not read a value by itself must not: unscaling, the check, clipping, whole multiplications."""
    twin, half = prepared(net(), place, device, precision=FP16), net().half()
    for m in (twin, half):
        torch.autograd.backward(m(ids()) * 1024)
    opt, amp = offload.optim.AdamW(twin.parameters(), lr=1e-2), scaler()
    offload.runtime(twin).synchronize()
    with monkeypatch.context() as patched:
        for owner, name in ((Gradients, "read"), (Places, "read"), (Places, "store"), (Places, "scale")):
            patched.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(name))
        amp.unscale_(opt)
        norm = offload.clip_grad_norm_(twin, 1e3)
        grads = [p.grad for p in twin.parameters()]
        torch._foreach_mul_(grads, 0.5)
        torch._foreach_mul_(grads, torch.tensor(0.5))
        for g in grads:
            g.mul_(0.5).mul_(torch.tensor(0.5, dtype=torch.float64))
    near(norm, torch.stack([q.grad.double().norm() for q in half.parameters()]).norm().float() / 1024, 4)
    for name, p, q in pairs(twin, half):
        same(p.grad, q.grad.float() / 1024 / 16, name)
    amp.step(opt)
    amp.update()
    assert opt.skipped == 0 and amp.get_scale() == 1024.0


def test_after_a_step_gradients_read_unscaled(prepared: Prepared) -> None:
    twin, half = prepared(net(), precision=FP16), net().half()
    for m in (twin, half):
        torch.autograd.backward(m(ids()) * 1024)
    scaler().step(offload.optim.AdamW(twin.parameters()))
    for name, p, q in pairs(twin, half):
        same(p.grad, q.grad.float() / 1024, name)


def test_misuse_raises_as_with_torch(prepared: Prepared) -> None:
    twin = prepared(net(), precision=FP16)
    opt, amp = offload.optim.AdamW(twin.parameters()), scaler()
    with pytest.raises(AssertionError, match="No inf checks"):
        amp.step(opt)
        amp.update()
    amp = scaler()
    torch.autograd.backward(twin(ids()) * 1024)
    amp.unscale_(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        amp.unscale_(opt)
    amp.step(opt)
    with pytest.raises(RuntimeError, match="after step"):
        amp.unscale_(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        amp.step(opt)


def test_scales_that_are_no_powers_of_two_and_scales_below_one(prepared: Prepared) -> None:
    for scale in (1000.0, 0.3, 2.0**-7):
        twin, model = prepared(net(), precision=FP32), net()
        for m, module in ((twin, offload.optim), (model, torch.optim)):
            opt, amp = module.AdamW(m.parameters(), lr=1e-2, eps=1e-3), scaler(scale)
            amp.scale(m(ids())).backward()
            amp.unscale_(opt)
            amp.step(opt)
            amp.update()
        for name, p, q in pairs(twin, model):
            near(p.grad, q.grad, 1, 0.0, name)
            near(p, q, 8, 1e-2, name)


def test_one_scaler_two_models_and_gradients_of_ones_own(prepared: Prepared) -> None:
    """One bad gradient skips what its optimizer holds, of both models, and nothing of another optimizer's, as with torch."""
    twins = [prepared(bag(seed=s, shapes={"vector": (7,), "odd": (4097,)}), "nvme", precision=FP16) for s in (1, 9, 5)]
    opts = [offload.optim.AdamW([*twins[0].parameters(), *twins[1].parameters()]), offload.optim.AdamW(twins[2].parameters())]
    amp = scaler()
    for i, m in enumerate(twins):
        for p in m.parameters():
            p.grad = noise(p.shape, i) * 1024
    twins[1].odd.grad[4096] = math.nan
    for opt in opts:
        amp.step(opt)
    amp.update()
    assert [o.skipped for o in opts] == [1, 0] and amp.get_scale() == 512.0
    for m, seed in zip(twins[:2], (1, 9), strict=True):
        same_models(m, bag(seed=seed, shapes={"vector": (7,), "odd": (4097,)}))
    assert not opts[0].state and float(opts[1].state[twins[2].odd]["step"]) == 1.0


# Overflow and underflow on the way


class Use(Bag):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.p * x


class Uses(nn.Module):
    """One parameter used `uses` times; the gradient of each use is what the input says."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        p = nn.Parameter(torch.ones(5))
        self.parts = nn.ModuleList(Use(p=p) for _ in range(uses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x).float().sum() for part in self.parts)  # type: ignore[return-value]


@everywhere
@pytest.mark.parametrize(("precision", "uses", "value"), [(FP16, 2, 40_000.0), (FP16, 2, -40_000.0), (TO_FP16, 1, 70_000.0), (TO_FP16, 2, 40_000.0)])
def test_what_overflows_on_the_way_skips_the_step(
    prepared: Prepared, device: str, place: str, precision: offload.Precision, uses: int, value: float
) -> None:
    twin = prepared(Uses(uses), place, device, precision=precision)
    opt = offload.optim.AdamW(twin.parameters())
    torch.autograd.backward(twin(torch.tensor([1.0, 1.0, value, 1.0, 1.0])))
    assert math.isinf(float(twin.parts[0].p.grad[2])) and float(twin.parts[0].p.grad[1]) == uses
    assert math.isinf(float(offload.clip_grad_norm_(twin, 1.0)))
    with pytest.warns(RuntimeWarning, match="not finite"):
        opt.step()
    assert opt.skipped == 1 and torch.equal(plain(twin.parts[0].p), torch.ones(5)) and not opt.state


def test_sums_over_micro_batches_do_not_overflow(prepared: Prepared) -> None:
    for declared in (1, 2):
        twin = prepared(Uses(1), "nvme", precision=FP16, accumulate=declared)
        for _ in range(2):
            torch.autograd.backward(twin(torch.full((5,), 40_000.0)))
        assert torch.equal(plain(twin.parts[0].p.grad), torch.full((5,), 80_000.0))


def test_a_written_gradient_is_added_to(prepared: Prepared) -> None:
    twin, both = prepared(net(), "nvme", precision=FP16), Masters(net(), net())
    for seed in (1, 2):
        torch.autograd.backward(twin(ids(seed)))
        both.backward(both.half(ids(seed)))
        if seed == 1:
            for m in (twin, both.masters):
                m.embed.weight.grad.mul_(2.0**-20).add_(0.0)
    for name, p, q in pairs(twin, both.masters):
        ulps = 2**13 if name == "embed.weight" else 1  # it was rounded to fp16 when it was written
        near(p.grad, q.grad, ulps, float(q.grad.abs().max()), name)


def test_gradients_from_a_users_hook(prepared: Prepared) -> None:
    """What a hook makes of a gradient may be smaller than fp16 can hold."""
    twin, half = prepared(net(), precision=FP16), net().half()
    twin.blocks[0].up.weight.register_hook(lambda g: g * 2.0**-40)
    for m in (twin, half):
        torch.autograd.backward(m(ids()) * 64)
    same(twin.blocks[0].up.weight.grad, half.blocks[0].up.weight.grad.float() * 2.0**-40)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exponent=st.integers(-140, 115), assigned=st.booleans(), place=st.sampled_from(["host", "nvme"]))
def test_written_gradients_keep_fp16s_digits_at_any_size(prepared: Prepared, exponent: int, assigned: bool, place: str) -> None:
    twin = prepared(bag(shapes={"odd": (4097,)}), place, precision=FP16)
    value = torch.ldexp(noise((4097,), exponent % 7).clamp(-2, 2).sign() * (1 + noise((4097,), 1).sigmoid()), torch.tensor(exponent - 1))
    if not assigned:
        twin.odd.grad = torch.zeros(4097)
        assert offload.clip_grad_norm_(twin, 1.0) == 0
    if assigned:
        twin.odd.grad = value
    else:
        twin.odd.grad.copy_(value)
    norm = float(offload.clip_grad_norm_(twin, math.inf))
    assert math.isclose(norm, float(value.double().norm()), rel_tol=2**-11) or exponent < -125
    assert float(((plain(twin.odd.grad) - value).abs() / value.abs()).max()) <= 2**-11 or exponent < -125  # fp32's own denormals
    opt = offload.optim.AdamW(twin.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert opt.skipped == 0


def test_what_fp16_holds_is_written_as_it_is(prepared: Prepared) -> None:
    twin = prepared(bag(shapes={"p": (65536,)}), precision=FP16)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    for value in (every.nan_to_num(0.0, 0.0, 0.0), every):
        twin.p.grad = value.clone()
        offload.clip_grad_norm_(twin, math.inf)
        got = plain(twin.p.grad)
        assert torch.equal(got.nan_to_num(1.5), value.nan_to_num(1.5))


def test_a_multiplication_past_fp32_is_found(prepared: Prepared) -> None:
    twin = prepared(bag(shapes={"p": (5,)}), precision=TO_FP16)
    for act in (lambda g: g.mul_(1e38), lambda g: g.mul_(math.nan), lambda g: g.mul_(0.5).mul_(math.inf)):
        twin.p.grad = torch.full((5,), 1000.0)
        offload.clip_grad_norm_(twin, 1e9)
        act(twin.p.grad)
        opt = offload.optim.AdamW(twin.parameters())
        with pytest.warns(RuntimeWarning, match="not finite"):
            opt.step()


# offload train

RUN = SMALL.but(
    model={"config": sizes(128, 64, 128)},
    data={"seq_length": 32, "accumulate": 2},
    tiers={"device": "48MiB"},
    precision={"compute": "fp16", "grad": "fp16"},
    optimizer={"lr": 1e-3, "clip": 1.0},
    train={"steps": 6},
)


def test_a_run_scales_its_loss(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**22))
    nvme = 'tiers.place={parameter="nvme", gradient="nvme", optimizer="nvme"}'
    ours, other = (RUN.train(tmp_path, *how, out=f"out{i}") for i, how in enumerate(((), ("train.device=sim", nvme))))
    assert ours["digest"] == other["digest"] and ours["losses"] == other["losses"] and ours["eval_loss_last"] == other["eval_loss_last"]
    lines = records_of(tmp_path / "out0")
    skipped = [b["skipped"] > a["skipped"] for a, b in zip([{"skipped": 0}, *lines], lines, strict=False)]
    assert 1 <= sum(skipped) == ours["skipped"] < 6 and not skipped[-1]
    assert [line["loss_scale"] for line in lines] == [2.0 ** (22 - sum(skipped[:i])) for i in range(6)]
    assert all((line["grad_norm"] is None) == s for line, s in zip(lines, skipped, strict=True))
    assert all(abs(value - math.log(128)) < 0.2 for value in ours["losses"]) and 0.5 < lines[-1]["grad_norm"] < 5.0  # neither is scaled
