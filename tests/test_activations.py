"""Boundary activations on the host and on NVMe: the bits of keeping them, within budgets, and back where they were after every step."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import models as M
import offload
from offload.engine import activations
from offload.engine.registry import engine_of
from offload.errors import OffloadError, SwapError
from offload.planner.cost import traffic_of
from offload.planner.demand import IN_TRANSIT, boundary_bytes
from offload.transfer.device import Put, SimDevice
from offload.transfer.queue import Transfer

MIB = 1 << 20
AWAY = ["host", "nvme"]
X = torch.linspace(-1, 1, 64).view(4, 16)


@pytest.fixture(autouse=True)
def _small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 1)


def _stack() -> nn.Module:
    return M.Stack(depth=4, width=16, dropout=0.1)


def _loss(model: nn.Module) -> torch.Tensor:
    return M.mean_square(model, X)


def free_bytes(model: nn.Module) -> int:
    engine_of(model).device.settle()  # a move under way holds what it moves
    return engine_of(model).activations.free_bytes  # no collector is needed


# Bits


class Encoder(nn.Module):
    """Blocks that all take the states of another tower, a mask, and a pair of tables; one of them changes shape on the way."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.other = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Cross(width) for _ in range(depth))
        self.tables = nn.Parameter(torch.rand(4, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, mask, tables = self.other(x).tanh(), x > -2, (self.tables.cos(), self.tables.detach().sin())
        for i, block in enumerate(self.blocks):
            x = x.t().contiguous().t() if i == 1 else x[None].expand(2, *x.shape).mean(0)
            x = block(x, states, mask=mask, pair=tables, scale=0.5, nothing=None)
        return x


class Cross(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = M.Block(width)

    def forward(self, x: torch.Tensor, states: torch.Tensor, *, mask: torch.Tensor, pair: Any, scale: float, nothing: None) -> torch.Tensor:
        return (self.inner(x) + states * scale) * pair[0] * mask + pair[1]


CASES: dict[str, tuple[M.Make, M.Loss]] = {
    "stack": (_stack, M.mean_square),
    "cross": (Encoder, _loss),
    "twice": (M.Twice, _loss),
    "language": (lambda: M.Language(701), lambda m: M.mean_square(m, torch.arange(24).view(2, 12) * 101 % 701)),
    "vision": (M.Vision, lambda m: M.mean_square(m, torch.linspace(-1, 1, 192).view(2, 8, 12))),
    "segments": (lambda: M.Stack(2, False, depth=4, width=16), M.mean_square),
    "reentrant": (lambda: M.Stack(2, True, depth=4, width=16), M.mean_square),
    "structured": (lambda: M.Structured("dict"), lambda m: M.mean_square(m, X, shift=X[0], flags={"a": [X]})),
}
_references: dict[Any, tuple[list[float], str]] = {}


def _reference(path: Path, case: str, clip: float | None, accumulate: int) -> tuple[list[float], str]:
    key = (case, clip, accumulate)
    if key not in _references:
        _references[key] = _run(path, case, clip, accumulate, device="cpu", activations="keep")
    return _references[key]


def _run(path: Path, case: str, clip: float | None, accumulate: int, **options: Any) -> tuple[list[float], str]:
    make, loss = CASES[case]
    with M.prepared(M.seeded(make), M.tiers(path), precision=M.FP32, accumulate=accumulate, **options) as model:
        losses = M.train(model, loss, 2, clip=clip, accumulate=accumulate)
        boundaries = engine_of(model).plan.boundaries
        assert free_bytes(model) >= boundaries.nbytes
        return losses, offload.runtime(model).digest()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "host", "nvme"])
def test_every_mode_gives_the_same_bits(tmp_path: Path, mode: str, device: str) -> None:
    for case in CASES if mode in AWAY else ("stack", "cross"):  # the other modes have tests of their own
        for clip, accumulate in ((None, 1), (1e-3, 4)):
            got = _run(tmp_path, case, clip, accumulate, device=device, activations=mode)
            assert got == _reference(tmp_path, case, clip, accumulate), case


@given(
    st.sampled_from(list(CASES)), st.sampled_from(AWAY), st.sampled_from([None, 1e-3]), st.sampled_from([1, 4]), st.integers(0, 10**6),
    st.sampled_from([None, "host", "nvme"]), st.sampled_from([None, 4]),
)  # fmt: skip
@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_adversarial_delays(
    tmp_path: Path, case: str, mode: str, clip: float | None, accumulate: int, seed: int, tier: str | None, slots: int | None
) -> None:
    place = M.placed(tier) if tier else None
    got = _run(tmp_path, case, clip, accumulate, device=SimDevice(seed=seed), activations=mode, place=place, slots=slots)
    assert got == _reference(tmp_path, case, clip, accumulate)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", AWAY)
def test_llama_in_bf16(tmp_path: Path, mode: str, device: str) -> None:
    """Keyword arguments, rotary tables and positions of a library's model; its masks are shared by all blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, use_cache=False
    )
    ids = torch.arange(128).view(2, 64) * 37 % 211
    got = {}
    for activations_ in ("recompute", mode):
        with M.prepared(
            M.seeded(lambda: LlamaForCausalLM(config).train()), M.tiers(tmp_path), device=device, activations=activations_, batch=(2, 64)
        ) as model:
            losses = M.train(model, lambda m: m(input_ids=ids, labels=ids).loss, 2)
            moved, plan = offload.runtime(model).stats()["moved_bytes"], offload.runtime(model).plan
            got[activations_] = losses, offload.runtime(model).digest(), moved
    assert got[mode][:2] == got["recompute"][:2]
    away = 2 * 4 * ids.numel() * 64 * 2  # steps, blocks, tokens, width, bytes
    assert plan.boundaries.nbytes == away // 2  # as planned from shapes of parameters
    assert got[mode][2]["d2h"] - got["recompute"][2]["d2h"] == away
    direct = device == "cpu"
    traffic = traffic_of(plan, direct=direct).__dict__
    none = traffic_of(dataclasses.replace(plan, boundaries=type(plan.boundaries)()), direct=direct).__dict__
    for link in ("h2d", "nvme_read", "nvme_write"):
        extra = got[mode][2][link] - got["recompute"][2][link]
        assert extra == 2 * (traffic[link] - none[link]) or (direct and link == "h2d"), link
        assert extra in (0, away)


# Leaving


def _inputs(model: nn.Module) -> tuple[list[StorageWeakRef], torch.Tensor]:
    """The storages of the blocks' inputs in one forward; what is expired afterwards was given up. And the result, which holds the graph."""
    seen: list[StorageWeakRef] = []
    handles = [b.register_forward_pre_hook(lambda m, a: seen.append(StorageWeakRef(a[0].untyped_storage())) or None) for b in model.blocks]
    value = M.mean_square(model)
    for handle in handles:
        handle.remove()
    engine_of(model).synchronize()
    return seen, value


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["recompute", "host", "nvme"])
def test_boundaries_leave_the_device(tmp_path: Path, mode: str, device: str) -> None:
    with M.prepared(M.seeded(_stack), M.tiers(tmp_path), precision=M.FP32, device=device, activations=mode) as model:
        inputs, value = _inputs(model)
        assert [r.expired() for r in inputs] == [mode != "recompute"] * 4
        before = free_bytes(model)
        value.backward()
        if mode != "recompute":
            assert free_bytes(model) == before + 4 * 4096


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("mode", AWAY)
def test_what_is_in_transit_stays_within_the_plan(tmp_path: Path, mode: str, seed: int | None) -> None:
    class Counting(SimDevice):
        out, back, most = 0, 0, 0

        def stow(self, source: torch.Tensor, store: Callable[[Put], None]) -> Transfer:
            self.out += source.nbytes
            self.most = max(self.most, self.out + self.back)

            def stored(put: Put) -> None:
                store(put)
                self.out -= source.nbytes

            return super().stow(source, stored)

        def scratch(self, nbytes: int) -> torch.Tensor:
            memory = super().scratch(nbytes)
            self.back += nbytes
            self.most = max(self.most, self.out + self.back)
            weakref.finalize(memory.untyped_storage(), self.freed, nbytes)
            return memory

        def freed(self, nbytes: int) -> None:
            self.back -= nbytes

    device = Counting(seed=seed)
    with M.prepared(
        M.seeded(lambda: M.Stack(depth=8, width=128)), M.tiers(tmp_path), precision=M.FP32, device=device, activations=mode, batch=(1, 256)
    ) as model:
        x = torch.ones(256, 128)
        M.mean_square(model, x).backward()
        engine_of(model).synchronize()
        plan = offload.runtime(model).plan
        gc.collect()
        assert device.out == device.back == 0
        largest = max(boundary_bytes(u.spec, 256, 4) for u in plan.layouts if u.spec.repeated)
        assert x.nbytes <= device.most <= IN_TRANSIT * largest + plan.working.in_flight
        assert engine_of(model).activations.counters.misses == 0


