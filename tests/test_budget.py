"""Budgets and lifetimes: what does not fit is refused before anything is allocated, what runs stays within, and closing gives all of it back."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import models as M
import offload
from offload.engine.registry import engine_of
from offload.errors import BudgetError, OffloadError, PlanError
from offload.memory.limits import resident_bytes

MIB = 1 << 20
X = torch.linspace(-1, 1, 64).view(4, 16)


def loss(model: nn.Module) -> torch.Tensor:
    return M.mean_square(model, X)


def _files(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file() or p.name.startswith("offload-")]


def _wide(width: int = 512, depth: int = 6) -> nn.Module:
    return M.Stack(depth=depth, width=width)


# Staying within


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(
    ("budgets", "place"),
    [(("3MiB", "3MiB"), None), (("16MiB", "4MiB"), M.placed("nvme")), (("4MiB", "32MiB"), None), (("40MiB", "1MiB"), {"parameter": "device"})],
)
def test_reservations_and_arenas_stay_within(tmp_path: Path, budgets: tuple[str, str], place: dict[str, str] | None, device: str) -> None:
    """Peaks of reservations, the arenas themselves, and the swap file on disk."""
    where = M.tiers(tmp_path, *budgets, "64MiB")
    with M.prepared(M.seeded(lambda: _wide(128)), where, device=device, place=place, activations="recompute", batch=(1, 16)) as model:
        M.train(model, M.mean_square, 2, clip=0.1)
        engine, stats = engine_of(model), offload.runtime(model).stats()
        for tier, n in where.budget_bytes().items():
            assert 0 <= engine.budgets[tier].used <= engine.budgets[tier].peak <= n
            assert stats["budget_bytes"][tier] == n
        assert engine.host.nbytes <= where.host
        assert engine.arena.nbytes <= where.device
        assert engine.host.used_bytes <= engine.host.nbytes
        on_disk = sum(p.stat().st_size for p in _files(tmp_path) if p.is_file())
        assert engine.plan.resting["nvme"] == on_disk <= where.nvme_bytes
        placed = stats["placement"]
        assert sum(placed[r]["nvme"] for r in placed) <= on_disk
        held = [s for u in engine.units for part in (u.parameters, u.gradients, u.states) for s in part]
        by_tier = {t: sum(s.nbytes for s in held if s.tier == t) for t in where.budget_bytes()}
        assert all(by_tier[t] <= engine.plan.resting[t] for t in by_tier)


def test_memory_of_a_run_stays_within(tmp_path: Path) -> None:
    """Resident memory of a process that trains, less its own base, stays under device + host, and what torch's kernels keep."""
    script = """
import sys, torch, offload, gc
sys.path.insert(0, sys.argv[2])
import models as M
from offload.memory.limits import resident_bytes
from pathlib import Path
with M.prepared(M.seeded(lambda: M.Stack(depth=2, width=64)), M.tiers(Path(sys.argv[1])), place=M.placed("nvme")) as toy:
    M.train(toy, M.mean_square, 2, clip=0.1)
with torch.device("meta"):
    model = M.Stack(depth=8, width=768)
model.x = torch.ones(16, 768)
gc.collect()
base = resident_bytes()
where = offload.Tiers("40MiB", "40MiB", [(sys.argv[1] + "/swap", "1GiB")])
model = offload.prepare(model, where, device=sys.argv[3], batch=(1, 16))
M.train(model, M.mean_square, 2, clip=0.1)
state = offload.runtime(model).stats()["state_bytes"]
peak = next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmHWM"))
print(peak - base, state)
"""
    for device in ("cpu", "sim"):
        out = _python(script, str(tmp_path), str(Path(__file__).parent), device)
        grown, state = map(int, out.split())
        assert state > 400 * MIB
        assert grown <= 80 * MIB + 24 * MIB, f"{device}: {grown / MIB:.0f} MiB above the base"
        assert not _files(tmp_path)


