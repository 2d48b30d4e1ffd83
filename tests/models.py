"""Small models and helpers for tests of streaming and placement. No pytest asserts here: helpers raise or return values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.engine.registry import engine_of
from offload.planner.layout import DTYPE_BYTES

torch.set_num_threads(1)  # tiny tensors: OpenMP's barriers cost seconds on a busy machine

FP32 = offload.Precision("fp32", "fp32")
BF16 = offload.Precision("bf16", "bf16")
SEGMENTS = [(0, False), (1, False), (1, True), (3, False), (3, True), (6, False), (6, True)]
Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """A first layer and `depth` blocks, checkpointed in segments where `segment` is not 0."""

    def __init__(self, segment: int = 0, reentrant: bool = False, depth: int = 6, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.segment, self.reentrant, self.x = segment, reentrant, torch.randn(16, width)

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(self.x if x is None else x)
        step = self.segment or 1
        for i in range(0, len(self.blocks), step):

            def run(h: torch.Tensor, part: Any = self.blocks[i : i + step]) -> torch.Tensor:
                for b in part:
                    h = b(h)
                return h

            x = checkpoint(run, x, use_reentrant=self.reentrant) if self.segment else run(x)
        return x


class Vision(nn.Module):
    """Parameters of its own at the root: a class token, positions, and a scalar."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.token, self.position, self.scale = (
            nn.Parameter(torch.randn(1, 1, width)),
            nn.Parameter(torch.randn(1, 9, width)),
            nn.Parameter(torch.tensor(0.7)),
        )
        self.patch = nn.Linear(12, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x[:, 0])


class Language(nn.Module):
    """A tied language model with a large vocabulary; `tied=False` leaves the head its own weight."""

    def __init__(self, vocabulary: int = 3001, width: int = 16, depth: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(nn.Module):
    """Modules called twice, one of them a block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 1, 2, 0):
            x = self.mix(self.blocks[i](x)).tanh()
        return x


class Branches(nn.Module):
    """Two towers whose outputs join, and a third that is not used."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Block(width) for _ in range(2)))
        self.right = nn.Sequential(*(Block(width) for _ in range(3)))
        self.idle = nn.Linear(width, width)
        self.join = nn.Bilinear(width, width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.left(x), self.right(x.sin()))


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.rand(width)), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.gain) * self.gain


class Nested(nn.Module):
    """Units inside units inside units, each with parameters of its own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.bias, self.inner, self.outer = nn.Parameter(torch.randn(width)), Inner(width), Inner(width)
        self.outer.linear = Inner(width)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x + self.bias)) * self.bias


class Order(nn.Module):
    """Blocks run in an order given at each call."""

    def __init__(self, width: int = 16, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.order = list(range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Split(nn.Module):
    """A block that takes keywords and returns `kind`: a tuple, a dict, a named tuple or a data class."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(width, width), nn.Linear(width, width), kind

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor, flags: dict[str, Any] | None = None) -> Any:
        one, two = self.a(x) + shift, self.b(x) * shift
        if self.kind == "tuple":
            return one, (two, None)
        if self.kind == "dict":
            return {"one": one, "two": [two], "name": "x"}
        if self.kind == "named":
            return Pair(one, two)
        return Output(one, {"two": two})


class Structured(nn.Module):
    def __init__(self, kind: str, width: int = 16) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Split(width, kind) for _ in range(3))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, flags: dict[str, Any] | None = None) -> torch.Tensor:
        for part in self.parts:
            out = part(x, shift=shift, flags=flags)
            if isinstance(out, dict):
                x = out["one"] + out["two"][0]
            elif isinstance(out, Output):
                x = out.hidden + out.extra["two"]
            elif isinstance(out, Pair):
                x = out.first + out.second
            else:
                x = out[0] + out[1][0]
        return x