def test_a_tensor_of_several_units_stays(tmp_path: Path) -> None:
    """The other tower's states are seen again by the next block: they move once, in vain, and from then on never."""
    with M.prepared(M.seeded(Encoder), M.tiers(tmp_path), precision=M.FP32, device="sim", activations="host") as model:
        moved = []
        for _ in range(3):
            before = offload.runtime(model).stats()["moved_bytes"]["h2d"]
            out = engine_of(model).device.moved["d2h"]
            value = _loss(model)
            moved.append((engine_of(model).device.moved["d2h"] - out) // X.nbytes)
            value.backward()
            assert (offload.runtime(model).stats()["moved_bytes"]["h2d"] - before) % X.nbytes == 0
        assert moved == [4, 2, 2]  # the first block's own input needs no gradient; states and a table stay


@pytest.mark.parametrize("mode", AWAY)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_forms_of_inputs(tmp_path: Path, mode: str, device: str) -> None:
    """Strides, and addresses modulo 64, are in backward what they were in forward."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forms.append((x.shape, x.stride(), x.data_ptr() % 64, x.sum().item()))
            return self.inner(x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Probe() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            x = self.blocks[1](x.t().contiguous().t())
            x = self.blocks[2](x[1:].expand(3, 3, 16))
            x = self.blocks[3](x.reshape(-1)[16:].view(4, 2, 16)[:, 1])
            x = self.blocks[4](torch.cat([x, x], 1).chunk(2, 1)[1])
            return self.blocks[5](torch.cat([x.new_zeros(1), x.flatten()])[1:].view(4, 16))

    forms: list[Any] = []
    with M.prepared(M.seeded(Root), M.tiers(tmp_path), precision=M.FP32, device=device, activations=mode) as model:
        _loss(model).backward()
        first, again = forms[:6], forms[6:]
        assert again == first[::-1]


# Backward in every way


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", AWAY)
def test_graphs_kept_and_run_twice(tmp_path: Path, mode: str, device: str) -> None:
    """retain_graph, gradients of gradients, and several forwards whose backwards come in any order; memory is the same after each."""

    def penalty(model: nn.Module) -> torch.Tensor:
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        return grad.square().sum()

    def retained(model: nn.Module) -> torch.Tensor:
        value = _loss(model)
        value.backward(retain_graph=True)
        return value

    def several(model: nn.Module) -> torch.Tensor:
        values = [M.mean_square(model, X * k) for k in (1, 2, 3)]
        for k in (1, 0):
            values[k].backward()
        return values[2]

    def reentrant(model: nn.Module) -> torch.Tensor:
        return checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).square().mean()

    plain = M.seeded(M.Order)
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, device=device, activations=mode) as model:
        _loss(model).backward()
        model.zero_grad()
        whole = free_bytes(model)
        for way in (penalty, retained, several, reentrant):
            for m in (plain, model):
                m.zero_grad()
                way(m).backward()
            assert all(torch.equal(g, h) if way is not several else torch.allclose(g, h, rtol=1e-5) for g, h in
                       zip(M.gradients(model).values(), M.gradients(plain).values(), strict=True)), way.__name__  # fmt: skip
            assert M.at_rest(model)
            if way is several:
                assert free_bytes(model) >= whole  # more were alive at once: the pool has grown
                whole = free_bytes(model)
            assert free_bytes(model) == whole


class _Boom(Exception):
    pass


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", AWAY)
def test_memory_returns(tmp_path: Path, mode: str, device: str) -> None:
    """After a step, a forward without backward, one that raises, a backward that raises, evaluation; and training goes on in the same bits."""

    def dropped(model: nn.Module) -> None:
        for _ in range(3):
            _loss(model)

    def forward_raises(model: nn.Module) -> None:
        handle = model.blocks[3].up.register_forward_pre_hook(boom)
        with pytest.raises(_Boom):
            _loss(model)
        handle.remove()

    def backward_raises(model: nn.Module) -> None:
        handle = model.blocks[2].up.weight.register_hook(boom)
        value = _loss(model)
        with pytest.raises(_Boom):
            value.backward()
        handle.remove()

    def evaluation(model: nn.Module) -> None:
        moved = dict(engine_of(model).device.moved)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                _loss(model.eval())
        assert engine_of(model).device.moved["d2h"] == moved["d2h"]
        model.train()

    def boom(*_: Any) -> None:
        raise _Boom

    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, device=device, activations=mode) as model:
        M.train(model, _loss, 1)
        whole, held = free_bytes(model), {t: b.used for t, b in engine_of(model).budgets.items()}
        for interlude in (dropped, forward_raises, backward_raises, evaluation):
            interlude(model)
            model.zero_grad()
            if interlude is backward_raises:  # autograd keeps what it had queued until the next one
                _loss(model).backward()
                model.zero_grad()
            gc.collect()  # an exception's traceback holds frames, and they the exception
            assert free_bytes(model) == whole, interlude.__name__
        M.train(model, _loss, 2)
        assert free_bytes(model) == whole
        assert {t: b.used for t, b in engine_of(model).budgets.items()} == held
        got = offload.runtime(model).digest()
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, activations="keep") as model:
        M.train(model, _loss, 1)
        M.train(model, _loss, 2)
        assert offload.runtime(model).digest() == got


@pytest.mark.parametrize("mode", AWAY)
@pytest.mark.parametrize("device", ["cpu", 0, 1])
@pytest.mark.parametrize("where", ["inside", "after"])
def test_inputs_changed_in_place_are_refused(tmp_path: Path, where: str, device: Any, mode: str) -> None:
    """As recomputation refuses them, whenever the copy was taken; what follows is not disturbed."""

    class Changing(M.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2) if changing and where == "inside" else x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleList(Changing(16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                y = block(x)
                if changing and where == "after":
                    x.mul_(2)
                x = y
            return x

    chosen = SimDevice(seed=device) if isinstance(device, int) else device
    changing = True
    with M.prepared(M.seeded(Root), M.tiers(tmp_path), precision=M.FP32, device=chosen, activations=mode) as model:
        value = _loss(model)
        with pytest.raises(OffloadError, match=r"an input of blocks\.2 was changed in place"):
            value.backward()
        changing = False
        model.zero_grad()
        _loss(model).backward()
        want = M.plain_gradients(Root, _loss)[1]
        assert not M.differing(M.gradients(model), want)
        assert M.at_rest(model)


def test_captured_inputs_keep_their_values(tmp_path: Path) -> None:
    """What a hook of the user's keeps of a recomputation is not overwritten by the next step."""
    kept: list[torch.Tensor] = []
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, activations="host") as model:
        model.blocks[2].norm.register_forward_hook(lambda m, a, o: kept.append(a[0]))
        _loss(model).backward()
        copies = [k.detach().clone() for k in kept]
        kept[:], first = [], list(kept)
        M.mean_square(model, X * 3).backward()
        assert all(torch.equal(a.detach(), b) for a, b in zip(first, copies, strict=True))


