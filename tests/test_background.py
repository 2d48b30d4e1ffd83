"""Updates under the next forward: the bits of updates that end within their step, whoever touches what, and however late they run."""

from __future__ import annotations

import copy
import errno
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

import models as M
import offload
from late import late
from offload import _core
from offload.engine.registry import engine_of
from offload.memory import swap
from offload.transfer.device import SimDevice

X = torch.linspace(-1, 1, 64).view(4, 16)
IDS = torch.arange(24).view(2, 12) * 101 % 701
COMPACT = offload.Precision(master="split", moments="int8")
CASES: dict[str, tuple[M.Make, M.Loss]] = {
    "stack": (lambda: M.Stack(2, False, depth=4, width=16, dropout=0.1), M.mean_square),
    "tied": (lambda: M.Language(701), lambda m: M.mean_square(m, IDS)),
    "twice": (M.Twice, lambda m: M.mean_square(m, X)),
    "nested": (M.Nested, lambda m: M.mean_square(m, X)),
    "branches": (M.Branches, lambda m: M.mean_square(m, X)),  # has a part that is not used
    "frozen": (lambda: _frozen(M.Order()), lambda m: M.mean_square(m, X)),
}
STATE_ON_NVME = {"parameter": "host", "gradient": "host", "optimizer": "nvme"}
PLACES = [M.placed("nvme"), M.placed("host"), STATE_ON_NVME,
          {"parameter": "nvme", "gradient": "nvme", "optimizer": "host"}, None]  # fmt: skip


def _frozen(model: nn.Module) -> nn.Module:
    for p in list(model.parameters())[2:7]:
        p.requires_grad_(False)
    return model


def _train(
    model: nn.Module, loss: M.Loss, steps: int, clip: float | None, accumulate: int, zero: Callable[[Any, nn.Module], None], wait: bool
) -> list[float]:
    torch.manual_seed(5)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            value = loss(model) / accumulate
            value.backward()
            losses.append(float(value.detach()))
        if clip is not None:
            losses.append(float(offload.clip_grad_norm_(model, clip)))
        optimizer.step()
        if wait:
            offload.runtime(model).synchronize()
        schedule.step()
        zero(optimizer, model)
    return losses


ZERO: list[Callable[[Any, nn.Module], None]] = [
    lambda optimizer, model: optimizer.zero_grad(),
    lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    lambda optimizer, model: model.zero_grad(set_to_none=False),
]


def _run(
    case: str, path: Path, steps: int, clip: float | None, accumulate: int, zero: int, lateness: int | None = -1, **over: Any
) -> tuple[list[float], str]:  # fmt: skip
    """`lateness`: -1 for updates that end within their step, None for all late, else the seed of which are."""
    make, loss = CASES[case]
    slots = over.pop("slots", None)
    slots = None if case == "nested" else slots
    with M.prepared(M.seeded(make), M.tiers(path), accumulate=accumulate if zero == 0 else 1, slots=slots, **over) as model:
        if lateness == -1:
            return _train(model, loss, steps, clip, accumulate, ZERO[zero], wait=True), offload.runtime(model).digest()
        with late(model, lateness):
            return _train(model, loss, steps, clip, accumulate, ZERO[zero], wait=False), offload.runtime(model).digest()


