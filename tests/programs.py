"""Random programs: what a user's loop may do to a model, in any order and under any setting, beside the same done in memory, one thing after another.

A program is of one seed. Each of its actions is done to both models, with the same random numbers; what it returns or raises must be the same, to the
bit, and so must the digest at the end. Where updates run under the backward, an action that the runtime refuses must have changed nothing: the other
model is spared it too.
"""

from __future__ import annotations

import copy
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import models as M
import offload
from late import late
from offload.engine.registry import engine_of
from offload.transfer.device import SimDevice
from overlap import PLACES, small_activations_leave

X = torch.linspace(-1, 1, 64).view(4, 16)
IDS = torch.arange(24).view(2, 12) * 101
LENGTH = 20  # actions, of which some are whole steps
FP16 = offload.Precision("fp16", "fp16")
PRECISIONS = [
    M.FP32, M.BF16, FP16, offload.Precision("bf16", "fp32"), offload.Precision("bf16", "bf16", "split", "int8"),
    offload.Precision("fp32", "bf16", moments="bf16"), offload.Precision("bf16", "fp16", moments="int8"),
]  # fmt: skip


class _Tied(M.Language):
    """A tied table, and some parameters that are frozen."""

    def __init__(self) -> None:
        super().__init__(211, depth=3)
        for p in list(self.blocks.parameters())[3:8]:
            p.requires_grad_(False)


class _Mixed(M.Order):
    """Units whose frozen parameters have a dtype of their own, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(16, 16)
        for block in self.blocks[1:4]:
            block.norm.requires_grad_(False)
            block.down.bias = nn.Parameter(block.down.bias.detach().double(), requires_grad=False)


class _Restless(M.Order):
    """Each forward uses other units, in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.order = random.Random(float(x.detach().double().sum())).sample(range(5), 4)
        return super().forward(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": _Tied, "dropout": lambda: M.Stack(depth=4, width=16, dropout=0.1), "twice": M.Twice, "branches": M.Branches, "mixed": _Mixed,
    "nested": M.Nested, "restless": _Restless, "checkpointed": lambda: M.Stack(2, False, depth=4, width=16),
}  # fmt: skip


class Setting(NamedTuple):
    """How a seed's subject is prepared. `accumulate` is declared; programs run as many backwards as they like."""

    kind: str
    device: str
    place: dict[str, str] | None
    budget: str
    precision: offload.Precision
    updates: str
    accumulate: int
    activations: str
    slots: int | None
    late: int | None
    keep: bool
    optimizers: int


def setting_of(seed: int) -> Setting:
    c = random.Random(seed)
    precision = c.choice(PRECISIONS)
    fp16 = "fp16" in (precision.compute, precision.grad)
    updates, kind = "forward" if fp16 else c.choice(["forward", "backward"]), c.choice(list(MODELS))
    place = c.choice([*PLACES, None, None])
    return Setting(
        kind, c.choice(["cpu", "sim"]), place, "64MiB" if place is not None else c.choice(["64MiB", "1MiB", "768KiB"]), precision, updates,
        c.choice([1, 1, 2, 3]), c.choice(["keep", "recompute", "host", "nvme", "auto"]),
        None if kind == "nested" or place is None else c.choice([None, 3]), c.choice([None, seed, seed, -1]), c.random() < 0.5,
        c.choice([1, 1, 2]) if updates == "forward" else 1,
    )  # fmt: skip


class Side:
    """One of the two models, with what a loop has beside it."""

    def __init__(self, model: nn.Module, setting: Setting, path: Path, subject: bool) -> None:
        self.model, self.setting, self.path, self.subject = model, setting, path, subject
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.floats = [p for p in model.parameters() if p.dtype != torch.float64]
        shared = len(self.parameters) // setting.optimizers
        self.optimizers: list[Any] = [
            kind(self.parameters[i * shared : -2 if i == setting.optimizers - 1 else (i + 1) * shared], lr=1e-2, weight_decay=0.1)
            for i, kind in zip(range(setting.optimizers), (offload.optim.AdamW, offload.optim.Adam), strict=False)
        ]
        self.left = self.parameters[-2:]  # for add_param_group
        fp16 = "fp16" in (setting.precision.compute, setting.precision.grad)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=fp16)
        self.kept: dict[str, Any] = {}
        self.graphs: list[torch.Tensor] = []
        self.saves = 0

    @property
    def started(self) -> bool:
        """Whether updates of the step to come have started."""
        return bool(engine_of(self.model).early._started)

    def loss(self, c: random.Random) -> torch.Tensor:
        if self.setting.kind == "tied":
            return M.mean_square(self.model, (IDS + c.randrange(5)) % 211)
        return M.mean_square(self.model, X * c.choice([1.0, 0.5, -0.7]))

    def backward(self, value: torch.Tensor, **options: Any) -> torch.Tensor:
        torch.autograd.backward(self.scaler.scale(value / self.setting.accumulate), **options)
        return value.detach()

    def pick(self, c: random.Random) -> nn.Parameter:
        return c.choice(self.parameters)