def _python(script: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# Refusing


@pytest.mark.parametrize(
    ("tier", "where", "options"),
    [
        ("device", ("256KiB", "64MiB", "256MiB"), {"device": "sim"}),
        ("device", ("8MiB", "64MiB", "256MiB"), {"batch": (64, 4096)}),
        ("device", ("4MiB", "64MiB", "256MiB"), {"place": {"parameter": "device"}}),
        ("host", ("8MiB", "2MiB", "256MiB"), {"place": {"optimizer": "host"}}),
        ("host", ("8MiB", "64KiB", "256MiB"), {}),
        ("nvme", ("8MiB", "8MiB", "8MiB"), {}),
        ("nvme", ("8MiB", "8MiB", "8MiB"), {"place": {"optimizer": "nvme"}}),
    ],
)
def test_what_does_not_fit_is_refused_before_anything(tmp_path: Path, tier: str, where: tuple[str, str, str], options: dict[str, Any]) -> None:
    """The tier, need, have and three ways out; no file, no thread, no memory, and the model as it was."""
    model = M.seeded(lambda: _wide(256))
    before, threads = M.values(model), threading.active_count()
    for call in (
        lambda: offload.plan(model, M.tiers(tmp_path, *where), **options),
        lambda: offload.prepare(model, M.tiers(tmp_path, *where), **options),
    ):
        with pytest.raises(PlanError, match=rf"the {tier} tier is short: need .*; have .*Ways out: [^;]+; [^;]+; [^;]+\.$"):
            call()
        assert not (tmp_path / "swap").exists()
        assert threading.active_count() == threads
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert not M.differing(M.values(model), before)
    with M.prepared(model, M.tiers(tmp_path)) as made:  # it can still be prepared
        assert not M.differing(M.values(made), before)


def test_drives_too_small_one_by_one(tmp_path: Path) -> None:
    """What fits the drives together fits them as they are, or is refused by the plan; never in between."""
    for size in range(200, 900, 50):
        where = offload.Tiers("2MiB", "2MiB", [(str(tmp_path / f"d{i}"), size << 10) for i in range(6)])
        model = M.seeded(lambda: M.Language(4001, width=32, depth=2))
        try:
            plan = offload.plan(model, where, device="cpu", place={"optimizer": "nvme", "parameter": "nvme"})
        except PlanError:
            continue
        made = offload.prepare(model, where, device="cpu", plan=plan)
        M.mean_square(made, torch.arange(4)[None]).backward()
        offload.runtime(made).close()


@pytest.mark.parametrize("problem", ["gradient", "meta", "rule"])
def test_refused_model_stays_as_it_was(tmp_path: Path, problem: str) -> None:
    """What is wrong with a later unit is found before an earlier one is taken over."""
    model = M.seeded(M.Order)
    before, last = M.values(model), model.blocks[-1]
    if problem == "gradient":
        last.down.bias.grad = torch.ones(16)
    elif problem == "meta":
        last.down.weight = nn.Parameter(torch.empty(16, 48, device="meta"))
    else:
        last.register_buffer("table", torch.empty(3, device="meta"), persistent=False)  # a block has no rule that fills it
    with pytest.raises(offload.ConfigError):
        offload.prepare(model, M.tiers(tmp_path), place=M.placed("nvme"))
    assert not _files(tmp_path)
    if problem == "meta":
        last.down.weight = nn.Parameter(before["blocks.4.down.weight"])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not M.differing(M.values(model), before)
    loss(model).backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_undeclared_second_backward_that_does_not_fit(tmp_path: Path, device: str) -> None:
    """BudgetError before it computes; what was there stays, and training goes on."""
    rest, nvme = ("device", "2304KiB") if device == "cpu" else ("nvme", "64MiB")
    where = offload.Tiers("16MiB", "1MiB", [(str(tmp_path / "swap"), nvme)])
    model = M.seeded(lambda: M.Stack(depth=3, width=96))
    plan = offload.plan(model, where, device=device, place={"parameter": rest, "gradient": "nvme", "optimizer": rest}, batch=(1, 16))
    spare = plan.resting["nvme"] + (64 << 10)
    where = offload.Tiers("16MiB", plan.peak_bytes["host"], [(str(tmp_path / "swap"), spare)])
    with M.prepared(model, where, device=device, plan=plan) as made:
        optimizer = offload.optim.AdamW(made.parameters())
        first = M.mean_square(made)
        first.backward()
        kept = M.gradients(made)
        seen: list[int] = []
        second = M.mean_square(made)
        made.blocks[0].up.register_full_backward_hook(lambda *a: seen.append(1))
        with pytest.raises(BudgetError, match=r"second backward.*fp32.*needs .*accumulate=N.*zero_grad"):
            second.backward()
        assert not seen
        assert not M.differing(M.gradients(made), kept)
        assert M.at_rest(made)
        optimizer.step()
        optimizer.zero_grad()
        got = offload.runtime(made).digest()
        M.mean_square(made).backward()
        optimizer.step()
    with M.prepared(M.seeded(lambda: M.Stack(depth=3, width=96)), M.tiers(tmp_path)) as made:
        optimizer = offload.optim.AdamW(made.parameters())
        M.mean_square(made).backward()
        optimizer.step()
        assert offload.runtime(made).digest() == got


@pytest.mark.parametrize("which", ["whole", "part"])
def test_prepared_models_cannot_be_prepared_again(tmp_path: Path, which: str) -> None:
    """Nor inside another model, nor in part; the model goes on as if that had not been tried."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), precision=M.FP32) as model:
        before = M.values(model)
        with pytest.raises(offload.ConfigError, match="prepared"):
            offload.prepare(nn.Sequential(model) if which == "whole" else model.blocks[0], M.tiers(tmp_path))
        assert not M.differing(M.values(model), before)
        loss(model).backward()
        assert not M.differing(M.gradients(model), M.plain_gradients(M.Order, loss)[1])


def test_closed_models_cannot_be_prepared_again(tmp_path: Path) -> None:
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path))
    offload.runtime(model).close()
    with pytest.raises(OffloadError, match=r"closed|prepared already"):
        offload.prepare(model, M.tiers(tmp_path))


# Closing


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_close_returns_everything(tmp_path: Path, device: str) -> None:
    """Memory, descriptors, threads and files, though the model, a gradient and a loss are still held."""

    def once() -> tuple[Any, ...]:
        with torch.device("meta"):
            model = M.Stack(depth=6, width=1024)
        model.x = torch.ones(16, 1024)
        made = offload.prepare(model, M.tiers(tmp_path, "96MiB", "96MiB", "1GiB"), device=device, batch=(1, 16))
        M.train(made, M.mean_square, 1, clip=0.1)
        value = M.mean_square(made)
        value.backward()
        kept = made, value, made.blocks[0].up.weight.grad, offload.runtime(made), offload.optim.AdamW(made.parameters())
        held = resident_bytes()
        offload.runtime(made).close()
        return *kept, held

    M.train(offload.prepare(warm := M.seeded(M.Order), M.tiers(tmp_path), device=device), loss, 1)
    offload.runtime(warm).close()
    once()
    gc.collect()
    threads, descriptors, memory = threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()
    tasks = len(os.listdir("/proc/self/task"))
    kept = [once() for _ in range(2)]
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(os.listdir("/proc/self/task")) == tasks
    assert not _files(tmp_path)
    assert kept[0][-1] - memory > 100 * MIB  # they did hold something
    assert resident_bytes() - memory < 24 * MIB


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_use_after_close(tmp_path: Path, device: str) -> None:
    """Every use of what was closed says so; closing twice is nothing."""
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), device=device, place=M.placed("nvme"))
    runtime, optimizer = offload.runtime(model), offload.optim.AdamW(model.parameters())
    loss(model).backward()
    optimizer.step()
    pending = loss(model)
    gradient, moment = model.blocks[0].up.weight.grad, next(iter(optimizer.state.values()))["exp_avg"]
    runtime.close()
    runtime.close()
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(X),
        "backward": lambda: pending.backward(),
        "parameter": lambda: model.blocks[0].up.weight.sum(),
        "write": lambda: model.blocks[0].up.weight.detach().zero_(),
        "gradient": lambda: gradient.clone(),
        "moment": lambda: moment.clone(),
        "digest": runtime.digest,
        "synchronize": runtime.synchronize,
        "clip": lambda: offload.clip_grad_norm_(model, 1.0),
        "runtime": lambda: offload.runtime(model),
        "lease": lambda: runtime.lease(model.blocks[0]).__enter__(),
        "state": lambda: {k: v.clone() for k, v in model.state_dict().items()},
    }
    wrong = []
    for name, use in uses.items():
        try:
            use()
        except OffloadError as error:
            if not any(word in str(error) for word in ("closed", "not prepared")):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(f"{name}: no error")
    assert not wrong
    with contextlib.suppress(OffloadError):  # counters may be read, or say that it is closed
        runtime.stats()
    with contextlib.suppress(OffloadError):
        optimizer.step()
    assert repr(model)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("prepared_first", [True, False])
@pytest.mark.parametrize(("where", "pre"), [("", True), ("blocks.1", True), ("blocks.1.up", True), ("blocks.1", False), ("blocks.1.up", False)])
@pytest.mark.parametrize("make", [M.Order, M.Vision])
def test_close_by_a_hook_in_the_middle_of_a_forward(
    tmp_path: Path, make: M.Make, where: str, pre: bool, prepared_first: bool, device: str
) -> None:  # fmt: skip
    """Nothing of the model is computed any more, and whoever tries is told why; so is the next forward."""
    x = X if make is M.Order else torch.linspace(-1, 1, 4 * 8 * 12).view(4, 8, 12)
    model, closing = M.seeded(make), list[Any]()

    def close(*_: Any) -> None:
        for runtime in closing:
            runtime.close()

    def hook() -> None:
        module = model.get_submodule(where)
        (module.register_forward_pre_hook if pre else module.register_forward_hook)(close)

    if not prepared_first:
        hook()
    offload.prepare(model, M.tiers(tmp_path), device=device, place=M.placed("nvme"))
    if prepared_first:
        hook()
    model(x)
    closing.append(offload.runtime(model))
    for _ in range(2):
        with pytest.raises(OffloadError, match="closed"):
            model(x)
    assert not _files(tmp_path)


def test_context_manager_closes_after_an_error(tmp_path: Path) -> None:
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("nvme"))

    def boom(*_: Any) -> None:
        raise ZeroDivisionError

    model.blocks[1].register_forward_hook(boom)
    with pytest.raises(ZeroDivisionError), offload.runtime(model):
        loss(model)
    assert not _files(tmp_path)
    with pytest.raises(OffloadError, match=r"closed|not prepared"):
        offload.runtime(model)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_model_that_is_dropped_goes(tmp_path: Path, device: str) -> None:
    """Nothing global keeps a model alive: dropped without close(), it leaves no file and no thread behind."""
    threads = threading.active_count()
    model = offload.prepare(M.seeded(M.Order), M.tiers(tmp_path), place=M.placed("nvme"), device=device)
    loss(model).backward()
    offload.runtime(model).synchronize()  # a transfer under way holds what it moves
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    assert not _files(tmp_path)
    assert threading.active_count() == threads


@pytest.mark.parametrize(("device", "end"), [("cpu", ""), ("sim", "del model"), ("cpu", "raise KeyboardInterrupt"), ("sim", "sys.exit(0)")])
def test_exit_without_close_leaves_no_files(tmp_path: Path, device: str, end: str) -> None:
    script = f"""
import sys, torch, offload
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
place = dict.fromkeys(("parameter", "gradient", "optimizer"), "nvme")
offload.prepare(model, offload.Tiers("8MiB", "8MiB", [(sys.argv[1], "8MiB")]), device="{device}", place=place)
model(torch.ones(2, 64)).sum().backward()
{end}
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == (0 if "raise" not in end else done.returncode), done.stderr[-2000:]
    assert done.returncode >= 0 or "raise" in end  # an interrupt may end the process by its signal
    assert "Exception ignored" not in done.stderr
    assert not _files(tmp_path)


# Forks


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index / 12)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_data_loader_workers(tmp_path: Path, device: str) -> None:
    """Workers forked from a process that holds a prepared model, with transfers under way, do not disturb it."""

    def run(workers: int) -> str:
        with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=device, place=M.placed("nvme")) as model:
            optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                for batch in DataLoader(_Numbers(), batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None):
                    M.mean_square(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return offload.runtime(model).digest()

    assert run(2) == run(0)


def _forked(work: Callable[[], Any]) -> int:
    """Exit status of a forked child: 0 if `work` returned, 3 if it raised OffloadError, 4 another error, negative: killed by a signal."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        status = 4
        try:
            work()
            status = 0
        except OffloadError:
            status = 3
        except BaseException:
            status = 4
        finally:
            os._exit(status)
    import select

    fd = os.pidfd_open(child)
    try:
        if not select.select([fd], [], [], 30)[0]:  # it hangs: end it
            os.kill(child, 9)
    finally:
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_use_in_a_child_raises(tmp_path: Path, tier: str, device: str) -> None:
    """No value can be had in a child; saying so is an error, never a crash, a hang or a wrong value. The parent goes on."""
    with M.prepared(M.seeded(M.Order), M.tiers(tmp_path), device=device, place=M.placed(tier), precision=M.FP32) as model:
        optimizer = offload.optim.AdamW(model.parameters())
        loss(model).backward()
        optimizer.step()
        loss(model).backward()
        engine_of(model).synchronize()
        p = model.blocks[0].up.weight

        def write() -> None:
            with torch.no_grad():
                p.zero_()

        uses: dict[str, Callable[[], Any]] = {
            "parameter": lambda: p.detach().clone(),
            "write": write,
            "gradient": lambda: p.grad.clone(),
            "moment": lambda: optimizer.state[p]["exp_avg"].clone(),
            "digest": lambda: offload.runtime(model).digest(),
            "forward": lambda: model(X).sum().item(),
            "step": optimizer.step,
            "state_dict": lambda: [v.clone() for v in model.state_dict().values()],
        }
        before = M.values(model)
        got = {name: _forked(use) for name, use in uses.items()}
        assert got == dict.fromkeys(uses, 3)
        assert not M.differing(M.values(model), before)
        optimizer.step()
        loss(model).backward()


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "precision": ({}, {"precision": M.FP32}), "accumulate": ({"accumulate": 2}, {"accumulate": 3}), "activations": ({}, {"activations": "recompute"}),
    "batch": ({}, {"batch": (1, 2)}), "place": ({"place": M.placed("host")}, {"place": M.placed("nvme")}),
}  # fmt: skip


@pytest.mark.parametrize("setting", PLANS)
def test_a_setting_beside_a_plan_is_the_plans_or_refused(tmp_path: Path, setting: str) -> None:
    for_plan, other = PLANS[setting]
    make, where = (lambda: M.Stack(depth=2, width=16)), M.tiers(tmp_path)
    plan = offload.plan(make(), where, device="cpu", **for_plan)
    with pytest.raises(offload.ConfigError, match=rf"^{setting} is not what the plan was made with"):
        offload.prepare(make(), where, device="cpu", plan=plan, **other)
    for options in ({}, for_plan):  # what is not said is the plan's
        with M.prepared(make(), where, device="cpu", plan=plan, **options) as model:
            assert offload.runtime(model).plan is plan


def test_a_plan_with_its_own_settings(tmp_path: Path) -> None:
    make, where = (lambda: M.Stack(depth=2, width=16)), M.tiers(tmp_path)
    plan = offload.plan(make(), where, device="cpu", precision=M.FP32, accumulate=2)
    with M.prepared(make(), where, device="cpu", plan=plan, updates="backward") as model:
        assert model(model.x).dtype == torch.float32
        optimizer = offload.optim.AdamW(model.parameters())
        for _ in range(2):  # the second starts updates
            M.mean_square(model).backward()
        optimizer.step()


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    where = M.tiers(tmp_path)
    plan = offload.plan(M.Stack(depth=2, width=16), where, device="cpu")
    frozen = M.Stack(depth=2, width=16)
    frozen.blocks[1].up.weight.requires_grad_(False)
    for model, name in (
        (M.Stack(depth=3, width=16), r"blocks\.2\.norm\.weight"),
        (M.Stack(depth=2, width=32), r"first\.weight"),
        (frozen, r"blocks\.1\.up\.weight"),
    ):
        with pytest.raises(offload.ConfigError, match=rf"the plan is of another model, or of other units: parameter {name} in unit"):
            offload.prepare(model, where, device="cpu", plan=plan)


def _closed(where: offload.Tiers) -> nn.Module:
    model = offload.prepare(M.Stack(depth=2, width=16), where, device="cpu")
    offload.runtime(model).close()
    return model


WRONG: dict[str, tuple[Callable[[offload.Tiers], Any], str]] = {
    "tiers": (lambda t: offload.prepare(M.Stack(), ("1GiB", "1GiB")), r"tiers = \('1GiB', '1GiB'\): give offload\.Tiers\("),  # type: ignore[arg-type]
    "precision": (lambda t: offload.prepare(M.Stack(), t, precision="bf16"), "precision = 'bf16': give offload.Precision"),  # type: ignore[arg-type]
    "no model": (lambda t: offload.plan(M.Stack, t), "a type is no torch.nn.Module"),  # type: ignore[arg-type]
    "batch": (lambda t: offload.prepare(M.Stack(), t, batch=8), r"batch = 8: give \(sequences, tokens"),  # type: ignore[arg-type]
    "no batch": (lambda t: offload.plan(M.Stack(), t, batch=(0, 8)), r"batch = \(0, 8\)"),
    "accumulate": (lambda t: offload.prepare(M.Stack(), t, accumulate=0), "accumulate = 0: give the number"),
    "half": (lambda t: offload.plan(M.Stack(), t, accumulate=2.5), r"accumulate = 2\.5"),  # type: ignore[arg-type]
    "seed": (lambda t: offload.prepare(M.Stack(), t, seed=-1), "seed = -1"),
    "numbered": (lambda t: offload.prepare(M.Stack(), t, device="cuda:7"), r"torch\.cuda\.set_device\(7\)"),
    "lazy": (lambda t: offload.prepare(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4)), t), r"parameter 1\.weight has no shape yet"),
    "closed": (lambda t: offload.prepare(_closed(t), t), "was closed, and its value with it"),
    "clipped": (lambda t: offload.clip_grad_norm_(M.Stack().parameters(), 1.0), "not its parameters"),  # type: ignore[arg-type]
    "norm": (lambda t: offload.clip_grad_norm_(offload.prepare(M.Stack(), t, device="cpu"), -1.0), r"max_norm = -1\.0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_given_is_checked_in_words(tmp_path: Path, wrong: str) -> None:
    act, says = WRONG[wrong]
    with pytest.raises(offload.ConfigError, match=says):
        act(M.tiers(tmp_path))


def test_a_device_of_torchs(tmp_path: Path) -> None:
    with M.prepared(M.seeded(lambda: M.Stack(depth=2, width=16)), M.tiers(tmp_path), device=torch.device("cpu")) as model:
        assert engine_of(model).device.name == "cpu"
