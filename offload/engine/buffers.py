"""What modules of units that are computed again in backward have beside parameters.

[Note: buffers]
A forward may change its module's buffers: batch norm its statistics, spectral norm the vectors that it iterates on. Where the unit is computed
again, the second forward starts from the buffers that the first one found, and what it makes of them is dropped, so that they change once, as where
activations are kept. So it does from the mode of each module, training or evaluation. Small buffers are copied for that; a large one, as a table of
a mask is, is held as it is, and must be as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from offload.config import format_size
from offload.errors import OffloadError

COPIED_MOST = 64 << 10  # bytes of a buffer; no budget counts copies, which are there until the backward


@dataclass(frozen=True)
class _Found:
    """A buffer as a forward found it; `version`: of one that is held and not copied."""

    module: nn.Module
    key: str
    value: torch.Tensor
    version: int | None


class Buffers:
    """The buffers of some modules, and their modes, as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        copies: dict[int, torch.Tensor] = {}
        self._training = [(m, m.training) for m in modules]
        self._found = [_found(m, key, b, copies) for m in modules for key, b in m._buffers.items() if b is not None]

    @contextmanager
    def back(self, unit: str) -> Iterator[None]:
        """While the context lasts the modules have them again. OffloadError if one that was not copied was changed in place; `unit` is named."""
        for found in self._found:
            if found.version is not None and found.value._version != found.version:
                raise OffloadError(
                    f"buffer {found.key} of a {type(found.module).__name__} in {unit}, {format_size(found.value.nbytes)}, was changed in place since "
                    'the unit\'s forward began, and its backward computes from it again: assign a new tensor to it, or give activations="keep"'
                )
        before = [found.module._buffers.get(found.key) for found in self._found]
        others = [m for m, training in self._training if m.training != training]
        copies = {id(found.value): found.value.clone() for found in self._found if found.version is None}
        try:
            _turn(others)
            for found in self._found:
                found.module._buffers[found.key] = copies.get(id(found.value), found.value)
            yield
        finally:
            _turn(others)
            for found, value in zip(self._found, before, strict=True):
                found.module._buffers[found.key] = value


def _found(module: nn.Module, key: str, buffer: torch.Tensor, copies: dict[int, torch.Tensor]) -> _Found:
    if buffer.nbytes > COPIED_MOST and not buffer.is_inference():  # which has no version
        return _Found(module, key, buffer, buffer._version)
    if id(buffer) not in copies:  # it may have several places
        copies[id(buffer)] = buffer.detach().clone()
    return _Found(module, key, copies[id(buffer)], None)


def _turn(modules: Sequence[nn.Module]) -> None:
    """From training mode to evaluation mode, or back."""
    for module in modules:
        module.training = not module.training