Action = Callable[[Side, random.Random], Any]


def backward(side: Side, c: random.Random) -> Any:
    return side.backward(side.loss(c))


def graph(side: Side, c: random.Random) -> Any:
    """One that is kept, as long as the last two are."""
    side.graphs = [*side.graphs[-1:], side.loss(c)]
    return side.graphs[-1].detach()


def backward_of_graph(side: Side, c: random.Random) -> Any:
    """Of the older graph that is kept, which may stay."""
    if not side.graphs:
        return None
    retained = c.random() < 0.5
    return side.backward(side.graphs[0] if retained else side.graphs.pop(0), retain_graph=retained)


def evaluate(side: Side, c: random.Random) -> Any:
    side.model.eval()
    try:
        with c.choice([torch.no_grad, torch.inference_mode])():
            return side.loss(c).clone()
    finally:
        side.model.train()


class _Stop(Exception):
    pass


@contextmanager
def _raising(side: Side, c: random.Random, backward: bool) -> Iterator[None]:
    """A block's forward raises, or the backward of its output."""
    blocks = [m for m in side.model.modules() if isinstance(m, M.Block)] or [side.model]
    error = c.choice([_Stop, KeyboardInterrupt])("stop")

    def stop(*_: Any) -> None:
        raise error

    def hook(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        out.register_hook(stop) if backward and out.requires_grad else stop()

    handle = c.choice(blocks).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def raising_forward(side: Side, c: random.Random) -> Any:
    with _raising(side, c, False):
        return side.loss(c).detach()


def raising_backward(side: Side, c: random.Random) -> Any:
    with _raising(side, c, True):
        value = side.loss(c)
        return side.backward(value)


def step(side: Side, c: random.Random) -> Any:
    seen, scaled, clips = [], side.scaler.is_enabled(), c.random() < 0.3 and side.setting.updates == "forward"
    for optimizer in side.optimizers:
        if len(side.optimizers) == 1 or c.random() < 0.8:
            if scaled and not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                continue  # GradScaler wants one
            if clips:
                side.scaler.unscale_(optimizer)
                seen.append(nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05))
            side.scaler.step(optimizer)
            side.scaler.update()
    return [*seen, *(o.skipped for o in side.optimizers)]


def zero(side: Side, c: random.Random) -> None:
    (side.model if c.random() < 0.4 else c.choice(side.optimizers)).zero_grad(set_to_none=c.random() < 0.7)


def clip(side: Side, c: random.Random) -> Any:
    return offload.clip_grad_norm_(side.model, c.choice([0.01, 1e3])) if c.random() < 0.7 else nn.utils.clip_grad_norm_(side.parameters, 0.02)


def read_value(side: Side, c: random.Random) -> Any:
    p = c.choice(side.floats)
    return c.choice([lambda: p.detach().clone(), lambda: p.detach().view(-1)[:3].clone(), lambda: p.abs().max().detach()])()


def read_gradient(side: Side, c: random.Random) -> Any:
    p = side.pick(c)
    return None if p.grad is None else p.grad.clone()


def read_moment(side: Side, c: random.Random) -> Any:
    states = [s for o in side.optimizers for s in o.state.values()]
    return c.choice(states)[c.choice(["exp_avg", "exp_avg_sq"])].clone() if states else None


