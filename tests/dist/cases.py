"""Small models trained on one rank or several, and what came of it, for the tests of ranks."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import offload
from offload.dist.world import World
from offload.engine.registry import engine_of

RANKS = 2
FP32 = ("fp32", "fp32", "fp32", "fp32")


class Block(nn.Module):
    """Wide enough that its matrices lie on both sides of a cut. `extra` is used where asked for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width, bias=False)
        self.extra = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.extra, std=0.02)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        return x + h + (x @ self.extra).tanh() if extra else x + h


class Net(nn.Module):
    """A tied language model in miniature; `side` is a unit that only some forwards use."""

    def __init__(self, vocabulary: int = 211, width: int = 44, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.side = nn.Linear(width, width)
        self.idle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, extra: bool = True, side: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, extra)
        if side:
            x = x + self.side(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def net(seed: int = 1, frozen: bool = False) -> Net:
    torch.manual_seed(seed)
    made = Net()
    if frozen:
        made.blocks[1].requires_grad_(False)
        made.blocks[0].up.requires_grad_(False)
    return made


def ids(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 211, (2, 12), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _uses_side(use: str, rank: int) -> bool:
    return {"side": rank == 0, "side in a group": rank < 2}.get(use, True)


def refused(act: Callable[[], object]) -> str | None:
    """What an OffloadError says, after its name; None where there is none."""
    try:
        act()
    except offload.OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of all ranks, where it is divided among them."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _hash(tensors: Any) -> str:
    whole = hashlib.blake2b(digest_size=12)
    for name, value in tensors:
        whole.update(name.encode())
        if value is not None:
            whole.update(value.detach().clone().float().numpy().tobytes())
    return whole.hexdigest()


def train(
    stage: int = 3, place: str | None = "host", device: str = "cpu", precision: tuple[str, ...] = FP32, clip: float | None = None,
    accumulate: int = 1, use: str = "all", frozen: bool = False, steps: int = 3, tiers: tuple[str, str] = ("8MiB", "16MiB"),
    activations: str = "auto", meta: bool = False, by_torch: bool = False, ranks: int = RANKS, mesh: tuple[int, int] | None = None,
    no_sync: str = "no",
) -> dict[str, Any]:  # fmt: skip
    """What training came to on this rank. One rank does the micro-batches of all of them, one after another.

    `no_sync`: "but last" or "all", the micro-batches that each rank sums by itself. `use`: "all"; "extra" or "side", which rank 0 alone then uses; or
    "side in a group", that of ranks 0 and 1.
    """
    world = World.current()
    torch.manual_seed(1)
    model: nn.Module = net(seed=1 if world.rank == 0 else 99, frozen=frozen)  # values are rank 0's
    if meta:
        with torch.device("meta"):
            model = Net()
    everywhere = [(r, m) for m in range(accumulate) for r in range(ranks)]
    mine = [(world.rank, m) for m in range(accumulate)] if world.size > 1 else everywhere
    losses, norms = [], []
    with tempfile.TemporaryDirectory() as swap:
        offload.prepare(
            model,
            offload.Tiers(*tiers, [(swap, "64MiB")]),
            device=device,
            precision=offload.Precision(*precision),  # type: ignore[arg-type]
            place=dict.fromkeys(("parameter", "gradient", "optimizer"), place) if place else None,
            accumulate=len(mine),
            stage=stage,
            activations=activations,
            mesh=mesh_of(tuple(mesh)) if mesh is not None else None,
        )
        runtime = offload.runtime(model)
        optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        before = runtime.stats()["moved_bytes"]
        engine = engine_of(model)
        filled: list[int] = []  # units, as they came to slots
        fill = engine.slots._fill
        engine.slots._fill = lambda slot, unit: (filled.append(unit), fill(slot, unit))[1]  # type: ignore[method-assign, func-returns-value]
        gradients = ""
        for step in range(steps):
            total = 0.0
            for rank, micro in mine:
                loss = model(ids(step, micro, rank), extra=use != "extra" or rank == 0, side=_uses_side(use, rank))
                apart = no_sync == "all" or (no_sync == "but last" and (rank, micro) != mine[-1])
                with runtime.no_sync() if apart else nullcontext():
                    (loss / len(mine)).backward()
                total += float(loss.detach()) / len(mine)
            if clip is not None:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip) if by_torch else offload.clip_grad_norm_(model, clip)))
            if step == steps - 1:
                with runtime.uncounted():
                    gradients = _hash((n, p.grad) for n, p in model.named_parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(world.share(total)) / world.size)
        runtime.synchronize()
        moved = {k: v - before[k] for k, v in runtime.stats()["moved_bytes"].items()}
        out = {
            "losses": losses,
            "norms": norms,
            "digest": runtime.digest(),
            "gradients": gradients,
            "state_dict": _hash(model.state_dict().items()),
            "moments": _hash((f"{i}{k}", v[k]) for i, v in optimizer.state_dict()["state"].items() for k in ("exp_avg", "exp_avg_sq")),
            "moved": moved,
            "held": runtime.stats().get("state_bytes_per_rank"),
            "state_bytes": runtime.stats()["state_bytes"],
            "filled": {u.name: (filled.count(u.number), 4 * sum(f.numel for f in u.layout.flats)) for u in engine.units if filled},
            "flat_bytes": sum(f.numel * 4 for u in engine.plan.layouts if "idle" not in u.spec.name for f in u.flats),
            "values": [float(p.detach().clone().double().sum()) for _, p in sorted(model.named_parameters())],
        }
        runtime.close()
    return out
