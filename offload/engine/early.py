"""Updates that start during the backward.

[Note: updates under the backward]
With updates="backward", the backward of a step's last micro-batch begins a gated batch: hyperparameters are those that the optimizer then has.
A unit's updates *start* once every gradient that the graph holds for it has come and no lease on it stands, so nothing in this backward needs its
values any more; they are *opened* once those gradients are at rest and finite. Gradients that rest on NVMe are taken from the staging buffer in
which they landed, where the update has its own buffer by then; they need not be read, nor, unless somebody may read `.grad`
(`keep_gradients`), be written. Everything else is left to step(). Until step() has found that
it would have done just that, whatever would make a difference is refused: before it happens where it can be seen, else for good.

Gradients that pass (planner/passing.py) land in places that another unit's may still be in: that one's updates are opened first. Units of which this
backward starts no updates though it has gradients for them are given places of their own before it computes any; all are where there are hidden uses.

[Note: hidden uses]
A forward without gradients inside a custom function's, as reentrant checkpoints are, may run again with them in its backward: the graph does not
tell. Units so used are left to step().
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

import torch

from offload.engine.atrest import AtRest
from offload.engine.background import Background, Hypers
from offload.engine.gradients import Gradients
from offload.engine.graph import accumulates
from offload.engine.passing import Passing
from offload.engine.record import Record, Unit
from offload.engine.slots import Use
from offload.engine.sources import GradientSource
from offload.errors import ConfigError, OffloadError, StepError
from offload.planner.schedule import unit_order

KEEPING = 'A plan with keep_gradients=True, or updates="forward", has a place for it; zero_grad() drops what there is'
WAY_OUT = 'prepare(..., updates="forward") allows it'


class Optimizer(Protocol):
    """What this needs of an optimizer that holds parameters of the model."""

    def hypers_of(self, records: Iterable[Record]) -> dict[int, Hypers]:
        """By number, for those of the records that it holds and could step now: what the next step would update them with."""

    def begin(self, records: Iterable[Record]) -> None:
        """Brings their moments to where they rest."""


class Early:
    """Which updates start when in a backward. `accumulate`: the micro-batches of a step; 0: none ever does."""

    def __init__(
        self, units: Sequence[Unit], gradients: Gradients, background: Background, uses: Sequence[Use], forward: Callable[[], list[int]],
        accumulate: int, passing: Passing, keep: Callable[[Sequence[int]], None],
    ) -> None:  # fmt: skip
        """`keep` gives units whose gradients pass places of their own, or raises."""
        self._units, self._gradients, self._background, self._uses, self._forward = units, gradients, background, uses, forward
        self._passing, self._keep = passing, keep
        self.accumulate = accumulate
        self.units_most = len(units)  # those whose gradients come first
        self.keep_gradients = True  # also where an update had no need of them at rest
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.hidden: set[int] = set()  # see [Note: hidden uses]
        self._trained = [[r for r in u.records if r.trained] for u in units]
        self._order: list[int] = []
        self._error: OffloadError | None = None
        self.reset()

    def reset(self) -> None:
        """A step is over."""
        self._backwards = 0  # that accumulated, since the last step
        for unit in self._passing.over():
            self._gradients.entries.spend(self._trained[unit])
        self.hidden.clear()
        self._task = -1  # of the backward that starts updates
        self._awaited: dict[int, set[int]] = {}  # by unit, the parameters whose gradients are to come
        self._chosen: frozenset[int] = frozenset()  # units whose updates this backward is to start
        self._complete: list[int] = []
        self._hypers: dict[int, Hypers] = {}
        self._started: dict[int, list[int]] = {}  # by unit, the generations of its gradients
        self._opened: set[int] = set()
        self._spoilt = False

    # During a backward

    def order(self) -> list[int]:
        """The units in the order in which their updates are expected to come."""
        forward = self._forward()
        return self._order or unit_order(forward, self._most(forward) if self.accumulate else 0)

    def _most(self, forward: list[int]) -> int:
        """How many units may be early: those whose gradients pass are, however few are to be."""
        return max(self.units_most, *(n for n, unit in enumerate(reversed(forward), 1) if self._passing.has(unit)), 0)

    def begin(self, scaled: bool = False) -> None:
        """A backward begins, and no gradient of it has come. OffloadError if the last one's updates have started; ConfigError if its loss is
        `scaled` by a GradScaler."""
        if not self.accumulate or not self._most(self._forward()) or not any(accumulates(r.parameter) for records in self._trained for r in records):
            return
        self.check()
        if scaled:
            raise ConfigError(
                "a GradScaler scaled the loss of this backward: a step in which a gradient overflows is to be skipped whole; with "
                'updates="backward" a part of it would be applied before that shows. Nothing was changed. bf16 and fp32 gradients need no scaler: '
                f"leave it out (GradScaler(enabled=False)); {WAY_OUT}"
            )
        if self._started:
            raise OffloadError(
                f"a backward began before step(), and the last one has started the updates of {self._name(next(iter(self._started)))} already. "
                f"Call step() after {self.accumulate} of them, declare their number with prepare(..., accumulate=N), or {WAY_OUT}"
            )
        self._task, self._awaited, self._complete = -1, {}, []  # of one that raised
        if not any(self._begun(r) for records in self._trained for r in records):
            self._backwards = 0
        self._backwards += 1
        if self._backwards == self.accumulate:
            self._arm()

    def _begun(self, record: Record) -> bool:
        """Whether the parameter has a gradient other than the zeros of zero_grad(set_to_none=False)."""
        return record.parameter.grad is not None and record.number not in self._gradients.places.zeroed

    def nested(self) -> None:
        """A backward begins inside of another, which may have shown no sign yet. BudgetError as for one."""
        if self.hidden and self._passing.units:
            self._keep(list(self._passing.units))  # which of them it has gradients for is not known, nor which it adds to others

    def _arm(self) -> None:
        optimizer = self._optimizer()
        forward = self._forward()
        most = self._most(forward)
        chosen = [u for u in unit_order(forward, most)[:most] if self._trained[u] and u not in self.hidden]
        chosen = [u for u in chosen if all(accumulates(r.parameter) for r in self._trained[u])]
        known = optimizer.hypers_of(r for u in chosen for r in self._trained[u]) if optimizer is not None else {}
        chosen = [u for u in chosen if all(r.number in known for r in self._trained[u])]
        self._passing.forget()
        coming = [u for u in self._passing.units if u not in chosen and any(accumulates(r.parameter) for r in self._trained[u])]
        left = list(self._passing.units) if self.hidden else coming
        if left:
            self._keep(left)
        if optimizer is None or not chosen:
            return
        optimizer.begin(r for u in chosen for r in self._trained[u])
        self._hypers = {r.number: known[r.number] for u in chosen for r in self._trained[u]}
        self._order = [*chosen, *(u for u in forward if u not in chosen)]
        self._background.gate(self._hypers, self._order)
        self._task = torch._C._current_graph_task_id()
        self._awaited = {u: {r.number for r in self._trained[u]} for u in chosen}
        self._chosen = frozenset(chosen)

    def _optimizer(self) -> Optimizer | None:
        if len(self.optimizers) > 1:
            gc.collect()  # a scheduler leaves its optimizer in a cycle
        if len(self.optimizers) > 1:
            kinds = ", ".join(sorted(type(o).__name__ for o in self.optimizers))
            raise ConfigError(
                f'updates="backward" takes the rates of updates from the optimizer before step(), and {len(self.optimizers)} hold parameters of this '
                f"model ({kinds}). Give one of them param groups for all, drop (del) those that are not stepped, or {WAY_OUT}"
            )
        return next(iter(self.optimizers), None)

    def came(self, record: Record) -> None:
        """Autograd has accumulated into `.grad`."""
        if self._task == -1:
            return
        self.advance()  # what came before; of this one hooks of the user's may be still to run
        awaited = self._awaited.get(record.unit)
        if awaited is None:
            return
        if torch._C._current_graph_task_id() != self._task:
            del self._awaited[record.unit]  # a backward inside of this one, of which its graph did not tell
            return
        awaited.discard(record.number)
        if not awaited:
            del self._awaited[record.unit]
            self._complete.append(record.unit)

    def advance(self) -> None:
        """Starts and opens what may be. See [Note: updates under the backward]."""
        if self._task == -1 or self._spoilt or self._background.gated is None:
            return
        complete, self._complete = self._complete, []
        for unit in complete:
            if self._uses[unit].firm or self._uses[unit].soft:
                self._complete.append(unit)
            elif all(self._stands(r) and self._gradients.entries[r.number].scale == 1.0 for r in self._trained[unit]):
                self._started[unit] = [self._gradients.entries[r.number].generation for r in self._trained[unit]]
        for unit in self._started:
            if unit not in self._opened and self._gradients.landed(self._trained[unit]):
                self._spoilt = not all(math.isfinite(self._gradients.norm_squared(r)) for r in self._trained[unit])
                if self._spoilt:
                    return
                if not self._gradients.give(unit, self._at_once, self._background.open, self.keep_gradients):
                    continue
                self._opened.add(unit)
                if self._passing.has(unit):
                    self._passing.opened(unit)
                    self._gradients.entries.spend(self._trained[unit])
                for record in self._trained[unit]:
                    record.version += 1

    def claim(self, record: Record) -> None:
        """Makes the places in which a gradient is to land its unit's, where they are shared. OffloadError if another's is there and must stay."""
        unit = record.unit
        if not self._passing.has(unit):
            return
        if unit not in self._chosen or torch._C._current_graph_task_id() != self._task:
            raise OffloadError(
                f"the gradient of {record.name} has no place to rest, as this plan (keep_gradients=False) has it pass to an update that its backward "
                f"starts, and there is none. {KEEPING}"
            )
        holder = self._passing.holder(unit)
        if holder is not None:
            self._clear(holder, record)
        self._passing.take(unit)

    def _clear(self, holder: int, record: Record) -> None:
        """Opens the updates of a unit in whose places the gradient of another is to land; waits for its own gradients to land."""
        self.advance()
        if holder in self._started and holder not in self._opened and not self._spoilt:
            self._gradients.landed(self._trained[holder], wait=True)
            self.advance()
        if holder in self._opened:
            return
        if self._spoilt:  # the step is skipped, or ends the run
            self._gradients.entries.spend(self._trained[holder])
            return
        self._background.check()
        why = f"the gradient of {record.name} came while {self._name(holder)}, whose places for gradients it shares, still had gradients to come"
        if self._opened:
            self._fail(why)
        raise OffloadError(f"{why}. {KEEPING}")

    def takes(self, unit: int, chunk: int) -> bool:
        """Whether a gradient that has come whole is for its update alone, and that can start at once. From any thread."""
        return not self.keep_gradients and unit in self._chosen and not self._spoilt and self._at_once(unit, chunk)

    def _at_once(self, unit: int, chunk: int) -> bool:
        """Whether a chunk's update, once it is opened, waits for no buffer. From any thread."""
        gated = self._background.gated
        return gated is not None and gated.has_frame(unit, chunk)

    def _stands(self, record: Record) -> bool:
        """Whether `.grad` is the parameter's gradient at rest."""
        grad = record.grad
        if not isinstance(grad, AtRest) or grad.chain or not isinstance(grad.source, GradientSource):
            return False
        return grad.source.record is record and grad.source.current

    # Between that backward and step()

    def started(self, unit: int) -> bool:
        return unit in self._started

    def opened(self, record: Record) -> bool:
        return record.unit in self._opened

    def guard_use(self, unit: int) -> None:
        """OffloadError if the unit's updates have started: whoever wants its values wants those before."""
        if unit in self._started:
            self.check()
            self._background.check()
            self.guard(self._trained[unit][0], "using the value")

    def guard(self, record: Record, doing: str, whole: bool = False) -> None:
        """OffloadError if the update of the parameter (`whole`: of any) has started, and `doing` would not be as if it had not."""
        if whole and self._passing.has(record.unit):
            raise OffloadError(f"{doing} of {record.name}, which this plan (keep_gradients=False) has pass to its update and rest nowhere. {KEEPING}")
        if self._started and (record.unit in self._started or (whole and torch._C._current_graph_task_id() < 0)):
            unit = record.unit if record.unit in self._started else next(iter(self._started))
            raise OffloadError(
                f'{doing} of {record.name} between backward and step(): with updates="backward" the update of {self._name(unit)} has started. '
                f"Do it before the backward or after step(); {WAY_OUT}"
            )

    def refuse(self, doing: str) -> None:
        """OffloadError if any update has started, and `doing` would come too late."""
        if self._started:
            unit = self._name(next(iter(self._started)))
            raise OffloadError(
                f'{doing} between backward and step(): with updates="backward" the update of {unit} has started. Do it after step(); {WAY_OUT}'
            )

    # step()

    def check(self) -> None:
        """Raises the error that left a step partly applied."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def verify(self, hypers: dict[int, Hypers]) -> None:
        """Unless what has started is what step() would do with `hypers`: StepError, for good, or OffloadError where no update was opened yet."""
        self.check()
        self._background.check()
        for unit, generations in self._started.items():
            for record, generation in zip(self._trained[unit], generations, strict=True):
                grad, now, used = record.grad, hypers.get(record.number), self._hypers[record.number]
                if grad is None:
                    self._fail(f"the gradient of {record.name} was dropped (zero_grad() or .grad = None)")
                elif not self._stands(record) or self._gradients.entries[record.number].generation != generation:
                    self._fail(f"the gradient of {record.name} was replaced")
                elif now is None:
                    self._fail(f"{record.name} is not stepped by this optimizer")
                elif now != used:
                    key = next(k for k in used if used[k] != now[k])
                    self._fail(f"{key} of {record.name} was {used[key]} at the start of the backward and is {now[key]} now")

    def skip(self, why: str) -> None:
        """The step changes nothing. StepError, for good, if a part of it has."""
        if not self.accumulate:
            return
        self.check()
        if self._opened:
            self._fail(why)
        self._background.drop()
        self.reset()

    def _fail(self, why: str) -> NoReturn:
        """The step cannot be what was asked for. Where none of its updates was opened yet, all is as it was, and they are left to step()."""
        started = f'{why}, after the backward had started updates (updates="backward")'
        if not self._opened:
            self._background.drop()
            self._task, self._awaited, self._complete = -1, {}, []
            self._started.clear()
            raise OffloadError(
                f"{started}: none of them is applied, and nothing was changed. Call step() again for a step by what there is now, or zero_grad() for "
                f"none; {WAY_OUT}"
            )
        done = ", ".join(self._name(u) for u in list(self._opened)[:3]) + (", ..." if len(self._opened) > 3 else "")
        self._error = StepError(
            f"{started}: the step is partly applied ({len(self._opened)} units: {done}), and this model can only be closed. "
            'Go on from a checkpoint, with prepare(..., updates="forward") (train.updates in a run file), which takes all of a step or nothing'
        )
        raise self._error

    def _name(self, unit: int) -> str:
        return self._units[unit].name or "the model's own parameters"