def write_value(side: Side, c: random.Random) -> None:
    p = c.choice(side.floats)
    acts: list[Callable[[], Any]] = [
        lambda: p.mul_(0.5), lambda: p.view(-1)[:3].fill_(0.25), lambda: p.copy_(torch.full_like(p, 0.1)), lambda: p.data.add_(0.5),
    ]  # fmt: skip
    with torch.no_grad():
        c.choice(acts)()


def write_gradient(side: Side, c: random.Random) -> None:
    p = side.pick(c)
    if p.grad is None:
        return
    acts: list[Callable[[], Any]] = [
        lambda: p.grad.mul_(0.5), lambda: p.grad.mul_(3.0), lambda: p.grad.copy_(torch.ones(p.shape)), lambda: p.grad.view(-1)[:2].zero_(),
        lambda: p.grad.zero_(), lambda: p.grad.add_(0.01),
    ]  # fmt: skip
    with torch.no_grad():
        c.choice(acts)()


def spoil_gradient(side: Side, c: random.Random) -> None:
    p = side.pick(c)
    if p.grad is not None:
        with torch.no_grad():
            p.grad.view(-1)[0] = c.choice([math.inf, math.nan])


def replace_gradient(side: Side, c: random.Random) -> None:
    p = side.pick(c)
    p.grad = None if c.random() < 0.5 else torch.full(p.shape, 0.01, dtype=p.dtype)


def write_moment(side: Side, c: random.Random) -> None:
    states = [s for o in side.optimizers for s in o.state.values()]
    if states:
        chosen = c.choice(states)["exp_avg"]
        chosen.mul_(0.5) if c.random() < 0.5 else chosen.view(-1)[:1].fill_(0.01)


def rate(side: Side, c: random.Random) -> None:
    c.choice(side.optimizers).param_groups[0]["lr"] = c.choice([1e-2, 3e-3, torch.tensor(2e-3)])


def add_group(side: Side, c: random.Random) -> None:
    left, side.left = side.left, []
    if left:
        side.optimizers[-1].add_param_group({"params": left, "lr": 5e-3})


def freeze(side: Side, c: random.Random) -> None:
    p = side.pick(c)
    p.requires_grad_(not p.requires_grad)


def keep_states(side: Side, c: random.Random) -> None:
    side.kept = {"model": {k: v.clone() for k, v in side.model.state_dict().items()},
                 "optimizers": [copy.deepcopy(o.state_dict()) for o in side.optimizers]}  # fmt: skip


def load_states(side: Side, c: random.Random) -> None:
    if side.kept and len(side.kept["optimizers"][-1]["param_groups"]) == len(side.optimizers[-1].param_groups):
        which = c.randrange(3)
        if which != 1:
            side.model.load_state_dict(side.kept["model"], assign=c.random() < 0.3)
        if which:
            for optimizer, state in zip(side.optimizers, side.kept["optimizers"], strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))


def save(side: Side, c: random.Random) -> None:
    if len(side.optimizers) == 1 and not side.left:
        offload.save(side.path / "checkpoint", side.model, side.optimizers[0], {"some": side.saves})
        side.saves += 1


def load(side: Side, c: random.Random) -> Any:
    return offload.load(side.path / "checkpoint", side.model, side.optimizers[0]) if side.saves else None


def synchronize(side: Side, c: random.Random) -> None:
    offload.runtime(side.model).synchronize()


def digest(side: Side, c: random.Random) -> Any:
    return offload.runtime(side.model).digest()


def stats(side: Side, c: random.Random) -> None:
    found = offload.runtime(side.model).stats()
    over = {tier: n for tier, n in found["peak_bytes"].items() if tier in ("host", "nvme") and n > found["budget_bytes"][tier]}
    if over:
        raise AssertionError(f"over the budget: {over}")


ACTIONS: dict[Action | str, int] = {
    "loop": 30, backward: 12, step: 10, zero: 6, graph: 4, backward_of_graph: 4, evaluate: 4, raising_forward: 3,
    raising_backward: 3, clip: 3, read_value: 5, read_gradient: 5, read_moment: 3, write_value: 5, write_gradient: 5, spoil_gradient: 2,
    replace_gradient: 3, write_moment: 3, rate: 3, add_group: 1, freeze: 2, keep_states: 2, load_states: 2, save: 1, load: 1, synchronize: 2,
    digest: 1, stats: 1,
}  # fmt: skip
# with updates under the backward a step cannot be finished after these, and says so; a save is refused too, but a load changes things before it sees
CHANGING = {step, write_value, load_states, load, freeze}
ENDING = {zero, replace_gradient, rate, spoil_gradient, add_group, load_states, load, raising_backward, freeze}


