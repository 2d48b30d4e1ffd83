"""Loops as users write them, under two ranks: what torch makes of them on one at the whole batch, alike at every stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from ranks import ROOT, run

SETTINGS = [
    *((stage, "host", "cpu", "keep") for stage in range(4)),
    *((stage, "nvme", "cpu", "recompute") for stage in range(4)),
    (1, "nvme", "sim", "keep"),
    (3, "host", "sim", "recompute"),
]

SCRIPT = f"""
import sys, tempfile
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import json, loops
from offload.dist.world import World
world = World.current(device="cpu")
found = {{}}
for name in loops.LOOPS:
    for settings in json.loads(sys.argv[2]):
        with tempfile.TemporaryDirectory() as swap:
            found[name, *settings] = loops.by_ranks(name, *settings, swap)
torch.save(found, f"{{sys.argv[1]}}/{{world.rank}}.pt")
world.barrier("the end")
world.close()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[Any, ...], Any]]:
    """By loop and settings, what came of it on each rank."""
    where: Path = tmp_path_factory.mktemp("loops")
    run(SCRIPT, 2, str(where), json.dumps(SETTINGS), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})
    return [torch.load(where / f"{rank}.pt") for rank in range(2)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _alike(name: str, settings: Any) -> Any:
    """Those of one kind have the same bits: not where ranks sum several micro-batches first, nor by our clipping and torch's, which rounds norms."""
    stage, place, _, _ = settings
    return stage < 2 if name == "accumulated" else place if name == "clipped" else None


@pytest.mark.parametrize("name", loops.LOOPS)
def test_stages_and_places_give_the_same_bits_on_all_ranks(found: Any, name: str) -> None:
    for kind in {_alike(name, settings) for settings in SETTINGS}:
        results = [of[name, *settings] for settings in SETTINGS if _alike(name, settings) == kind for of in found]
        assert len(results) > 4
        for result in results:
            assert all(_same(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("name", loops.LOOPS)
def test_as_torch_at_the_whole_batch(found: Any, name: str) -> None:
    losses, gradients, state = loops.by_torch(name)
    for stage in (0, 3):
        own = found[0][name, stage, "host", "cpu", "keep"]
        assert own[0] == pytest.approx(losses, rel=2e-5)
        assert (own[1] is None) == (gradients is None)
        for key, value in (gradients or {}).items():
            assert (own[1][key] is None) == (value is None), key
            torch.testing.assert_close(own[1][key], value, rtol=1e-4, atol=1e-6, msg=key) if value is not None else None
        assert own[2].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(own[2][key], value, rtol=0, atol=2e-5, msg=key)
