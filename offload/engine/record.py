"""What the runtime knows of one parameter, and of one unit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from offload.dist.divided import Divided
from offload.memory.shard import Shard
from offload.planner.layout import Slice, UnitLayout

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "int8": torch.int8,
    "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the extension's dtype codes
NORM_BLOCK = 4096  # elements a sum of squares; never depends on chunks


@dataclass
class Record:
    """One parameter, or this rank's part of one ([Note: tensor parallel]): where it lies in its unit, and its own step count.

    `slices` pairs a chunk's number with the slice of this parameter in it, in order.
    `written`: it has a value; one made on the meta device has none until a rule or a load gives it.
    `sums` has the sum of squares of each block of the gradient at rest (float64).
    """

    number: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    trained: bool
    unit: int
    flat: int
    offset: int
    slices: tuple[tuple[int, Slice], ...]
    parameter: nn.Parameter
    uses: list[tuple[nn.Module, str]]
    step: int = 0
    written: bool = False
    version: int = 0  # counts changes of the value, so that a backward over a changed one is refused
    sums: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64, device="cpu"))
    divided: Divided | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def whole_shape(self) -> torch.Size:
        """The shape that users see, of which `shape` may be a part's."""
        return self.shape if self.divided is None else torch.Size(self.divided.spec.shape)

    @property
    def grad(self) -> torch.Tensor | None:
        """`.grad`, or this rank's part of it."""
        grad = self.parameter.grad
        return grad if grad is None or self.divided is None else self.divided.part(grad, "the gradient")

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.parameter.grad = None if value is None else self.whole(value)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """What users see of a tensor that is as the parameter is."""
        return part if self.divided is None else self.divided.whole(part)


@dataclass
class Unit:
    """One unit: its layout, its shards, and the modules whose forward it serves.

    `parameters` has a shard per flat, `gradients` and `states` one per chunk of the trained flat; of several ranks, what this one keeps.
    `sums`: device memory, the trained flat's elements in fp32, where the gradients rest of which `gradients` has a copy for the update; or None.
    """

    number: int
    name: str
    layout: UnitLayout
    records: list[Record]
    modules: list[nn.Module]
    parameters: list[Shard] = field(default_factory=list)
    gradients: list[Shard] = field(default_factory=list)
    states: list[Shard] = field(default_factory=list)
    sums: torch.Tensor | None = None
    initialised: bool = True
    repeated: bool = False


def flat_slices(layout: UnitLayout, flat: int, index: int) -> tuple[tuple[int, Slice], ...]:
    """(chunk number, slice) of parameter `index` in a flat, in order."""
    return tuple((c, s) for c, chunk in enumerate(layout.flats[flat].chunks) for s in chunk.slices if s.parameter == index)
