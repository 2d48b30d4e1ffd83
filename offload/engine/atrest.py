"""Tensors whose value rests elsewhere.

[Note: at rest]
`AtRest` has a true shape, dtype and the device cpu, and no memory: a source reads and writes its value. An operation on it runs on the
value read, and what the operation's schema marks as written is written back. A view remembers the operation that made it, and replays it
on the value of its base, so writes through views reach the source. Operations on lists go element by element, so that a whole model is
never read at once. Gradients of one parameter are summed by their sources, where they rest.
A gradient is multiplied by a number, as clipping does, and unscaled by a GradScaler where it rests, without being read.
There is no storage: what reaches for it is refused, for torch would follow a null pointer; only its size is told. numpy gets a copy that
cannot be written to.

[Note: moves]
nn.Module._apply is what `.to()`, `.cuda()`, `.half()` and their kin come down to. They move nothing that rests and refuse a change of dtype. It
converts children and buffers before a parameter is asked, so it is watched, once for all modules: the conversion is tried on an empty tensor
at rest first, and a refusal leaves every buffer as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from offload.dist.divided import is_divided, part_of
from offload.errors import ConfigError, OffloadError
from offload.memory.limits import host_limits

aten = torch.ops.aten
_CPU = torch.device("cpu")


class Source(Protocol):
    """Where a value rests. `read` gives a fresh plain tensor that the caller may write to; `write` stores one."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor: ...

    def write(self, value: torch.Tensor) -> None: ...

    def describe(self) -> str: ...


ATTRIBUTES = ("source", "chain")  # of a tensor at rest
_Step = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]


