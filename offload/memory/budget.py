"""Budgets: the ceiling of a tier in bytes, held as values."""

from __future__ import annotations

import threading

from offload.errors import BudgetError


class Reservation:
    """Bytes of one tier that are held until released; a context manager."""

    def __init__(self, budget: Budget, nbytes: int, what: str) -> None:
        self.nbytes = nbytes
        self.what = what
        self._budget: Budget | None = budget

    def release(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._give_back(self.nbytes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Budget:
    """The ceiling of one tier. What is reserved never exceeds it; `peak` is the most that was ever held, in bytes."""

    def __init__(self, tier: str, capacity: int) -> None:
        self.tier = tier
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def reserve(self, nbytes: int, what: str) -> Reservation:
        with self._lock:
            if self.used + nbytes > self.capacity:
                raise BudgetError(
                    f"{what} needs {nbytes} bytes of the {self.tier} tier, "
                    f"which has {self.capacity - self.used} of its budget of {self.capacity} left; "
                    f"raise the {self.tier} budget, or lower what else rests there"
                )
            self.used += nbytes
            self.peak = max(self.peak, self.used)
        return Reservation(self, nbytes, what)

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes
