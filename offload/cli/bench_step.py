"""The step of a small model, prepared and plain, in a process of its own: its memory is then nobody else's.

    python -m offload.cli.bench_step DIRECTORY
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

VOCAB, WIDTH, BLOCKS, HEADS, BATCH, TOKENS = 4096, 512, 4, 8, 2, 128
ROUNDS = 3


def _model() -> Any:
    """A decoder of 17 M parameters, seeded."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x and the result: [batch, tokens, WIDTH]."""
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(mixed.transpose(1, 2).flatten(2))
            y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
            return y

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, VOCAB, bias=False))


def _stepper(model: Any, optimizer: Any, synchronize: Callable[[], None], device: str, autocast: bool) -> Callable[[], float]:
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=generator).to(device)

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten().to(logits.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - start

    return step


def _plain(device: str) -> Callable[[], float]:
    import torch

    model = _model().to(device)
    return _stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
                    torch.cuda.synchronize if device == "cuda" else lambda: None, device, autocast=True)  # fmt: skip


def _prepared(directory: str, place: dict[str, str], device: str) -> tuple[Callable[[], float], Any]:
    import offload

    model = offload.prepare(_model(), offload.Tiers("3GiB", "2GiB", [(directory, "1GiB")]), place=place, batch=(BATCH, TOKENS))
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-4)
    runtime = offload.runtime(model)
    return _stepper(model, optimizer, runtime.synchronize, "cpu", autocast=False), runtime


def measure(directory: str) -> dict[str, Any]:
    """Median seconds of a step: plain torch (bf16 autocast, fused AdamW), prepared with all in the host, and with the optimizer's state on NVMe."""
    import torch

    from offload.errors import OffloadError
    from offload.observe.measure import turns

    device = "cuda" if torch.cuda.is_available() else "cpu"
    contenders = {"plain torch": _plain(device)}
    runtimes, refused = [], {}
    host = {"parameter": "host", "gradient": "host", "optimizer": "host"}
    for name, place in {"all in host": host, "optimizer on nvme": host | {"optimizer": "nvme"}}.items():
        try:
            contenders[name], runtime = _prepared(directory, place, device)
            runtimes.append(runtime)
        except OffloadError as error:
            refused[name] = str(error)
    try:
        taken = turns(contenders, ROUNDS)
    finally:
        for runtime in runtimes:
            runtime.close()
    parameters = sum(p.numel() for p in _model().parameters())
    seconds = {name: sorted(times)[len(times) // 2] for name, times in taken.items()}
    return {"parameters": parameters, "tokens": BATCH * TOKENS, "device": device, "seconds": seconds, "refused": refused}


if __name__ == "__main__":
    print("@" + json.dumps(measure(sys.argv[1])), flush=True)
