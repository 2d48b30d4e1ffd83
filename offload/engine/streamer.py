"""Streams units through the device around forward and backward. The only module that registers hooks.

[Note: streaming]
Forward: a unit's pre-hook takes a firm lease, binds its parameters and starts fetching the unit that follows in the recorded
order; its post-hook undoes that. Tensors saved for backward that view a slot are packed as handles and found again wherever the
unit then is; all others go to the hooks around (checkpointing's, say). Recomputation wraps inside the lease and outside those
hooks, in the first forward and in the second alike, so that both save the same tensors. Backward: the first gradient of a unit's
output takes a soft lease and binds again, for checkpoints that call `forward` without hooks.

[Note: scaled losses]
Where updates start in the backward, GradScaler.scale is watched, once for all scalers: a hook on what it gives notes the backward that starts there,
so that one whose steps may have to be skipped whole is refused before anything of it is updated.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import _autograd
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

from offload.dist.divided import part_of, whole
from offload.engine.activations import Activations
from offload.engine.atrest import AtRest
from offload.engine.binding import Entry, Watch, bind, unbind
from offload.engine.buffers import Buffers
from offload.engine.caches import as_they_are
from offload.engine.containers import replaced, tensors
from offload.engine.eager import compiled_by, compiler, eager
from offload.engine.early import Early
from offload.engine.functions import in_backward, in_forward
from offload.engine.gradients import Gradients
from offload.engine.hook import Hook
from offload.engine.order import AccessOrder
from offload.engine.record import Record, Unit
from offload.engine.slots import Slots
from offload.errors import ConfigError, OffloadError
from offload.planner.schedule import AHEAD


@dataclass(eq=False)
class _Call:
    """One forward of a unit under way."""

    unit: int
    before: list[torch.Tensor | None]
    owners: list[int]
    watch: Watch
    within_checkpoint: bool = False
    saved: saved_tensors_hooks | None = None
    checkpoint: Generator[None, None, None] | None = None
    start: float = 0.0


@dataclass
class _Backward:
    """The unit whose backward is under way, with what its modules had before it was bound (None: it is not bound)."""

    unit: int | None = None
    before: list[torch.Tensor | None] | None = None
    task: int = -1
    start: float = 0.0


@dataclass(frozen=True)
class _Saved:
    """A tensor saved for backward that views a parameter on the device: found again wherever the parameter then is. `spec`: of a DTensor whose part
    does so."""

    record: Record
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any = None


class _Kwargs(dict[str, Any]):
    """Keyword arguments that live as long as the frame of a module's call: an interrupt, for which torch calls no hook, ends the call too."""

    def __init__(self, kwargs: dict[str, Any], ended: Callable[[], None]) -> None:
        super().__init__(kwargs)
        self._ended = ended

    @eager
    def __del__(self) -> None:
        self._ended()


class _Ending:
    """Autograd's final callback: `end(True)`. A backward that raises never calls it but lets go of it, which serves as well."""

    def __init__(self, end: Callable[[bool], None]) -> None:
        self._end: Callable[[bool], None] | None = end

    def __call__(self, whole: bool = True) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(whole)

    def __del__(self) -> None:
        self(False)


