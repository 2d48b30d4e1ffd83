"""What is closed at the end of a `with` block, and what becomes of an error then."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from offload.errors import OffloadError

log = logging.getLogger("offload")


class Closing(ABC):
    """A context manager that closes. An error that ends the block counts for more than one of closing, which is then logged."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except OffloadError as own:
            if error is None:
                raise
            log.warning("%s", own)