class AtRest(torch.Tensor):
    """A tensor at rest; see [Note: at rest]."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    source: Source
    chain: tuple[_Step, ...]

    @staticmethod
    def __new__(cls, source: Source, requires_grad: bool = False, chain: tuple[_Step, ...] = (), like: torch.Tensor | None = None) -> AtRest:
        shape, dtype = (like.shape, like.dtype) if like is not None else (source.shape, source.dtype)
        strides = like.stride() if like is not None else None
        offset = like.storage_offset() if like is not None else None
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=_CPU, requires_grad=requires_grad
        )

    def __init__(self, source: Source, requires_grad: bool = False, chain: tuple[_Step, ...] = (), like: torch.Tensor | None = None) -> None:
        self.source, self.chain = source, chain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.numel() > 1000:
            return f"AtRest({self.source.describe()}, shape={tuple(self.shape)}, dtype={self.dtype})"
        with torch.no_grad():
            return f"AtRest({self.source.describe()}, {self.plain()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copy: torch.Tensor = self.plain()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.numel() * self.element_size() > host_limits().room:  # what is pickled stays in memory until the end
            raise OffloadError(
                f"{self.source.describe()} does not fit the memory that is left, so it cannot be pickled; "
                "use offload.save, which streams, or save fewer tensors at once"
            )
        value: torch.Tensor = self.plain()
        if isinstance(self, torch.nn.Parameter):
            value = torch.nn.Parameter(value, self.requires_grad)
        return value.__reduce_ex__(protocol)

    def _no_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OffloadError(
            f"{self.source.describe()} rests outside memory that can be pointed at or shared; read it first, as with .clone(). Of a whole model "
            "offload.save_pretrained() and torch.save(model.state_dict()) write files, of its optimizer too offload.save()"
        )

    data_ptr = storage = _typed_storage = share_memory_ = __dlpack__ = _no_memory

    def untyped_storage(self) -> _NoStorage:  # type: ignore[override]
        return _NoStorage(self)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Takes the value, where torch takes the memory."""
        if isinstance(value, AtRest) and value.source is self.source and value.chain is self.chain:
            return
        if self.chain or value.shape != self.shape or value.dtype != self.dtype:
            raise OffloadError(
                f"{self.source.describe()} rests as {self.dtype} of shape {tuple(self.source.shape)}, which assigning {value.dtype} of shape "
                f"{tuple(value.shape)} to the .data of {'a view' if self.chain else 'it'} cannot change"
            )
        with torch.no_grad():
            self.copy_(value)

    # As Python and numpy read it

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """A copy, read-only: written to, it would not reach what it stands for."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        array: np.ndarray[Any, Any] = self.plain().numpy()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"{self.source.describe()} is at rest: an array of it is a copy")
        array = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return array.copy() if copy else array

    def plain(self) -> torch.Tensor:
        """The value, as a plain tensor of its own."""
        with torch.no_grad():
            return _replay(self.source.read(), self.chain)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


class _NoStorage:
    """What stands for the memory that a tensor at rest has not. Its size can be asked for, as torch.distributed.checkpoint does; nothing else."""

    def __init__(self, tensor: AtRest) -> None:
        self._tensor = tensor

    def size(self) -> int:
        """Bytes, were the whole value in memory."""
        source = self._tensor.source
        return source.shape.numel() * source.dtype.itemsize

    nbytes = size

    def __getattr__(self, name: str) -> NoReturn:
        self._tensor._no_memory()


def _replay(base: torch.Tensor, chain: tuple[_Step, ...]) -> torch.Tensor:
    for func, args, kwargs, index in chain:
        out = func(base, *args, **kwargs)
        base = out if index is None else out[index]
    return base


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.detach.default:
        return AtRest(args[0].source, chain=args[0].chain, like=args[0])
    summed = _sum(func, args, kwargs)
    if summed is not None:
        return summed
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, *args)
    if func is aten.mul_.Tensor and _multiplied(*args):
        return args[0]
    if func is aten.zeros_like.default and args[0].is_contiguous() and _alike(args[0], kwargs):
        return _zeros(args[0])
    if func is aten._to_copy.default:
        moved = _move(args[0], kwargs)
        if moved is not None:
            return moved
    if func._schema.name.startswith("aten::_foreach_"):
        return _each(func, args, kwargs)
    first = args[0] if args else None
    if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
        _refuse_reshaping(func, args, kwargs)
    if isinstance(first, AtRest) and _is_view(func):
        return _view(func, first, args[1:], kwargs)
    return _run(func, args, kwargs)


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AtRest | None:
    """Gradients of one parameter added by autograd: to each other, or to what `.grad` has."""
    if func not in (aten.add.Tensor, aten.add_.Tensor) or kwargs.get("alpha", 1) != 1 or len(args) != 2:
        return None
    a, b = args
    if not (isinstance(a, AtRest) and isinstance(b, AtRest) and hasattr(a.source, "plus") and hasattr(b.source, "plus")) or a.chain or b.chain:
        return None
    if func is aten.add.Tensor:
        source = a.source.plus(b.source)
        return AtRest(source) if source is not None else None
    return a if a.source.add(b.source) else None  # type: ignore[attr-defined]


def _multiplied(x: Any, factor: Any) -> bool:
    """Whether `x`, a whole gradient, has been multiplied by the number `factor` where it rests."""
    if not isinstance(x, AtRest) or x.chain or not hasattr(x.source, "multiply"):
        return False
    if isinstance(factor, torch.Tensor) and not isinstance(factor, AtRest) and factor.ndim == 0 and not factor.is_complex():
        factor = factor.item()
    return isinstance(factor, (int, float)) and bool(x.source.multiply(float(factor)))


def _unscale(func: Any, grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """torch.amp.GradScaler's check and unscaling: `found_inf` becomes 1 if a gradient is not finite, all are multiplied by `inv_scale`."""
    if found_inf.is_pinned() or inv_scale.is_pinned():
        torch.cuda.current_stream().synchronize()  # GradScaler copies both from the GPU without waiting
    factor = float(inv_scale)
    for grad in grads:
        finite = getattr(grad.source, "finite", None) if isinstance(grad, AtRest) and not grad.chain else None
        known = finite() if finite is not None else None
        if known is None or not (factor == 1.0 or _multiplied(grad, factor)):
            _run(func, ([grad], found_inf, inv_scale), {})
        elif not known:
            found_inf.fill_(1.0)


def _alike(x: AtRest, kwargs: dict[str, Any]) -> bool:
    """Whether a `*_like` asks for the kind of tensor that `x` is."""
    return all(value in (None, False, torch.preserve_format, getattr(x, key, None)) for key, value in kwargs.items())


def _zeros(like: AtRest) -> torch.Tensor:
    """Plain zeros that take memory only where they are written to: torch.distributed.checkpoint makes such a gradient for every parameter at once."""
    return torch.from_numpy(np.zeros(like.numel() * like.element_size(), np.uint8)).view(like.dtype).view(like.shape)


def _move(value: Any, kwargs: dict[str, Any]) -> AtRest | None:
    """A conversion; None outside of a module's. See [Note: moves]."""
    if not isinstance(value, AtRest) or not _moving.get():
        return None
    dtype = kwargs.get("dtype") or value.dtype
    if dtype != value.dtype:
        raise ConfigError(
            f"{value.source.describe()} is {value.dtype} and its model is prepared: .to(), .half() and .float() cannot change its dtype to {dtype}; "
            "convert the model before prepare(), or choose Precision(compute=...)"
        )
    return AtRest(value.source, chain=value.chain, like=value)


