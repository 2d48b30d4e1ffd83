"""Small models, tiers in a temporary directory, and comparisons to the bit, for tests against plain torch."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

import offload

PLACES = ("device", "host", "nvme")
SETTINGS = [(device, place) for device in ("cpu", "sim") for place in PLACES]  # where it computes, where all roles rest
FP32 = offload.Precision(compute="fp32", grad="fp32")
BF16 = offload.Precision(compute="bf16", grad="bf16")
PRECISIONS = [
    offload.Precision(compute, "bf16", master, moments)  # type: ignore[arg-type]
    for compute, master in (("bf16", "fp32"), ("bf16", "split"), ("fp32", "fp32"))
    for moments in ("fp32", "bf16", "int8")
]  # every form of state


class Block(nn.Module):
    """Odd widths on purpose: nothing is a multiple of a chunk, a block or a page."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied language model in miniature. Input: token ids (rows, length), int64; output: the loss, a scalar."""

    def __init__(self, vocab: int = 61, width: int = 12, depth: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def net(seed: int = 0, **over: Any) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(**over)


def ids(seed: int = 7, rows: int = 3, length: int = 9, vocab: int = 61) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def noise(shape: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn(n: int, rng: torch.Generator, spread: float, special: Sequence[float] = (), share: float = 0.0) -> torch.Tensor:
    """`n` normal numbers times `spread`, in fp32, a `share` of them drawn from `special` instead."""
    x = torch.randn(n, generator=rng) * spread
    if special and n:
        where = torch.rand(n, generator=rng) < share
        x[where] = torch.tensor(special)[torch.randint(len(special), (int(where.sum()),), generator=rng)]
    return x


class Bag(nn.Module):
    """A module that only holds parameters, by name."""

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, p in parameters.items():
            self.register_parameter(name, p)


SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (), "one": (1,), "empty": (0,), "empty2": (3, 0), "vector": (7,), "matrix": (5, 9),
    "cube": (3, 4, 5), "block": (4096,), "odd": (4097,), "wide": (3, 3001),
}  # fmt: skip

FILLED = {k: v for k, v in SHAPES.items() if "empty" not in k}
FEW = {"scalar": (), "empty": (0,), "vector": (7,), "odd": (4097,)}
ULPS = 4  # of the larger of the value and lr, and a step: what differently ordered fp32 operations may come to


def bag(dtype: torch.dtype = torch.float32, seed: int = 3, shapes: dict[str, tuple[int, ...]] | None = None) -> Bag:
    """Parameters of every awkward shape."""
    return Bag(**{k: nn.Parameter(noise(s, seed + i, dtype)) for i, (k, s) in enumerate((shapes or SHAPES).items())})


class Prepared(AbstractContextManager["Prepared"]):
    """Prepares copies of models and closes them at the end. Swap directories lie in `where`.

    torch computes with one thread meanwhile: models are tiny.
    """

    def __init__(self, where: Path) -> None:
        self.where, self._count, self._models = where, itertools.count(), list[nn.Module]()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __call__(self, model: nn.Module, place: str | None = "host", device: str = "cpu", *, keep: bool = False, **over: Any) -> Any:
        """A prepared deep copy of `model` (the model itself with `keep`), all roles on the tier `place` (None: the planner's choice)."""
        twin = model if keep else copy.deepcopy(model)
        tiers = over.pop("tiers", None) or self.tiers()
        over.setdefault("precision", FP32)
        if place is not None:
            over.setdefault("place", dict.fromkeys(("parameter", "gradient", "optimizer"), place))
        offload.prepare(twin, tiers, device=device, **over)
        self._models.append(twin)
        return twin

    def tiers(self, device: str | int = "64MiB", host: str | int = "64MiB", nvme: str | int | None = "64MiB") -> offload.Tiers:
        return offload.Tiers(device=device, host=host, nvme=[(str(self.where / f"swap{next(self._count)}"), nvme)] if nvme is not None else [])

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for model in self._models:
            try:
                offload.runtime(model).close()
            except offload.ConfigError:
                continue  # the test closed it
        torch.set_num_threads(self._threads)


def flip(path: Path, at: int | None = None) -> None:
    """Turns a bit of a file's byte `at` (None: the middle one; negative: from the end) where it is, and on the drive."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at = size // 2 if at is None else at % size
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 8]), at)
        os.fsync(file.fileno())


def plain(t: torch.Tensor) -> torch.Tensor:
    """The value in memory of its own."""
    return t.detach().clone()


def bits(t: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(t.numel(), dtype=t.dtype)
    return flat.copy_(t.detach().reshape(-1)).view(torch.uint8)


def same(got: torch.Tensor | None, want: torch.Tensor | None, what: str = "") -> None:
    """Raises unless shape, dtype and every bit agree."""
    if got is None or want is None:
        if got is not want:
            raise AssertionError(f"{what}: {'nothing' if got is None else 'a tensor'}, torch has {'nothing' if want is None else 'a tensor'}")
        return
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{what}: {tuple(got.shape)} {got.dtype}, torch has {tuple(want.shape)} {want.dtype}")
    if not torch.equal(bits(got), bits(want)):
        a, b = plain(got).double().reshape(-1), plain(want).double().reshape(-1)
        raise AssertionError(
            f"{what}: {int((a != b).sum())} of {a.numel()} elements differ, "
            f"by at most {float((a - b).abs().max()):.3g}; first {a[a != b][:3]} for {b[a != b][:3]}"
        )


def near(got: torch.Tensor, want: torch.Tensor, ulps: float, scale: float = 0.0, what: str = "") -> None:
    """Raises unless every element is within `ulps` units in the last place of the larger of its own size and `scale`, in `want`'s dtype."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{what}: {tuple(got.shape)} {got.dtype}, torch has {tuple(want.shape)} {want.dtype}")
    if want.numel() == 0:
        return
    a, b = plain(got).double(), plain(want).double()
    bound = ulps * torch.finfo(want.dtype).eps * b.abs().clamp(min=scale)
    over = (a - b).abs() > bound
    if bool(over.any()) or bool((a.isnan() != b.isnan()).any()):
        worst = ((a - b).abs() / bound.clamp(min=1e-300)).max()
        raise AssertionError(
            f"{what}: {int(over.sum())} of {a.numel()} elements are off, "
            f"the worst by {float(worst) * ulps:.3g} ulp; first {a[over][:3]} for {b[over][:3]}"
        )


def same_models(got: nn.Module, want: nn.Module) -> None:
    """All parameters and buffers, by name, to the bit."""
    ours, theirs = dict(got.named_parameters()), dict(want.named_parameters())
    if list(ours) != list(theirs):
        raise AssertionError(f"names differ: {sorted(set(ours) ^ set(theirs))}")
    for name, p in theirs.items():
        same(ours[name], p, name)
    buffers = dict(got.named_buffers())
    for name, b in want.named_buffers():
        same(buffers[name], b, name)


def same_gradients(got: nn.Module, want: nn.Module) -> None:
    ours = dict(got.named_parameters())
    for name, p in want.named_parameters():
        same(ours[name].grad, p.grad, f"{name}.grad")


def pairs(got: nn.Module, want: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    ours = dict(got.named_parameters())
    for name, p in want.named_parameters():
        yield name, ours[name], p


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


def both(
    prepared: Prepared, act: Callable[[nn.Module], Any], place: str = "host", device: str = "cpu", model: Callable[[], nn.Module] = net, **over: Any
) -> tuple[Any, Any]:
    """Does the same to a prepared model and to a plain one, compares gradients and parameters, and gives both back."""
    twin, want = prepared(model(), place, device, **over), model()
    results = [act(m) for m in (twin, want)]
    for a, b in zip(*[r if isinstance(r, (list, tuple)) else [r] for r in results], strict=True):
        if isinstance(b, torch.Tensor):
            same(a, b)
    same_gradients(twin, want)
    same_models(twin, want)
    return twin, want


def clip(m: nn.Module, most: float) -> torch.Tensor:
    """offload's clipping for a prepared model, torch's for any other."""
    try:
        offload.runtime(m)
    except offload.ConfigError:
        return torch.nn.utils.clip_grad_norm_(m.parameters(), most)
    return offload.clip_grad_norm_(m, most)
