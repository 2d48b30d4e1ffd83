"""What happens when in a step: the order that the runtime keeps, and the times that the links' speeds make of it. Pure.

[Note: order of a step]
Updates come in the order in which a forward uses parameters: `update_order`. From the start of a backward on, what the first of them need of NVMe,
gradients aside, is read, as many as there are buffers: `read_early`. step() waits for every gradient, as the norm needs them all. With `early` units
those whose gradients come first are updated before all others, each as soon as its gradients are at rest and its backward is over; what others
need is then read as buffers come free, without waiting for step(). Of these, updates that had a buffer from the start take their gradients from where
they landed (`taken`): they are never written. Units whose gradients pass are early in any case (`least_early`), and wait for the updates that read
from the places which they share. A unit's forward waits for its own updates; its gradients wait for the updates that read the last ones; a read waits
for the write-back of the chunk that had the buffer before.
Several micro-batches are as one with as much compute and traffic as all of them have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from offload.planner.layout import DTYPE_BYTES, Chunk
from offload.planner.leftover import fetches, slots_of
from offload.planner.placement import Plan, chunks_of, gradient_chunk_bytes
from offload.planner.share import ABSENT
from offload.planner.sums import link_bytes
from offload.planner.timeline import Timeline

Place = tuple[int, int]  # a unit, and a chunk of its trained flat
STEPS = 4  # simulated, the last of which is steady
TRIED = 4  # parts of the units that choose_early() tries in turn
AHEAD = 4  # visits among which units to fetch are sought
LEAST_GAIN = 0.02  # of a step, for which it is worth to start updates that can no longer be skipped
KINDS = ("fetch", "forward", "backward", "release", "gradient", "boundary", "step", "read", "update", "write")


class _Task(NamedTuple):
    number: int
    kind: str
    unit: int
    chunk: int
    step: int
    after: tuple[int, ...]
    staging: int


@dataclass(frozen=True)
class Speeds:
    """Bytes a second of each link while all that uses it runs, and trained elements a second that are updated. Infinite: of no account."""

    h2d: float = math.inf
    d2h: float = math.inf
    nvme_read: float = math.inf
    nvme_write: float = math.inf
    update: float = math.inf


@dataclass(frozen=True)
class Work:
    """A unit's seconds of compute."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Event:
    """Something that happens to a unit (-1: to all), or to one of its chunks (-1: to the whole).

    It starts at `start` seconds after the step before ended, `earliest` where its link is free. `staging`: bytes that it takes of the buffers; a
    "read" keeps them until its chunk's "write" ends, others to their own end.
    """

    kind: str
    unit: int
    chunk: int
    earliest: float
    start: float
    end: float
    staging: int = 0


@dataclass(frozen=True)
class Schedule:
    """One of many steps that are alike, `seconds` long: its forward and backward, and the updates of the step before."""

    events: tuple[Event, ...]
    updates: tuple[Place, ...]
    early: tuple[Place, ...]
    seconds: float

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e.kind == kind]

    def staging_peak(self) -> int:
        """The most bytes that reads and writes of chunks hold at once."""
        written = {(e.unit, e.chunk): e.end for e in self.of("write")}
        changes = [(e.start, e.staging) for e in self.of("read")] + [(written[e.unit, e.chunk], -e.staging) for e in self.of("read")]
        held = most = 0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        return most


def update_order(chunks: Sequence[int], forward: Sequence[int]) -> tuple[Place, ...]:
    """Every chunk of every unit, given each unit's number of chunks and the order in which a forward uses units."""
    return tuple((unit, chunk) for unit in forward for chunk in range(chunks[unit]))


def unit_order(forward: Sequence[int], early: int) -> list[int]:
    """Units in the order of their updates: `early` of them as their gradients come in a backward, the rest as the next forward uses them."""
    first = list(reversed(forward))[:early]
    return [*first, *(unit for unit in forward if unit not in first)]


def read_early(updates: Sequence[Place], plan: Plan) -> tuple[Place, ...]:
    """Those of the updates whose states are read before step(): as many of those that need a buffer as there are."""
    return tuple(p for p in updates if _needs_buffer(plan, p))[: plan.staging.updates]


def _needs_buffer(plan: Plan, place: Place) -> bool:
    unit, chunk = place
    return "nvme" in (plan.state[unit][chunk], plan.gradient[unit][chunk], plan.parameter[unit])