class _Empty:
    """Stands in for a value: no elements, of its dtype."""

    shape = torch.Size((0,))

    def __init__(self, source: Source) -> None:
        self.dtype, self.describe = source.dtype, source.describe

    def read(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def write(self, value: torch.Tensor) -> None:
        pass


_moving: ContextVar[bool] = ContextVar("moving", default=False)  # a module's _apply is under way, and was not refused
_module_apply: Callable[[torch.nn.Module, Callable[..., Any], bool], torch.nn.Module] = torch.nn.Module._apply


@functools.wraps(_module_apply)
def _watched_apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
    """See [Note: moves]."""
    kinds = {} if _moving.get() else {p.dtype: p.source for p in map(part_of, self.parameters(recurse)) if isinstance(p, AtRest)}
    if not kinds:
        return _module_apply(self, fn, recurse)
    hooked = [(p, p._backward_hooks, p._post_accumulate_grad_hooks) for p in self.parameters(recurse) if is_divided(p)]
    token = _moving.set(True)
    try:
        with torch.no_grad():
            for source in kinds.values():
                fn(AtRest(_Empty(source)))
        return _module_apply(self, fn, recurse)
    finally:
        _moving.reset(token)
        for p, hooks, after in hooked:  # torch swaps these for others, which have none
            p._backward_hooks, p._post_accumulate_grad_hooks = hooks, after


torch.nn.Module._apply = _watched_apply  # type: ignore[method-assign]


def _is_view(func: Any) -> bool:
    info = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return info is not None and not info.is_write and not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _view(func: Any, base: AtRest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shadow = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    out = func(shadow, *args, **kwargs)
    if isinstance(out, torch.Tensor):
        return AtRest(base.source, chain=(*base.chain, (func, args, kwargs, None)), like=out)
    return [AtRest(base.source, chain=(*base.chain, (func, args, kwargs, i)), like=o) for i, o in enumerate(out)]


def _each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A list operation, one element at a time."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    n = len(lists[0])

    def pick(x: Any, i: int) -> Any:
        return [x[i]] if isinstance(x, (list, tuple)) and len(x) == n else x

    if func in (aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor):
        for x in args[0]:
            if not _multiplied(x, args[1]):
                _run(func, ([x], args[1]), {})
        return None
    results = [_run(func, tuple(pick(a, i) for a in args), {k: pick(v, i) for k, v in kwargs.items()}) for i in range(n)]
    if all(isinstance(r, (list, tuple)) for r in results):
        return [r[0] for r in results]
    return None if func._schema.name.endswith("_") else results


def _refuse_reshaping(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    involved = tree_leaves((args, kwargs)) if func._schema.name == "aten::set_" else _writes(func, args, kwargs)
    for x in involved:
        if isinstance(x, AtRest):
            raise _reshaped(x, func)


def _reshaped(x: AtRest, func: Any) -> OffloadError:
    return OffloadError(f"{x.source.describe()} rests in a place of its own shape, which {func._schema.name.removeprefix('aten::')} would change")


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors (or lists of them) that the schema marks as written."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if value is not None:
                written.append(value)
    return written


class _Bases:
    """Values read for one operation: one base per source, so that two views of it alias as they do in memory."""

    def __init__(self) -> None:
        self._bases: dict[int, tuple[Source, torch.Tensor]] = {}

    def value(self, x: Any) -> Any:
        if not isinstance(x, AtRest):
            return x
        if id(x.source) not in self._bases:
            self._bases[id(x.source)] = (x.source, x.source.read())
        return _replay(self._bases[id(x.source)][1], x.chain)

    def store(self, x: AtRest) -> None:
        source, base = self._bases[id(x.source)]
        source.write(base)


def _flat(written: list[Any]) -> Iterator[Any]:
    for target in written:
        yield from target if isinstance(target, (list, tuple)) else (target,)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bases = _Bases()
    written = _writes(func, args, kwargs)
    if func is aten.copy_.default and isinstance(args[0], AtRest) and not args[0].chain:
        return _overwrite(args[0], args[1])
    if func is aten.zero_.default and isinstance(args[0], AtRest) and not args[0].chain and hasattr(args[0].source, "zero"):
        args[0].source.zero()
        return args[0]
    plain_args, plain_kwargs = tree_map(bases.value, args), tree_map(bases.value, kwargs)
    out = func(*plain_args, **plain_kwargs)
    targets = {id(x.source): x for x in _flat(written) if isinstance(x, AtRest)}
    for x, value in zip(_flat(written), _flat(_writes(func, plain_args, plain_kwargs)), strict=True):
        if isinstance(x, AtRest) and value.shape != x.shape:  # as out= may do
            raise _reshaped(x, func)
    for x in targets.values():
        bases.store(x)
    if len(written) == 1 and isinstance(out, torch.Tensor) and isinstance(written[0], AtRest):
        return written[0]
    return out


def _overwrite(target: AtRest, value: torch.Tensor) -> AtRest:
    """`copy_` of a whole value: nothing needs to be read first."""
    plain = value.plain() if isinstance(value, AtRest) else value.detach()
    target.source.write(plain.to(device="cpu", dtype=target.dtype).expand(target.shape).contiguous())
    return target
