"""Collectives over several processes: their values, their bytes, and whose name an error has."""

from __future__ import annotations

import signal

import pytest
import torch
from ranks import LONG, ends, job, run

from offload.dist.world import World
from offload.errors import ConfigError

VALUES = """
import torch
from offload.dist.world import World
from offload.errors import ConfigError

world = World.current()
assert World.current() is world and (world.local_rank, world.local_size) == (world.rank, 3)

def of(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(3).to(dtype)

def total(numel, dtype):
    wide = torch.zeros(numel)
    for rank in range(3):
        wide = of(rank, numel, dtype).float() if rank == 0 else wide + of(rank, numel, dtype).float()
    return wide

for dtype in (torch.float32, torch.bfloat16):
    for shard in (1, 255, 700_001):  # the last is more than a piece
        own, full = of(world.rank, shard, dtype), torch.empty(3 * shard, dtype=dtype)
        world.gather_into(full, own, "values").wait()
        assert torch.equal(full, torch.cat([of(r, shard, dtype) for r in range(3)]))
        within = torch.zeros(3 * shard, dtype=dtype)
        part = within.view(3, -1)[world.rank]
        part.copy_(own)
        world.gather_into(within, part, "values in place").wait()
        assert torch.equal(within, full)

        full, own, mine = of(world.rank, 3 * shard, dtype), torch.empty(shard, dtype=dtype), slice(world.rank * shard, (world.rank + 1) * shard)
        exact = total(3 * shard, dtype)
        wide = torch.empty(shard)
        works = [world.reduce_scatter(own, full, "gradients"), world.reduce_scatter(wide, full, "gradients as fp32")]
        for work in works:
            work.wait()
        assert torch.equal(own, exact[mine].to(dtype)) and torch.equal(wide, exact[mine])
        world.reduce_scatter(full[mine], full, "gradients in place").wait()
        assert torch.equal(full[mine], exact[mine].to(dtype))

        x = of(world.rank, 3 * shard - 2, dtype)
        world.all_reduce(x, "all").wait()
        assert torch.equal(x, total(3 * shard - 2, dtype).to(dtype))

most = torch.tensor([float(world.rank), -float(world.rank)], dtype=torch.float64)
world.all_reduce(most, "largest", "max").wait()
assert most.tolist() == [2.0, 0.0]
count = torch.tensor([1 << 40])
world.all_reduce(count, "a count").wait()
assert count.item() == 3 << 40

# of different names, in an order of each rank's own
works = {}
for name in sorted("abc", key=lambda n: (ord(n) + world.rank) % 3):
    full = torch.empty(3)
    works[name] = full, world.gather_into(full, torch.tensor([ord(name) + 0.25 * world.rank]), name)
for name, (full, work) in works.items():
    work.wait()
    assert full.tolist() == [ord(name) + 0.25 * r for r in range(3)]

world.moved = dict.fromkeys(world.moved, 0)
a = [world.gather_into(torch.empty(300), torch.empty(100), "x"), world.reduce_scatter(torch.empty(100), torch.zeros(300, dtype=torch.bfloat16), "y")]
for work in (*a, world.all_reduce(torch.zeros(300), "z")):
    work.wait()
    work.wait()
assert world.moved == {"all_gather": 800, "reduce_scatter": 400, "all_reduce": 1600}, world.moved

assert world.share({"rank": world.rank, "x": 0.1}) == [{"rank": r, "x": 0.1} for r in range(3)]
assert world.broadcast(["chosen", world.rank] if world.rank == 1 else None, source=1) == ["chosen", 1]
world.agree(3, "a number")
try:
    world.agree(world.rank // 2, "train.seed")
    raise SystemExit("not refused")
except ConfigError as error:
    assert "train.seed" in str(error) and "1 on rank 2" in str(error)
world.barrier("the end")
world.close()
world.close()
"""


def test_values_bytes_and_order() -> None:
    run(VALUES, 3)