def least_early(plan: Plan, forward: Sequence[int]) -> int:
    """How many units are updated during the backward at the least: down to the last whose gradients pass."""
    return max((n for n, unit in enumerate(reversed(forward), 1) if unit in plan.passing), default=0)


def taken(plan: Plan, forward: Sequence[int], early: int) -> frozenset[Place]:
    """Chunks whose gradients would rest on nvme but are taken by their updates, `early` units', from the staging where they landed: of each
    unit as many as that holds."""
    early = max(early, least_early(plan, forward))
    order = unit_order(forward, early)
    ahead, left = read_early(update_order([len(chunks_of(u)) for u in plan.layouts], order), plan), max(1, plan.staging.parts - 1)
    return frozenset((u, c) for u, c in ahead if u in order[:early] and c < left and plan.gradient[u][c] == "nvme")


class _Builder:
    """Adds the tasks of several steps to a timeline."""

    def __init__(self, plan: Plan, forward: Sequence[int], speeds: Speeds, work: Sequence[Work], direct: bool, early: int) -> None:
        self.plan, self.forward, self.speeds, self.work, self.direct = plan, list(forward), speeds, work, direct
        self.passes = plan.accumulate
        self.fetches = fetches(slots_of(plan, direct), plan.slots, plan.accumulate)
        self.timeline = Timeline()
        self.tasks: list[_Task] = []
        self.steps: list[int] = []  # the tasks that end them
        order = unit_order(forward, early)
        every = update_order([len(chunks_of(u)) for u in plan.layouts], order)
        self.updates = tuple((unit, chunk) for unit, chunk in every if plan.state[unit][chunk] != ABSENT)
        self.early = set(read_early(self.updates, plan))
        self.first = set(order[:early])  # units
        self.taken = taken(plan, forward, early)
        self._held: dict[Place, tuple[int, int]] = {}  # the read of a chunk that has a buffer, and its place in _writes
        self._updated: dict[Place, tuple[int, int]] = {}  # the last update of a chunk, and the last write of its state
        self._writes: list[int] = []  # of chunks that took a buffer, in the order in which they did
        self._compute: list[int] = []
        self._landed: list[int] = []
        self._visits: list[int] = []  # of this step
        self._record_bytes = cache(plan.form.record_bytes)
        self._over: dict[int, int] = {}  # by unit whose gradients pass, what ends its updates
        self._users: dict[int, int] = {}  # by place, the unit whose gradients were there last
        self._left: dict[int, list[int]] = {}  # by unit, what ends the way out of its boundary

    def task(self, kind: str, unit: int, chunk: int, lane: str, seconds: float, after: list[int], staging: int = 0, early: bool = False) -> int:
        number = self.timeline.add(lane, seconds, after)
        step = len(self.steps) + (1 if early else 0)
        self.tasks.append(_Task(number, kind, unit, chunk, step, tuple(after), staging))
        return number

    def step(self) -> None:
        """A forward, a backward, and the updates that follow."""
        self._visits = []
        for unit in self.forward:
            self._visit("forward", unit)
        start = self._compute
        for place in self.updates:
            if place in self.early:
                self._read(place, start, True)
        for unit in reversed(self.forward):
            self._visit("backward", unit)
            landed = self._gradients(unit)
            if unit in self.first and landed:
                over = self.timeline.add("over", 0.0, [*self._compute, *landed])  # one to wait for, as there may be hundreds of chunks
                for c in range(len(chunks_of(self.plan.layouts[unit]))):
                    if self.plan.state[unit][c] != ABSENT:
                        self._update((unit, c), [over], start, True)
                if unit in self.plan.passing:
                    updates = [self._updated[unit, c][0] for c in range(len(chunks_of(self.plan.layouts[unit])))]
                    self._over[unit] = self.timeline.add("over", 0.0, updates)
        end = self.task("step", -1, -1, "compute", 0.0, [*self._compute, *self._landed])
        self.steps.append(end)
        self._compute, self._landed = [end], []
        for place in self.updates:
            if place[0] not in self.first:
                self._update(place, [end], start if self.first else [end], False)

    def _visit(self, phase: str, unit: int) -> None:
        after = list(self._compute)
        if phase == "forward":
            after += [self._updated[unit, c][0] for c in range(len(chunks_of(self.plan.layouts[unit]))) if (unit, c) in self._updated]
        if self._moves(unit):
            after.append(self._fetch(unit, self.fetches[unit][phase == "backward"]))
        if phase == "backward" and unit in self._left:
            after += self._boundary(unit, self._left.pop(unit), ("nvme_read", "h2d"))
        if phase == "backward" and self.direct:
            after += self._readers(unit)  # it is compute's thread that waits
        seconds = self.work[unit].forward if phase == "forward" else self.work[unit].backward
        task = self.task(phase, unit, -1, "compute", seconds, after)
        if phase == "forward" and any(self.plan.boundaries.sizes[unit : unit + 1]):
            self._left[unit] = self._boundary(unit, self._visits[-1:], ("d2h", "nvme_write"))
        if self._moves(unit):
            self.task("release", unit, -1, "slots", 0.0, [task])
        self._compute = [task]
        self._visits.append(task)

    def _boundary(self, unit: int, after: list[int], lanes: tuple[str, str]) -> list[int]:
        """A unit's input leaves when the unit before is done, and comes back when backward is one unit from it."""
        nbytes = self.passes * self.plan.boundaries.sizes[unit]
        after = [*after, *(self._visits[-2:-1] if lanes[0] == "nvme_read" else [])]
        for lane in lanes:
            if self.plan.boundaries.tier == "nvme" if lane.startswith("nvme") else not self.direct:
                after = [self.task("boundary", unit, -1, lane, nbytes / getattr(self.speeds, lane), after)]
        return after

    def _moves(self, unit: int) -> bool:
        if self.plan.share.divides("parameter"):
            return True
        return self.plan.parameter[unit] not in (("device", "host") if self.direct else ("device",))

    def _fetch(self, unit: int, times: int) -> int:
        """A fetch starts as far ahead as there are slots, from what the unit's own updates made of it. No `times`: it is there."""
        plan, nvme = self.plan, self.plan.parameter[unit] == "nvme"
        nbytes = sum(plan.share.parameter_bytes(f) for f in plan.layouts[unit].flats)
        after = [self._updated[unit, c][1 if nvme else 0] for c in range(len(chunks_of(plan.layouts[unit]))) if (unit, c) in self._updated]
        depth = self._depth(nbytes)
        after += [self._visits[-1 - depth]] if len(self._visits) > depth else self.steps[-1:]
        lane, speed = ("nvme_read", self.speeds.nvme_read) if nvme else ("h2d", self.speeds.h2d)
        if nvme and not self.direct:
            speed = min(speed, self.speeds.h2d)
        return self.task("fetch", unit, -1, lane, times * nbytes / speed, after, plan.staging.part_bytes if nvme and not self.direct else 0)

    def _depth(self, nbytes: int) -> int:
        """How many visits before its own a unit of so many bytes is fetched: one slot is in use, and none much larger is taken ahead of need."""
        return min(AHEAD, max(1, sum(nbytes <= slot <= 2 * nbytes for slot in self.plan.slots) - 1))

    def _readers(self, unit: int) -> list[int]:
        """What ends the updates that read from the places that the unit shares."""
        before = self._users.get(self.plan.places[unit]) if unit in self.plan.passing else None
        return [self._over[before]] if before is not None else []

    def _gradients(self, unit: int) -> list[int]:
        """A unit's gradients leave the device, and go where they rest once the last update has read what was there."""
        plan, sent, first = self.plan, [*self._compute, *self._readers(unit)], len(self._landed)
        if unit in plan.passing:
            self._users[plan.places[unit]] = unit
        for c, chunk in enumerate(chunks_of(plan.layouts[unit])):
            if plan.gradient[unit][c] == ABSENT:
                continue
            nbytes = gradient_chunk_bytes(chunk, plan.grad)
            after = [*sent, *([self._updated[unit, c][0]] if (unit, c) in self._updated else [])]
            lane, seconds = "d2h", 0.0 if self.direct else link_bytes(chunk.numel, plan.sent, self.passes, unit in plan.summed) / self.speeds.d2h
            if plan.gradient[unit][c] == "device" and not self.direct:
                lane, seconds = "device", 0.0
            landed = self.task("gradient", unit, c, lane, seconds, after)
            if plan.gradient[unit][c] == "nvme":
                sums = 0 if unit in plan.summed else self.passes - 1  # that are written, and read to be added to
                written = sums + ((unit, c) not in self.taken)
                for lane, times, speed in (("nvme_read", sums, self.speeds.nvme_read), ("nvme_write", written, self.speeds.nvme_write)):
                    if times:
                        landed = self.task("gradient", unit, c, lane, times * nbytes / speed, [landed], plan.staging.part_bytes)
            self._landed.append(landed)
        return self._landed[first:]

    def _read(self, place: Place, after: list[int], early: bool) -> None:
        """Reads a chunk's state into a buffer: the one whose chunk was written back longest ago."""
        at = len(self._writes)
        waits = [*after, *([self._writes[at - self.plan.staging.updates]] if at >= self.plan.staging.updates else [])]
        waits += [self._updated[place][1]] if place in self._updated else []
        self._writes.append(-1)  # known once its update is
        nbytes = self._read_bytes(place)
        read = self.task("read", *place, "nvme_read", nbytes / self.speeds.nvme_read, waits, self.plan.staging.frame_bytes, early)
        self._held[place] = read, at

    def _chunk(self, place: Place) -> Chunk:
        return chunks_of(self.plan.layouts[place[0]])[place[1]]

    def _read_bytes(self, place: Place) -> int:
        plan, n = self.plan, self._chunk(place).numel
        state = self._record_bytes(n) if plan.state[place[0]][place[1]] == "nvme" else 0
        value = n * DTYPE_BYTES[plan.compute] if plan.form.value_is_master and plan.parameter[place[0]] == "nvme" else 0
        return state + value

    def _write_bytes(self, place: Place) -> int:
        plan, n = self.plan, self._chunk(place).numel
        state = self._record_bytes(n) if plan.state[place[0]][place[1]] == "nvme" else 0
        return state + (n * DTYPE_BYTES[plan.compute] if plan.parameter[place[0]] == "nvme" else 0)

    def _update(self, place: Place, after: list[int], readable: list[int], early: bool) -> None:
        """A chunk's update once `after` has ended; its state may be read once `readable` has, if it has no buffer yet."""
        plan, (unit, c), after = self.plan, place, list(after)
        slot = -1
        if _needs_buffer(plan, place):
            if place not in self._held:
                self._read(place, readable, early)
            read, slot = self._held.pop(place)
            after.append(read)
            if plan.gradient[unit][c] == "nvme" and place not in self.taken:
                nbytes = gradient_chunk_bytes(self._chunk(place), plan.grad)
                after.append(self.task("read", unit, c, "nvme_read", nbytes / self.speeds.nvme_read, list(after), early=early))
        lane, seconds = "compute" if self.direct else "update", self._chunk(place).numel / self.speeds.update
        if plan.state[unit][c] == "device" and not self.direct:
            lane, seconds = "device", 0.0  # at the speed of its memory, as compute is
        updated = written = self.task("update", unit, c, lane, seconds, after, early=early)
        if slot >= 0:
            seconds = self._write_bytes(place) / self.speeds.nvme_write
            written = self._writes[slot] = self.task("write", unit, c, "nvme_write", seconds, [updated], early=early)
        self._updated[place] = updated, written


