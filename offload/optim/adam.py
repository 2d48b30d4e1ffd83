"""AdamW and Adam.

Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); Kingma and Ba, Adam (2015). Arithmetic: cpp/simd/adam.h.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload.engine.engine import Engine
from offload.engine.record import Record
from offload.engine.registry import record_of
from offload.errors import ConfigError

log = logging.getLogger("offload")

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` for the parameters of prepared models.

    Param groups, schedulers, `step(closure)`, `state_dict` and `load_state_dict` are torch's. `state[p]` has `step` (fp32 scalar), `exp_avg` and
    `exp_avg_sq` (fp32, at rest). A step in which a gradient is not finite is skipped whole and warned of; `skipped` counts them.
    """

    _decoupled = True

    def __init__(
        self, params: _Params, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float | None = None, amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        decay = (1e-2 if self._decoupled else 0.0) if weight_decay is None else weight_decay
        _check(lr, betas, eps, decay)
        if amsgrad:
            raise ConfigError("amsgrad is not supported; leave it out")
        self.skipped = 0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "amsgrad": False, "maximize": maximize})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter whose `.grad` is not None. Calls `closure` first, with gradients enabled, and returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for engine, chosen in self._with_gradients().items():
                self._update(engine, chosen)
        return loss

    def _with_gradients(self) -> dict[Engine, list[tuple[Record, dict[str, Any]]]]:
        chosen: dict[Engine, list[tuple[Record, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                owner = record_of(p)
                if owner is None:
                    raise ConfigError(
                        f"this optimizer holds a parameter of shape {tuple(p.shape)} that belongs to no prepared model; "
                        "call offload.prepare(model, tiers) before step(), "
                        "or give other parameters an optimizer of torch's"
                    )
                engine, record = owner
                chosen.setdefault(engine, []).append((record, group))
        for engine, pairs in chosen.items():
            engine.gradients.adopt(record for record, _ in pairs)
        return chosen

    def _update(self, engine: Engine, chosen: list[tuple[Record, dict[str, Any]]]) -> None:
        bad = engine.not_finite(r for r, _ in chosen)
        if bad is not None:
            self.skipped += 1
            engine.skipped += 1
            warnings.warn(f"step skipped: the gradient of {bad.name} is not finite; no parameter was changed", RuntimeWarning, stacklevel=4)
            return
        engine.update({record.number: self._hyper(record, group) for record, group in chosen})
        for record, _ in chosen:
            record.step += 1
            self._note_state(engine, record)

    def _hyper(self, record: Record, group: dict[str, Any]) -> dict[str, float | int | bool]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "grad_scale": 1.0, "step": record.step + 1, "decoupled": self._decoupled, "maximize": bool(group["maximize"]),
        }  # fmt: skip

    def _note_state(self, engine: Engine, record: Record) -> None:
        state = self.state[record.parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = engine.moment(record, "exp_avg"), engine.moment(record, "exp_avg_sq")
        state["step"].fill_(float(record.step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes param groups as torch does; moments and steps go to where they rest, in fp32."""
        saved = dict(state_dict["state"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        old = [i for g in state_dict["param_groups"] for i in g["params"]]
        new = [p for g in self.param_groups for p in g["params"]]
        for index, p in zip(old, new, strict=True):
            if index not in saved:
                continue
            owner = record_of(p)
            if owner is None:
                raise ConfigError(
                    "load_state_dict: this optimizer's parameters belong to no prepared model; call offload.prepare(model, tiers) first"
                )
            engine, record = owner
            entry = saved[index]
            for role in ("exp_avg", "exp_avg_sq"):
                if tuple(entry[role].shape) != tuple(record.shape):
                    raise ConfigError(
                        f"load_state_dict: {role} of {record.name} has shape {tuple(entry[role].shape)}, the parameter {tuple(record.shape)}"
                    )
                value = entry[role]
                engine.state.write_state(record, role, value.plain() if hasattr(value, "plain") else value)
            record.step = int(entry["step"])
            self._note_state(engine, record)


class Adam(AdamW):
    """`torch.optim.Adam`: weight decay is an L2 term of the gradient, 0 unless given."""

    _decoupled = False


def _check(lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not of shape {tuple(lr.shape)}")
    for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            raise ValueError(f"{name} must be at least 0, not {value}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{i}] must be in [0, 1), not {beta}")