def mean_square(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(model, Stack) and not args:
        args = (model.x,)  # through the root, which casts it
    return model(*args, **kwargs).float().square().mean()


def seeded(make: Make, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def tiers(path: Path, device: str = "64MiB", host: str = "64MiB", nvme: str = "256MiB") -> offload.Tiers:
    return offload.Tiers(device, host, [(str(path / "swap"), nvme)])


def placed(tier: str) -> dict[str, str]:
    return dict.fromkeys(("parameter", "gradient", "optimizer"), tier)


@contextmanager
def prepared(model: nn.Module, where: offload.Tiers, *, slots: int | None = None, **options: Any) -> Iterator[nn.Module]:
    """The model prepared, with exactly `slots` slots of the largest unit's size if given; closed at the end."""
    if slots is not None:
        kept = {k: v for k, v in options.items() if k in ("device", "precision", "activations", "units", "place", "batch", "accumulate")}
        options["plan"] = with_slots(offload.plan(model, where, **kept), slots)
    model = offload.prepare(model, where, **options)
    try:
        yield model
    finally:
        offload.runtime(model).close()


def slot_bytes(layout: Any, compute: str) -> int:
    """What a unit of a plan takes in a slot, from its flats as they are cut."""
    size = {"fp32": 4, "bf16": 2, "fp16": 2}[compute]
    floating = ("fp32", "bf16", "fp16", "fp64")
    return sum(-(-f.numel * (size if f.dtype in floating else DTYPE_BYTES[f.dtype]) // 4096) * 4096 for f in layout.flats)


def with_slots(plan: Any, count: int) -> Any:
    return dataclasses.replace(plan, slots=(max(slot_bytes(u, plan.compute) for u in plan.layouts),) * count)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def differing(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Names whose tensors differ by a bit, dtype or presence."""
    wrong = sorted(set(got) ^ set(want))
    for name in sorted(set(got) & set(want)):
        a, b = got[name], want[name]
        if (a is None) != (b is None) or (a is not None and (a.dtype != b.dtype or not torch.equal(a, b))):
            wrong.append(name)
    return wrong


def plain_gradients(make: Make, loss: Loss, seed: int = 3, run: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model = seeded(make, seed)
    torch.manual_seed(run)
    value = loss(model)
    value.backward()
    return value.detach(), gradients(model)


def wrong_gradients(make: Make, loss: Loss, where: offload.Tiers, *, seed: int = 3, run: int = 5, **options: Any) -> list[str]:
    """Names whose gradients (or "loss") differ from plain torch in fp32."""
    value, want = plain_gradients(make, loss, seed, run)
    options.setdefault("precision", FP32)
    with prepared(seeded(make, seed), where, **options) as model:
        torch.manual_seed(run)
        got = loss(model)
        got.backward()
        wrong = differing(gradients(model), want)
        return wrong if torch.equal(got.detach(), value) else ["loss", *wrong]


def train(
    model: nn.Module, loss: Loss, steps: int = 3, *, clip: float | None = None, accumulate: int = 1, lr: float = 1e-2, run: int = 5
) -> list[float]:
    """Trains a prepared model with offload's AdamW; losses by micro-batch."""
    torch.manual_seed(run)
    optimizer = offload.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            value = loss(model) / accumulate
            value.backward()
            losses.append(float(value.detach()))
        if clip is not None:
            offload.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run_and_digest(make: Make, loss: Loss, where: offload.Tiers, *, seed: int = 3, **options: Any) -> tuple[list[float], str]:
    loop = {k: options.pop(k) for k in ("steps", "clip", "accumulate", "lr") if k in options}
    options["accumulate"] = loop.get("accumulate", 1)
    with prepared(seeded(make, seed), where, **options) as model:
        losses = train(model, loss, **loop)
        return losses, offload.runtime(model).digest()


def at_rest(model: nn.Module) -> bool:
    """Whether every module holds the very parameters that the runtime knows, nothing left bound to a slot."""
    return all(module._parameters[key] is record.parameter for record in engine_of(model).records for module, key in record.uses)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
