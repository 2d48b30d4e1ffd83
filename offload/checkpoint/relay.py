"""The checksum of a file that several ranks write, taken as they write: whoever has the next stretch goes on where the one before it has ended.

[Note: relay]
A hash of many bytes is made in their order, so it passes from rank to rank with the stretches of the file: a message of about a KiB. A rank reads
and writes ahead meanwhile, as many blocks as it has. One that fails says so with each message that it still owes, and so does who hears of it; so all
come to the end, and nobody waits for what does not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from offload import _core
from offload.dist.world import Work, World
from offload.errors import CheckpointError

_Range = tuple[int, int]  # first byte of a file, and behind the last


class Spoilt(Exception):
    """Another rank has failed."""


class Relay:
    """This rank's part in it. `ranges`: by rank, what of the file it writes, in order."""

    def __init__(self, world: World, ranges: Sequence[Sequence[_Range]], what: str) -> None:
        """CheckpointError where they are not all of a file, each byte once."""
        self._world, self._name = world, f"checksum of {what}"
        legs = _legs(ranges, what)
        own = [i for i, (_, _, rank) in enumerate(legs) if rank == world.rank]
        self._from = {legs[i][0]: legs[i - 1][2] if i else world.rank for i in own}  # by byte: from whom the hash of what is before comes
        self._to = {legs[i][1]: legs[i + 1][2] for i in own if i + 1 < len(legs)}
        self._last = bool(own) and own[-1] == len(legs) - 1
        self._empty = len(_core.Digest().state())
        self._digest, self._spoilt = _core.Digest(), False
        self._sent: list[Work] = []

    def update(self, data: memoryview, at: int) -> None:
        """Bytes of the file from `at` on, in order, of one of this rank's stretches. Spoilt, from then on; RankError."""
        if self._spoilt:  # what is owed for what was before is sent by `skip`, in order
            raise Spoilt
        source = self._from.pop(at, None)
        if source is not None:
            self._receive(source)
        self._digest.update(data)
        target = self._to.pop(at + data.nbytes, None)
        if target is not None:
            self._send(target, self._digest.state())

    def ended_by(self, error: BaseException) -> None:
        """This rank has failed. If it was interrupted it takes part in nothing more, and neither it nor others wait for each other."""
        if not isinstance(error, Exception):
            self._world.fail(error)

    def _receive(self, source: int) -> None:
        if source == self._world.rank:
            return  # the file begins here
        message = torch.empty(1 + self._empty, dtype=torch.uint8, device="cpu")
        self._world.receive(message, source, self._name).wait()
        if message[0]:
            self._spoilt = True
            raise Spoilt
        self._digest = _core.Digest(bytes(message[1:].numpy()))

    def _send(self, target: int, state: bytes | None) -> None:
        message = torch.zeros(1 + self._empty, dtype=torch.uint8, device="cpu")
        if state is None:
            message[0] = 1
        else:
            message[1:] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self._sent.append(self._world.send(message, target, self._name))

    def skip(self, start: int, stop: int) -> None:
        """This rank has failed: what others wait for of bytes [start, stop), or of what of them is not hashed yet, tells them so."""
        for at in sorted(n for n in self._from if start <= n < stop):
            with suppress(Spoilt):
                self._receive(self._from.pop(at))
        for at in sorted(n for n in self._to if start < n <= stop):
            self._send(self._to.pop(at), None)

    def settle(self) -> None:
        """What was sent has come."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def hexdigest(self) -> str | None:
        """That of the file, on the rank that has written its end."""
        return str(self._digest.hexdigest()) if self._last else None


def _legs(ranges: Sequence[Sequence[_Range]], what: str) -> list[tuple[int, int, int]]:
    """(first byte, behind the last, rank) of what follows each other in the file, those that one rank writes on end as one."""
    legs: list[tuple[int, int, int]] = []
    end = 0
    for start, stop, rank in sorted((start, stop, rank) for rank, own in enumerate(ranges) for start, stop in own if start < stop):
        if start != end:
            by = "no rank" if start > end else "two ranks"
            raise CheckpointError(f"of {what} byte {min(start, end)} would be written by {by}; nothing was saved")
        end = stop
        if legs and legs[-1][2] == rank:
            legs[-1] = legs[-1][0], stop, rank
        else:
            legs.append((start, stop, rank))
    return legs
