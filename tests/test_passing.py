"""Gradients that pass to their updates through places that units share: bits, bounds, who may read them, and what cannot pass."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import models as M
import offload
import test_backward as B
from late import late
from offload import _core
from offload.cli.plan import plan_command
from offload.engine.registry import engine_of
from offload.memory import swap
from offload.planner.passing import KEPT, kinds, places
from offload.planner.placement import Plan, chunks_of, gradient_chunk_bytes
from offload.transfer.device import SimDevice
from runs import SMALL, sizes

X = B.X
NVME_BUT_GRADIENTS = {"parameter": "nvme", "optimizer": "nvme"}
PLACES = [NVME_BUT_GRADIENTS, {"parameter": "host", "optimizer": "nvme"}, {"parameter": "nvme", "optimizer": "host"}, {"optimizer": "host"}, None]


def passing(plan: Plan, direct: bool) -> Plan:
    """The plan with gradients passing wherever they can, however much room there is."""
    of = [k if plan.parameter[u] != "device" or direct else KEPT for u, k in enumerate(kinds([layout.spec for layout in plan.layouts]))]
    where, resting = places(of), dict(plan.resting)
    for u, layout in enumerate(plan.layouts):
        for c, chunk in enumerate(chunks_of(layout) if of[u] != KEPT else ()):
            resting[plan.gradient[u][c]] -= gradient_chunk_bytes(chunk, plan.grad)
            resting["host"] += gradient_chunk_bytes(chunk, plan.grad) if where[u] == u else 0
    tiers = tuple(tuple("host" for _ in t) if of[u] != KEPT else t for u, t in enumerate(plan.gradient))
    return dataclasses.replace(plan, places=where, gradient=tiers, resting=resting)


@contextmanager
def _prepared(path: Path, make: M.Make = M.Order, device: Any = "cpu", slots: int | None = None, **over: Any) -> Iterator[nn.Module]:
    model, where = M.seeded(make), M.tiers(path, **{k: over.pop(k) for k in ("host", "nvme") if k in over})
    over = {"place": NVME_BUT_GRADIENTS} | over
    plan = passing(offload.plan(model, where, device=device, **over), device == "cpu")
    assert plan.passing
    plan = M.with_slots(plan, slots) if slots is not None else plan
    model = offload.prepare(model, where, device=device, plan=plan, updates="backward", **over)
    try:
        yield model
    finally:
        offload.runtime(model).close()


def _step(model: nn.Module, optimizer: Any, x: torch.Tensor = X) -> None:
    M.mean_square(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


class Tied(B.Tied):
    """More blocks, of which two share a weight: the others' gradients pass."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.blocks.extend(M.Block(width) for _ in range(4))


