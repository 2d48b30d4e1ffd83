"""updates="backward": the bits of updates="forward", whatever comes when; and what would tell the two apart is refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import models as M
import offload
from late import late
from offload import _core
from offload.engine.gradients import Gradients
from offload.engine.registry import engine_of
from offload.memory import swap
from offload.transfer.device import SimDevice

X = torch.linspace(-1, 1, 64).view(4, 16)
IDS = torch.arange(24).view(2, 12) * 101 % 701
COMPACT = offload.Precision(master="split", moments="int8")


class Tied(nn.Module):
    """A block whose weight another block of a later unit uses too, without a gradient and with one; a bias that only adds; an output that passes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(M.Block(width) for _ in range(3))
        self.plus = nn.Module()
        self.plus.bias = nn.Parameter(torch.randn(width))
        self.last = nn.Linear(width, width)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x


class Mixed(nn.Module):
    """A reentrant checkpoint around a block whose module runs outside of it too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(M.Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        x = self.blocks[1](x)
        return self.blocks[2](self.blocks[0](x))


class Detached(nn.Module):
    """A weight whose value is used once more where it gets no gradient: first in its unit."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Detached(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Detached(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.linear.weight.detach()) + x
        return x @ self.linear.weight + self.linear.bias


def _frozen(model: nn.Module) -> nn.Module:
    for p in list(model.parameters())[2:7]:
        p.requires_grad_(False)
    return model


CASES: dict[str, tuple[M.Make, M.Loss]] = {
    "stack": (lambda: M.Stack(depth=4, width=16, dropout=0.1), M.mean_square),
    "segments": (lambda: M.Stack(2, False, depth=4, width=16, dropout=0.1), M.mean_square),
    "reentrant": (lambda: M.Stack(2, True, depth=4, width=16, dropout=0.1), M.mean_square),
    "tied": (lambda: M.Language(701), lambda m: M.mean_square(m, IDS)),
    "tied blocks": (Tied, lambda m: M.mean_square(m, X)),
    "twice": (M.Twice, lambda m: M.mean_square(m, X)),
    "nested": (M.Nested, lambda m: M.mean_square(m, X)),
    "unused": (M.Branches, lambda m: M.mean_square(m, X)),
    "frozen": (lambda: _frozen(M.Order()), lambda m: M.mean_square(m, X)),
    "mixed": (Mixed, lambda m: M.mean_square(m, X)),
    "detached": (Detached, lambda m: M.mean_square(m, X)),
}
STATE_ON_NVME = {"parameter": "host", "gradient": "host", "optimizer": "nvme"}
GRADIENTS_ON_NVME = {"parameter": "nvme", "gradient": "nvme", "optimizer": "host"}
PLACES = [M.placed("nvme"), M.placed("host"), STATE_ON_NVME, GRADIENTS_ON_NVME, None]


def _train(model: nn.Module, loss: M.Loss, accumulate: int, steps: int = 3, read: bool = True) -> tuple[list[float], int]:
    """Losses, and norms of gradients if they are to be `read`; and the most units whose updates ran before a step()."""
    torch.manual_seed(5)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    losses, started = [], 0
    for _ in range(steps):
        for micro in range(accumulate):
            value = loss(model) / accumulate
            value.backward()
            losses.append(float(value.detach()))
            assert micro == accumulate - 1 or not engine_of(model).early._started
        started = max(started, len(engine_of(model).early._started))
        losses += [float(p.grad.double().norm()) for p in model.parameters() if p.grad is not None and read]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, started


def _run(
    case: str, path: Path, updates: str, accumulate: int, lateness: int | None, units: int | None = None, keep: bool = True, **over: Any
) -> tuple[Any, str, int]:  # fmt: skip
    """`lateness`: -1 for updates as they come, None for all late, else the seed of which are. `units`: how many may be early. `keep`: gradients are
    kept where they were to rest, and read."""
    make, loss = CASES[case]
    slots = None if case == "nested" else over.pop("slots", None)
    over.pop("slots", None)
    with M.prepared(M.seeded(make), M.tiers(path), accumulate=accumulate, updates=updates, slots=slots, **over) as model:
        offload.runtime(model).start_early(len(engine_of(model).units) if units is None else units, keep_gradients=keep)
        if lateness == -1:
            losses, started = _train(model, loss, accumulate, read=keep)
            return losses, offload.runtime(model).digest(), started
        with late(model, lateness):
            losses, started = _train(model, loss, accumulate, read=keep)
            return losses, offload.runtime(model).digest(), started


