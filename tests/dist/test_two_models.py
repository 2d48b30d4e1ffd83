"""Two models on one world: what each gathers and reduces in threads of its own is never taken for the other's."""

from __future__ import annotations

import json

from ranks import ROOT, run

SCRIPT = f"""
import json, sys, threading
sys.path.insert(0, {str(ROOT / "tests" / "dist")!r})
import torch
torch.set_num_threads(1)
import cases, offload
from offload.dist.world import World
from offload.engine.registry import engine_of
world = World.current(device="cpu")
rank, begun, current, sent = world.rank, threading.Event(), threading.local(), World.gather_into

def gather(self, *given, **settings):
    work = sent(self, *given, **settings)
    if getattr(current, "first", False):
        begun.set()
    return work

World.gather_into = gather

def prepared(stage, seed):
    tiers, precision = offload.Tiers("8MiB", "16MiB"), offload.Precision("fp32", "fp32")
    model = offload.prepare(cases.net(seed), tiers, device="cpu", precision=precision, stage=stage)
    return model, offload.optim.AdamW(model.parameters(), lr=1e-2)

def stepped(models, number):
    for model, _ in models:
        model(cases.ids(number, 0, rank)).backward()
    for _, optimizer in models:
        optimizer.step()
        optimizer.zero_grad()

def closed(models):
    digests = [offload.runtime(model).digest() for model, _ in models]
    for model, _ in models:
        offload.runtime(model).close()
    return digests

def evaluated(model, number):
    with torch.no_grad():
        return float(model(cases.ids(number, 1, rank)))

def crossed(models, stage):
    # The threads of one model begin their gathers first on one rank, those of the other on the other.
    begun.clear()
    for model, _ in models:
        engine = engine_of(model)
        owner = engine.refresh if stage == 1 else engine.slots

        def late(*given, act=owner._gather, first=model is models[rank][0]):
            current.first = first
            if not first:
                assert begun.wait(100)
            act(*given)

        owner._gather = late

out = []
for stage in (1, 3):
    alone = []
    for seed in (1, 2):
        models = [prepared(stage, seed)]
        for number in range(3):
            stepped(models, number)
        alone += closed(models)
    models = [prepared(stage, seed) for seed in (1, 2)]
    crossed(models, stage)
    if stage == 3:
        for model, _ in models:
            assert engine_of(model).slots.prefetch(0)
    for number in range(3):
        stepped(models, number)
    out.append(closed(models) == alone)

teacher, student = prepared(3, 1), prepared(3, 2)
told = []
for number in range(3):
    told.append(evaluated(teacher[0], number))
    stepped([student], number)
assert closed([student]) == alone[1:]
out.append(told == [evaluated(teacher[0], number) for number in range(3)] and closed([teacher])[0] != alone[0])

first, second = prepared(3, 1), prepared(3, 1)
out.append(cases.refused(lambda: evaluated((first, second)[rank][0], 0)))
print(json.dumps(out))
world.barrier("the end")
world.close()
"""


def test_two_models_train_as_each_does_alone_and_are_not_taken_for_each_other() -> None:
    first, second = (json.loads(out) for out in run(SCRIPT, 2, env={"OFFLOAD_COLLECTIVE_TIMEOUT": "60"}))
    assert first == second and first[:3] == [True, True, True]
    assert "rank 0 is at the start of a forward without gradients, rank 1 at the start of a forward without gradients of model 2" in first[3]
