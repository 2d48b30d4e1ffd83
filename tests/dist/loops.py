"""Training loops as users write them, each for torch on one rank or for a prepared model on several, which have their rows of the same batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import cases
import torch

import offload
from offload.dist.world import World

ROWS = 4
Losses = list[float]


@dataclass
class Job:
    """What a loop is given. `mine`: this rank's rows of a batch [ROWS, tokens]; `mean`: over ranks."""

    model: Any
    optimizer: Any
    clip: Callable[[Any, float], Any]
    mine: Callable[[torch.Tensor], torch.Tensor]
    mean: Callable[[Any], float]
    gradients: dict[str, torch.Tensor | None] | None = None

    def keep(self) -> None:
        self.gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.model.named_parameters()}

    def adamw(self, groups: Any, **settings: Any) -> Any:
        return self.optimizer(groups, **{"lr": 3e-3, "eps": 1e-3} | settings)  # eps: what rounds to either side of zero is not magnified


def batches(n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 211, (ROWS, 12), generator=generator) for _ in range(n)]


def plain(job: Job, beside: Callable[[int], dict[str, Any]] = lambda step: {}) -> Losses:
    """`beside`: what the forward of a step is given besides ids."""
    optimizer, losses = job.adamw(job.model.parameters(), weight_decay=0.1), []
    for number, ids in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = job.model(job.mine(ids), **beside(number))
        loss.backward()
        losses.append(job.mean(loss))
        job.keep()
        optimizer.step()
    return losses


def clipped(job: Job) -> Losses:
    optimizer, losses = job.adamw(job.model.parameters()), []
    for ids in batches(4):
        optimizer.zero_grad()
        loss = job.model(job.mine(ids))
        loss.backward()
        losses += [job.mean(loss), float(job.clip(job.model.parameters(), 0.05))]
        job.keep()
        optimizer.step()
    return losses


def accumulated(job: Job) -> Losses:
    """`zero_grad` of the model, not of the optimizer; at stages 0 and 1 ranks talk at the last micro-batch alone."""
    optimizer, losses = job.adamw(job.model.parameters()), []
    for ids in batches(3):
        for number, rows in enumerate(ids.split(2)):
            apart = job.optimizer is not torch.optim.AdamW and not number
            with offload.runtime(job.model).no_sync() if apart else nullcontext():
                loss = job.model(job.mine(rows)) / 2
                loss.backward()
            losses.append(job.mean(loss))
        job.keep()
        optimizer.step()
        job.model.zero_grad()
    return losses


def groups(job: Job) -> Losses:
    matrices, rest = ([p for p in job.model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    settings = [{"params": matrices, "weight_decay": 0.2, "lr": 5e-3}, {"params": rest, "weight_decay": 0.0, "betas": (0.8, 0.95)}]
    optimizer, losses = job.adamw(settings, lr=1e-3), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[5e-3, 1e-3], total_steps=6)
    for ids in batches(4):
        optimizer.zero_grad()
        loss = job.model(job.mine(ids))
        loss.backward()
        losses.append(job.mean(loss))
        optimizer.step()
        schedule.step()
    return losses + [group["lr"] for group in optimizer.param_groups]


def frozen(job: Job) -> Losses:
    """What is frozen after `prepare`."""
    job.model.blocks[0].requires_grad_(False)
    return plain(job)


def unused(job: Job) -> Losses:
    """A unit that some steps use, on all ranks."""
    return plain(job, lambda step: {"side": step in (1, 2)})


def closure(job: Job) -> Losses:
    optimizer, losses = job.adamw(job.model.parameters()), []
    for ids in batches(3):

        def again(ids: torch.Tensor = ids) -> Any:
            optimizer.zero_grad()
            loss = job.model(job.mine(ids))
            loss.backward()
            return loss

        losses.append(job.mean(optimizer.step(again)))
    return losses


def evaluated(job: Job) -> Losses:
    """Between steps the model is evaluated and its parameters are read and written, by all ranks alike."""
    optimizer, losses = job.adamw(job.model.parameters()), []
    for ids in batches(3):
        optimizer.zero_grad()
        job.model(job.mine(ids)).backward()
        optimizer.step()
        job.model.eval()
        with torch.no_grad():
            losses += [job.mean(job.model(job.mine(ids))), float(job.model.blocks[1].up.weight.norm())]
            job.model.blocks[2].norm.weight.mul_(0.99)
            job.model.embed.weight[3] += 0.25
        job.model.train()
    return losses


LOOPS: dict[str, Callable[[Job], Losses]] = {
    loop.__name__: loop for loop in (plain, clipped, accumulated, groups, frozen, unused, closure, evaluated)
}


def by_torch(name: str) -> tuple[Losses, Any, dict[str, torch.Tensor]]:
    """Losses, the last gradients where the loop keeps them, and the parameters at its end."""
    job = Job(cases.net(), torch.optim.AdamW, torch.nn.utils.clip_grad_norm_, lambda ids: ids, lambda loss: float(loss.detach()))
    losses = LOOPS[name](job)
    return losses, job.gradients, dict(job.model.state_dict())


def by_ranks(name: str, stage: int, place: str, device: str, activations: str, swap: str) -> tuple[Losses, Any, dict[str, torch.Tensor]]:
    """As `by_torch`, on this rank of several."""
    world = World.current()
    tiers = offload.Tiers("8MiB", "16MiB", [(swap, "64MiB")])
    model = offload.prepare(
        cases.net(), tiers, device=device, precision=offload.Precision("fp32", "fp32"), stage=stage, activations=activations,
        place=dict.fromkeys(("parameter", "gradient", "optimizer"), place), accumulate=2 if name == "accumulated" else 1,
    )  # fmt: skip
    own = (lambda params, norm: offload.clip_grad_norm_(model, norm)) if place == "nvme" else torch.nn.utils.clip_grad_norm_
    job = Job(
        model, offload.optim.AdamW, own, lambda ids: ids.tensor_split(world.size)[world.rank],
        lambda loss: sum(world.share(float(loss.detach()))) / world.size,
    )  # fmt: skip
    losses = LOOPS[name](job)
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    offload.runtime(model).close()
    return losses, job.gradients, state