ACTIVATIONS = ("keep", "recompute", "host", "nvme")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_bits_are_those_of_updates_under_the_forward(tmp_path: Path, case: str, seed: int) -> None:
    n = seed + 3 * list(CASES).index(case)
    accumulate, precision = (1, 3)[n // 2 % 2], (M.FP32, M.BF16, COMPACT)[n % 3]
    activations = ACTIVATIONS[n // 3 % 4] if case not in ("segments", "reentrant", "mixed") else "keep"
    want = _run(case, tmp_path, "forward", accumulate, -1, precision=precision)
    device: Any = "cpu" if seed == 0 else SimDevice(seed=n)
    lateness = (-1, None, n, -1)[seed]
    over: dict[str, Any] = {"place": PLACES[n % 5], "activations": activations, "precision": precision, "slots": (None, 3)[n % 2]}
    got = _run(case, tmp_path, "backward", accumulate, lateness, device=device, **over)
    assert got[:2] == want[:2]
    assert want[2] == 0 < got[2]


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(list(CASES)), place=st.sampled_from(PLACES), accumulate=st.sampled_from([1, 3]), units=st.integers(0, 6),
    device=st.one_of(st.none(), st.integers(0, 1000)), lateness=st.one_of(st.none(), st.just(-1), st.integers(0, 1000)),
    precision=st.sampled_from([M.FP32, M.BF16, COMPACT]), slots=st.sampled_from([None, 3]), keep=st.booleans(),
)  # fmt: skip
def test_any_number_of_units_and_any_delay(
    tmp_path_factory: Any, case: str, accumulate: int, device: int | None, precision: Any, keep: bool, **over: Any
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("swap")
    want = _run(case, path, "forward", accumulate, -1, precision=precision, keep=keep)
    chosen: Any = "cpu" if device is None else SimDevice(seed=device)
    assert _run(case, path, "backward", accumulate, device=chosen, precision=precision, keep=keep, **over)[:2] == want[:2]


def test_states_are_read_and_updated_in_the_order_of_the_backward(tmp_path: Path) -> None:
    """All updates are under way before step(), whatever the order of the forward that was recorded before."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=STATE_ON_NVME, updates="backward") as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        early = engine_of(model).early
        for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2], [4, 3, 2, 1, 0]):
            model.order = order
            M.mean_square(model, X).backward()
            assert list(early._started) == list(reversed(order)) and len(early._opened) == 5
            assert engine_of(model).background.gated is not None
            offload.runtime(model).synchronize()  # waits for what was opened, and ends
            optimizer.step()
            optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        M.mean_square(model, X).backward()
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# Refusals


def _model(tmp_path: Path, place: str = "host", make: M.Make = M.Order, **over: Any) -> Any:
    return M.prepared(M.seeded(make), M.tiers(tmp_path), place=M.placed(place), updates="backward", **over)


def _poke(model: Any, _: Any) -> None:
    with torch.no_grad():
        model.blocks[3].up.weight.mul_(2.0)


def _replay(model: Any, _: Any) -> None:
    M.mean_square(model, X).backward()


BEFORE: dict[str, Callable[[Any, Any], Any]] = {
    "clip": lambda model, _: offload.clip_grad_norm_(model, 1e9),
    "torch's clip": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "scale": lambda model, _: model.blocks[3].up.weight.grad.mul_(2.0),
    "write": lambda model, _: model.blocks[3].up.weight.grad.view(-1)[2:4].fill_(1.0),
    "zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "read value": lambda model, _: model.blocks[3].up.weight.sum(),
    "write value": _poke,
    "forward": lambda model, _: model(X),
    "second backward": _replay,
    "digest": lambda model, _: offload.runtime(model).digest(),
    "load": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("what", BEFORE)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_what_comes_too_late_is_refused_before_it_happens(tmp_path: Path, what: str, place: str) -> None:
    """The step can be finished afterwards, to the bits of a step without it."""
    digests = []
    for act in (None, BEFORE[what]):
        with _model(tmp_path, place) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                M.mean_square(model, X).backward()
                if act is not None and step:
                    with pytest.raises(offload.OffloadError, match=r'updates="forward"'):
                        act(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


def _set(key: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda _, optimizer: optimizer.param_groups[0].update({key: value})


def _replace(model: Any, _: Any) -> None:
    model.blocks[2].down.bias.grad = torch.ones(16)


def _drop_one(model: Any, _: Any) -> None:
    model.blocks[2].down.bias.grad = None


def _counted(model: Any, optimizer: Any) -> None:
    optimizer.state[model.blocks[2].down.bias]["step"].add_(1)


def _scaled(_: Any, optimizer: Any) -> None:
    optimizer.grad_scale = torch.tensor(4.0)


AFTER: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "lr": (_set("lr", 0.5), "lr of .* was 0.01 .* is 0.5 now"),
    "betas": (_set("betas", (0.5, 0.999)), "beta1 of"),
    "weight decay": (_set("weight_decay", 0.5), "weight_decay of"),
    "step count": (_counted, "step of blocks.2.down.bias"),
    "scale": (_scaled, "grad_scale of"),
    "replaced": (_replace, "gradient of blocks.2.down.bias was replaced"),
    "dropped": (_drop_one, "gradient of blocks.2.down.bias was dropped"),
    "all dropped": (lambda _, optimizer: optimizer.zero_grad(), "was dropped"),
}


def _open_all(model: nn.Module) -> None:
    """Whatever the backward has started is opened, as it mostly is by the time of a step."""
    engine = engine_of(model)
    engine.gradients.settle()
    engine.early.advance()
    assert engine.early._opened


@pytest.mark.parametrize("what", AFTER)
def test_what_cannot_be_seen_is_found_at_step_for_good(tmp_path: Path, what: str) -> None:
    act, match = AFTER[what]
    with _model(tmp_path) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            M.mean_square(model, X).backward()
            optimizer.step()
            optimizer.zero_grad()
        M.mean_square(model, X).backward()
        _open_all(model)
        act(model, optimizer)
        for _ in range(2):
            with pytest.raises(offload.StepError, match=match) as said:
                optimizer.step()
            assert 'updates="forward"' in str(said.value) and "partly applied" in str(said.value)


@pytest.mark.parametrize("what", AFTER)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_what_is_found_before_anything_was_opened_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, place: str) -> None:
    """It is said once; the next step() is one by what there is then, to the bits of updates under the forward."""
    act, match = AFTER[what]
    digests = []
    for updates in ("forward", "backward"):
        with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed(place), updates=updates) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(4):
                with monkeypatch.context() as patched:
                    if step == 2:
                        patched.setattr(Gradients, "landed", lambda *_, **__: False)  # until step() nothing has
                    M.mean_square(model, X).backward()
                if step == 2:
                    assert bool(engine_of(model).early._started) == (updates == "backward") and not engine_of(model).early._opened
                    act(model, optimizer)
                    if updates == "backward":
                        with pytest.raises(offload.OffloadError, match=match) as said:
                            optimizer.step()
                        assert 'updates="forward"' in str(said.value) and "nothing was changed" in str(said.value)
                        assert not isinstance(said.value, offload.StepError)
                optimizer.step()
                optimizer.grad_scale = None
                optimizer.zero_grad()
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


def test_step_takes_no_closure(tmp_path: Path) -> None:
    with _model(tmp_path) as model, pytest.raises(offload.ConfigError, match="closure"):
        offload.optim.AdamW(model.parameters()).step(lambda: 1 / 0)


def test_one_optimizer_alone(tmp_path: Path) -> None:
    with _model(tmp_path) as model:
        halves = [offload.optim.AdamW(list(model.parameters())[i::2], lr=1e-2) for i in range(2)]
        with pytest.raises(offload.ConfigError, match=r"2 hold parameters.*AdamW.*forward"):
            M.mean_square(model, X).backward()
        halves.pop()
        M.mean_square(model, X).backward()  # the first half of each unit's parameters alone: nothing is early
        assert not engine_of(model).early._started
        halves[0].step()


@pytest.mark.parametrize("precision", [offload.Precision("fp16", "fp16"), offload.Precision("bf16", "fp16"), offload.Precision("fp16", "bf16")])
def test_fp16_is_refused(tmp_path: Path, precision: Any) -> None:
    model = M.seeded(M.Order)
    with pytest.raises(offload.ConfigError, match=r"fp16.*'forward'"):
        offload.prepare(model, M.tiers(tmp_path), precision=precision, updates="backward")
    with pytest.raises(offload.ConfigError, match="'forward', 'backward'"):
        offload.prepare(model, M.tiers(tmp_path), updates="sideways")


SCALED: dict[str, Callable[[torch.amp.GradScaler, torch.Tensor], torch.Tensor]] = {
    "loss": lambda scaler, loss: scaler.scale(loss),
    "divided": lambda scaler, loss: scaler.scale(loss) / 2,
    "list": lambda scaler, loss: scaler.scale([loss])[0],
}


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("precision", [M.FP32, M.BF16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scaled_loss_is_refused_before_anything_is_updated(tmp_path: Path, accumulate: int, precision: Any, how: str) -> None:
    """The first backward of a step says so; without the scaler, or with one that is off, training goes on as if nothing had been."""
    digests = []
    for refused in (False, True):
        with _model(tmp_path, precision=precision, accumulate=accumulate) as model:
            optimizer, off = offload.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", enabled=False)
            for _ in range(2):
                if refused:
                    with pytest.raises(offload.ConfigError, match=r'GradScaler.*Nothing was changed.*updates="forward"'):
                        SCALED[how](torch.amp.GradScaler("cpu"), M.mean_square(model, X)).backward()
                    assert all(p.grad is None for p in model.parameters())
                for _ in range(accumulate):
                    off.scale(M.mean_square(model, X)).backward()
                off.step(optimizer)
                optimizer.zero_grad()
            assert optimizer.skipped == 0
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


def test_a_scaler_of_another_model_is_no_matter(tmp_path: Path) -> None:
    """Nor is one of a model whose updates run under the forward."""
    other, scaler = M.seeded(M.Order), torch.amp.GradScaler("cpu")
    theirs = torch.optim.AdamW(other.parameters())
    with _model(tmp_path) as model, M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32) as forward:
        optimizers = [offload.optim.AdamW(m.parameters()) for m in (model, forward)]
        for _ in range(2):
            values = [M.mean_square(m, X) for m in (other, forward, model)]
            for value in values[:2]:
                scaler.scale(value).backward()
            values[2].backward()
            assert engine_of(model).early._started
            optimizers[0].step()
            for optimizer in (theirs, optimizers[1]):
                scaler.step(optimizer)
            scaler.update()
            for optimizer in (theirs, *optimizers):
                optimizer.zero_grad()


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


class Spoilt(M.Order):
    at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
            x = _Spoil.apply(x) if i == self.at else x
        return x


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_gradient_that_is_not_finite(tmp_path: Path, device: str, place: str) -> None:
    """In the unit that comes first it skips the step whole; later it ends the run, saying so at each step."""
    digests = []
    for spoil in (False, True):
        with _model(tmp_path, place, Spoilt, device=device) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                model.at = 4 if step == 1 else None
                if step != 1 or spoil:
                    M.mean_square(model, X).backward()
                    if step == 1:
                        with pytest.warns(RuntimeWarning, match=r"step skipped.*no parameter was changed"):
                            optimizer.step()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
            assert optimizer.skipped == spoil
            digests.append(offload.runtime(model).digest())
            model.at = 1
            M.mean_square(model, X).backward()
            if not engine_of(model).early._opened:
                continue  # nothing had landed yet
            for _ in range(2):
                with pytest.raises(offload.OffloadError, match=r"gradient of blocks\.[01]\.\S+ is not finite.*partly applied"):
                    optimizer.step()
            for act in (lambda: M.mean_square(model, X), offload.runtime(model).digest):
                with pytest.raises(offload.OffloadError, match="partly applied"):
                    act()
    assert digests[0] == digests[1]


# Errors


@pytest.mark.parametrize("job", range(5))
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_failed_update_is_told_once_and_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, job: int, device: str) -> None:
    options: dict[str, Any] = {"place": STATE_ON_NVME, "precision": M.BF16}
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), **options) as model:
        extent = [s for u in engine_of(model).units for s in u.states][job].extent
    assert extent is not None
    begin = extent.offset + extent.nbytes // 3
    faults = {f"{kind}_errno": errno.EIO, "bad_begin": begin, "bad_end": begin + 1}
    monkeypatch.setattr(swap, "open_engine", lambda *_: _core.Engine("faults", 2, 4096, **faults))
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), device=device, updates="backward", **options)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(offload.SwapError, match="EIO"):
        for _ in range(3):
            M.mean_square(model, X).backward()
            optimizer.step()
            optimizer.zero_grad()
            offload.runtime(model).synchronize()
    for act in (lambda: M.mean_square(model, X).backward(), optimizer.step, offload.runtime(model).synchronize):
        with pytest.raises(offload.OffloadError):
            act()
            optimizer.step()
            offload.runtime(model).synchronize()
    offload.runtime(model).close()
    assert not list((tmp_path / "swap").iterdir())


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_close_between_backward_and_step(tmp_path: Path, place: str) -> None:
    with _model(tmp_path, place) as model, late(model):
        offload.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        M.mean_square(model, X).backward()
        assert engine_of(model).early._started and optimizer is not None


def test_an_optimizer_made_before_prepare_is_known_from_its_first_step(tmp_path: Path) -> None:
    model = M.seeded(M.Order)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
    with M.prepared(model, M.tiers(tmp_path), place=M.placed("host"), updates="backward"):
        for step in range(2):
            M.mean_square(model, X).backward()
            assert len(engine_of(model).early._started) == (5 if step else 0)
            optimizer.step()
            optimizer.zero_grad()


def test_a_write_to_what_was_read_ahead(tmp_path: Path) -> None:
    """A parameter whose update has not started is written between backward and step(): what was read of it is read again."""
    digests = []
    for updates in ("forward", "backward"):
        with M.prepared(M.seeded(M.Branches), M.tiers(tmp_path), place=STATE_ON_NVME, updates=updates) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            engine_of(model).early.units_most = 3
            for _ in range(3):
                M.mean_square(model, X).backward()
                with torch.no_grad():
                    model.left[0].up.weight.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


# Backwards that come to nothing


class _Raised(Exception):
    pass


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_backward_that_raised_leaves_nothing_for_the_next(tmp_path: Path, place: str, to_none: bool) -> None:
    """All gradients of a unit had come, and its updates had not started."""

    def stop(*_: Any) -> None:
        raise _Raised

    digests = []
    for updates in ("forward", "backward"):
        with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed(place), updates=updates) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                M.mean_square(model, X).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            hook = model.blocks[3].register_forward_hook(lambda _, __, out: out.register_hook(stop) and None, prepend=True)
            with pytest.raises(_Raised):
                M.mean_square(model, X).backward()
            hook.remove()
            assert not engine_of(model).early._started
            optimizer.zero_grad(set_to_none=to_none)
            model.order = [4, 0, 1, 2, 3]
            for _ in range(2):
                M.mean_square(model, X).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_is_begun_again(tmp_path: Path, to_none: bool) -> None:
    """zero_grad() of either kind after one of two micro-batches: the next two are the step's."""
    digests = []
    for updates in ("forward", "backward"):
        with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("host"), updates=updates, accumulate=2) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                for spoilt in (True, False, False):
                    M.mean_square(model, X).backward()
                    if spoilt:
                        optimizer.zero_grad(set_to_none=to_none)
                assert bool(engine_of(model).early._started) == (updates == "backward")
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            digests.append(offload.runtime(model).digest())
    assert digests[0] == digests[1]


def test_a_refused_backward_leaves_nothing_under_way(tmp_path: Path) -> None:
    with _model(tmp_path) as model:
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
        value = M.mean_square(model, X)
        value.backward(retain_graph=True)
        streamer = engine_of(model).streamer
        with pytest.raises(offload.OffloadError, match=r"backward between backward and step"):
            value.backward()
        assert streamer._backward.task == -1 and not any(use.soft for use in streamer.slots.uses)
        optimizer.step()
