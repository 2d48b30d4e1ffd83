"""Whatever happens to a run: a clear error or none, the right exit code, no hang, no thread left, and a last checkpoint that goes on to the bit."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import harm
from disks import mounted_anew, small_disk
from matrix import MATRIX, PLACES, Case, NoCase
from scene import Calm, Scene, make_calm

SEEDS = 5
CASES = [(f"{fault}-{place}-{number}" if len(cases) > 1 else f"{fault}-{place}", case)
         for fault, row in MATRIX.items() for place, cases in row.items() for number, case in enumerate(cases)]  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return make_calm(tmp_path_factory.mktemp("calm"))


@pytest.fixture
def scene(calm: Calm, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, calm)
    with made.mounts, made.harmed:
        yield made


def test_the_table_is_whole() -> None:
    for fault, row in MATRIX.items():
        assert tuple(row) == PLACES, fault
        for cases in row.values():
            assert cases and (len(cases) == 1 or not any(isinstance(case, NoCase) for case in cases)), fault


@pytest.mark.parametrize("case", [pytest.param(c, id=name) for name, c in CASES if isinstance(c, Case)])
def test_a_fault(scene: Scene, case: Case) -> None:
    if case.before is not None:
        case.before(scene)
    child = scene.start(case.of(scene) if case.of is not None else case.harm)
    if case.meanwhile is not None:
        assert child.hear() == "here"
        case.meanwhile(scene, child)
        child.answer()
    got = child.join()
    assert (got.code, got.error) == (case.code, case.error), got.said
    for says in case.says:
        assert re.search(says, got.said), got.said
    assert "Traceback" not in got.said and (not case.error or got.said.count("error:") == 1), got.said
    assert not got.left
    if got.code >= 0:
        on_swap = [p.name for p in scene.swap.glob("*")]
        assert len(on_swap) == len(case.left) and all(map(re.fullmatch, case.left, on_swap)), on_swap
    if case.mend is not None:
        case.mend(scene)
    scene.whole()
    if case.code == 0 and not case.stopped:
        scene.finished_right()
    else:
        if case.code == 0:
            saved = scene.summary()
            assert saved["interrupted"] and saved["checkpoint"] == f"step-{saved['steps']:08d}" and saved["digest"] is None
        scene.goes_on()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_at_random(calm: Calm, tmp_path: Path, seed: int) -> None:
    """From its start, and again as it goes on, at any write, synchronisation, rename or move of swap."""
    draw, scene = random.Random(seed), Scene(tmp_path, calm)
    shutil.rmtree(scene.out)
    for most in (calm.events, calm.events // 2):
        got = scene.start(harm.Dies(draw.randrange(most), large=seed % 2 == 0)).join()
        assert got.code in (-signal.SIGKILL, 0), got.said
        scene.whole()
    done = scene.start().join()
    assert done.code == 0, done.said
    scene.finished_right()
    assert not list(scene.swap.glob("*"))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_power_goes(calm: Calm, tmp_path: Path, seed: int, large: bool) -> None:
    """What is not on the drive by then is lost: checkpoints are whole all the same, and the metrics have their steps."""
    draw, scene = random.Random(seed), Scene(tmp_path, calm)
    with small_disk("ext4", scene.disk):
        scene.lay_out()
        subprocess.run(["sync", "-f", str(scene.disk)], check=True)
        got = scene.start(harm.Dies(draw.randrange(calm.events // 2), cuts=scene.disk, large=large)).join()
        assert got.code == -signal.SIGKILL, got.said
        mounted_anew(scene.disk)
        assert scene.checkpoints
        scene.whole()
        scene.goes_on()
