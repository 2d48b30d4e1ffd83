"""What goes wrong on one rank alone, outside of collectives: all have the error, at once, and can go on together."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import ROOT, run

from offload.checkpoint.relay import Relay
from offload.dist.devices import check_devices
from offload.dist.divided import check_backends
from offload.dist.world import World
from offload.errors import CheckpointError, ConfigError

HEAD = f"""
import errno, json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from cases import refused
from offload.checkpoint import disk
from offload.dist.world import World
world = World.current(device="cpu")
FP32 = offload.Precision(compute="fp32", grad="fp32")
last = world.rank == world.size - 1

def prepared(model, device="8MiB", host="16MiB", nvme=(), **how):
    return offload.prepare(model, offload.Tiers(device, host, nvme), device="cpu", precision=FP32, **how)
"""

PREPARES = (
    HEAD
    + """
where, stage = sys.argv[1], int(sys.argv[2])
out = {}
model = cases.net(seed=world.rank)
out["plan"] = refused(lambda: prepared(model, device="64KiB" if last else "8MiB", host="64KiB" if last else "16MiB", stage=stage))
if last:
    open(os.path.join(where, "file"), "w").close()
swap = os.path.join(where, "file" if last else "swap")
out["swap"] = refused(lambda: prepared(model, nvme=[(swap, "16MiB")], place={"optimizer": "nvme"}, stage=stage))
held = model.head(torch.ones(1, 44, requires_grad=True)) if last else None  # its graph has the parameter
out["held"] = refused(lambda: prepared(model, stage=stage))
out["plain"] = all(type(p) is torch.nn.Parameter and type(p.detach()) is torch.Tensor for p in model.parameters())
del held
prepared(model, stage=stage)
out["digest"] = offload.runtime(model).digest()
offload.runtime(model).close()
print(json.dumps(out))
world.barrier("the end")
world.close()
"""
)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_cannot_prepare_none_does(tmp_path: Any, stage: int) -> None:
    env = {"OFFLOAD_COLLECTIVE_TIMEOUT": "60"}
    found = [json.loads(out.splitlines()[-1]) for out in run(PREPARES, 3, str(tmp_path), str(stage), env=env)]
    for rank, said in enumerate(found):
        for name, kind, text in (("plan", "PlanError", "planning"), ("swap", "SwapError", "opening tiers"), ("held", "ConfigError", "taking")):
            assert said[name] is not None and said[name].startswith(kind), (name, said[name])
            assert rank == 2 or (text in said[name] and "failed on rank 2" in said[name]), said[name]
        assert said["plain"] and said["digest"] == found[0]["digest"]


SAVES = (
    HEAD
    + """
where = sys.argv[1]
out = {}
model = prepared(cases.net())
optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
model(cases.ids(0, 0, world.rank)).backward()
optimizer.step()
optimizer.zero_grad()
out["extra"] = refused(lambda: offload.save(where, model, optimizer, extra=object() if last else None))
out["nothing"] = not os.path.exists(where)
out["saved"] = refused(lambda: offload.save(where, model, optimizer))
read = disk.read
if last:
    def broken(file, into):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    disk.read = broken
out["read"] = refused(lambda: offload.load(where, model, optimizer))
disk.read = read
out["loaded"] = refused(lambda: offload.load(where, model, optimizer))
out["digest"] = offload.runtime(model).digest()
print(json.dumps(out))
world.barrier("the end")
world.close()
"""
)


def test_what_one_rank_cannot_save_or_load_none_does(tmp_path: Any) -> None:
    found = [json.loads(out.splitlines()[-1]) for out in run(SAVES, 2, str(tmp_path / "saved"), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "60"})]
    for rank, said in enumerate(found):
        assert said["extra"].startswith("ConfigError") and "object" in said["extra"] and said["nothing"]
        assert said["read"].startswith("CheckpointError") and "in part" in said["read"]
        assert rank == 1 or ("on rank 1" in said["extra"] and "on rank 1" in said["read"])
        assert said["saved"] is None and said["loaded"] is None and said["digest"] == found[0]["digest"]


def test_memory_is_that_of_the_ranks_on_one_machine() -> None:
    world = World(1, 4)
    world._locate(["a", "b", "a", "b"])
    assert world.of_machine([1, 10, 100, 1000]) == 1010 and (world.local_rank, world.local_size) == (0, 2)


def test_a_save_that_is_interrupted_keeps_no_rank_waiting() -> None:
    told: list[BaseException] = []
    world: Any = SimpleNamespace(rank=0, fail=told.append)
    relay = Relay(world, [[(0, 10)], [(10, 20)]], "x")
    relay.ended_by(OSError("full"))  # others are told in their turn
    assert not told
    relay.ended_by(KeyboardInterrupt())
    assert [type(error) for error in told] == [KeyboardInterrupt]


def test_what_ranks_write_is_all_of_a_file() -> None:
    world: Any = SimpleNamespace(rank=0)
    for ranges, byte in (([[(0, 10)], [(11, 20)]], "byte 10 would be written by no rank"), ([[(0, 10)], [(9, 20)]], "byte 9 would be .* two ranks")):
        with pytest.raises(CheckpointError, match=byte):
            Relay(world, ranges, "x")


def test_two_ranks_on_one_gpu_are_refused() -> None:
    check_devices(["a", "b"], [0, 2])
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 would both compute on one GPU \(a\)"):
        check_devices(["a", "b", "a"], [0, 1, 2])


def test_parts_over_ranks_that_cannot_talk_of_host_memory_are_refused() -> None:
    def mesh(*kinds: str) -> SimpleNamespace:
        return SimpleNamespace(ndim=1, get_group=lambda: SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds]))

    check_backends(mesh("cpu", "cuda"))
    with pytest.raises(ConfigError, match="cpu:gloo,cuda:nccl"):
        check_backends(mesh("cuda"))