@pytest.mark.parametrize("seed", range(60))
def test_late_updates_change_nothing(tmp_path: Path, seed: int) -> None:
    case = list(CASES)[seed % len(CASES)]
    accumulate, clip, zero = (1, 4)[seed // 2 % 2], (None, 0.01)[seed // 3 % 2], (0, 0, 1, 2)[seed // 5 % 4]
    precision = (M.FP32, M.BF16, COMPACT)[seed // 7 % 3]
    over: dict[str, Any] = {"place": PLACES[seed % 5], "activations": ("keep", "recompute")[seed // 4 % 2], "precision": precision}
    want = _run(case, tmp_path, 3, clip, accumulate, zero, precision=precision)
    device: Any = "cpu" if seed % 3 == 0 else SimDevice(seed=seed)
    lateness = None if seed % 4 == 0 else seed
    assert _run(case, tmp_path, 3, clip, accumulate, zero, lateness, device=device, slots=None if seed % 2 else 3, **over) == want


@pytest.mark.parametrize(("device", "place"), list(itertools.product(["cpu", "sim"], ["host", "nvme"])))
def test_step_and_zero_grad_do_not_wait(tmp_path: Path, device: str, place: str) -> None:
    """step() and every kind of zero_grad() after it return while no update has run."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=device, place=M.placed(place)) as model, late(model):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        for zero in ZERO:
            M.mean_square(model, X).backward()
            optimizer.step()
            zero(optimizer, model)
            batch = engine_of(model).background._batches[-1]
            assert not batch.begun
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            assert not batch.begun


def test_each_reader_waits_for_what_it_needs_alone(tmp_path: Path) -> None:
    """A forward that ends early, a parameter, a moment: each brings about the updates of its own unit, or chunk, and of no other."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("host"), precision=M.BF16) as model, late(model):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        M.mean_square(model, X).backward()
        optimizer.step()
        batch = engine_of(model).background._batches[-1]
        units = [u.number for u in engine_of(model).units for _ in u.states]

        def begun() -> set[int]:
            return {units[i] for i, b in enumerate(batch._batches) if b is not None}

        assert not begun()
        model.blocks[3].up.weight.sum()
        assert begun() == {3}
        optimizer.state[model.blocks[1].down.bias]["exp_avg"].sum()
        assert begun() == {1, 3}
        with torch.no_grad():
            model.blocks[4].norm.bias.zero_()
            assert begun() == {1, 3, 4}
            model.blocks[0](X.bfloat16())
        assert begun() == {0, 1, 3, 4}
        model.blocks[2].up.weight.grad.mul_(2)
        assert begun() == {0, 1, 2, 3, 4}


def test_updates_come_in_the_order_of_the_forward(tmp_path: Path) -> None:
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("host")) as model, late(model):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        background = engine_of(model).background
        for order in ([3, 1, 4, 0, 2], [0, 2, 1], [4, 3, 2, 1, 0]):
            model.order = order
            M.mean_square(model, X).backward()
            optimizer.step()
            places = [unit for unit, jobs in enumerate(background.jobs._jobs) for j in jobs.values() if j.batch is background._batches[-1]]
            index = {unit: j.index for unit, jobs in enumerate(background.jobs._jobs) for j in jobs.values()}
            assert sorted(places, key=lambda u: index[u])[: len(order)] == order
            optimizer.zero_grad()


def test_states_are_read_ahead_as_far_as_buffers_allow(tmp_path: Path) -> None:
    """After a backward the first chunks' states have been read, before step(); a write to a state or a master on NVMe drops them."""
    with M.prepared(M.seeded(lambda: M.Order(depth=9)), M.tiers(tmp_path), place=STATE_ON_NVME) as model:
        engine, optimizer = engine_of(model), offload.optim.AdamW(model.parameters(), lr=1e-2)
        assert engine.space is not None
        sizes = [s.nbytes for u in engine.units for s in u.states]
        early = sum(sizes[: engine.plan.staging.updates])
        assert early < sum(sizes)
        for step in range(3):
            before = engine.space.counters()["nvme_read"]
            M.mean_square(model, X).backward()
            while engine.space.counters()["nvme_read"] - before < early:
                engine.space.drain()
            engine.space.drain()
            assert engine.space.counters()["nvme_read"] - before == early
            if step == 1:
                with torch.no_grad():
                    model.blocks[0].up.weight.mul_(0.5)
                assert engine.background._prepared is None
            optimizer.step()
            optimizer.zero_grad()
            offload.runtime(model).synchronize()
            again = early + 4 * model.blocks[0].up.weight.numel() if step == 1 else 0
            assert engine.space.counters()["nvme_read"] - before == sum(sizes) + again


# Anything between step() and the next forward


class Touching(RuleBasedStateMachine):
    """Two models, one whose updates are late and one whose updates end within step(): whatever is done to both reads alike."""

    @initialize(
        place=st.sampled_from(PLACES), device=st.one_of(st.just("cpu"), st.integers(0, 100)), lateness=st.one_of(st.none(), st.integers(0, 100)),
        precision=st.sampled_from([M.FP32, M.BF16, COMPACT]),
    )  # fmt: skip
    def start(self, place: dict[str, str] | None, device: str | int, lateness: int | None, precision: offload.Precision) -> None:
        self.stack = ExitStack()
        where = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.models, self.optimizers, self.pairs = [], [], []
        for late_one in (True, False):
            model = M.seeded(lambda: _frozen(M.Language(211, depth=3)))
            chosen = SimDevice(seed=device) if isinstance(device, int) and late_one else "cpu"
            model = self.stack.enter_context(M.prepared(model, M.tiers(where), device=chosen, place=place if late_one else None, precision=precision))
            self.models.append(model)
            self.optimizers.append(offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
            self.pairs.append([p for p in model.parameters() if p.requires_grad])
        self.stack.enter_context(late(self.models[0], lateness))

    def both(self, act: Callable[[Any, Any, list[Any]], Any]) -> None:
        a, b = (act(*x) for x in zip(self.models, self.optimizers, self.pairs, strict=True))
        assert a is b is None or torch.equal(torch.as_tensor(a), torch.as_tensor(b))

    @rule(shift=st.integers(0, 5))
    def backward(self, shift: int) -> None:
        def act(model: Any, _: Any, parameters: list[Any]) -> torch.Tensor:
            loss = M.mean_square(model, (IDS + shift) % 211)
            loss.backward()
            return loss.detach()

        self.both(act)

    @rule(clip=st.sampled_from([None, 0.1]))
    def step(self, clip: float | None) -> None:
        if clip is not None:
            self.both(lambda model, *_: offload.clip_grad_norm_(model, clip))
        self.both(lambda _, optimizer, __: optimizer.step())
        offload.runtime(self.models[1]).synchronize()

    @rule(kind=st.integers(0, 2))
    def zero(self, kind: int) -> None:
        self.both(lambda model, optimizer, _: ZERO[kind](optimizer, model))

    @rule(i=st.integers(0, 30), how=st.integers(0, 3))
    def write(self, i: int, how: int) -> None:
        def act(_: Any, __: Any, parameters: list[Any]) -> None:
            p = parameters[i % len(parameters)]
            with torch.no_grad():
                (lambda: p.mul_(0.5), lambda: p.view(-1)[1:3].fill_(0.25), lambda: p.copy_(torch.full_like(p, 0.1)), lambda: p.data.add_(1.0))[how]()

        self.both(act)

    @rule(i=st.integers(0, 30), how=st.integers(0, 4))
    def write_gradient(self, i: int, how: int) -> None:
        def act(_: Any, __: Any, parameters: list[Any]) -> None:
            p = parameters[i % len(parameters)]
            if how == 0:
                p.grad = torch.full(p.shape, 0.01)
            elif how == 1:
                p.grad = None
            elif p.grad is not None:
                (lambda: p.grad.mul_(3.0), lambda: p.grad.copy_(torch.ones(p.shape)), lambda: p.grad.view(-1)[:2].zero_())[how - 2]()

        self.both(act)

    @rule(i=st.integers(0, 30), what=st.integers(0, 3))
    def read(self, i: int, what: int) -> None:
        def act(_: Any, optimizer: Any, parameters: list[Any]) -> Any:
            p = parameters[i % len(parameters)]
            if what == 0:
                return p.detach().clone()
            if what == 1:
                return None if p.grad is None else p.grad.clone()
            return optimizer.state[p]["exp_avg_sq"].clone() if optimizer.state.get(p) else None

        self.both(act)

    @rule(i=st.integers(0, 30))
    def write_moment(self, i: int) -> None:
        def act(_: Any, optimizer: Any, parameters: list[Any]) -> None:
            p = parameters[i % len(parameters)]
            if optimizer.state.get(p):
                optimizer.state[p]["exp_avg"].mul_(0.5)

        self.both(act)

    @rule()
    def evaluate(self) -> None:
        def act(model: Any, *_: Any) -> torch.Tensor:
            with torch.no_grad():
                return M.mean_square(model, IDS % 211)

        self.both(act)

    @rule()
    def reload(self) -> None:
        def act(model: Any, optimizer: Any, _: Any) -> None:
            kept = copy.deepcopy(optimizer.state_dict())
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            optimizer.load_state_dict(kept)

        self.both(act)

    @rule()
    def digest(self) -> None:
        a, b = (offload.runtime(m).digest() for m in self.models)
        assert a == b

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.digest()
            self.stack.close()


Touching.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestTouching = Touching.TestCase


# Errors


USES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward": lambda model, _: M.mean_square(model, X),
    "step": lambda _, optimizer: optimizer.step(),
    "digest": lambda model, _: offload.runtime(model).digest(),
    "synchronize": lambda model, _: offload.runtime(model).synchronize(),
    "state": lambda _, optimizer: [v["exp_avg"].clone() for v in optimizer.state.values()],
}


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, job: int, device: Any, place: dict[str, str], held: bool
) -> Iterator[tuple[nn.Module, Any, Any]]:
    """A model whose first step's `job`-th update cannot be read (or written back); the engine of its drive is given too."""
    options: dict[str, Any] = {"place": place, "precision": M.BF16}
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), **options) as model:
        shards = [s for u in engine_of(model).units for s in u.states]
        extent = shards[job % len(shards)].extent
    assert extent is not None
    begin = extent.offset + extent.nbytes // 3  # moments: nobody writes them before
    faults = {f"{kind}_errno": errno.EIO, "bad_begin": begin, "bad_end": begin + 1}
    engines = []

    def open_engine(*_: Any) -> Any:
        engines.append(_core.Engine("faults", 2, 4096, **faults))
        return engines[-1]

    monkeypatch.setattr(swap, "open_engine", open_engine)
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), device=device, **options)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
    if held:
        engines[0].hold()
    M.mean_square(model, X).backward()
    yield model, optimizer, engines[0]
    assert not list((tmp_path / "swap").iterdir())


