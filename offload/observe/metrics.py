"""Appends records to a JSON-lines file away from the thread that trains."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiofiles  # type: ignore[import-untyped]

from offload.errors import OffloadError

BACKLOG = 256


class MetricsWriter:
    """One line per record, in order, each written out before the next is taken.

    `write` returns at once unless `BACKLOG` records wait. An error of the file is raised by the next `write` or by `close`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._queue: queue.Queue[str | threading.Event | None] = queue.Queue(BACKLOG)
        self._error: OSError | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._drain()), name="offload-metrics", daemon=True)
        self._thread.start()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        broken = False
        file = None
        while (line := await loop.run_in_executor(None, self._queue.get)) is not None:
            try:
                if isinstance(line, threading.Event):
                    if file is not None and not broken:
                        os.fsync(file.fileno())
                    line.set()
                    continue
                if broken:
                    continue
                file = file or await aiofiles.open(self._path, "a")
                await file.write(line)
                await file.flush()
            except OSError as error:
                self._error, broken = error, True
                if isinstance(line, threading.Event):
                    line.set()
        if file is not None:
            try:
                await file.close()
            except OSError as error:
                self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise OffloadError(f"cannot write {self._path}: {error.strerror}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Queues `record` as a line of JSON."""
        self._check()
        self._queue.put(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Returns when every record is on the drive."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        self._check()

    def close(self) -> None:
        """Returns when every record is written."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._check()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