def exact(value: Any) -> Any:
    """What can be compared to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    if isinstance(value, (list, tuple)):
        return [exact(v) for v in value]
    return {k: exact(v) for k, v in value.items()} if isinstance(value, dict) else value


def outcome(side: Side, act: Action, key: str) -> Any:
    torch.manual_seed(sum(map(ord, key)))
    try:
        return exact(act(side, random.Random(key)))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, (AssertionError, offload.SwapError)):
            raise
        said = f"{type(error).__name__}: {error}"
        return ("refused" if isinstance(error, offload.OffloadError) else "raised", said if isinstance(error, offload.OffloadError) else type(error))


@contextmanager
def pair(path: Path, seed: int, setting: Setting) -> Iterator[tuple[Side, Side]]:
    """The subject, and the model that does the same one thing after another, all in memory."""
    with ExitStack() as stack:
        stack.enter_context(small_activations_leave())
        same: dict[str, Any] = {"precision": setting.precision, "accumulate": setting.accumulate}
        make = MODELS[setting.kind]
        device: Any = SimDevice(seed=seed) if setting.device == "sim" else "cpu"
        sides = []
        for subject in (True, False):
            over: dict[str, Any] = {"device": "cpu", "place": M.placed("device"), "activations": "keep"}
            if subject:
                over = {
                    "device": device,
                    "place": setting.place,
                    "activations": setting.activations,
                    "updates": setting.updates,
                    "slots": setting.slots,
                }
            where = path / ("subject" if subject else "reference")
            model = stack.enter_context(M.prepared(M.seeded(make), M.tiers(where, device=setting.budget if subject else "64MiB"), **same, **over))
            sides.append(Side(model, setting, where, subject))
        subject_model = sides[0].model
        engine_of(subject_model).early.keep_gradients = setting.keep
        stack.enter_context(nullcontext() if setting.late == -1 else late(subject_model, setting.late))
        yield sides[0], sides[1]


def actions(c: random.Random, length: int, setting: Setting) -> Iterator[Action]:
    for act in c.choices(list(ACTIONS), list(ACTIONS.values()), k=length):
        yield from [*[backward] * setting.accumulate, step, zero] if isinstance(act, str) else [act]  # a step as loops make it


def run(path: Path, seed: int, length: int = LENGTH) -> str:
    """What goes wrong in the program of a seed; nothing if nothing does."""
    setting, c, done = setting_of(seed), random.Random(seed), []
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pair(path, seed, setting) as (subject, reference):
            for i, act in enumerate(actions(c, length, setting)):
                if subject.started and act in ENDING:
                    act = step
                if subject.setting.updates == "backward" and act is spoil_gradient:
                    act = stats
                if act in CHANGING:  # a graph over values that changed is refused, as in torch
                    subject.graphs, reference.graphs = [], []
                done.append(act.__name__)
                got = outcome(subject, act, f"{seed}/{i}")
                if isinstance(got, tuple) and got[0] == "refused":
                    done[-1] += f" ({got[1][:150]})"
                    if not legitimate(setting, act, got[1]):
                        return f"seed {seed}, {setting}: refused after {done}"
                    continue
                want = outcome(reference, act, f"{seed}/{i}")
                offload.runtime(reference.model).synchronize()
                if got != want:
                    return f"seed {seed}, {setting}: {_short(got)} for {_short(want)} after {done}"
            if subject.started:
                for side in (subject, reference):
                    outcome(side, step, "end")
            if seed % 5:  # else it is closed as it is
                got, want = (outcome(side, digest, "end") for side in (subject, reference))
                if got != want:
                    return f"seed {seed}, {setting}: digests differ after {done}"
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("offload")]
    return f"seed {seed}, {setting}: threads {left} are left after {done}" if left else ""


def legitimate(setting: Setting, act: Action, said: str) -> bool:
    """Whether a refusal is one of those that users are told of."""
    if "partly applied" in said:
        return False
    known = ['updates="forward"', "was not kept", "BudgetError", "Declare it", "gave way to that of another"]
    return any(text in said for text in known)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."
