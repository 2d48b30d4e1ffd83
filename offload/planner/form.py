"""How the optimizer state of trained parameters is stored. Pure, and the one place that knows.

[Note: state records]
Each chunk has one state record: an array for each of the form's parts, one behind another, and zeros up to a page. An array has an element for
each element of the chunk, or for each GROUP of them. Chunks are of multiples of 4096 elements, so arrays start on multiples of 64 bytes.
A parameter's groups are its own, as it starts on a multiple of GROUP. All bytes zero are moments of zero in every form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from offload.config import Precision
from offload.planner.layout import ALIGN, DTYPE_BYTES, PAGE, round_up

MOMENTS = ("exp_avg", "exp_avg_sq")
GROUP = ALIGN  # elements that share a scale of int8 moments
_BYTES = {"exp_avg": "int8", "exp_avg_sq": "uint8"}


class Part(NamedTuple):
    """One array of a record: its role, its dtype, and how many elements of the parameter one of its own stands for."""

    role: str
    dtype: str
    group: int = 1

    def numel(self, n: int) -> int:
        """Its own elements for `n` of the parameter."""
        return -(-n // self.group)

    def nbytes(self, n: int) -> int:
        """Bytes for `n` elements of the parameter."""
        return self.numel(n) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateForm:
    """What an update reads and writes beside the parameter and its gradient; see [Note: state records].

    `compute` is the parameter's dtype at rest. `master`: "own" (the parameter is the fp32 master), "fp32" (the master is a part of its own) or
    "split" (the bf16 parameter and the part "low" are the upper and the lower half of the master's bits). `moments`: "fp32", "bf16" or "int8".
    """

    compute: str
    master: str
    moments: str

    @classmethod
    def of(cls, precision: Precision) -> StateForm:
        """The form that this precision means."""
        return cls(precision.compute, "own" if precision.compute == "fp32" else precision.master, precision.moments)

    @property
    def value_is_master(self) -> bool:
        """Whether the parameter at rest is the master or half of it, so that an update reads it too."""
        return self.master != "fp32"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The arrays of a record, in order."""
        masters = {"own": (), "fp32": (Part("master", "fp32"),), "split": (Part("low", "int16"),)}[self.master]
        coded = self.moments == "int8"
        moments = tuple(Part(role, _BYTES[role] if coded else self.moments) for role in MOMENTS)
        scales = tuple(Part(scale_of(role), "fp32", GROUP) for role in MOMENTS) if coded else ()
        return (*masters, *moments, *scales)

    def part(self, role: str) -> Part:
        """The part of this role; KeyError where the form has none."""
        return self._by_role[role]

    @cached_property
    def _by_role(self) -> dict[str, Part]:
        return {part.role: part for part in self.parts}

    def nbytes(self, n: int) -> int:
        """Bytes of state of a parameter of `n` elements, without padding."""
        return sum(part.nbytes(n) for part in self.parts)

    def record_bytes(self, n: int) -> int:
        """Bytes of the record of a chunk of `n` elements."""
        return round_up(self.nbytes(n), PAGE)

    def at(self, role: str, n: int, element: int) -> int:
        """The byte in the record of a chunk of `n` elements where the value of its `element`-th, or of the group that starts there, is."""
        start = 0
        for part in self.parts:
            if part.role == role:
                return start + part.nbytes(element)
            start += part.nbytes(n)
        raise KeyError(role)


def scale_of(role: str) -> str:
    """The role of the scales of an int8 moment."""
    return f"{role}_scale"