def test_of_a_mesh_and_of_a_group_that_is_there() -> None:
    script = """
        import torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from offload.dist.world import World
        from offload.errors import ConfigError

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        try:
            World.current(init_device_mesh("cpu", (1, 2, 2)))
            raise SystemExit("three dimensions were taken")
        except ConfigError as error:
            assert "mesh['shard']" in str(error)
        world = World.current(mesh["shard"])
        assert World.current(mesh["shard"]) is world and world.within is world and world.across is None
        assert (world.rank, world.size) == (rank % 2, 2)
        x = torch.tensor([float(rank)])
        world.all_reduce(x, "x").wait()
        assert x.item() == (1 if rank < 2 else 5)
        whole = World.current()
        assert (whole.rank, whole.size) == (rank, 4) and whole.share(rank) == [0, 1, 2, 3]
        whole.barrier("the end")
        world.close()
        whole.close()
        assert dist.is_initialized()  # it was not ours
    """
    run(script, 4)


DIES = """
    import os, signal, sys, torch
    import torch.distributed as dist
    from offload.dist.world import World

    world = World.current()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    def collective(name):
        if sys.argv[1] == "gather":
            return world.gather_into(torch.empty(world.size * 4), torch.ones(4), name)
        if sys.argv[1] == "reduce":
            return world.reduce_scatter(torch.empty(1 << 20), torch.ones(world.size << 20), name)
        return world.all_reduce(torch.ones(5), name)

    collective("unit a").wait()
    if world.rank == 1:
        if sys.argv[2] == "killed":
            store.set("ready", "1")
            store.wait(["never"])
        if sys.argv[2] == "late":
            store.wait(["others are over"])
            raise SystemExit(7)
        world.fail(ValueError("no room\\non the disk"))
        store.wait(["others are over"])
        raise SystemExit(7)
    try:
        collective("unit b").wait()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        raise SystemExit(3)
"""


@pytest.mark.parametrize("kind", ["gather", "reduce", "all"])
def test_a_rank_that_is_killed_is_named(kind: str) -> None:
    with job(DIES, 2, kind, "killed") as (processes, store):
        store.wait(["ready"])
        processes[1].send_signal(signal.SIGKILL)
        code, out, err = ends(processes[:1])[0]
    assert code == 3, err
    assert out.startswith("RankError: rank 0 has lost its connection to rank 1") and "of unit b" in out, out


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_what_a_rank_that_fails_says_is_heard_by_all_while_it_lives(kind: str) -> None:
    with job(DIES, 3, kind, "fails") as (processes, store):
        found = ends([processes[0], processes[2]])
        store.set("others are over", "1")
        assert processes[1].wait(LONG) == 7
    for code, out, err in found:
        assert code == 3, err
        assert "RankError: rank 1 has failed: ValueError: no room on the disk" in out and "of unit b" in out, out


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_a_rank_that_is_late_is_named_with_what_it_was_at(kind: str) -> None:
    with job(DIES, 2, kind, "late", env={"OFFLOAD_COLLECTIVE_TIMEOUT": "3"}) as (processes, store):
        code, out, err = ends(processes[:1])[0]
        store.set("others are over", "1")
        assert processes[1].wait(LONG) == 7
    assert code == 3, err
    assert "rank 1 has not come to the" in out and "of unit b, for which rank 0 has waited 3 s; it was last at the" in out and "of unit a" in out, out


def test_alone_copies_and_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.current()
    assert (world.rank, world.size, world.local_size) == (0, 1, 1)
    full, own = torch.zeros(3), torch.arange(3.0)
    world.gather_into(full, own, "x").wait()
    assert torch.equal(full, own)
    world.reduce_scatter(own, 2 * full, "x").wait()
    assert own.tolist() == [0, 2, 4]
    world.all_reduce(own, "x").wait()
    assert own.tolist() == [0, 2, 4] and world.share({"a": 1}) == [{"a": 1}] and world.broadcast(5) == 5
    world.barrier("x")
    world.fail(ValueError())
    world.close()
    assert not any(world.moved.values()) and not torch.distributed.is_initialized()


@pytest.mark.parametrize("half", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1"}])
def test_half_an_environment_is_refused(half: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in half.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        World.current()
