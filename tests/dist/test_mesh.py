"""Groups of ranks that divide state among them and each hold all of it: which ranks are in them, their bits, their bytes, their errors."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
from ranks import LONG, ROOT, ends, job, run

from offload.dist.mesh import column, equal_rows, rows_of
from offload.errors import ConfigError

STAGES = (0, 1, 2, 3)
SPLIT = ("bf16", "bf16", "split", "int8")
SUMMED = {"accumulate": 3, "no_sync": "but last", "clip": 0.5, "steps": 2}
BITS = ("losses", "norms", "digest", "gradients", "state_dict", "moments")

# Which ranks


def mesh(ranks: list[Any], names: tuple[str, ...] | None = None, coordinate: tuple[int, ...] | None = (0,)) -> SimpleNamespace:
    tensor = torch.tensor(ranks)
    return SimpleNamespace(mesh=tensor, ndim=tensor.ndim, mesh_dim_names=names, get_coordinate=lambda: coordinate)


def test_rows_of_a_mesh() -> None:
    assert rows_of(mesh([2, 0, 1])) == [[2, 0, 1]]
    assert rows_of(mesh([[0, 2], [1, 3]], ("replicate", "shard"))) == [[0, 2], [1, 3]]
    assert rows_of(mesh([[0, 1]], ("dp_replicate", "dp_shard"))) == [[0, 1]]
    assert equal_rows(6, 2) == [[0, 1, 2], [3, 4, 5]] and equal_rows(1, 1) == [[0]]
    assert column([[0, 2], [1, 3]], 3) == [2, 3]


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (mesh([[[0]]]), "3 dimensions"),
        (object(), "None dimensions"),
        (mesh([[0, 1]], ("shard", "replicate")), "other order"),
        (mesh([[0, 1]], ("dp", "tp")), r"mesh\['dp'\]"),
        (mesh([0], None, None), "not in the mesh"),
    ],
)  # fmt: skip
def test_meshes_that_are_refused(refused: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        rows_of(refused)


def test_groups_are_equal() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot be 3 equal groups"):
        equal_rows(4, 3)
    with pytest.raises(ConfigError, match="one rank cannot be 2"):
        equal_rows(1, 2)


# Training

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases
from offload.dist.world import World
World.current()
for settings in json.loads(sys.argv[1]):
    print(json.dumps(cases.train(**settings)), flush=True)
World.current().close()
"""


def trained(ranks: int, settings: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """By setting, what came of it on each rank."""
    outs = run(SCRIPT, ranks, json.dumps(settings), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "120"})
    return [list(of) for of in zip(*([json.loads(line) for line in out.splitlines()] for out in outs), strict=True)]


def test_one_row_is_one_dimension_and_rows_of_one_rank_divide_nothing() -> None:
    """On two ranks all sums are of two, so every mesh and stage has the bits of every other."""
    common = {"clip": 0.5, "steps": 2}
    settings = [common | {"stage": s, "mesh": m} for s in (0, 1, 3) for m in (None, (1, 2), (2, 1))]
    found = trained(2, settings)
    for setting, results in zip(settings, found, strict=True):
        for rank, result in enumerate(results):
            assert {key: result[key] for key in BITS} == {key: found[0][0][key] for key in BITS}, setting
            if setting["mesh"] is not None:
                same = found[settings.index(setting | {"mesh": None, "stage": setting["stage"] if setting["mesh"] == (1, 2) else 0})][rank]
                assert result["held"] == same["held"] and result["moved"] == same["moved"], setting


