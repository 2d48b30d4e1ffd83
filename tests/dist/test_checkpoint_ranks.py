"""Checkpoints of several ranks: one file that any number of ranks loads, under any stage, to the bit; and errors of one rank that all have."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from ranks import run

from helpers import flip
from offload.checkpoint.manifest import verify

SCRIPT = """
import errno, json, os, sys, torch, offload
from helpers import Net
from offload.checkpoint import blocks, disk
from offload.dist.world import World
from offload.errors import CheckpointError

what, where, stage, moments, place = sys.argv[1:6]
world = World.current(device="cpu")
torch.manual_seed(0 if what != "load" else 1)
model = Net(vocab=300, width=65, depth=2)
model.blocks[0].up.weight.requires_grad_(False)
model.register_buffer("kept", torch.arange(5.0) if what != "load" else torch.zeros(5))
if os.environ.get("BLOCK"):
    blocks.block_bytes = lambda room: int(os.environ["BLOCK"])
precision = offload.Precision(compute="bf16", grad="fp32", master="split", moments=moments)
tiers = offload.Tiers(device="64MiB", host="64MiB", nvme=[(os.path.join(os.path.dirname(where), "swap"), "64MiB")])
places = {role: place for role in ("parameter", "gradient", "optimizer")} if place != "any" else None
offload.prepare(model, tiers, device="cpu", precision=precision, place=places, stage=int(stage), seed=3)
optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
extra = None
if what == "load":
    extra = offload.load(where, model, optimizer)
    assert model.kept.tolist() == [0, 1, 2, 3, 4]
else:
    for step in range(2):
        ids = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(10 * step + world.rank))
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    if what == "full" and world.rank == int(os.environ["FULL"]):
        real, left = disk.write_at, [int(os.environ["WRITES"])]
        def write(file, data, at):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(file, data, at)
        disk.write_at = write
    def opened(event, args):  # what is saved is never read
        if event == "open" and str(args[0]).endswith("tensors.safetensors"):
            assert args[2] & os.O_ACCMODE == os.O_WRONLY, args
    sys.addaudithook(opened)
    try:
        offload.save(where, model, optimizer, extra={"step": 2, "t": torch.tensor([1.5])})
    except CheckpointError as error:
        print(json.dumps(str(error)))
        world.barrier("the end")
        raise SystemExit(0)
if what == "load":
    offload.save(where + "-again", model, optimizer, extra={"step": 2, "t": torch.tensor([1.5])})
print(json.dumps([offload.runtime(model).digest(), extra is None or extra["t"].tolist() == [1.5]]))
offload.runtime(model).close()
world.barrier("the end")
world.close()
"""


def on(ranks: int, *args: object, **env: object) -> list[object]:
    """What each rank says: the digest, and whether `extra` is as it was."""
    settings = {"OFFLOAD_COLLECTIVE_TIMEOUT": "60"} | {key: str(value) for key, value in env.items()}
    said = [json.loads(text.splitlines()[-1]) for text in run(SCRIPT, ranks, *map(str, args), env=settings)]
    assert said == [said[0]] * ranks
    return said[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "stage", "moments", "place", "then"),
    [
        (2, 3, "fp32", "nvme", [(1, 3, "host"), (3, 1, "any")]),
        (2, 1, "int8", "host", [(1, 3, "nvme"), (2, 2, "host")]),
        (1, 3, "bf16", "nvme", [(2, 0, "any"), (3, 3, "nvme")]),
    ],
)  # fmt: skip
def test_any_number_of_ranks_loads_it_to_the_bit(
    tmp_path: Path, ranks: int, stage: int, moments: str, place: str, then: list[tuple[int, int, str]]
) -> None:
    path, again = tmp_path / "saved", tmp_path / "saved-again"
    saved = on(ranks, "save", path, stage, moments, place)
    verify(path)
    for other, another, elsewhere in then:
        assert on(other, "load", path, another, moments, elsewhere, BLOCK=8192) == saved, (other, another, elsewhere)
        for name in os.listdir(path):  # whoever saves the same saves the same bytes
            assert (path / name).read_bytes() == (again / name).read_bytes(), (other, another, name)
        shutil.rmtree(again)
    assert sorted(os.listdir(tmp_path)) == ["saved", "swap"] or os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize(("rank", "writes"), [(0, 0), (0, 7), (1, 0), (1, 20), (2, 5)])
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path, rank: int, writes: int) -> None:
    said = on(3, "full", tmp_path / "saved", 3, "fp32", "host", FULL=rank, WRITES=writes, BLOCK=4096)
    assert "No space left on device" in str(said) and f"on rank {rank}" in str(said)
    assert not [name for name in os.listdir(tmp_path) if name != "swap"]


def test_a_damaged_one_is_refused_by_all(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    on(2, "save", path, 3, "fp32", "host")
    flip(path / "tensors.safetensors", -1)
    with pytest.raises(AssertionError, match=r"CheckpointError.*damaged: its bytes are not those that were saved"):
        on(2, "load", path, 3, "fp32", "host")
