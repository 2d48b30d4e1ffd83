"""What a step needs on the device besides state at rest: slots, activations, logits, gradients in flight. Pure.

The figures are estimates from parameter shapes alone, meant to lie above what a run uses: a matrix of (out, in) keeps
its input and its output, norms and attention keep about as much again in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.planner.layout import CHUNK_ALIGN, DTYPE_BYTES, ParameterSpec, UnitSpec

VOCABULARY_RATIO = 8  # a matrix this much taller than wide is a table of a vocabulary, not a projection
IN_TRANSIT = 3  # boundaries on the device where they rest elsewhere: one computed on, and one on its way or awaited on either side
REDUCING = 2  # buffers of the largest unit's gradients among several ranks
SLACK_MOST, SLACK_SHARE = 32 << 20, 8  # what estimates leave out: at most this, or this fraction of the device budget


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
    """Bytes on the device by what holds them; `in_flight` is the part of `gradients` that may be on its way to the host at once, with the
    one that is computed meanwhile, `largest` at the most; `reduction` the part in which ranks sum them."""

    activations: int
    logits: int
    gradients: int
    slack: int
    in_flight: int
    reduction: int = 0
    largest: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gradients + self.slack

    @property
    def _spare(self) -> int:
        return max(0, self.in_flight - self.largest)

    def room(self, free: int) -> int:
        """What `free` bytes of the device have for further state: gradients in flight give way to it, but for one of the largest."""
        return free - self.total + self._spare

    def beside(self, nbytes: int, room: int) -> Working:
        """With `nbytes` of a `room` taken: as many fewer in flight as it has not without them."""
        taken = min(self._spare, max(0, nbytes - room + self._spare)) if nbytes else 0
        return replace(self, gradients=self.gradients - taken, in_flight=self.in_flight - taken)


def is_table(p: ParameterSpec) -> bool:
    """Whether a matrix belongs to a vocabulary rather than to a projection."""
    return p.inner > 0 and p.numel >= VOCABULARY_RATIO * p.inner * p.inner


def _widths(p: ParameterSpec) -> int:
    """Elements a token of what a projection keeps."""
    if p.inner <= 0:
        return 0
    return p.inner if is_table(p) else p.inner + p.numel // p.inner


def kept_bytes(unit: UnitSpec, tokens: int, compute_bytes: int) -> int:
    """What one unit keeps for its backward."""
    return int(2.0 * compute_bytes * tokens * sum(_widths(p) for p in unit.parameters))


def boundary_bytes(unit: UnitSpec, tokens: int, compute_bytes: int) -> int:
    return compute_bytes * tokens * max((p.inner for p in unit.parameters), default=0)


def again(units: Sequence[UnitSpec], mode: str, kept: int = 0) -> list[int]:
    """The units that are computed again in backward, by number: repeated ones, but for the last `kept` of them."""
    repeated = [number for number, unit in enumerate(units) if unit.repeated]
    return [] if mode == "keep" else repeated[: max(0, len(repeated) - kept)]


def activation_bytes(units: Sequence[UnitSpec], batch: Batch | None, compute: str, mode: str, kept: int = 0) -> int:
    """Of a micro-batch at their most: while a unit is computed again, boundaries of others are there, and all of what the last `kept` units keep."""
    if batch is None:
        return 0
    size, t = DTYPE_BYTES[compute], batch.total
    if mode == "keep":
        return sum(kept_bytes(u, t, size) for u in units)
    computed_again = again(units, mode, kept)
    whole = set(range(len(units))).difference(computed_again)
    there = sorted((boundary_bytes(units[n], t, size) for n in computed_again), reverse=True)[: IN_TRANSIT if mode in ("host", "nvme") else None]
    largest = max((kept_bytes(u, t, size) for u in units if u.repeated), default=0) * 3 // 2
    return sum(kept_bytes(units[n], t, size) for n in whole) + sum(there) + largest


def largest_kept(units: Sequence[UnitSpec], batch: Batch | None, compute: str) -> int:
    """What one unit keeps and uses on the way, at its most."""
    return max((kept_bytes(u, batch.total, DTYPE_BYTES[compute]) for u in units), default=0) * 3 // 2 if batch else 0


def logits_bytes(units: Sequence[UnitSpec], batch: Batch | None) -> int:
    """Logits in the compute dtype, in fp32, their softmax and their gradient."""
    if batch is None:
        return 0
    rows = max((p.numel // p.inner for u in units for p in u.parameters if is_table(p)), default=0)
    return rows * min(batch.loss_tokens or batch.total, batch.total) * 14


def gradient_bytes(units: Sequence[UnitSpec], compute: str, grad: str) -> tuple[int, int]:
    """(gradients on the device, those of them that may be in flight at once): one parameter's is in flight at the least.

    Where gradients rest in another dtype than they are computed in, those of a shared parameter's uses are summed on the device first:
    two and their sum.
    """
    trained = [p for u in units for p in u.parameters if p.trained]
    summed = [p for p in trained if p.uses > 1 and grad != compute]
    size = DTYPE_BYTES[compute]
    in_flight = size * max((p.numel for p in trained if p not in summed), default=0)
    return in_flight + 3 * size * max((p.numel for p in summed), default=0), in_flight


def reduction_bytes(units: Sequence[UnitSpec], moves: str, ranks: int) -> int:
    """What ranks reduce gradients in: two of the largest unit's, one that is filled and one under way."""
    if ranks == 1:
        return 0
    sizes = [sum(p.numel for p in u.parameters if p.trained) for u in units]
    return REDUCING * (max(sizes, default=0) + ranks * CHUNK_ALIGN) * DTYPE_BYTES[moves]


def slack_bytes(device_budget: int) -> int:
    return min(SLACK_MOST, device_budget // SLACK_SHARE)


def budget_for(nbytes: int) -> int:
    """The least device budget that leaves `nbytes` beside its slack."""
    return min(nbytes + SLACK_MOST, -(-nbytes * SLACK_SHARE // (SLACK_SHARE - 1)))


def working(
    units: Sequence[UnitSpec], batch: Batch | None, compute: str, grad: str, mode: str, device_budget: int, kept: int = 0, reduction: int = 0
) -> Working:  # fmt: skip
    gradients, in_flight = gradient_bytes(units, compute, grad)
    activations, logits = activation_bytes(units, batch, compute, mode, kept), logits_bytes(units, batch)
    return Working(activations, logits, gradients + reduction, slack_bytes(device_budget), in_flight, reduction, in_flight)


def bound_at_once(units: Sequence[UnitSpec]) -> int:
    """The greatest number of units whose parameters are bound at once, one module inside another."""
    return max((u.depth + 1 + u.borrows for u in units), default=1)


def slot_sizes(sizes: Sequence[int], at_once: int, copies: int) -> tuple[int, ...]:
    """Slots for units of these sizes in bytes: by classes of powers of two, `copies` of each class, or as many as are bound at once and one more.

    Fewer units never need more.
    """
    classes: dict[int, list[int]] = {}
    for size in sizes:
        if size:
            classes.setdefault(size.bit_length(), []).append(size)
    slots = [max(members) for members in classes.values() for _ in range(min(len(members), max(copies, at_once + 1)))]
    return tuple(sorted(slots, reverse=True))


def fewest_slots(sizes: Sequence[int], at_once: int) -> tuple[int, ...]:
    """The least that can work: as many slots as units are bound at once and one to fill ahead, the largest units'."""
    return tuple(sorted((s for s in sizes if s), reverse=True)[: at_once + 1])