# settings of each group change nothing that is computed
GROUPS: dict[str, list[dict[str, Any]]] = {
    "clip": [{"stage": s, "clip": 0.5} for s in STAGES]
    + [{"stage": s, "clip": 0.5, "place": "nvme"} for s in (1, 3)]
    + [{"stage": s, "clip": 0.5, "device": "sim"} for s in (0, 3)],
    "accumulate": [{"stage": s, "accumulate": 2} for s in (0, 3)],
    "frozen": [{"stage": s, "frozen": True, "clip": 1.0} for s in (1, 3)],
    "a parameter unused": [{"stage": s, "use": "extra", "clip": 1.0} for s in (0, 3)],
    "a unit unused": [{"stage": s, "use": "side", "clip": 1.0} for s in (0, 2)],
    "a unit unused in a group": [{"stage": s, "use": "side in a group", "clip": 1.0} for s in STAGES],
    "split int8": [{"stage": s, "precision": SPLIT, "clip": 1.0} for s in STAGES] + [{"stage": 3, "precision": SPLIT, "clip": 1.0, "place": "nvme"}],
    "bytes": [{"stage": s, "steps": 2} for s in STAGES],
    "summed": [{"stage": s, **SUMMED} for s in (0, 1)]
    + [{"stage": s, **SUMMED, "place": "nvme"} for s in (0, 1)]
    + [{"stage": 1, **SUMMED, "device": "sim"}]
    + [{"stage": s, **SUMMED, "no_sync": "all"} for s in (0, 1)],
    "summed, a unit unused in a group": [{"stage": s, **SUMMED, "use": "side in a group", "place": p} for s, p in ((0, "host"), (1, "nvme"))],
    "summed, split int8": [{"stage": s, **SUMMED, "precision": SPLIT} for s in (0, 1)],
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """By group, each of its settings with what came of it on the four ranks of a 2 x 2 mesh."""
    everything = [(name, settings) for name, group in GROUPS.items() for settings in group]
    results = trained(4, [settings | {"mesh": (2, 2)} for _, settings in everything])
    by_group: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    for (name, settings), result in zip(everything, results, strict=True):
        by_group.setdefault(name, []).append((settings, result))
    return by_group


@pytest.mark.parametrize("name", GROUPS)
def test_stages_and_places_give_the_same_bits_on_all_ranks(found: Any, name: str) -> None:
    first = found[name][0][1][0]
    for settings, results in found[name]:
        for result in results:
            for key in BITS:
                assert result[key] == first[key], (settings, key)


@pytest.mark.parametrize("name", [n for n in GROUPS if "int8" not in n])
def test_as_one_rank_at_the_whole_batch(found: Any, name: str) -> None:
    settings, (result, *_) = found[name][0]
    alone = cases.train(**settings | {"stage": 3, "ranks": 4})
    assert result["losses"] == pytest.approx(alone["losses"], rel=2e-5)
    assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert result["values"] == pytest.approx(alone["values"], rel=1e-3, abs=0.05)  # sums; Adam magnifies what rounds to either side of zero


def test_bytes_of_communication(found: Any) -> None:
    """By the book, with half of a buffer B coming to a rank of two: gradients cross groups as shares, so a rank receives B / 2 of them within its
    group and 2 x B / 4 across at every stage, and, where they do not stay divided, B / 2 more."""
    steps = 2
    for settings, results in found["bytes"]:
        for result in results:
            moved, half, stage = result["moved"], result["flat_bytes"] // 2, settings["stage"]
            assert moved["reduce_scatter"] == half * steps
            sums = moved["all_reduce"] - half * steps
            assert sums == 0 if stage < 2 else 0 < sums < half // 50 * steps  # of squares, 8 bytes a block of 4096 elements
            if stage < 3:
                assert moved["all_gather"] == half * steps * {0: 1, 1: 2, 2: 1}[stage]
            else:
                assert half * steps <= moved["all_gather"] <= 2 * half * steps  # a unit whose slot nobody wanted is not gathered again


def test_bytes_of_what_ranks_have_summed(found: Any) -> None:
    """Once a step, whatever the micro-batches: within a group, across as shares, and within again."""
    steps = SUMMED["steps"]
    for settings, results in found["summed"]:
        for result in results:
            moved, half = result["moved"], result["flat_bytes"] // 2
            assert moved["reduce_scatter"] == moved["all_reduce"] == half * steps, settings
            assert moved["all_gather"] == half * steps * (2 if settings["stage"] else 1), settings


def test_groups_of_ranks_that_chunks_do_not_divide_by() -> None:
    settings = [{"stage": s, **SUMMED, "mesh": (2, 3), "place": p} for s, p in ((0, "host"), (1, "nvme"))]
    found = trained(6, settings)
    for results in found:
        for result in results:
            assert {key: result[key] for key in BITS} == {key: found[0][0][key] for key in BITS}
    alone = cases.train(**SUMMED, stage=3, ranks=6)
    assert found[0][0]["losses"] == pytest.approx(alone["losses"], rel=2e-5) and found[0][0]["norms"] == pytest.approx(alone["norms"], rel=1e-4)


def test_state_is_divided_within_a_group(found: Any) -> None:
    for settings, results in found["bytes"]:
        whole, share = results[0]["state_bytes"], {0: 16, 1: 12, 2: 10, 3: 8}[settings["stage"]] / 16
        assert sum(r["held"] for r in results) == pytest.approx(4 * whole * share)
        assert [r["held"] for r in results[:2]] == [r["held"] for r in results[2:]]


# Skipped steps and checkpoints

HEAD = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from offload.dist.world import World

job = World.current(device="cpu")

def made(stage, mesh, seed=1, swap=None):
    tiers = offload.Tiers("8MiB", "16MiB", [(swap, "64MiB")] if swap else [])
    place = {{"optimizer": "nvme"}} if swap else None
    precision = offload.Precision("fp32", "fp32")
    mesh = cases.mesh_of(mesh) if mesh else None
    model = offload.prepare(cases.net(seed), tiers, device="cpu", precision=precision, stage=stage, mesh=mesh, place=place)
    return model, offload.optim.AdamW(model.parameters(), lr=1e-2)
"""

SKIPS = (
    HEAD
    + """
out = []
for stage in (0, 1, 3):
    model, optimizer = made(stage, (2, 2))
    digests = []
    for step in range(3):
        loss = model(cases.ids(step, 0, job.rank))
        (loss * (float("inf") if step == 1 and job.rank == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(offload.runtime(model).digest())
    out.append([optimizer.skipped, digests[0] == digests[1] != digests[2], digests[2]])
    offload.runtime(model).close()
print(json.dumps(out))
job.barrier("the end")
job.close()
"""
)


def test_what_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    said = [json.loads(out) for out in run(SKIPS, 4)]
    assert said == [said[0]] * 4 and said[0] == [[1, True, said[0][0][2]]] * 3


SAVES = (
    HEAD
    + """
what, where, stage, mesh = sys.argv[1], sys.argv[2], int(sys.argv[3]), tuple(json.loads(sys.argv[4])) or None
model, optimizer = made(stage, mesh, 1 if what == "save" else 2, os.path.join(os.path.dirname(where), "swap"))
extra = offload.load(where, model, optimizer) if what == "load" else None
for step in range(2) if what == "save" else ():
    model(cases.ids(step, 0, job.rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
if what == "save":
    offload.save(where, model, optimizer, extra={"t": torch.tensor([1.5])})
print(json.dumps([offload.runtime(model).digest(), extra is None or extra["t"].tolist() == [1.5]]))
offload.runtime(model).close()
job.barrier("the end")
job.close()
"""
)


def test_checkpoints_go_from_groups_to_other_ranks_and_back(tmp_path: Any) -> None:
    def on(ranks: int, *args: object) -> Any:
        said = [json.loads(out.splitlines()[-1]) for out in run(SAVES, ranks, *map(str, args))]
        assert said == [said[0]] * ranks
        return said[0]

    path = tmp_path / "saved"
    saved = on(4, "save", path, 3, [2, 2])
    for ranks, stage, shape in ((1, 3, []), (2, 1, []), (4, 1, [2, 2])):
        assert on(ranks, "load", path, stage, shape) == saved, (ranks, stage, shape)
    one = on(1, "save", path, 3, [])
    assert one != saved and on(4, "load", path, 2, [2, 2]) == one


# Errors

DIES = """
    import os, sys, torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from offload.dist.world import World

    dist.init_process_group("gloo")
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    world = World.current(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), "cpu")
    assert (world.within.rank, world.within.size, world.across.rank, world.across.size) == (world.rank % 2, 2, world.rank // 2, 2)
    x = torch.tensor([1.0 + world.rank, 10.0 * (1 + world.rank)])
    own = x[world.within.rank : world.within.rank + 1]
    world.within.reduce_scatter(own, x, "x").wait()
    world.across.all_reduce(own, "x").wait()
    world.within.gather_into(x, own, "x", reducing=True).wait()
    assert x.tolist() == [10.0, 100.0] and world.within.moved is not world.moved
    assert world.moved == {"reduce_scatter": 4, "all_reduce": 4, "all_gather": 4}, world.moved
    if world.rank == 3:
        store.set("ready", "1")
    if world.rank in (0, 3):
        store.wait(["others are over"])
        os._exit(7)
    try:
        if world.rank == 1:
            world.across.all_reduce(torch.ones(5), "unit b").wait()
        else:
            world.within.gather_into(torch.empty(8), torch.ones(4), "unit b").wait()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        world.fail(error)
        raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_rank_that_is_gone_or_late_is_named_as_the_whole_mesh_counts_it(how: str) -> None:
    with job(DIES, 4, how, env={"OFFLOAD_COLLECTIVE_TIMEOUT": "3"} if how == "late" else None) as (processes, store):
        store.wait(["ready"])
        if how == "killed":
            processes[3].send_signal(signal.SIGKILL)
        found = ends(processes[1:3])
        store.set("others are over", "1")
        assert processes[0].wait(LONG) == 7
    for rank, collective in ((1, "all-reduce"), (2, "all-gather")):  # which of them tells the other first is not known
        code, out, err = found[rank - 1]
        assert code == 3, err
        said = "rank 3 has not come to the" if how == "late" else f"rank {rank} has lost its connection to rank 3 in the"
        assert out.startswith("RankError") and (f"{said} {collective} of unit b" in out or f"rank {3 - rank} has failed" in out), out
    assert any("connection to rank 3" in out or "rank 3 has not come" in out for _, out, _ in found)