@pytest.mark.parametrize("job", range(5))
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("seed", [None, 1])
def test_an_error_is_raised_where_it_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, job: int, seed: int | None) -> None:
    """step() returns; whatever needs a failed update raises, each time; what needs another's does not wait for it; close() says no more of it."""
    device: Any = "cpu" if seed is None else SimDevice(seed=seed)
    with failing(monkeypatch, tmp_path, kind, job, device, STATE_ON_NVME, held=True) as (model, optimizer, engine):
        optimizer.step()
        optimizer.zero_grad()
        engine.release()
        first = list(USES)[job]
        for name in (first, *USES, *USES):
            if name == "forward" and kind == "write":
                continue  # what it computes with was updated in memory
            with pytest.raises(offload.SwapError, match="EIO"):
                USES[name](model, optimizer) if name != "step" else (_give(model), optimizer.step())
        offload.runtime(model).close()


def _give(model: nn.Module) -> None:
    with pytest.raises(offload.SwapError, match="EIO"):
        offload.runtime(model).synchronize()
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)


@pytest.mark.parametrize("job", range(5))
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_close_does_not_lose_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, job: int, device: str) -> None:
    with failing(monkeypatch, tmp_path, kind, job, device, M.placed("nvme"), held=False) as (model, optimizer, _):
        said = []
        for act in (optimizer.step, optimizer.zero_grad, offload.runtime(model).close):  # step() says it if it was read ahead
            try:
                act()
            except offload.SwapError as error:
                said.append(str(error))
        assert len(said) == 1 and "EIO" in said[0]
        with pytest.raises(offload.OffloadError, match=r"closed|not prepared"):
            offload.runtime(model)
