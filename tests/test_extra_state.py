"""What modules keep beside their parameters: extra state, persistent buffers and those that are not, in everything that saves and loads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from checkpoints import adam
from helpers import Prepared, give, same
from offload.checkpoint.export import saved_tensors
from offload.checkpoint.modules import persistent_buffers
from offload.errors import CheckpointError, ConfigError


class Counting(nn.Linear):
    """Has extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__(3, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise RuntimeError("not this one")
        self.extra = state


class Model(nn.Module):
    def __init__(self, extra: Any, fill: float = 0.0) -> None:
        super().__init__()
        self.one, self.two = Counting(extra), nn.Sequential(Counting({"n": 0}))
        self.register_buffer("kept", torch.full((3,), fill))
        self.register_buffer("passing", torch.full((3,), fill), persistent=False)
        shared = torch.full((2,), fill)
        self.two.register_buffer("hidden", shared, persistent=False)
        self.one.register_buffer("seen", shared)


EXTRA: dict[str, Any] = {
    "values": {"amax": [1.5, float("inf")], 3: (b"x", None)},
    "tensors": {"scale": torch.arange(4.0), "deep": [torch.tensor(True)]},
    "tensor": torch.arange(6.0).view(2, 3),
    "nothing": None,
}


def alike(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(alike(got[k], v) for k, v in want.items())
    if isinstance(want, list):
        return len(got) == len(want) and all(map(alike, got, want))
    return type(got) is type(want) and bool(got == want)


def test_buffers_are_those_of_a_state_dict() -> None:
    model = Model(None)
    assert list(persistent_buffers(model)) == ["kept", "one.seen"] == [k for k, v in model.state_dict().items() if k in dict(model.named_buffers())]


@pytest.mark.parametrize("kind", EXTRA)
def test_checkpoints_have_it(prepared: Prepared, tmp_path: Path, kind: str) -> None:
    model, twin = prepared(Model(EXTRA[kind], 1.0)), prepared(Model("other", 2.0))
    model.two[0].extra = {"n": 7}
    optimizer, resumed = adam(model), adam(twin)
    give(model, 1)
    optimizer.step()
    offload.save(tmp_path / "at", model, optimizer, extra=[1])
    assert offload.load(tmp_path / "at", twin, resumed) == [1]
    assert alike(twin.one.extra, EXTRA[kind]) and twin.two[0].extra == {"n": 7}
    assert twin.kept.tolist() == [1.0] * 3 and twin.passing.tolist() == [2.0] * 3 and twin.one.seen.tolist() == [1.0] * 2
    assert {"one.seen", "kept", "one.weight"} <= saved_tensors(tmp_path / "at").keys()


def test_checkpoints_refuse_what_they_cannot_hold_or_give_back(prepared: Prepared, tmp_path: Path) -> None:
    model = prepared(Model(io.BytesIO(b"x")))
    optimizer = adam(model)
    with pytest.raises(ConfigError, match=r"one\._extra_state is _io\.BytesIO, which a checkpoint does not hold"):
        offload.save(tmp_path / "at", model, optimizer)
    assert not (tmp_path / "at").exists()
    model.one.extra = "fine"
    offload.save(tmp_path / "at", model, optimizer)
    plainer = Model(0)
    plainer.one = nn.Linear(3, 2)  # type: ignore[assignment]
    plainer.one.register_buffer("seen", torch.zeros(2))
    twin = prepared(plainer)
    before = offload.runtime(twin).digest()
    with pytest.raises(CheckpointError, match=r"has 1 extra states that the model lacks \(one\._extra_state\)"):
        offload.load(tmp_path / "at", twin, adam(twin))
    assert offload.runtime(twin).digest() == before
    offload.save(tmp_path / "plain", twin, adam(twin))
    with pytest.raises(CheckpointError, match=r"lacks 1 of the model's extra states"):
        offload.load(tmp_path / "plain", model, optimizer)
    model.one.extra = "bad"
    offload.save(tmp_path / "at", model, optimizer)
    with pytest.raises(CheckpointError, match=r"set_extra_state refused one\._extra_state.*not this one"):
        offload.load(tmp_path / "at", model, optimizer)


@pytest.mark.parametrize("kind", ["tensor", "values"])
def test_files_of_weights_have_tensors(prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    model, twin = prepared(Model(EXTRA[kind], 1.0)), prepared(Model("other", 2.0))
    offload.save_pretrained(model, tmp_path / "out")
    assert ("one._extra_state of the model is dict" in caplog.text) == (kind == "values")
    loaded = offload.load_pretrained(twin, tmp_path / "out")
    assert loaded.missing == loaded.unexpected == []
    assert alike(twin.one.extra, EXTRA["tensor"] if kind == "tensor" else "other")
    assert twin.kept.tolist() == [1.0] * 3 and twin.passing.tolist() == [2.0] * 3
    same(twin.one.weight, model.one.weight.clone())


def test_files_of_weights_and_buffers_that_they_lack_or_should_not_have(prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import save_file

    state = {k: v.clone() for k, v in Model("", 1.0).state_dict().items() if isinstance(v, torch.Tensor) and k != "kept"}
    save_file(state | {"passing": torch.ones(3)}, tmp_path / "model.safetensors")
    twin = prepared(Model("other", 2.0))
    loaded = offload.load_pretrained(twin, tmp_path)
    assert loaded.missing == ["kept"] and loaded.unexpected == ["passing"]
    assert twin.kept.tolist() == twin.passing.tolist() == [2.0] * 3 and twin.one.seen.tolist() == [1.0] * 2
    assert "lacks 1 tensors, which keep the values they have: kept" in caplog.text


def test_a_buffer_that_safetensors_has_no_dtype_for(prepared: Prepared, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("count", torch.ones(2, dtype=torch.uint16))
    model = prepared(model)
    for save in (lambda: offload.save_pretrained(model, tmp_path / "out"), lambda: offload.save(tmp_path / "out", model, adam(model))):
        with pytest.raises(ConfigError, match=r"phase is (a Tensor, )?torch\.complex64"):
            save()
    assert not (tmp_path / "out").exists()


def test_torch_and_accelerate_see_it_in_state_dicts(prepared: Prepared) -> None:
    model, twin = prepared(Model(EXTRA["values"], 1.0)), prepared(Model("other", 2.0))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert alike(twin.one.extra, EXTRA["values"]) and twin.kept.tolist() == [1.0] * 3 and twin.passing.tolist() == [2.0] * 3
