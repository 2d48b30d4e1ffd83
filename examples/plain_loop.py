"""A plain PyTorch loop over a model whose state rests on the host and on NVMe.

    python examples/plain_loop.py [SWAP_DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

import offload

VOCAB, WIDTH = 1000, 256


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result: [..., WIDTH]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(swap: str) -> None:
    """Learns to count modulo VOCAB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(Block() for _ in range(8)), nn.Linear(WIDTH, VOCAB))
    tiers = offload.Tiers(device="40MiB", host="16MiB", nvme=[(swap, "256MiB")])

    model = offload.prepare(model, tiers)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    for step in range(50):
        ids = torch.randint(0, VOCAB - 1, (64,))
        loss = nn.functional.cross_entropy(model(ids).float(), ids + 1)
        loss.backward()
        offload.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.3f}")

    with offload.runtime(model) as runtime:
        stats = runtime.stats()
        print({key: stats[key] for key in ("state_bytes", "peak_bytes", "moved_bytes")})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)