def schedule(plan: Plan, forward: Sequence[int], speeds: Speeds, work: Sequence[Work], direct: bool = False, early: int = 0) -> Schedule:
    """The steady step of a plan: `forward` has every unit in the order of use, `work` each unit's compute by number; `direct` as in Capacities;
    `early` units are updated during the backward."""
    build = _Builder(plan, forward, speeds, work, direct, max(early, least_early(plan, forward)))
    for _ in range(STEPS):
        build.step()
    time = build.timeline
    time.run()
    origin = time.end[build.steps[-2]]
    events = [
        Event(t.kind, t.unit, t.chunk, max((time.end[a] for a in t.after), default=0.0) - origin, time.start[t.number] - origin,
              time.end[t.number] - origin, t.staging)
        for t in build.tasks if t.step == STEPS - 1
    ]  # fmt: skip
    ahead = tuple(p for p in build.updates if p in build.early)
    return Schedule(tuple(sorted(events, key=lambda e: e.start)), build.updates, ahead, time.end[build.steps[-1]] - origin)


def choose_early(plan: Plan, forward: Sequence[int], speeds: Speeds, work: Sequence[Work], direct: bool = False) -> int:
    """How many units, those whose gradients come first, are best updated during the backward: the fewest of those tried that take least time."""
    least = least_early(plan, forward)
    tried = sorted({max(least, len(forward) * i // TRIED) for i in range(TRIED + 1)})
    seconds = {n: schedule(plan, forward, speeds, work, direct, n).seconds for n in tried}
    return next(n for n in tried if seconds[n] <= (1 + LEAST_GAIN) * min(seconds.values()))