# Drives


@pytest.mark.parametrize("device", ["cpu", "sim", 1])
@pytest.mark.parametrize("what", ["read", "write"])
def test_failing_drives(tmp_path: Path, what: str, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SwapError in the backward that needs the activation; the state is as it was, and training goes on."""

    class Failed:
        done = True

        def wait(self) -> None:
            raise SwapError("state.swap, bytes 0 to 4096: bad sector")

    chosen = SimDevice(seed=device) if isinstance(device, int) else device
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32, device=chosen, activations="nvme") as model:
        M.train(model, _loss, 1)
        whole, before = free_bytes(model), offload.runtime(model).digest()
        with monkeypatch.context() as patch:
            patch.setattr(engine_of(model).space, what, lambda *a, **k: Failed())
            value = _loss(model)
            with pytest.raises(SwapError, match="bad sector"):
                value.backward()
        del value
        _loss(model).backward()  # until then autograd keeps what was queued
        model.zero_grad()
        gc.collect()  # tracebacks hold frames
        assert free_bytes(model) == whole
        assert M.at_rest(model)
        assert offload.runtime(model).digest() == before
        M.train(model, _loss, 1)
        got = offload.runtime(model).digest()
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32) as model:
        M.train(model, _loss, 1)
        M.train(model, _loss, 1)
        assert offload.runtime(model).digest() == got


def test_checksums_and_several_drives(tmp_path: Path) -> None:
    where = offload.Tiers("64MiB", "64MiB", [(str(tmp_path / f"d{i}"), "8MiB") for i in range(3)], checksum=True)
    with M.prepared(M.seeded(_stack), where, precision=M.FP32, activations="nvme", batch=(1, 16)) as model:
        M.train(model, M.mean_square, 2)
        counters = engine_of(model).space.counters()
        assert counters["nvme_read"] == counters["nvme_write"] == counters["bytes_verified"] == 2 * 4 * 4096


def test_closing_with_a_graph_alive(tmp_path: Path) -> None:
    for mode in AWAY:
        for device in ("cpu", SimDevice(seed=0)):
            model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), device=device, activations=mode)
            pending = _loss(model)
            offload.runtime(model).close()
            with pytest.raises(OffloadError, match="closed"):
                pending.backward()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