class Gated(nn.Module):
    """Blocks with a part that is not always used."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Gated(width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Gated(nn.Module):
    used = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always, self.expert = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.always(x)) + x
        return self.expert(x) + x if self.used else x


CASES: dict[str, tuple[M.Make, M.Loss]] = {name: B.CASES[name] for name in ("stack", "segments", "reentrant", "twice", "unused", "mixed", "detached")}
CASES |= {
    "tied": (Tied, lambda m: M.mean_square(m, X)),
    "tied table": (lambda: M.Language(701, depth=4), lambda m: M.mean_square(m, B.IDS)),
    "frozen": (lambda: B._frozen(M.Order(depth=7)), lambda m: M.mean_square(m, X)),
    "wide": (lambda: M.Order(112, 5), lambda m: M.mean_square(m, torch.linspace(-1, 1, 448).view(4, 112))),  # more chunks than buffers
}


def _want(case: str, path: Path, precision: Any) -> tuple[list[float], str]:
    make, loss = CASES[case]
    with M.prepared(M.seeded(make), M.tiers(path), precision=precision, place=M.placed("host")) as model:
        return B._train(model, loss, 1, read=False)[0], offload.runtime(model).digest()


def _got(case: str, path: Path, lateness: int | None, **over: Any) -> tuple[list[float], str]:
    """`lateness`: as in test_backward."""
    make, loss = CASES[case]
    with _prepared(path, make, **over) as model, late(model, lateness) if lateness != -1 else nullcontext():
        return B._train(model, loss, 1, read=False)[0], offload.runtime(model).digest()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_bits_are_those_of_gradients_at_rest(tmp_path: Path, case: str, seed: int) -> None:
    precision = (M.BF16, B.COMPACT, M.FP32)[(seed + list(CASES).index(case)) % 3]
    device: Any = "cpu" if seed < 2 else SimDevice(seed=seed)
    got = _got(case, tmp_path, (-1, None, seed, -1)[seed], device=device, precision=precision, host="2MiB" if case == "wide" else "64MiB")
    assert got == _want(case, tmp_path, precision)


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(list(CASES)), place=st.sampled_from(PLACES[:-1]), device=st.one_of(st.none(), st.integers(0, 1000)),
    lateness=st.one_of(st.none(), st.just(-1), st.integers(0, 1000)), precision=st.sampled_from([M.FP32, M.BF16, B.COMPACT]),
    slots=st.sampled_from([None, 3]), host=st.sampled_from(["64MiB", "8MiB"]),
)  # fmt: skip
def test_any_placement_and_any_delay(tmp_path_factory: Any, case: str, device: int | None, precision: Any, **over: Any) -> None:
    path = tmp_path_factory.mktemp("swap")
    chosen: Any = "cpu" if device is None else SimDevice(seed=device)
    assert _got(case, path, device=chosen, precision=precision, **over) == _want(case, path, precision)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_as_few_bytes_as_two_units(tmp_path: Path, device: str) -> None:
    """Nothing of a gradient moves to or from NVMe, and what rests is counted as it is."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("nvme"), device=device, updates="backward") as model:
        kept = offload.runtime(model).plan
    with _prepared(tmp_path, device=device) as model:
        runtime = offload.runtime(model)
        plan, units = runtime.plan, engine_of(model).units
        assert plan.passing == set(range(5)) and plan.places == (0, 1, 0, 1, 0)
        assert len({s.address() for u in units for s in u.gradients}) == 2
        unit = plan.describe()["gradient"]["host"] // 2
        assert kept.peak_bytes["nvme"] - plan.peak_bytes["nvme"] == 5 * unit
        assert kept.state_bytes - plan.state_bytes == 3 * sum(p.numel() for p in model.blocks[0].parameters()) * 2
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        _step(model, optimizer)
        runtime.synchronize()
        runtime.reset_counters()
        _step(model, optimizer)
        runtime.synchronize()
        moved = runtime.stats()["moved_bytes"]
        state = plan.describe()["optimizer"]["nvme"]
        parameters = sum(f.numel * 2 for u in plan.layouts for f in u.flats)
        assert moved["nvme_write"] == state + parameters


def test_parts_that_are_not_always_used(tmp_path: Path) -> None:
    """A unit with a parameter that gets no gradient has places of its own from then on; others' gradients pass as before."""
    digests = []
    for updates in ("forward", "backward"):
        prepared = _prepared(tmp_path, Gated) if updates == "backward" else M.prepared(M.seeded(Gated), M.tiers(tmp_path))
        with prepared as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for unused in ((), (2,), (0, 2), (5,), ()):
                for i, block in enumerate(model.blocks):
                    block.used = i not in unused
                _step(model, optimizer)
            if updates == "backward":
                engine = engine_of(model)
                assert set(engine.passing.units) == {1, 3, 4} and offload.runtime(model).stats()["passing_units"] == 3
                assert all(b.used <= b.capacity for b in engine.budgets.values())
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


