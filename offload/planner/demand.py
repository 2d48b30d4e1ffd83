"""What a step needs on the device besides state at rest: slots, activations, logits, gradients in flight. Pure.

The figures are estimates from parameter shapes alone, meant to lie above what a run uses: a matrix of (out, in) keeps
its input and its output, norms and attention keep about as much again in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planner.layout import DTYPE_BYTES, ParameterSpec, UnitSpec

VOCABULARY_RATIO = 8  # a matrix this much taller than wide is a table of a vocabulary, not a projection


@dataclass(frozen=True)
class Batch:
    """A micro-batch: sequences, tokens a sequence, and how many tokens' logits live at once (None: all of them)."""

    sequences: int
    tokens: int
    loss_tokens: int | None = None

    @property
    def total(self) -> int:
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Working:
    """Bytes on the device by what holds them."""

    activations: int
    logits: int
    gradients: int
    slack: int

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gradients + self.slack


def _is_table(p: ParameterSpec) -> bool:
    return p.inner > 0 and p.numel >= VOCABULARY_RATIO * p.inner * p.inner


def _widths(p: ParameterSpec) -> int:
    """Elements a token of what a projection keeps."""
    if p.inner <= 0:
        return 0
    return p.inner if _is_table(p) else p.inner + p.numel // p.inner


def kept_bytes(unit: UnitSpec, tokens: int, compute_bytes: int) -> int:
    """What one unit keeps for its backward."""
    return int(2.0 * compute_bytes * tokens * sum(_widths(p) for p in unit.parameters))


def boundary_bytes(unit: UnitSpec, tokens: int, compute_bytes: int) -> int:
    return compute_bytes * tokens * max((p.inner for p in unit.parameters), default=0)


def activation_bytes(units: Sequence[UnitSpec], batch: Batch | None, compute: str, mode: str) -> int:
    if batch is None:
        return 0
    size, t = DTYPE_BYTES[compute], batch.total
    if mode == "keep":
        return sum(kept_bytes(u, t, size) for u in units)
    repeated = [u for u in units if u.repeated]
    rest = sum(kept_bytes(u, t, size) for u in units if not u.repeated)
    return rest + sum(boundary_bytes(u, t, size) for u in repeated) + max((kept_bytes(u, t, size) for u in repeated), default=0) * 3 // 2


def logits_bytes(units: Sequence[UnitSpec], batch: Batch | None) -> int:
    """Logits in the compute dtype, in fp32, their softmax and their gradient."""
    if batch is None:
        return 0
    rows = max((p.numel // p.inner for u in units for p in u.parameters if _is_table(p)), default=0)
    return rows * min(batch.loss_tokens or batch.total, batch.total) * 14


def gradient_bytes(units: Sequence[UnitSpec], compute: str, grad: str) -> int:
    """Gradients not yet moved: the largest parameter's, three times over where uses of it are summed on the device.

    They are, unless gradients rest in the dtype they are computed in: then the first use's lands before the next.
    """
    size = DTYPE_BYTES[compute]
    single = max((p.numel for u in units for p in u.parameters if p.trained), default=0)
    shared = max((p.numel for u in units for p in u.parameters if p.trained and p.uses > 1), default=0)
    return size * max(single, shared if grad == compute else 3 * shared)


def working(units: Sequence[UnitSpec], batch: Batch | None, compute: str, grad: str, mode: str, device_budget: int) -> Working:
    slack = min(32 << 20, device_budget // 8)
    return Working(activation_bytes(units, batch, compute, mode), logits_bytes(units, batch), gradient_bytes(units, compute, grad), slack)


def slot_sizes(sizes: Sequence[int], depth: int, copies: int) -> tuple[int, ...]:
    """Slots for units of these sizes in bytes: classes by powers of two below the largest, `copies` of each class.

    `depth` is the greatest number of units open at once, one inside another; one slot more lets the next unit arrive.
    """
    left = sorted((s for s in sizes if s), reverse=True)
    total = len(left)
    slots: list[int] = []
    while left:
        top = left[0]
        members = [s for s in left if 2 * s > top]
        slots += [top] * min(len(members), copies)
        left = left[len(members) :]
    need = min(depth + 1, total)
    while slots and len(slots) < need:
        slots.append(slots[0])
    return tuple(sorted(slots, reverse=True))


def fewest_slots(sizes: Sequence[int], depth: int) -> tuple[int, ...]:
    """The least that can work: as many slots as units open at once and one to fill ahead, the largest units'."""
    left = sorted((s for s in sizes if s), reverse=True)
    return tuple(left[: depth + 1])
