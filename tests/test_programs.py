"""Random programs of users' actions give the bits of the same actions one thing after another, in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import programs

SEEDS = 30  # `python tests/test_programs.py FIRST LAST` runs as many as one likes


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_program(tmp_path: Path, seed: int) -> None:
    assert not programs.run(tmp_path, seed)


if __name__ == "__main__":
    import sys
    import tempfile

    first, last = (int(n) for n in sys.argv[1:3])
    for seed in range(first, last):
        with tempfile.TemporaryDirectory(prefix="offload-program-") as directory:
            if wrong := programs.run(Path(directory), seed, programs.LENGTH * (1 + seed % 3)):
                print(wrong, flush=True)
    print(f"{last - first} programs")
