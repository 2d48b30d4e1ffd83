"""A gradient that is not finite, found when a part of the step is applied: runs go back by themselves, unless they were told when updates start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.config import RunConfig
from offload.engine.gradients import Gradients
from offload.engine.registry import engine_of
from offload.errors import ConfigError, PlanError, StepError
from offload.train import model
from offload.train.estimate import Estimate
from offload.train.loop import Trainer
from runs import SMALL, records_of, sizes

RUN = SMALL.but(
    model={"config": sizes(layers=3, attention_dropout=0.2)},
    data={"eval_sequences": 2},
    tiers={"place": {"optimizer": "nvme"}},
    precision={"compute": "fp32", "moments": "int8"},
    optimizer={"schedule": "cosine", "warmup": 2},
    train={"steps": 7},
)
SAVING = "checkpoint.every=2"
SPOILT = 4  # the step whose first layer has a gradient that is not finite: step 5 for the user


class _Spoiling:
    """Spoils the gradients of what comes before the second layer, and makes landings so quick that updates of the layers behind are open by then."""

    step = -1

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        build, landed, step = model.build, Gradients.landed, Trainer._step

        def built(*args: Any, **kwargs: Any) -> Any:
            made: Any = build(*args, **kwargs)
            made.model.layers[0].register_forward_hook(self._hook)
            return made

        def stepped(trainer: Trainer, number: int) -> None:
            self.step = number
            try:
                step(trainer, number)
            finally:
                self.step = -1

        patch.setattr(model, "build", built)
        patch.setattr(Trainer, "_step", stepped)
        patch.setattr(Gradients, "landed", lambda gradients, records, wait=False: landed(gradients, records, wait=True))
        patch.setattr(Estimate, "early", lambda self, plan, **_: len(plan.layouts))

    def _hook(self, _: Any, __: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if self.step == SPOILT and hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * math.nan)


@pytest.fixture(autouse=True)
def _spoiling() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _Spoiling(patch)
        yield


@pytest.fixture
def skipped(tmp_path: Path) -> dict[str, Any]:
    """The run that skips the step."""
    with pytest.warns(RuntimeWarning, match="no parameter was changed"):
        summary = RUN.train(tmp_path, "train.updates=forward", out="forward")
    assert summary["skipped"] == 1 and summary["steps"] == 7
    return summary


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for key in ("losses", "digest", "skipped", "steps", "tokens", "eval_loss_first", "eval_loss_last"):
        assert got[key] == want[key], key


@pytest.mark.parametrize("saving", [True, False])
def test_a_run_goes_back_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str], skipped: dict[str, Any], saving: bool) -> None:
    """To its newest checkpoint, or its start, to the bits of a run whose updates were under the forward all the time."""
    capfd.readouterr()
    with pytest.warns(RuntimeWarning, match="no parameter was changed"):
        got = RUN.train(tmp_path, *([SAVING] if saving else []))
    same(got, skipped)
    said = capfd.readouterr().err
    assert "step 5: the gradient of" in said and "is not finite" in said and "The run does so by itself" in said
    assert ("goes on from" in said and "step-00000004" in said) if saving else "the run starts from the start" in said
    assert "--resume" not in said
    lines = records_of(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, 8)) and [line["loss"] for line in lines] == skipped["losses"]
    assert 'updates = "forward"' in (tmp_path / "out/config.toml").read_text()
    assert not list((tmp_path / "swap").iterdir())


def test_a_run_that_was_told_ends_and_says_the_way_back(tmp_path: Path, capfd: pytest.CaptureFixture[str], skipped: dict[str, Any]) -> None:
    told = (SAVING, "train.updates=backward")
    for resume in (False, True):
        with pytest.raises(StepError, match=r"^step 5: the gradient of .* is not finite.*partly applied.*train\.updates"):
            RUN.train(tmp_path, *told, resume=resume)
        assert f"--resume {tmp_path / 'out'} --set train.updates=forward goes on from step-00000004" in capfd.readouterr().err
    with pytest.warns(RuntimeWarning, match="no parameter was changed"):
        same(RUN.train(tmp_path, SAVING, "train.updates=forward", resume=True), skipped)


def test_a_run_that_cannot_go_back_says_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Where updates under the forward do not fit."""
    plan = model.plan

    def short(model_config: Any, config: RunConfig, *args: Any, **kwargs: Any) -> Any:
        if config.updates_value() == "forward":
            raise PlanError("nvme: need 1 more")
        return plan(model_config, config, *args, **kwargs)

    monkeypatch.setattr(model, "plan", short)
    with pytest.raises(PlanError, match="skip the step that was spoilt: nvme: need 1 more"):
        RUN.train(tmp_path, SAVING)
    assert "step 5: the gradient of" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="has checkpoints"):  # they are still there
        RUN.train(tmp_path, SAVING)


def test_nothing_is_left_of_the_model_that_was_spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its budgets are free before the next one takes any: two never hold memory at once."""
    held: list[Any] = []
    prepare = offload.prepare

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert all(engine.closed and not any(b.used for b in engine.budgets.values()) for engine in held)
        made = prepare(*args, **kwargs)
        held.append(engine_of(made))
        return made

    monkeypatch.setattr(offload, "prepare", watched, raising=False)
    with pytest.warns(RuntimeWarning, match="no parameter was changed"):
        RUN.train(tmp_path, SAVING)
    assert len(held) >= 2
