"""Where a fault happens: a small run that has two checkpoints and is to go on, and what a run that nothing happens to has at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harm
from child import Child
from offload.checkpoint.manifest import verify
from runs import SMALL, records_of, summary_of

RUN = SMALL.but(
    data={"seq_length": 8},
    tiers={"nvme": [["swap", "8MiB"]], "place": {"parameter": "nvme", "gradient": "nvme", "optimizer": "nvme"}, "checksum": True},
    precision={"compute": "fp32"},
    optimizer={"clip": 1.0},
    train={"steps": 8},
    checkpoint={"every": 2},
)
OLDER, NEWEST, SAVED_NEXT = "step-00000002", "step-00000004", "step-00000006"


@dataclass(frozen=True)
class Calm:
    """A run that nothing happens to: its directory after step 4, its end, and how many events a kill may come at."""

    base: Path
    summary: dict[str, Any]
    events: int


class Scene:
    """A copy of the calm run after step 4, in `where`/disk/out, with a swap directory and a run file of its own."""

    def __init__(self, where: Path, calm: Calm | None) -> None:
        self.where, self.calm, self._count = where, calm, 0
        self.disk, self.out, self.swap = where / "disk", where / "disk/out", where / "swap"
        self.harmed = ExitStack()  # what is to be undone before the run goes on
        self.mounts = ExitStack()  # and at the end
        self._run = RUN.write(where)
        self.lay_out()

    def lay_out(self) -> None:
        """Puts the run in its place, anew."""
        self.disk.mkdir(exist_ok=True)
        shutil.rmtree(self.out, ignore_errors=True)
        if self.calm is not None:
            shutil.copytree(self.calm.base, self.out)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.out / "checkpoints").glob("*"))

    def start(self, harmed: Callable[[Any], None] | None = None, how: str = "--resume") -> Child:
        return self.command(["train", str(self._run), how, str(self.out)], harmed)

    def command(self, argv: list[str], harmed: Callable[[Any], None] | None = None) -> Child:
        self._count += 1
        return Child(self.where / f"said-{self._count}", argv, harmed)

    def summary(self) -> dict[str, Any]:
        return summary_of(self.out)

    def finished_right(self) -> None:
        """The run is at its end, to the bits of the calm one."""
        assert self.calm is not None
        for key in ("digest", "losses", "steps", "eval_loss_first", "eval_loss_last", "checkpoint", "interrupted"):
            assert self.summary()[key] == self.calm.summary[key], key
        assert len(records_of(self.out)) == self.calm.summary["steps"]

    def whole(self) -> None:
        """Every checkpoint is."""
        for path in self.checkpoints:
            verify(path)

    def goes_on(self) -> None:
        """The last checkpoint, resumed, ends in the bits of the calm run, and nothing is left on swap."""
        done = self.start().join()
        assert done.code == 0 and ("goes on from" in done.said or "is finished" in done.said), done.said
        self.finished_right()
        assert not list(self.swap.glob("*"))


def make_calm(where: Path) -> Calm:
    """Runs it, and keeps a copy of its directory before step 5."""
    scene = Scene(where / "calm", None)
    child = scene.start(harm.Pauses("step"), "--out")
    assert child.hear() == "here"
    shutil.copytree(scene.out, where / "base")
    child.answer()
    done = child.join()
    assert done.code == 0 and not done.left, done
    counted = Scene(where / "counted", None).start(harm.Dies(0), "--out").join()
    assert [p.name for p in sorted((where / "base/checkpoints").iterdir())] == [OLDER, NEWEST]
    return Calm(where / "base", scene.summary(), counted.told)
