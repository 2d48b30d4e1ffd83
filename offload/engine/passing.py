"""Places that gradients of several units share: whose are there, and whose updates may still read them. See [Note: passing gradients].

A unit *holds* its places from the first of its gradients that lands there until its updates are open or submitted, from when on they end by
themselves: only then does another take them, and what it lands waits for those updates, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class Passing:
    """`places`: by unit, the one in whose places its gradients land; `units` are those that share them. `let_go(unit, chunk)` waits until no update
    reads a chunk's gradient."""

    def __init__(self, places: Sequence[int], units: Collection[int], let_go: Callable[[int, int], None]) -> None:
        self._place = {unit: places[unit] for unit in units}
        self._let_go = let_go
        self._holder: dict[int, int] = {}  # by place
        self._reader: dict[int, int] = {}  # by place, the last unit whose updates read there
        self._before: dict[int, int] = {}  # by unit, the reader when it came to hold its places

    @property
    def units(self) -> Collection[int]:
        return self._place.keys()

    def has(self, unit: int) -> bool:
        return unit in self._place

    def holder(self, unit: int) -> int | None:
        """Who holds the unit's places, if it is another."""
        holder = self._holder.get(self._place[unit])
        return None if holder == unit else holder

    def take(self, unit: int) -> None:
        """From here on the unit holds its places. Whoever did before has no gradient any more."""
        place = self._place[unit]
        if self._holder.get(place) != unit:
            self._holder[place] = unit
            if place in self._reader:
                self._before[unit] = self._reader[place]

    def opened(self, unit: int) -> None:
        """The unit's updates will end by themselves."""
        place = self._place[unit]
        if self._holder.get(place) == unit:
            del self._holder[place]
        self._reader[place] = unit

    def over(self) -> list[int]:
        """A step is: the updates of all units that hold places are submitted or dropped. Gives those units."""
        units = list(self._holder.values())
        for unit in units:
            self.opened(unit)
        return units

    def forget(self) -> None:
        """A backward begins afresh: what an earlier one, which raised, has landed is no gradient."""
        self._holder.clear()

    def let_go(self, unit: int, chunk: int) -> None:
        """Returns when no update reads what the chunk's gradient is to be stored over. From the thread of landings too."""
        self._let_go(unit, chunk)
        before = self._before.get(unit)
        if before is not None and unit in self._place:
            self._let_go(before, chunk)

    def leave(self, unit: int) -> None:
        """The unit has places of its own. Nothing is under way."""
        place = self._place.pop(unit)
        for there in (self._holder, self._reader):
            if there.get(place) == unit:
                del there[place]
