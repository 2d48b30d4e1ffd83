"""Ranks that do different things are told so at once, by name, and what would part their state changes nothing; what one may do alone works."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import ROOT, run

from offload.engine.agreement import _difference

HEAD = f"""
import io, json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from cases import refused
from offload.dist.world import World
world = World.current(device="cpu")
rank = world.rank

def prepared(stage, model=None, **settings):
    precision = offload.Precision("fp32", "fp32")
    return offload.prepare(model or cases.net(), offload.Tiers("8MiB", "16MiB"), device="cpu", precision=precision, stage=stage, **settings)

def forward(model, number=0):
    return model(cases.ids(number, 0, rank))

def step(model, optimizer, number=0):
    forward(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()

def evaluated(model):
    with torch.no_grad():
        return float(forward(model, 7))
"""

APART = (
    HEAD
    + """
where, out = sys.argv[1], {}
model = prepared(3)
optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
step(model, optimizer)
before = offload.runtime(model).digest()

def apart(name, first, others):
    out[name] = refused(first if rank == 0 else others)

apart("evaluates", lambda: evaluated(model), lambda: forward(model))
apart("reads", lambda: torch.save(model.state_dict(), io.BytesIO()), lambda: forward(model))
apart("reads another", lambda: model.embed.weight.sum(), lambda: model.idle.weight.sum())
apart("reads moments", lambda: optimizer.state[model.embed.weight]["exp_avg"].sum(), lambda: optimizer.state[model.embed.weight]["exp_avg_sq"].sum())
apart("saves", lambda: offload.save(os.path.join(where, "saved"), model, optimizer), lambda: forward(model))
apart("saves weights", lambda: offload.save_pretrained(model, os.path.join(where, "weights")), lambda: offload.runtime(model).digest())
apart("digests", lambda: offload.runtime(model).digest(), lambda: evaluated(model))
apart("saves elsewhere", *(lambda n=n: offload.save(os.path.join(where, f"saved-{n}"), model, optimizer) for n in range(2)))
apart("saves weights elsewhere", *(lambda n=n: offload.save_pretrained(model, os.path.join(where, f"weights-{n}")) for n in range(2)))
assert os.listdir(where) == [], os.listdir(where)

forward(model, 1).backward()
apart("clips", lambda: offload.clip_grad_norm_(model, 1.0), lambda: model.embed.weight.grad.sum())
optimizer.zero_grad()

for n in range(2):
    offload.save(os.path.join(where, f"there-{n}"), model, optimizer, extra=n)
apart("loads another", *(lambda n=n: offload.load(os.path.join(where, f"there-{n}"), model, optimizer) for n in range(2)))

forward(model, 1).backward()
optimizer.param_groups[0]["lr"] = 1e-2 * (1 + rank)
out["rates"] = refused(optimizer.step)
optimizer.param_groups[0]["lr"] = 1e-2
model.embed.weight.grad.mul_(1 / (1 + rank))
out["factors"] = refused(optimizer.step)
model.embed.weight.grad.mul_(1.0 + rank)
kept = optimizer.param_groups[0]["params"]
optimizer.param_groups[0]["params"] = kept if rank else kept[1:]
out["parameters"] = refused(optimizer.step)
optimizer.param_groups[0]["params"] = kept
out["unchanged"] = offload.runtime(model).digest() == before
optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.zeros(())  # as GradScaler.step gives them
gradient = model.embed.weight.grad.clone()
optimizer.param_groups[0]["lr"] = 1e-2 * (1 + rank)
out["scaled"] = refused(optimizer.step)
out["gradient unchanged"] = torch.equal(model.embed.weight.grad, gradient)
optimizer.param_groups[0]["lr"] = 1e-2
del optimizer.grad_scale, optimizer.found_inf
optimizer.step()
optimizer.zero_grad()
step(model, optimizer, 2)
out["digest"] = offload.runtime(model).digest()
print(json.dumps(out))
world.barrier("the end")
world.close()
"""
)

DIFFERENT = {
    "evaluates": ("the start of a forward without gradients", "the start of a forward with gradients"),
    "reads": ("the value of embed.weight", "the start of a forward with gradients"),
    "reads another": ("the value of embed.weight", "the value of idle.weight"),
    "reads moments": ("the exp_avg of embed.weight", "the exp_avg_sq of embed.weight"),
    "saves": ("the saving", "the start of a forward with gradients"),
    "saves weights": ("", "the digest"),
    "clips": ("the norm of the gradients", "the gradient of embed.weight"),
    "digests": ("the digest", "the start of a forward without gradients"),
}


def test_what_differs_is_said_at_once_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    first, second = (json.loads(out) for out in run(APART, 2, str(tmp_path)))
    assert first == second
    for name, (one, other) in DIFFERENT.items():
        text = first[name]
        assert text.startswith(f"RankError: ranks do different things: rank 0 is at {one}") and f"rank 1 at {other}" in text, (name, text)
    assert first["saves elsewhere"].startswith("ConfigError: the directory to save to differs") and "saved-1' on rank 1" in first["saves elsewhere"]
    assert first["saves weights elsewhere"].startswith("ConfigError: the directory to save to differs")
    assert first["loads another"].startswith("ConfigError: the checkpoint (its manifest) differs")
    assert "with lr = 0.01 on rank 0 and 0.02 on rank 1" in first["rates"] and first["rates"].startswith("ConfigError")
    assert "embed.weight with grad_scale = 1.0 on rank 0 and 0.5 on rank 1" in first["factors"] and "updated nothing" in first["factors"]
    assert "would update embed.weight on rank 1 and not on rank 0" in first["parameters"]
    assert first["unchanged"] is True
    assert "with lr = 0.01 on rank 0" in first["scaled"] and first["gradient unchanged"] is True, "a step tried again would unscale twice"


ALONE = (
    HEAD
    + """
out = []
for stage in (0, 1, 2):
    model = prepared(stage)
    optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, number)
        if rank == 0:
            model.eval()
            evaluated(model)
            sum(float(value.sum()) for value in model.state_dict().values())
            model.train()
    out.append(offload.runtime(model).digest())
    offload.runtime(model).close()
