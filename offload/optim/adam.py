"""AdamW and Adam.

Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); Kingma and Ba, Adam (2015). Arithmetic: cpp/simd/adam.h.

[Note: whose moments]
`state` decides, as in torch: a parameter without an entry starts afresh, whatever rests for it. A parameter has room for one set of moments.
The optimizer that starts or loads a set is its owner; an earlier one finds its own entry stale, and is refused at its next step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload.dist.divided import is_divided, part_of
from offload.engine.atrest import AtRest
from offload.engine.background import Hypers
from offload.engine.engine import Engine
from offload.engine.record import Record
from offload.engine.registry import record_of
from offload.engine.sources import MomentSource
from offload.errors import ConfigError, OffloadError
from offload.planner.form import MOMENTS

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
_Group = dict[str, Any]
_Values = dict[str, Any]  # of one parameter: step, exp_avg, exp_avg_sq


class Adam(torch.optim.Optimizer):
    """`torch.optim.Adam` for the parameters of prepared models.

    Param groups, schedulers, `step(closure)`, `state_dict` and `load_state_dict` are torch's. `state[p]` has `step` (fp32 scalar), `exp_avg` and
    `exp_avg_sq` (at rest; they read as fp32, and are rounded to `Precision(moments=...)` when written). A step in which a gradient is not finite
    is skipped whole and warned of; `skipped` counts them. `torch.amp.GradScaler` works unchanged, and moves no gradient: the update unscales, and
    the norms tell what is not finite; a step that it finds so is skipped without a warning. With updates="backward", ConfigError
    at the first backward from a loss that one has scaled. `foreach` and `fused` choose among torch's kernels and change nothing here.
    ConfigError for `amsgrad`, `capturable` and `differentiable`.
    """

    skipped = 0
    _step_supports_amp_scaling = True  # GradScaler then leaves `grad_scale` and `found_inf` here for the time of a step

    def __init__(
        self, params: _Params, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, foreach: bool | None = None, maximize: bool = False, capturable: bool = False,
        differentiable: bool = False, fused: bool | None = None, decoupled_weight_decay: bool = False,
    ) -> None:  # fmt: skip
        _check_settings(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize, "foreach": foreach,
            "capturable": capturable, "differentiable": differentiable, "fused": fused, "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: _Group) -> None:
        _refuse_unsupported(self.defaults | param_group)
        super().add_param_group(param_group)
        self._engines()

    def _engines(self) -> list[Engine]:
        """Those of all parameters; from here on they know this optimizer."""
        homes = (record_of(p) for group in self.param_groups for p in group["params"])
        engines = list(dict.fromkeys(home[0] for home in homes if home is not None))
        for engine in engines:
            engine.early.optimizers.add(self)
        return engines

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter whose `.grad` is not None. Calls `closure` first, with gradients enabled, and returns its loss.

        With updates="backward", StepError where what the backward has started is not what this step would do: the step is then partly
        applied, and so are all later ones refused. OffloadError, and nothing changed, where none was open yet. ConfigError for a `closure`.
        """
        loss, engines = None, self._engines()
        if engines and all(engine.closed for engine in engines):  # and their gradients are gone with them
            raise OffloadError("the runtime that holds this optimizer's parameters was closed, so there is nothing to step")
        if closure is not None:
            if any(engine.early.accumulate for engine in engines):
                raise ConfigError('step(closure) runs its backward inside the step; prepare(..., updates="forward") allows it')
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            chosen = self._with_gradients()
            for engine in engines:
                engine.early.verify(self._hypers_now(chosen.get(engine, ())))
            for engine, part in chosen.items():
                engine.gradients.adopt([record for record, _ in part])
            factor = self._inverse_scale()
            _scale(chosen, factor)  # gradients are read without the loss scale from here on, as after torch's own step
            if self._all_finite(chosen):
                left = dict(chosen)
                try:
                    for engine in engines:
                        if engine in chosen:
                            self._update(engine, chosen[engine])
                            del left[engine]
                        else:
                            engine.early.skip("no parameter has a gradient")
                except ConfigError:  # ranks would not have updated alike: a step that is tried again unscales again
                    _scale(left, 1 / factor)
                    raise
            for engine, part in chosen.items():
                engine.gradients.entries.stepped(record for record, _ in part)
        return loss

    def _hypers_now(self, part: Iterable[tuple[Record, _Group]]) -> dict[int, Hypers]:
        factor = self._inverse_scale()
        return {record.number: _hyper(group, self._next_step(record)) | {"grad_scale": factor} for record, group in part}

    def _next_step(self, record: Record) -> int:
        values = self.state.get(record.parameter)
        return int(values["step"]) + 1 if values else 1

    # Updates that start during the backward (engine/early.py)

    def hypers_of(self, records: Iterable[Record]) -> dict[int, Hypers]:
        """What the next step would update those of the records with that this holds; without those that it would refuse."""
        wanted = {record.number: record for record in records}
        known: dict[int, Hypers] = {}
        for group in self.param_groups:
            for p in group["params"]:
                home = record_of(p)
                if home is None or wanted.get(home[1].number) is not home[1]:
                    continue
                try:
                    _refuse_unsupported(group)
                    if self.state.get(p):
                        _check_values(home[1], self.state[p])
                except ConfigError:
                    continue
                known[home[1].number] = _hyper(group, self._next_step(home[1]))
        return known

    def begin(self, records: Iterable[Record]) -> None:
        """Brings their moments to where they rest, as the next step would."""
        with torch.no_grad():
            for record in records:
                home = record_of(record.parameter)
                assert home is not None
                self._begin(home[0], record)

    def _with_gradients(self) -> dict[Engine, list[tuple[Record, _Group]]]:
        chosen: dict[Engine, list[tuple[Record, _Group]]] = {}
        for group in self.param_groups:
            _refuse_unsupported(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                engine, record = _home(p)
                if self.state.get(p):
                    _check_values(record, self.state[p])
                chosen.setdefault(engine, []).append((record, group))
        return chosen

    def _inverse_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).double().reciprocal().float())  # GradScaler.unscale_ rounds so

    def _all_finite(self, chosen: dict[Engine, list[tuple[Record, _Group]]]) -> bool:
        """Whether all gradients are, whichever model they are of; else the step is counted as skipped."""
        told = bool(getattr(self, "found_inf", 0))
        found = (engine.not_finite(record for record, _ in part) for engine, part in chosen.items())
        bad = None if told else next((record for record in found if record is not None), None)
        if bad is None and not told:
            return True
        for engine in chosen:
            engine.early.skip("a gradient is not finite" if bad is None else f"the gradient of {bad.name} is not finite")
        self.skipped += 1
        for engine in chosen:
            engine.skipped += 1
        if bad is not None:
            warnings.warn(f"step skipped: the gradient of {bad.name} is not finite; no parameter was changed", RuntimeWarning, stacklevel=4)
        return False

    def _update(self, engine: Engine, part: list[tuple[Record, _Group]]) -> None:
        steps = [self._next_step(r) if engine.early.started(r.unit) else self._begin(engine, r) for r, _ in part]
        engine.update({record.number: _hyper(group, step) for (record, group), step in zip(part, steps, strict=True)})
        # A graph that saved one at rest, used outside of its module, finds it changed, as after torch's own step.
        torch.autograd.graph.increment_version([record.parameter for record, _ in part if not record.parameter.is_inference()])
        for (record, _), step in zip(part, steps, strict=True):
            self._note(engine, record, step)

    def _begin(self, engine: Engine, record: Record) -> int:
        """Brings the moments that `state` has to their place; gives the number of the step to take. See [Note: whose moments]."""
        values = self.state.get(record.parameter)
        if not values:
            engine.state.start_moments(record)
            return 1
        if not any(_rests(values, record, role) for role in MOMENTS):
            engine.state.replace_moments(record)
        self._store(engine, record, values)
        return int(values["step"]) + 1

    def _store(self, engine: Engine, record: Record, values: _Values) -> None:
        """Moments from anywhere go to where they rest, in the form they have there."""
        for role in MOMENTS:
            if not _rests(values, record, role):
                value = values[role]
                value = value if record.divided is None else record.divided.part(value, role)
                engine.state.write_moment(record, role, value.plain() if isinstance(value, AtRest) else value)
                values[role] = engine.moment(record, role)

    def _note(self, engine: Engine, record: Record, step: int) -> None:
        values = self.state[record.parameter]
        record.step = step
        if isinstance(values.get("step"), torch.Tensor):
            values["step"].fill_(float(step))
        else:
            values["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        for role in MOMENTS:
            if role not in values:
                values[role] = engine.moment(record, role)

    # Checkpoints (offload/checkpoint)

    def settle(self, engine: Engine) -> dict[int, _Values]:
        """Brings all moments to where they rest. Of each parameter of the engine's that has a state, by number: what it is."""
        with torch.no_grad():
            held = [home for group in self.param_groups for p in group["params"] if self.state.get(p) and (home := record_of(p)) is not None]
            for owner, record in held:
                if owner is engine:
                    _check_values(record, self.state[record.parameter])
                    self._begin(engine, record)
        return {record.number: self.state[record.parameter] for owner, record in held if owner is engine}

    def replace(self, engine: Engine, record: Record, values: _Values | None) -> None:
        """The parameter starts afresh (None), or its moments are those that rest now, and `values` its step and whatever else its state has."""
        self.state.pop(record.parameter, None)
        if values is None:
            engine.state.start_moments(record)
        else:
            engine.state.replace_moments(record)
            self.state[record.parameter] = {k: v for k, v in values.items() if k != "step"}
            self._note(engine, record, int(values["step"]))

    # Loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes param groups as torch does; moments and steps go to where they rest. ConfigError, before anything is changed, for a state
        that does not fit; parameters that it lacks start afresh.
        """
        loads: list[tuple[Engine, Record, _Values, bool]] = []
        for engine in self._engines():
            engine.early.refuse("load_state_dict()")

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loads.extend(self._checked(given))
            own = set(itertools.chain.from_iterable(group["params"] for group in given["param_groups"]))
            return given | {"state": {key: value for key, value in given["state"].items() if key not in own}}

        def put(_: torch.optim.Optimizer) -> None:
            for load in loads:
                self._load(*load)

        # Between the user's own hooks: those before see the state as given, those after find it loaded.
        hooks = self.register_load_state_dict_pre_hook(take), self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _checked(self, given: dict[str, Any]) -> list[tuple[Engine, Record, _Values, bool]]:
        """For each parameter that has or had a state: what it is to have, and whether the moments that rest are this optimizer's."""
        for group in given["param_groups"]:
            _refuse_unsupported(group)
        loads = []
        keys = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
        for key, p in zip(keys, itertools.chain.from_iterable(group["params"] for group in self.param_groups), strict=False):  # torch compares
            values, present = given["state"].get(key) or {}, self.state.get(p) or {}
            if not values and not present:
                continue
            engine, record = _home(p)
            if values:
                _check_values(record, values)
            mine = bool(present) and all(_rests(present, record, role) and _current(present[role]) for role in MOMENTS)
            loads.append((engine, record, values, mine))
        return loads

    def _load(self, engine: Engine, record: Record, values: _Values, mine: bool) -> None:
        if not values:
            if mine:
                engine.state.start_moments(record)
            return
        entry = dict(values)
        if not (mine and all(_rests(entry, record, role) for role in MOMENTS)):
            engine.state.replace_moments(record)
        self._store(engine, record, entry)
        self.state[record.parameter] = {k: v for k, v in entry.items() if k != "step" and k not in MOMENTS}
        self._note(engine, record, int(entry["step"]))


class AdamW(Adam):
    """`torch.optim.AdamW`: as Adam here, with weight decay apart from the gradient, 0.01 unless given."""

    def __init__(
        self, params: _Params, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None, capturable: bool = False,
        differentiable: bool = False, fused: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=True,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _home(p: torch.Tensor) -> tuple[Engine, Record]:
    """The engine and the record of an optimizer's parameter."""
    home = record_of(p)
    if home is None:
        raise ConfigError(
            f"this optimizer holds a parameter of shape {tuple(p.shape)} that belongs to no prepared model; call offload.prepare(model, tiers) "
            "before step() and load_state_dict(), or give other parameters an optimizer of torch's"
        )
    engine, record = home
    if engine.closed:
        raise OffloadError(f"the runtime that holds {record.name} was closed")
    if not record.trained:
        raise ConfigError(f"parameter {record.name} was frozen when prepare() ran, so it has no moments; set requires_grad before prepare()")
    return home


def _scale(chosen: dict[Engine, list[tuple[Record, _Group]]], factor: float) -> None:
    for engine, part in chosen.items():
        engine.gradients.scale((record for record, _ in part), factor)


def _rests(values: _Values, record: Record, role: str) -> bool:
    """Whether a moment is at rest where it belongs."""
    value = part_of(values[role])
    if not isinstance(value, AtRest) or value.chain or not isinstance(value.source, MomentSource):
        return False
    return value.source.record is record and value.source.role == role


def _current(value: Any) -> bool:
    """Whether a moment at rest has given way to no other."""
    return bool(part_of(value).source.current)  # type: ignore[attr-defined]


def _check_values(record: Record, values: _Values) -> None:
    for role in ("step", *MOMENTS):
        if role not in values:
            raise ConfigError(f"the optimizer state of {record.name} has no {role}; load the state_dict() of an Adam or AdamW")
    for role in MOMENTS:
        value = values[role]
        if not isinstance(value, torch.Tensor) or value.shape != record.parameter.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"{role} of {record.name} in the optimizer state is {shape}, the parameter {tuple(record.parameter.shape)}")
        if is_divided(value) != (record.divided is not None):
            raise ConfigError(f"of {role} in the optimizer state and the parameter {record.name} one is a DTensor: give both as such, or neither")
        value = part_of(value)
        if isinstance(value, AtRest) and isinstance(value.source, MomentSource) and not value.source.current:
            raise ConfigError(
                f"the {role} of {value.source.record.name} that this state has gave way to that of another optimizer, or to one loaded since: "
                "a parameter has room for one set of moments. Step it by one optimizer, or load_state_dict() a copy of the state to go on with it"
            )


def check_group(group: _Group) -> None:
    """ValueError or TypeError for settings that no step could use."""
    _refuse_unsupported(group)
    _check_settings(group["lr"], group["betas"], group["eps"], group["weight_decay"])
    _hyper(group, 1)


def _hyper(group: _Group, step: int) -> Hypers:
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]), "grad_scale": 1.0, "step": step,
        "decoupled": bool(group["decoupled_weight_decay"]), "maximize": bool(group["maximize"]),
    }  # fmt: skip


def _refuse_unsupported(group: _Group) -> None:
    for name in ("amsgrad", "capturable", "differentiable"):
        if group.get(name):
            raise ConfigError(f"{name} is not supported; leave it out")


def _check_settings(lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not of shape {tuple(lr.shape)}")
    for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            raise ValueError(f"{name} must be at least 0, not {value}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{i}] must be in [0, 1), not {beta}")
