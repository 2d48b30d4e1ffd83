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
        self._readers: dict[int, tuple[int, ...]] = {}  # by place, units of which no update may read there unseen
        self._before: dict[int, tuple[int, ...]] = {}  # by unit, the readers when it came to hold its places

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
            self._before[unit] = self._readers.get(place, ())

    def opened(self, unit: int) -> None:
        """The unit's updates will end by themselves, and all its gradients have landed, so that others' have ended."""
        place = self._place[unit]
        if self._holder.get(place) == unit:
            del self._holder[place]
        self._readers[place] = (unit,)

    def over(self) -> list[int]:
        """A step is: the updates of all units that hold places are submitted or dropped, whatever of them has landed. Gives those units."""
        for place, unit in self._holder.items():
            self._readers[place] = (unit, *(u for u in self._readers.get(place, ()) if u != unit))
        units = list(self._holder.values())
        self._holder.clear()
        return units

    def forget(self) -> None:
        """A backward begins afresh: what an earlier one, which raised, has landed is no gradient."""
        self._holder.clear()

    def let_go(self, unit: int, chunk: int) -> None:
        """Returns when no update reads what the chunk's gradient is to be stored over. From the thread of landings too."""
        self._let_go(unit, chunk)
        for before in self._before.get(unit, ()):
            self._let_go(before, chunk)

    def leave(self, unit: int) -> None:
        """The unit has places of its own. Nothing is under way."""
        del self._place[unit]
        self._before.pop(unit, None)
