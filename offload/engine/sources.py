"""The values that tensors at rest stand for: a parameter's, a moment's, a gradient's."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from offload.engine.record import Record
from offload.errors import OffloadError

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.engine.gradients import Gradients
    from offload.engine.state import State


LEAST_SCALE = 2.0**-100  # of a gradient: below, it would be rounded among denormals


class ValueSource:
    """A parameter's current value: the master's where there is one."""

    def __init__(self, record: Record, engine: Engine) -> None:
        self.record, self.engine, self.state = record, engine, engine.state
        self.shape, self.dtype = record.shape, record.dtype

    def read(self) -> torch.Tensor:
        return self.state.read_value(self.record)

    def write(self, value: torch.Tensor) -> None:
        self.state.write_value(self.record, value)

    def describe(self) -> str:
        return f"parameter {self.record.name}"


class MomentSource:
    """One of Adam's moments of a parameter: fp32 as it reads, rounded to its form when it is written.

    It stands for one generation: a set that takes its place makes it stale.
    """

    dtype = torch.float32

    def __init__(self, record: Record, state: State, role: str) -> None:
        self.record, self.state, self.role = record, state, role
        self.shape, self.generation = record.shape, state.generation(record)

    @property
    def current(self) -> bool:
        return self.state.generation(self.record) == self.generation

    def _check(self) -> None:
        if not self.current:
            raise OffloadError(f"{self.describe()} gave way to that of another optimizer, or to one loaded or started afresh")

    def read(self) -> torch.Tensor:
        self._check()
        return self.state.read_state(self.record, self.role).view(self.shape)

    def write(self, value: torch.Tensor) -> None:
        self._check()
        self.state.write_moment(self.record, self.role, value)

    def describe(self) -> str:
        return f"{self.role} of {self.record.name}"


class GradientSource:
    """A parameter's gradient at rest. It stands for one generation: a fresh start after it makes it stale.

    It holds nothing that holds the parameter: `.grad` is a reference that no garbage collector sees.
    """

    def __init__(self, record: Record, gradients: Gradients, generation: int) -> None:
        self._gradients, self.number, self.generation = weakref.ref(gradients), record.number, generation
        self.shape, self.dtype = record.shape, record.dtype

    @property
    def gradients(self) -> Gradients:
        there = self._gradients()
        if there is None:
            raise OffloadError("the model of this gradient is gone; keep a copy (.clone()) of what is needed longer")
        return there

    @property
    def record(self) -> Record:
        return self.gradients.records[self.number]

    @property
    def current(self) -> bool:
        return self.gradients.entries[self.number].generation == self.generation

    def check(self) -> None:
        if not self.current:
            raise OffloadError(
                f"this gradient of {self.record.name} was replaced by that of a later backward; keep a copy (.clone()) of what is needed longer"
            )

    def read(self) -> torch.Tensor:
        self.check()
        return self.gradients.read(self.record).to(self.dtype).view(self.shape)

    def write(self, value: torch.Tensor) -> None:
        self.check()
        self.gradients.write(self.record, value)

    def zero(self) -> None:
        self.check()
        self.gradients.zero(self.record)

    def describe(self) -> str:
        return f"gradient of {self.record.name}"

    def plus(self, other: Any) -> Contribution | GradientSource | None:
        return other.plus(self) if isinstance(other, Contribution) else None

    def add(self, other: Any) -> bool:
        """`+=` of a contribution of a later micro-batch, where it rests."""
        if not isinstance(other, Contribution) or other.record is not self.record:
            return False
        self.check()
        self.gradients.sum_up(self.record, other)
        return True

    def finite(self) -> bool:
        """Whether every element is; known from its norm."""
        self.check()
        return math.isfinite(self.gradients.norm_squared(self.record))

    def multiply(self, factor: float) -> bool:
        """Multiplies it, moving nothing; False, and nothing done, where it might not then read as if each element had been multiplied."""
        self.check()
        if not LEAST_SCALE <= abs(self.gradients.entries[self.number].scale * factor) <= 1.0:
            return False
        self.gradients.scale([self.record], factor)
        return True


class Contribution:
    """One use's gradient of a parameter, on the device in the dtype it was computed in, until it lands.

    Uses of one backward are summed here, in that dtype, as autograd sums them. A first use that will wait long for the next may land
    early (`landed`), where landing keeps its bits.
    """

    def __init__(self, record: Record, gradients: Gradients, value: torch.Tensor) -> None:
        self.record, self.gradients = record, gradients
        self.shape, self.dtype = record.shape, record.dtype
        self.value: torch.Tensor | None = value
        self.landed: GradientSource | None = None

    def held(self) -> torch.Tensor:
        """The value in the dtype it was computed in."""
        if self.value is not None:
            return self.value
        assert self.landed is not None
        self.landed.check()
        return self.gradients.read(self.record).view(self.shape)

    def read(self) -> torch.Tensor:
        return self.held().to(device="cpu", dtype=self.dtype, copy=True)

    def write(self, value: torch.Tensor) -> None:
        if self.landed is not None:
            self.landed.write(value)
        else:
            assert self.value is not None
            self.value = value.to(device=self.value.device, copy=True)  # in the parameter's dtype, as a gradient that takes its place

    def describe(self) -> str:
        return f"gradient of {self.record.name}"

    def plus(self, other: Any) -> Contribution | None:
        if not isinstance(other, Contribution) or other.record is not self.record or torch._C._current_graph_task_id() < 0:
            return None  # what autograd.grad gave is added as it reads, in the parameter's dtype
        first, second = (self, other) if self.landed is not None else (other, self)
        if first.landed is not None and second.value is not None:
            first.landed.check()
            self.gradients.accumulate(self.record, second)
            return first
        return Contribution(self.record, self.gradients, self.held() + other.held())

    def add(self, other: Any) -> bool:
        return False