print(json.dumps(out))
world.barrier("the end")
world.close()
"""
)


def test_where_parameters_are_whole_a_rank_may_evaluate_and_read_them_alone() -> None:
    first, second = (json.loads(out) for out in run(ALONE, 2))
    assert first == second and len(set(first)) == 1


WRAPPED = (
    HEAD
    + """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
out = [refused(lambda: prepared(3, model)) for model in (DistributedDataParallel(cases.net()), DataParallel(cases.net()))]
whole = cases.net()
fully_shard(whole.side)
print(json.dumps([*out, refused(lambda: prepared(3, whole))]))
world.barrier("the end")
world.close()
"""
)


def test_wrappers_of_torchs_are_refused() -> None:
    for out in run(WRAPPED, 2):
        kinds = ("DistributedDataParallel", "DataParallel", "FSDPModule")
        for text, kind in zip(json.loads(out), kinds, strict=True):
            assert text.startswith("ConfigError: the model is wrapped by torch's") and kind in text, text


LINKED = (
    HEAD
    + """
where = os.path.join(sys.argv[1], "home" if rank == 0 else "link")
if rank == 0:
    os.mkdir(where)
    os.symlink("home", os.path.join(sys.argv[1], "link"))
world.barrier("making a link")
model = prepared(3)
optimizer = offload.optim.AdamW(model.parameters(), lr=1e-2)
step(model, optimizer)
for name in ("run", os.fsdecode(b"run-\\xff")):
    offload.save(os.path.join(where, name), model, optimizer)
    offload.load(os.path.join(where, name), model, optimizer)
print(sorted(os.listdir(where)) == ["run", os.fsdecode(b"run-\\xff")])
world.barrier("the end")
world.close()
"""
)


def test_ranks_may_have_names_of_their_own_for_one_directory(tmp_path: Path) -> None:
    assert run(LINKED, 2, str(tmp_path), env={"OFFLOAD_COLLECTIVE_TIMEOUT": "30"}) == ["True\n"] * 2


def test_what_differs_in_bits_alone_is_said_with_the_ranks_own_numbers() -> None:
    assert "lr = 0.0 on rank 2 and -0.0 on rank 3" in _difference([{"w": {"lr": 0.0}}, {"w": {"lr": -0.0}}], [2, 3])
    same = float("nan")
    assert "eps = 1 on rank 2" in _difference([{"w": {"lr": same, "eps": 1}}, {"w": {"lr": float("nan"), "eps": 2}}], [2, 3])
    assert "update w on rank 3 and not on rank 2" in _difference([{}, {"w": {}}], [2, 3])