def test_no_room_for_what_cannot_pass(tmp_path: Path) -> None:
    """It is refused before anything is computed, and the model goes on."""
    with _prepared(tmp_path, Gated) as model:
        engine = engine_of(model)
        held = [engine.budgets[tier].reserve(engine.budgets[tier].free, "test") for tier in ("host", "nvme")]
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        _step(model, optimizer)
        digest = offload.runtime(model).digest()
        model.blocks[3].used = False
        with pytest.raises(offload.BudgetError, match=r"gradients of blocks\.3 have to wait for step"):
            M.mean_square(model, X).backward()
        optimizer.zero_grad()
        assert offload.runtime(model).digest() == digest
        model.blocks[3].used = True
        _step(model, optimizer)
        for part in held:
            part.release()
        model.blocks[3].used = False
        _step(model, optimizer)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("at", range(7))
def test_a_gradient_that_is_not_finite(tmp_path: Path, device: str, at: int) -> None:
    """In the unit that comes first the step is skipped whole, however many gradients share its places; later the run ends, saying so."""
    with _prepared(tmp_path, lambda: B.Spoilt(depth=7), device=device) as model:
        optimizer, runtime = offload.optim.AdamW(model.parameters(), lr=1e-2), offload.runtime(model)
        _step(model, optimizer)
        before, model.at = runtime.digest(), at
        M.mean_square(model, X).backward()
        if engine_of(model).early._opened:
            assert at < 6
            with pytest.raises(offload.OffloadError, match=r"is not finite.*partly applied"):
                optimizer.step()
            return
        with pytest.warns(RuntimeWarning, match="step skipped"):
            optimizer.step()
        optimizer.zero_grad()
        assert runtime.digest() == before
        model.at = None
        _step(model, optimizer)
        assert runtime.digest() != before


ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda model, _: model.blocks[4].up.weight.grad.sum(),
    "write": lambda model, _: model.blocks[1].up.weight.grad.fill_(1.0),
    "scale": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "again": lambda model, _: M.mean_square(model, X).backward(),
    "step": lambda _, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("precision", [M.BF16, M.FP32])
def test_what_has_passed_is_neither_read_nor_summed(tmp_path: Path, act: str, precision: Any) -> None:
    digests = []
    for what in (None, ACTS[act]):
        with _prepared(tmp_path, precision=precision) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                M.mean_square(model, X).backward()
                optimizer.step()
                if what is not None:
                    with pytest.raises(offload.OffloadError, match=r"keep_gradients=False"):
                        what(model, optimizer)
                optimizer.zero_grad()
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


def test_gradients_of_the_users_own_have_no_place(tmp_path: Path) -> None:
    with _prepared(tmp_path) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        _step(model, optimizer)
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        with pytest.raises(offload.OffloadError, match=r"has no place to rest.*keep_gradients=True"):
            optimizer.step()


def test_without_an_optimizer_gradients_rest(tmp_path: Path) -> None:
    """As with one that was made before prepare(), which is known from its first step."""
    want = []
    for updates in ("forward", "backward"):
        with _prepared(tmp_path) if updates == "backward" else M.prepared(M.seeded(M.Order), M.tiers(tmp_path)) as model:
            M.mean_square(model, X).backward()
            want.append([p.grad.clone() for p in model.parameters()])
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            optimizer.step()
            optimizer.zero_grad()
            _step(model, optimizer)
            want.append([offload.runtime(model).digest()])
    assert all(torch.equal(a, b) for a, b in zip(want[0], want[2], strict=True)) and want[1] == want[3]


def test_updates_forward_or_sums_want_a_plan_that_keeps(tmp_path: Path) -> None:
    model, where = M.seeded(M.Order), M.tiers(tmp_path)
    plan = passing(offload.plan(model, where, place=NVME_BUT_GRADIENTS, device="cpu"), True)
    for options in ({"updates": "forward"}, {"updates": "backward", "accumulate": 2}):
        with pytest.raises(offload.ConfigError, match="keep_gradients=True"):
            offload.prepare(model, where, device="cpu", plan=plan, **options)


