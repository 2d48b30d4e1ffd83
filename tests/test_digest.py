"""The digest that can go on elsewhere: xxh3_128 of long streams, however they are given."""

from __future__ import annotations

import random

import pytest
import xxhash

from offload import _core


def test_as_xxhash_has_it() -> None:
    chance = random.Random(0)
    data = chance.randbytes(40_000)
    for nbytes in (*range(241, 1400), 2047, 2048, 2049, 3071, 3072, 3073, 39_999):
        digest = _core.Digest()
        digest.update(data[:nbytes])
        assert digest.hexdigest() == xxhash.xxh3_128_hexdigest(data[:nbytes]), nbytes


def test_in_any_parts_and_from_state_to_state() -> None:
    chance = random.Random(1)
    data = chance.randbytes(100_000)
    for trial in range(300):
        nbytes, at, digest = chance.randrange(241, 100_000 if trial % 10 == 0 else 6000), 0, _core.Digest()
        while at < nbytes:
            n = min(nbytes - at, chance.choice([0, 1, 63, 64, 65, 1023, 1024, 1025, 5000]))
            digest.update(memoryview(data)[at : at + n])
            at += n
            if chance.random() < 0.5:
                digest = _core.Digest(digest.state())
        assert digest.hexdigest() == digest.hexdigest() == xxhash.xxh3_128_hexdigest(data[:nbytes])


def test_what_is_refused() -> None:
    digest = _core.Digest()
    digest.update(bytes(240))
    with pytest.raises(ValueError, match="another"):
        digest.hexdigest()
    with pytest.raises(ValueError, match="no digest's state"):
        _core.Digest(b"x")
    with pytest.raises(ValueError, match="in a row"):
        digest.update(memoryview(bytes(64))[::2])
    with pytest.raises(TypeError):
        digest.update("text")
