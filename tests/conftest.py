"""What pytest hands to any test that names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import Prepared


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Prepared]:
    with Prepared(tmp_path) as make:
        yield make
