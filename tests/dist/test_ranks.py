"""Training on two ranks: every stage gives the same bits wherever state rests, and what one rank gives at twice the batch."""

from __future__ import annotations

import json
from typing import Any

import cases
import pytest
from ranks import ROOT, run

STAGES = (0, 1, 2, 3)
SPLIT = ("bf16", "bf16", "split", "int8")
SUMMED = {"accumulate": 3, "no_sync": "but last", "clip": 0.5, "steps": 2}

# what is trained; settings of each group change nothing that is computed
GROUPS: dict[str, list[dict[str, Any]]] = {
    "clip": [{"stage": s, "clip": 0.5} for s in STAGES]
    + [{"stage": s, "clip": 0.5, "place": "nvme"} for s in STAGES]
    + [{"stage": s, "clip": 0.5, "device": "sim"} for s in (0, 1, 2, 3)]
    + [{"stage": s, "clip": 0.5, "device": "sim", "place": "nvme"} for s in (2, 3)]
    + [{"stage": 3, "clip": 0.5, "activations": "recompute"}],
    "clip by torch": [{"stage": s, "clip": 0.5, "by_torch": True} for s in STAGES],
    "accumulate": [{"stage": s, "accumulate": 2} for s in STAGES] + [{"stage": 3, "accumulate": 2, "place": "nvme", "device": "sim"}],
    "summed": [{"stage": s, **SUMMED} for s in (0, 1)]
    + [{"stage": s, **SUMMED, "place": "nvme"} for s in (0, 1)]
    + [{"stage": s, **SUMMED, "device": "sim", "place": p} for s, p in ((0, "nvme"), (1, "host"))]
    + [{"stage": s, **SUMMED, "no_sync": "all"} for s in (0, 1)],
    "summed, divided": [{"stage": s, **SUMMED} for s in (2, 3)]
    + [{"stage": 1, **SUMMED, "no_sync": "no"}],  # ranks sum nothing by themselves
    "summed, a parameter unused": [{"stage": s, **SUMMED, "use": "extra"} for s in (0, 1)],
    "summed, a unit unused": [{"stage": s, **SUMMED, "use": "side", "place": p} for s, p in ((0, "host"), (1, "nvme"))],
    "summed, int8": [{"stage": s, **SUMMED, "precision": SPLIT, "place": p} for s, p in ((0, "host"), (1, "nvme"))],
    "frozen": [{"stage": s, "frozen": True, "clip": 1.0} for s in STAGES] + [{"stage": 3, "frozen": True, "clip": 1.0, "place": "nvme"}],
    "a parameter unused": [{"stage": s, "use": "extra", "clip": 1.0} for s in STAGES],
    "a unit unused": [{"stage": s, "use": "side", "clip": 1.0} for s in (0, 1, 2)],
    "split int8": [{"stage": s, "precision": SPLIT, "clip": 1.0} for s in STAGES]
    + [{"stage": s, "precision": SPLIT, "clip": 1.0, "place": "nvme"} for s in (1, 3)],
    "meta": [{"stage": s, "meta": True} for s in (0, 3)],
    "bytes": [{"stage": s, "steps": 2} for s in STAGES],
}  # fmt: skip
ALL = [(name, settings) for name, group in GROUPS.items() for settings in group]

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases
from offload.dist.world import World
for settings in json.loads(sys.argv[1]):
    print(json.dumps(cases.train(**settings)), flush=True)
World.current().close()
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """By group, each of its settings with what came of it on both ranks."""
    outs = run(SCRIPT, 2, json.dumps([settings for _, settings in ALL]), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})
    lines = [[json.loads(line) for line in out.splitlines()] for out in outs]
    by_group: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    for i, (name, settings) in enumerate(ALL):
        by_group.setdefault(name, []).append((settings, [lines[rank][i] for rank in range(2)]))
    return by_group


@pytest.mark.parametrize("name", GROUPS)
def test_stages_and_places_give_the_same_bits(found: Any, name: str) -> None:
    first = found[name][0][1][0]
    for settings, results in found[name]:
        for result in results:
            for key in ("losses", "norms", "digest", "gradients", "state_dict", "moments"):
                assert result[key] == first[key], (settings, key)


@pytest.mark.parametrize("name", [n for n in GROUPS if "int8" not in n])
def test_as_one_rank_at_the_whole_batch(found: Any, name: str) -> None:
    settings, (result, _) = found[name][0]
    alone = cases.train(**settings | {"stage": 3})
    assert result["losses"] == pytest.approx(alone["losses"], rel=2e-5)
    assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert result["values"] == pytest.approx(alone["values"], rel=1e-3, abs=0.05)  # sums; Adam magnifies what rounds to either side of zero
    assert alone["held"] == alone["state_bytes"] and "all_gather" not in alone["moved"]


def test_bytes_of_communication(found: Any) -> None:
    """By the book: (n - 1) / n of a buffer for a gather or a scatter, twice that for an all-reduce; padding counts."""
    steps = 2
    for settings, results in found["bytes"]:
        for result in results:
            moved, part = result["moved"], result["flat_bytes"] // 2
            stage = settings["stage"]
            assert moved["reduce_scatter"] == (part * steps if stage >= 2 else 0)
            if stage < 2:
                assert moved["all_reduce"] == 2 * part * steps
            else:
                assert 0 < moved["all_reduce"] < part // 50 * steps  # sums of squares, of 8 bytes a block of 4096 elements
            if stage < 3:
                assert moved["all_gather"] == (part * steps if stage else 0)
            else:
                assert part * steps <= moved["all_gather"] <= 2 * part * steps  # a unit whose slot nobody wanted is not gathered again


def test_bytes_of_several_micro_batches(found: Any) -> None:
    """Where gradients are whole on every rank they move once a step; where they are divided, with each micro-batch."""
    steps, micro = 2, 3
    of_stage: dict[int, list[Any]] = {s: [] for s in STAGES}
    for settings, results in [*found["summed"], *found["summed, divided"]]:
        if settings["no_sync"] != "no":
            of_stage[settings["stage"]] += results
    for stage, results in of_stage.items():
        assert len(results) >= 2
        for result in results:
            moved, part = result["moved"], result["flat_bytes"] // 2
            assert moved["reduce_scatter"] == (part * steps * micro if stage >= 2 else 0)
            if stage < 2:
                assert moved["all_reduce"] == 2 * part * steps
            if stage < 3:
                assert moved["all_gather"] == (part * steps if stage else 0)
                continue
            assert moved["all_gather"] == sum(times * nbytes // 2 for times, nbytes in result["filled"].values())
            for name, (times, _) in result["filled"].items():  # for a forward and a backward; two modules hold the table
                assert times <= 2 * micro * steps * (2 if name == "embed" else 1), name
            assert max(times for times, _ in result["filled"].values()) > micro * steps


def test_state_is_divided(found: Any) -> None:
    for settings, results in found["bytes"]:
        whole, share = results[0]["state_bytes"], {0: 16, 1: 12, 2: 10, 3: 8}[settings["stage"]] / 16
        assert sum(r["held"] for r in results) == pytest.approx(2 * whole * share)
