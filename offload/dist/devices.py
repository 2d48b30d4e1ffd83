"""Which GPU each rank computes on."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from offload.errors import ConfigError


def check_devices(devices: Sequence[str], ranks: Sequence[int]) -> None:
    """ConfigError, on all ranks, where two have one GPU, which NCCL does not know. `devices`: each rank's, by a name that no other has."""
    first: dict[str, int] = {}
    for device, rank in zip(devices, ranks, strict=True):
        if first.setdefault(device, rank) != rank:
            raise ConfigError(
                f"ranks {first[device]} and {rank} would both compute on one GPU ({device}): before anything else call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), or start no more ranks than there are GPUs"
            )


def device_name() -> str:
    """That of the GPU this process computes on, which no other has."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{getattr(properties, 'uuid', '') or f'{socket.gethostname()} {torch.cuda.current_device()}'}"
