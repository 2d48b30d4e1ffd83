"""When tasks run that wait for each other and share links. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Timeline:
    """Tasks, numbered as they are added. Each runs on one lane, one at a time there, first ready first served; `start` and `end` are in seconds."""

    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    _lanes: list[str] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _after: list[list[int]] = field(default_factory=list)
    _awaited: list[int] = field(default_factory=list)

    def add(self, lane: str, seconds: float, after: list[int]) -> int:
        """A task that starts when those before it have ended; gives its number. ValueError for one that is not there yet."""
        number = len(self._lanes)
        if after and not 0 <= min(after) <= max(after) < number:
            raise ValueError(f"task {number} waits for one that was not added before it")
        self._lanes.append(lane)
        self._seconds.append(seconds)
        self._after.append([])
        self._awaited.append(len(after))
        for a in after:
            self._after[a].append(number)
        return number

    def run(self) -> None:
        """Fills `start` and `end`."""
        count = len(self._lanes)
        self.start, self.end = [0.0] * count, [0.0] * count
        awaited = list(self._awaited)
        ready: dict[str, list[tuple[float, int]]] = defaultdict(list)
        free: dict[str, float] = defaultdict(float)
        busy: set[str] = set()
        ends: list[tuple[float, int]] = []

        def serve(lane: str, now: float) -> None:
            if ready[lane] and lane not in busy:
                _, task = heapq.heappop(ready[lane])
                busy.add(lane)
                self.start[task] = max(now, free[lane])
                self.end[task] = free[lane] = self.start[task] + self._seconds[task]
                heapq.heappush(ends, (self.end[task], task))

        for task in range(count):
            if not awaited[task]:
                ready[self._lanes[task]].append((0.0, task))
        for lane in list(ready):
            heapq.heapify(ready[lane])
            serve(lane, 0.0)
        while ends:
            now, task = heapq.heappop(ends)
            busy.discard(self._lanes[task])
            woken = {self._lanes[task]}
            for follower in self._after[task]:
                awaited[follower] -= 1
                if not awaited[follower]:
                    heapq.heappush(ready[self._lanes[follower]], (now, follower))
                    woken.add(self._lanes[follower])
            for lane in woken:
                serve(lane, now)
