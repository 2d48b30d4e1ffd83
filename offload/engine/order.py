"""The recorded order of units, and what comes next in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Visit = tuple[str, int]  # ("forward" or "backward", unit)


class AccessOrder:
    """Learns which visit follows each pair of visits, and predicts by it; before it knows, by the units' own order."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._next: dict[tuple[Visit | None, Visit], Visit] = {}
        self._before: Visit | None = None
        self._last: Visit | None = None
        self._computed: dict[int, None] = {}  # units whose parameters a forward used, in order
        self._backward_came = False

    def computed(self, units: Sequence[int]) -> None:
        """A forward, and no recomputation, uses the parameters of these units."""
        if self._backward_came:
            self._computed, self._backward_came = {}, False
        self._computed |= dict.fromkeys(units)

    def forward(self) -> list[int]:
        """All units in the order in which the last forward used their parameters; those that it did not use last."""
        return list(dict.fromkeys((*self._computed, *range(self._units))))

    def note(self, visit: Visit) -> None:
        self._backward_came = self._backward_came or visit[0] == "backward"
        if visit == self._last:
            return
        if self._last is not None:
            self._next[(self._before, self._last)] = visit
        self._before, self._last = self._last, visit

    def ahead(self, most: int) -> Iterator[Visit]:
        """The next visits, nearest first; ends where nothing is known."""
        before, last = self._before, self._last
        for _ in range(most):
            if last is None:
                return
            follow = self._next.get((before, last)) or self._guess(last)
            if follow is None:
                return
            yield follow
            before, last = last, follow

    def _guess(self, visit: Visit) -> Visit | None:
        phase, unit = visit
        follow = unit + 1 if phase == "forward" else unit - 1
        return (phase, follow) if 0 <= follow < self._units else None
