"""Appends records to a JSON-lines file away from the thread that trains."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiofiles  # type: ignore[import-untyped]

from offload.checkpoint.disk import sync_directory
from offload.errors import OffloadError
from offload.observe.closing import Closing

BACKLOG = 256


class MetricsWriter(Closing):
    """One line per record, in order, each written out before the next is taken.

    The file is opened, and made, by the first `write` or `sync`. `write` returns at once unless `BACKLOG` records wait. An error of the file is
    raised by the next `write` or `sync` and all later ones; by `close`, unless it was raised before. `make_room` is called where the disk is full,
    and tells whether there is more room now.
    """

    def __init__(self, path: str | os.PathLike[str], make_room: Callable[[], bool] = lambda: False) -> None:
        self._path, self._make_room = os.fspath(path), make_room
        self._queue: queue.Queue[str | threading.Event | None] = queue.Queue(BACKLOG)
        self._error: OSError | None = None
        self._told = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._drain()), name="offload-metrics", daemon=True)
        self._thread.start()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        file = None
        while (line := await loop.run_in_executor(None, self._queue.get)) is not None:
            try:
                if isinstance(line, threading.Event):
                    if self._error is None:
                        file = file or await aiofiles.open(self._path, "a")
                        os.fsync(file.fileno())
                        sync_directory(Path(self._path).parent)
                    line.set()
                    continue
                if self._error is not None:
                    continue
                file = file or await aiofiles.open(self._path, "a")
                await file.write(line)
                try:
                    await file.flush()
                except OSError as error:
                    if error.errno != errno.ENOSPC or not self._make_room():
                        raise
                    await file.flush()  # what was not written is still there
            except OSError as error:
                self._error = error
                if isinstance(line, threading.Event):
                    line.set()
        if file is not None:
            try:
                await file.close()
            except OSError as error:
                self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            self._told = True
            error = self._error
            raise OffloadError(f"cannot write {self._path}: {error.strerror}; make room there or mend it, and go on with --resume") from error

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
        if not self._told:
            self._check()