class Streamer:
    """Hooks of one prepared model. `early` is set before the first of them runs."""

    early: Early

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        records: list[Record],
        slots: Slots,
        gradients: Gradients,
        activations: Activations,
        recomputed: Collection[int],
        ready: Callable[[int], None],
    ) -> None:
        self.model, self.units, self.slots, self.gradients = model, units, slots, gradients
        self.order = AccessOrder(len(units))
        self.entries = _entries(units, records)
        self.owners = [sorted({e.record.unit for e in entries}) for entries in self.entries]
        self.activations, self.recomputed = activations, recomputed
        compute = slots.device.compute  # a checkpoint keeps the random state of the devices of its arguments, which may all have left
        self._anchor = None if compute.type == "cpu" else torch.empty(1, device=compute)
        self.before_backward: Callable[[], None] = lambda: None
        self.after_backward: Callable[[bool], None] = lambda whole: None
        self.on_root: Callable[[list[torch.Tensor]], None] = lambda inputs: None
        self._inside = {module: list(module.modules()) for unit in units if unit.repeated for module in unit.modules}
        self._ready = ready
        self._calls: list[_Call] = []
        self._backward = _Backward()
        self._handles: list[Any] = []
        self.unplanned = False  # activations are to be planned for at the first forward
        self._with_gradients = True  # whether the last forward of the root was
        self._own_hooks: weakref.WeakKeyDictionary[Callable[[torch.Tensor], Any], Any] = weakref.WeakKeyDictionary()  # pack: the hooks around
        self._enter_hooks: list[tuple[nn.Module, Any]] = []
        slots.on_steal = self._stolen
        gradients.before_backward = lambda: self._begin_backward(1)
        self._register(model, records)

    def _register(self, model: nn.Module, records: list[Record]) -> None:
        keep = self._handles.append
        # torch passes no keywords any more to the hooks of a call under way if one of the user's closes the model
        keep(model.register_forward_pre_hook(Hook(lambda m, a, k=None: self._root_forward(m, a, k)), prepend=True, with_kwargs=True))
        for unit in self.units:
            for module in unit.modules:
                enter = Hook(lambda m, a, k=None, u=unit.number: self._enter(m, u, a, k))
                handle = module.register_forward_pre_hook(enter, with_kwargs=True)
                self._enter_hooks.append((module, handle))
                keep(handle)
                leave = Hook(lambda m, a, o, u=unit.number: self._leave(m, u, o))
                keep(module.register_forward_hook(leave, always_call=True, prepend=True))
        for record in records:
            if record.trained:
                keep(record.parameter.register_post_accumulate_grad_hook(_arrival(record.number, self.gradients)))
        for module in model.modules():
            keep(module.register_load_state_dict_pre_hook(_copy_on_assign))

    def close(self) -> None:
        self.abandon()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _open(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """A call's keywords. OffloadError if a hook that ran before has closed the model."""
        if kwargs is None or not self._handles:
            raise OffloadError("the runtime of this model was closed by a hook in the middle of a forward; close it after its last backward and step")
        return kwargs

    # Forward

    def _root_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, Any] | None:
        if module is not self.model:
            return None  # a copy.copy() of the model shares its hooks
        kwargs = self._open(kwargs)
        if torch._C._current_graph_task_id() < 0:  # inside a backward it is a recomputation, whose leases stand
            self._end_backward()
            self.slots.device.stalls.computing()
            self.slots.begin_forward()
            self.activations.begin()
            self._with_gradients = torch.is_grad_enabled()
        for unit_module, handle in self._enter_hooks:  # last, so that what is recomputed starts from what the user's hooks made
            hooks = unit_module._forward_pre_hooks
            hooks[handle.id] = hooks.pop(handle.id)
        if self.unplanned:
            self.on_root(list(tensors((args, kwargs))))
        return _to_device(args, self.slots), _to_device(kwargs, self.slots)

    def _enter(self, module: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, Any] | None:
        if module not in self.units[number].modules:
            return None  # a copy.copy() of the model shares its hooks
        kwargs = self._open(kwargs)
        if torch._C._current_graph_task_id() < 0:
            if self._backward.task != -1:
                self._end_backward()  # a backward that raised
            if not self._calls and torch.is_grad_enabled():
                self.gradients.entries.new_forward()
                if self.unplanned:  # it was not the root that was called, or nothing was given to it
                    self.on_root(list(tensors((args, kwargs))))
            if self._with_gradients and not torch.is_grad_enabled() and in_forward():
                self.early.hidden.update(self.owners[number])
            self.order.computed(self.owners[number])
        self._check(number)
        start = self._now()
        flats = self._lease(number)
        call = self._begin(number, flats, start)
        self._visited(("forward", number))
        if torch.is_grad_enabled():
            if number in self.recomputed:
                call.checkpoint = self._checkpoint(module, number, args, kwargs)
                next(call.checkpoint)
            call.within_checkpoint = call.checkpoint is None and _autograd._top_saved_tensors_default_hooks(False) is not None
            call.saved = self._saving()
            call.saved.__enter__()
        return args, _Kwargs(kwargs, lambda: self._end_from(call))

    def _begin(self, number: int, flats: dict[int, list[torch.Tensor]], start: float) -> _Call:
        watch = Watch(self.entries[number], flats)
        call = _Call(number, bind(self.entries[number], flats, self.gradients), self.owners[number], watch, start=start)
        self._calls.append(call)
        return call

    def _check_unwritten(self, call: _Call) -> None:
        """OffloadError if the unit's parameters were written to on the device, which no master would ever see."""
        if call.watch.wrote():
            for owner in call.owners:
                self.slots.give_up(owner)
            raise OffloadError(
                f"parameters of {self.units[call.unit].name} ({type(self.units[call.unit].modules[0]).__name__}) were written to while they were "
                "computed with, which would not reach their masters: write to them outside of forward, as after step(), under torch.no_grad(); "
                "and give nn.Embedding no max_norm, but renormalise there"
            )

    def _leave(self, module: nn.Module, number: int, output: Any) -> Any:
        call = next((c for c in reversed(self._calls) if c.unit == number), None)
        if module not in self.units[number].modules or call is None:
            return None  # its pre-hook did not get so far
        escaping = any(self._on_device(t) for t in tensors(output))
        if escaping:  # a view of a parameter would not outlive its slot
            output = replaced(output, self._on_device, torch.clone)
        self._end_from(call)
        if output is not None:
            self._check_unwritten(call)
        if output is not None and torch.is_grad_enabled():
            mark = self.activations.mark
            for tensor in tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:  # an input handed on begins no backward of a unit's
                    tensor.register_hook(lambda grad, u=number, rebind=call.within_checkpoint: self._enter_backward(u, rebind, mark))
        return output if escaping else None

    def _unit_under(self, tensor: torch.Tensor) -> int | None:
        """The unit whose parameters on the device the tensor views."""
        if type(tensor) is not torch.Tensor:
            tensor = part_of(tensor)
            if isinstance(tensor, AtRest) or hasattr(tensor, "__tensor_flatten__"):  # the latter: of others, as what a collective has yet to fill
                return None
        if tensor.layout != torch.strided:
            return None
        return self.slots.unit_at(tensor.untyped_storage().data_ptr())

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return self._unit_under(tensor) is not None

    def _end_from(self, call: _Call) -> None:
        """Ends a call and whatever is still open inside it."""
        while call in self._calls:
            self._end(self._calls.pop())

    def _end(self, call: _Call) -> None:
        if call.saved is not None:
            call.saved.__exit__(None, None, None)
        if call.checkpoint is not None:
            next(call.checkpoint, None)
        unbind(self.entries[call.unit], call.before)
        for owner in call.owners:
            self.slots.uses[owner].firm -= 1
        self._record("forward", call.unit, call.start)

    def _now(self) -> float:
        """When a span of a trace starts, if there is one."""
        recorder = self.slots.device.stalls.recorder
        return recorder.clock() if recorder is not None else 0.0

    def _record(self, phase: str, number: int, start: float) -> None:
        recorder = self.slots.device.stalls.recorder
        if recorder is not None and start:
            recorder.span("compute", f"{phase} {self.units[number].name}", start)

    def abandon(self) -> None:
        """Undoes whatever is under way."""
        while self._calls:
            self._end(self._calls.pop())
        self._end_backward()

    def _lease(self, number: int) -> dict[int, list[torch.Tensor]]:
        for owner in self.owners[number]:
            self.early.guard_use(owner)
            self._ready(owner)
        for owner in self.owners[number]:
            self.slots.uses[owner].firm += 1
        try:
            return {owner: self.slots.resident(owner) for owner in self.owners[number]}
        except BaseException:
            for owner in self.owners[number]:
                self.slots.uses[owner].firm -= 1
            raise

    def _check(self, number: int) -> None:
        for entry in self.entries[number]:
            now = entry.module._parameters.get(entry.name)
            if now is not entry.record.parameter and not self._bound(number):
                raise ConfigError(
                    f"parameter {entry.record.name} was replaced in its module after prepare(); "
                    "write into it instead (p.copy_(value) under torch.no_grad()), or replace it before prepare()"
                )

    def _bound(self, number: int) -> bool:
        return self._backward.unit == number or any(c.unit == number for c in self._calls)

    @contextmanager
    def lease(self, number: int) -> Iterator[None]:
        """The unit resident and its parameters bound, gradients flowing, while the context lasts."""
        start = self._now()
        flats = self._lease(number)
        call = self._begin(number, flats, start)
        self.order.computed(self.owners[number])
        self._visited(("forward", number))
        try:
            with self._saving():
                yield
        finally:
            self._end_from(call)
        self._check_unwritten(call)

    # Saved tensors

    def _saving(self) -> saved_tensors_hooks:
        outer = _autograd._top_saved_tensors_default_hooks(False)
        slots = self.slots

        def pack(tensor: torch.Tensor) -> Any:
            unit = self._unit_under(tensor)
            if unit is None:
                return None, outer[0](tensor) if outer else tensor
            part = part_of(tensor)
            record, spec = slots.record_at(unit, part), tensor._spec if part is not tensor else None  # type: ignore[attr-defined]
            return _Saved(record, record.version, part.dtype, part.size(), part.stride(), int(part.storage_offset()), spec), None

        def unpack(packed: Any) -> torch.Tensor:
            saved, other = packed
            if saved is None:
                return outer[1](other) if outer else other
            if saved.record.version != saved.version:
                raise OffloadError(
                    f"parameter {saved.record.name}, which this backward needs, was changed since its forward (by a step or a write); "
                    "call backward before changing parameters"
                )
            part = slots.view(saved.record, saved.dtype, saved.size, saved.stride, saved.offset)
            if torch.is_grad_enabled() and slots.moves(saved.record.unit):
                part = part.clone()  # with create_graph it is saved again, where no hooks of ours see it
            return part if saved.spec is None else whole(part, saved.spec)

        self._own_hooks[pack] = outer
        return saved_tensors_hooks(pack, unpack)

    def _within_others_hooks(self) -> bool:
        """Whether hooks for saved tensors other than `_saving`'s are around: those of a checkpoint, or the user's."""
        hooks = _autograd._top_saved_tensors_default_hooks(False)
        while hooks is not None and hooks[0] in self._own_hooks:
            hooks = self._own_hooks[hooks[0]]
        return hooks is not None

    def _checkpoint(self, module: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None, None, None]:
        def again(anchor: Any, *args: Any, **kwargs: Any) -> Any:
            start = self._now()
            flats = self._lease(number)
            before = bind(self.entries[number], flats, self.gradients)
            try:
                args, kwargs = as_they_are(self.activations.back(args), self.activations.back(kwargs))
                with buffers.back(self.units[number].name), self._saving(), compiled_by(around):
                    return module.forward(*args, **kwargs)
            finally:
                unbind(self.entries[number], before)
                for owner in self.owners[number]:
                    self.slots.uses[owner].firm -= 1
                self._record("recompute", number, start)

        around, buffers, (args, kwargs) = compiler(), Buffers(self._inside[module]), as_they_are(args, kwargs)
        args, kwargs = self.activations.leave(number, self.units[number].name, args, kwargs, self._within_others_hooks())
        settings = True, noop_context_fn, "default", False, True
        return _checkpoint_without_reentrant_generator(again, *settings, self._anchor, *args, **kwargs)  # type: ignore[no-any-return]

    # Backward

    def _begin_backward(self, functions: int = 0) -> None:
        """At the first sign of a backward. `functions`: of those that are running backward, how many are ours."""
        if self._backward.task == -1 and torch._C._current_graph_task_id() >= 0:
            self._backward.task = torch._C._current_graph_task_id()
            self.slots.device.stalls.computing("backward")
            if in_backward() > functions:  # it runs inside another one: a custom function's, as reentrant checkpoints are
                self.gradients.nested_backward()
                self.early.nested()
            else:
                try:
                    self.before_backward()
                except BaseException:
                    self._backward.task = -1  # it is refused: the next one begins anew
                    raise
            torch.autograd.Variable._execution_engine.queue_callback(_Ending(self._end_backward))

    def _enter_backward(self, number: int, rebind: bool, mark: tuple[int, int]) -> None:
        self._begin_backward()
        if self._backward.unit != number:
            self._end_backward_unit()
            self.early.advance()
            if any(self.early.started(owner) for owner in self.owners[number]):
                return  # a gradient only passes through
            self._backward.start = self._now()
            flats = {owner: self.slots.resident(owner) for owner in self.owners[number]}
            for owner in self.owners[number]:
                self.slots.uses[owner].soft = True
            self._backward.unit = number
            if rebind:
                with torch.enable_grad():
                    self._backward.before = bind(self.entries[number], flats, self.gradients)
        self._visited(("backward", number))
        self.activations.ahead(mark)

    def _end_backward_unit(self) -> None:
        number, self._backward.unit = self._backward.unit, None
        if number is None:
            return
        before, self._backward.before = self._backward.before, None
        if before is not None:
            unbind(self.entries[number], before)
        for owner in self.owners[number]:
            self.slots.uses[owner].soft = False
        self._record("backward", number, self._backward.start)

    def _end_backward(self, whole: bool = False) -> None:
        self._end_backward_unit()
        self.activations.forget()
        under_way, self._backward.task = self._backward.task != -1, -1
        if whole:
            self.early.advance()
        if under_way:
            self.after_backward(whole)

    def _stolen(self, number: int) -> None:
        if self._backward.unit is not None and number in self.owners[self._backward.unit]:
            self._end_backward_unit()

    def _visited(self, visit: tuple[str, int]) -> None:
        self.slots.device.relieve()
        recorder = self.slots.device.stalls.recorder
        if recorder is not None:
            recorder.on_visit()
        self.order.note(visit)
        nearer = set(self.owners[visit[1]])
        for phase, number in self.order.ahead(AHEAD):
            if visit[0] == "backward" and phase == "forward":
                return  # an update comes between
            for owner in self.owners[number]:
                if not self.slots.at_hand(owner):
                    self._ready(owner)
                    if not self.slots.prefetch(owner, nearer):
                        return
                nearer.add(owner)


