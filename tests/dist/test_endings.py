"""How loops of users' own end: by an exception on one rank, by an interrupt, or with nothing closed; and waits that last."""

from __future__ import annotations

import re
import signal

import pytest
from ranks import ROOT, ends, job, run

HEAD = f"""
import atexit, os, sys, threading
# the first to be registered is called last
atexit.register(lambda: print("threads:", sorted(t.name for t in threading.enumerate() if t.name.startswith("offload")), flush=True))
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from torch.distributed.device_mesh import init_device_mesh
from offload.dist import world as worlds
rank = int(os.environ["RANK"])

def prepared(**settings):
    precision = offload.Precision("fp32", "fp32")
    model = offload.prepare(cases.net(), offload.Tiers("8MiB", "16MiB"), device="cpu", precision=precision, **settings)
    return model, offload.optim.AdamW(model.parameters(), lr=1e-2)

def step(model, optimizer, number):
    model(cases.ids(number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

OPEN = (
    HEAD
    + """
worlds._NOTED = 1e-4
job = worlds.World.current(device="cpu")
kept = []
for stage in (0, 1, 3):
    for mesh in (None, init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))):
        kept.append(prepared(stage=stage, mesh=mesh))
        for number in range(2):
            step(*kept[-1], number)
"""
)


def test_a_process_that_closes_nothing_ends_well() -> None:
    """The threads of ranks end before Python does: one that is within torch then aborts the process."""
    for out in run(OPEN, 2):
        assert out == "threads: []\n"


RAISES = (
    HEAD
    + """
where, stage, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model, optimizer = prepared(stage=stage)
step(model, optimizer, 0)

def raises(*args):
    if kind == "KeyboardInterrupt":
        os.kill(os.getpid(), 2)
    raise ValueError("a bad\\nrow")

if rank == 1:
    if where == "forward":
        model.blocks[1].register_forward_hook(raises)
    elif where == "backward":
        model.blocks[1].up.weight.register_hook(raises)
    else:
        raises()
for number in range(1, 3):
    step(model, optimizer, number)
"""
)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_what_is_raised_on_one_rank_ends_the_others_with_its_name(where: str, stage: int) -> None:
    with job(RAISES, 2, where, str(stage), "ValueError") as (processes, _):
        (code, _, err), (other, _, cause) = ends(processes)
    assert other == 1 and "ValueError: a bad" in cause
    assert code == 1 and "RankError: rank 1 has failed: ValueError: a bad row" in err, err[-2000:]


def test_an_interrupt_of_one_rank_ends_the_others() -> None:
    with job(RAISES, 2, "between", "3", "KeyboardInterrupt") as (processes, _):
        (code, _, err), (other, _, _) = ends(processes)
    assert other in (-signal.SIGINT, 130)
    assert code == 1 and "RankError: rank 1 has failed: KeyboardInterrupt" in err, err[-2000:]


LASTS = (
    HEAD
    + """
import logging
import torch.distributed as dist
worlds._LONG, worlds._NOTED = 0.5, 0.05
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

class Told(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        store.set("it was told", "1")

logging.getLogger("offload").addHandler(Told())
model, optimizer = prepared(stage=3)
step(model, optimizer, 0)
if rank == 1:
    store.wait(["it was told"])
offload.runtime(model).digest()
step(model, optimizer, 1)
"""
)


def test_a_wait_that_lasts_is_told_of_with_who_is_missing() -> None:
    waiting, late = (out.splitlines() for out in run(LASTS, 2))
    assert re.fullmatch(r"rank 0 has waited \d+ s for the .*; rank 1 was last at .*", waiting[0]), waiting
    assert [*waiting[1:], *late] == ["threads: []"] * 2
