"""What modules of a prepared model call, and what copies and pickles of these have in its place: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.engine.eager import alone, eager


class Hook:
    """A hook that runs as it is (eager.py). A deepcopy or a pickle of the module that has it is plain: it neither streams nor holds the runtime."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = eager(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nothing, ()


alone(Hook.__call__)


def nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that leaves everything as it is."""


def _nothing() -> Callable[..., None]:
    return nothing