_scale = GradScaler.scale
_scaled: deque[int] = deque(maxlen=256)  # the newest backwards from losses that a scaler scaled; few run at once


@functools.wraps(_scale)
def _watched_scale(self: GradScaler, outputs: Any) -> Any:
    """See [Note: scaled losses]."""
    scaled = _scale(self, outputs)
    if scaled is not outputs:  # it is enabled
        for value in tree_leaves(scaled):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(_note_scaled)
    return scaled


def _note_scaled(grad: torch.Tensor) -> None:
    _scaled.append(torch._C._current_graph_task_id())


def watch_scalers() -> None:
    """From here on `scaled` knows the backwards of losses that any GradScaler scales."""
    GradScaler.scale = _watched_scale  # type: ignore[method-assign]


def scaled() -> bool:
    """Whether the backward that runs starts from a loss that a GradScaler has scaled."""
    return torch._C._current_graph_task_id() in _scaled


def _entries(units: list[Unit], records: list[Record]) -> list[list[Entry]]:
    of_module: dict[int, list[Entry]] = {}
    for record in records:
        for module, name in record.uses:
            of_module.setdefault(id(module), []).append(Entry(module, name, record))
    return [[e for top in unit.modules for m in _inside(top, unit, units) for e in of_module.get(id(m), ())] for unit in units]


def _inside(top: nn.Module, unit: Unit, units: list[Unit]) -> Iterator[nn.Module]:
    """The modules below `top` whose parameters it binds: those that are no unit of their own."""
    others = {id(m) for u in units if u is not unit for m in u.modules}
    seen: set[int] = set()
    stack = [top]
    while stack:
        module = stack.pop()
        if id(module) in seen or (id(module) in others and module is not top):
            continue
        seen.add(id(module))
        yield module
        stack.extend(module.children())


def _arrival(number: int, gradients: Gradients) -> Callable[[torch.Tensor], None]:
    """The hook of one parameter. It holds nothing that holds the parameter: autograd's own reference to it is one that no collector sees."""
    weakly = weakref.ref(gradients)

    def arrived(parameter: torch.Tensor) -> None:
        there = weakly()
        if there is not None:
            there.arrived(there.records[number])
            there.came(there.records[number])

    return arrived


def _to_device(tree: Any, slots: Slots) -> Any:
    """Inputs on the compute device, floating ones in the compute dtype, in whatever containers torch knows."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device=slots.device.compute, dtype=slots.compute if leaf.is_floating_point() else leaf.dtype)

    return tree_map(move, tree)


def _copy_on_assign(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
    """`load_state_dict(assign=True)` copies: what it would assign would not be at rest."""
    local_metadata["assign_to_params_buffers"] = False