class Phased(nn.Module):
    """Blocks that run twice, with a part of their own each time: gradients of one come between those of another. Or with both parts at once."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Phased(width) for _ in range(5))
        self.phases: tuple[tuple[int, ...], ...] = ((0, 1),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parts in self.phases:
            for block in self.blocks:
                x = block(x, parts)
        return x


class _Phased(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        for part in parts:
            x = self.parts[part](x)
        return x


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_units_whose_gradients_come_between_each_other(tmp_path: Path, device: str) -> None:
    """It is said, and what was begun can be dropped."""
    digests = []
    for crossed in (False, True):
        with _prepared(tmp_path, Phased, device=device) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            _step(model, optimizer)
            if crossed:
                model.phases = ((0,), (1,))
                with pytest.raises(offload.OffloadError, match=r"blocks\.4.*still had gradients to come.*keep_gradients=True"):
                    M.mean_square(model, X).backward()
                optimizer.zero_grad()
                model.phases = ((0, 1),)
            _step(model, optimizer)
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("job", range(5))
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_failed_update_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, job: int, device: str) -> None:
    with _prepared(tmp_path, device=device) as model:
        extent = [s for u in engine_of(model).units for s in u.states][job].extent
    assert extent is not None
    begin = extent.offset + extent.nbytes // 3
    faults = {f"{kind}_errno": errno.EIO, "bad_begin": begin, "bad_end": begin + 1}
    monkeypatch.setattr(swap, "open_engine", lambda *_: _core.Engine("faults", 2, 4096, **faults))
    with pytest.raises(offload.SwapError, match="EIO"), _prepared(tmp_path, device=device) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            _step(model, optimizer)
            offload.runtime(model).synchronize()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_close_between_backward_and_step(tmp_path: Path, device: str) -> None:
    with _prepared(tmp_path, device=device) as model, late(model):
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        M.mean_square(model, X).backward()
        assert engine_of(model).early._started and optimizer is not None


def test_a_backward_that_raises_leaves_no_gradient_behind(tmp_path: Path) -> None:
    """One before any update has started can be done again."""
    digests = []
    for broken in (False, True):
        with _prepared(tmp_path) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            _step(model, optimizer)
            if broken:
                handle = model.blocks[4].norm.weight.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    M.mean_square(model, X).backward()
                handle.remove()
                optimizer.zero_grad()
            _step(model, optimizer)
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


RUN = SMALL.but(
    model={"config": sizes(1024, 256, 704, layers=8)},
    tiers={"device": "24MiB", "host": "20MiB"},
    precision={"master": "split", "moments": "int8"},
    train={"steps": 2, "activations": "recompute"},
)


def test_a_run_plans_and_trains_so_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation before the first step, which computes without gradients, is no hidden use. The schedule of either plan may be the shorter, so the
    drive has no room for the one that keeps them."""
    summaries = []
    for nvme, updates in (("256MiB", "forward"), ("13MiB", "auto")):
        changes = [f'tiers.nvme=[["swap", "{nvme}"]]', f"train.updates={updates}"]
        summaries.append(RUN.train(tmp_path, *changes, out=f"out-{updates}"))
        if updates == "auto":
            assert plan_command(str(tmp_path / "run.toml"), changes, None, 1, None, None, True) == 0
            planned = json.loads(capsys.readouterr().out)
    assert [s["passing_units"] for s in summaries] == [0, 8] and planned["passing_units"] == 8
    assert summaries[0]["digest"] == summaries[1]["digest"] and summaries[0]["losses"] == summaries[1]["losses"]
    assert planned["placement"] == summaries[1]["placement"] and planned["state_bytes"] == summaries[1]["state_bytes"] < summaries[0]["state_bytes"]
    assert all(summaries[1]["peak_bytes"][tier] <= summaries[1]["budget_bytes"][tier] for tier in ("host", "nvme"))
