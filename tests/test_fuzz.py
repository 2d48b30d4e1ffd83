"""Each target of tests/fuzz.py for a moment, and what it found before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz import Ground, property_of

TARGETS = [
    "manifest", "bytes", "state", "header", "weights", "weight bytes", "index", "run file", "run bytes", "override", "records", "model config",
    "command",
]  # fmt: skip


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with Ground(tmp_path_factory.mktemp("fuzz")) as ground:
        yield ground


def test_every_target_is_tried(ground: Ground) -> None:
    assert list(ground.targets) == TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files(ground: Ground, name: str) -> None:
    property_of(ground, name, 15, derandomize=True)()
