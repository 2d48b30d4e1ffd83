"""What can be told of the CUDA device where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.memory.arena import Arena
from offload.transfer import cuda
from offload.transfer.cuda import CudaDevice


@pytest.mark.parametrize("code", [0, 1, 2])
def test_host_memory_is_pinned_at_its_size_or_used_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int) -> None:
    """A system that refuses, as containers and WSL do, is said once for each arena, with the way out; its error is not left for the next kernel."""
    registered: list[tuple[int, int, int]] = []
    forgotten: list[None] = []

    def register(*args: int) -> int:
        registered.append(args)  # type: ignore[arg-type]
        return code

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(cuda, "_forget_error", lambda: forgotten.append(None))
    device: Any = SimpleNamespace(_pinned=[])
    arena = Arena("host", 3 * 4096)
    CudaDevice.register(device, arena)
    CudaDevice.register(device, Arena("host", 0))
    address = arena.whole.data_ptr()
    assert registered == [(address, 3 * 4096, 0)]
    assert device._pinned == ([] if code else [address]) and len(forgotten) == bool(code)
    assert caplog.text.count("12288 bytes could not be pinned (see `ulimit -l`)") == bool(code)


def test_errors_are_forgotten_where_there_is_no_runtime_of_cudas() -> None:
    cuda._forget_error()
