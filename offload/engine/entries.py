"""What is known of gradients: which have come, in which backward, as what they read, and what of them is still under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from offload.engine.record import Record
from offload.errors import OffloadError
from offload.transfer.queue import Transfer


@dataclass
class Entry:
    """Of one parameter's. A gradient reads as what rests times `scale`; each fresh start is another `generation`."""

    generation: int = 0
    scale: float = 1.0
    spent: bool = False  # an update took it from memory, and it was not kept
    landing: list[Transfer] = field(default_factory=list)
    failed: Transfer | None = None  # a landing whose error is raised to whoever needs the gradient, until another takes its place
    collecting: bool = False  # it has come and is not reduced; see [Note: reduction]
    backwards: int = 0  # that it is a sum of
    stepped: tuple[int, int] = (0, 0)  # the generation, and the backwards, that the last step has had
    copied: bool = True  # there is nothing on the device that its copy has not, or is to have; see [Note: copies of sums]
    early_task: int = -1  # the backward in which a first use of several landed early
    epoch: int = -1  # the forward after which it came, and the backward
    task: int = -1

    def settle(self, fresh: bool = False) -> None:
        """What is under way has landed, or its error is raised; unless another is to be there, a `fresh` start, so is one of before."""
        self.failed = None if fresh else self.failed
        while self.landing:
            try:
                self.landing[0].wait()
            except Exception:
                self.failed = self.failed or self.landing[0]
            del self.landing[0]
        if self.failed is not None:
            self.failed.wait()

    def take_scale(self) -> float:
        """What is to be multiplied where it rests, before anything is added: it reads as it is from here on."""
        scale, self.scale = self.scale, 1.0
        return scale


class Entries(dict[int, Entry]):
    """By the parameter's number. Knows forwards and backwards, and so what an earlier micro-batch left."""

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__((r.number, Entry()) for r in records)
        self._epoch = 0  # forwards seen: what came before the last one belongs to an earlier micro-batch
        self._nested_tasks: set[int] = set()

    def new_forward(self) -> None:
        self._epoch += 1
        self._nested_tasks.clear()

    def nested_backward(self) -> None:
        """The backward that runs now is part of another one."""
        self._nested_tasks.add(torch._C._current_graph_task_id())

    def start(self, record: Record, scale: float = 1.0) -> Entry:
        """A gradient of the backward that runs now takes the place of what was there."""
        entry = self[record.number]
        entry.generation += 1
        entry.scale, entry.spent, entry.failed, entry.backwards = scale, False, None, 1
        entry.epoch, entry.task = self._epoch, torch._C._current_graph_task_id()
        return entry

    def earlier(self, record: Record) -> bool:
        """In a backward: whether the parameter has a gradient of an earlier one, to which this one adds."""
        entry, now = self[record.number], torch._C._current_graph_task_id()
        if record.grad is None:
            return False
        return entry.epoch < self._epoch or (entry.task != now and entry.task not in self._nested_tasks)

    def any_came(self) -> bool:
        """Whether any gradient has ever come to rest."""
        return any(entry.generation for entry in self.values())

    def stepped(self, records: Iterable[Record]) -> None:
        """A step has had the gradients of these, whether it used them or skipped them."""
        for record in records:
            entry = self[record.number]
            entry.stepped = entry.generation, entry.backwards

    def waiting(self, records: Iterable[Record]) -> list[Record]:
        """Those of which something has come that no step has had."""
        there = ((r, self[r.number]) for r in records if r.grad is not None)
        return [r for r, entry in there if entry.backwards and entry.stepped != (entry.generation, entry.backwards)]  # none: they are zeros

    def spend(self, records: Iterable[Record]) -> None:
        """What came of these goes into their updates, or to nobody, and others come in its place."""
        for record in records:
            self[record.number].spent = True

    def check_kept(self, record: Record) -> None:
        """OffloadError if the gradient went into its update and was not kept."""
        if self[record.number].spent:
            raise OffloadError(
                f"the gradient of {record.name} went into its update during the backward and was not kept (keep_gradients=False): "
                "read none after a backward, and call zero_grad() after step(); or keep them"
            )

    def check_addends(self, records: Iterable[Record]) -> None:
        """At the start of a backward: as `check_kept` of the gradients to which it would add."""
        for record in records:
            if self[record.number].spent and self.earlier(record):
                self.check_kept(record)
