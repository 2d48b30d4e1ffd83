"""Each target of tests/fuzz.py for a moment, and what it found before."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offload
from fuzz import RUN, Ground, forge, nested, property_of
from offload.checkpoint.codec import decode
from offload.checkpoint.manifest import verify
from offload.cli import main
from offload.config import ModelTable, RunConfig
from offload.errors import CheckpointError, ConfigError, OffloadError
from offload.train.checkpoints import position, random_state, set_random_state
from offload.train.model import build, load_config
from offload.train.rundir import RunDirectory

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


# What was found, by reading and by chance

ZEROS = {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}
STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "settings that replace parameters": lambda s: s["groups"][0]["settings"].update(params=[]),
    "a rate that is none": lambda s: s["groups"][0]["settings"].update(lr="fast"),
    "betas that are none": lambda s: s["groups"][0]["settings"].update(betas={"$tuple": [0.9, None]}),
    "what is not supported": lambda s: s["groups"][0]["settings"].update(amsgrad=True),
    "settings that are no table": lambda s: s["groups"][0].update(settings={"$tuple": [1]}),
    "a step beside the step": lambda s: s["more"].update({next(iter(s["parameters"])): {"step": "x"}}),
    "a moment of another kind": lambda s: s["more"].update({next(iter(s["parameters"])): {"exp_avg": 1}}),
    "a number too large for a float": lambda s: s["extra"].update(mine={"$float": 10**400}),
    "a value without end": lambda s: s["extra"].update(mine=nested(400)),
    "extra state of no module": lambda s: s.update(modules={"x._extra_state": 1}),
}


@pytest.mark.parametrize("name", STATES)
def test_states(ground: Ground, name: str) -> None:
    state = copy.deepcopy(ground.state)
    STATES[name](state)
    at = ground.checkpoint(state_json=json.dumps(state).encode())
    forge(at)
    before = offload.runtime(ground.model).digest()
    with pytest.raises(CheckpointError):
        offload.load(at, ground.model, ground.optimizer)
    assert offload.runtime(ground.model).digest() == before


def test_a_tensor_of_no_elements_whose_others_overflow(ground: Ground) -> None:
    header = {name: entry for name, entry in ground.header.items() if name != "__metadata__"} | {"tensor/9": ZEROS}
    text = json.dumps(header).encode()
    data = ground.good["tensors.safetensors"]
    at = ground.checkpoint(tensors_safetensors=len(text).to_bytes(8, "little") + text + data[8 + ground.header_bytes :])
    forge(at)
    with pytest.raises(CheckpointError, match="tensor/9"):
        offload.load(at, ground.model, ground.optimizer)
    (at / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + ground.header_bytes :])
    with pytest.raises(CheckpointError):
        offload.load_pretrained(ground.model, at)


@pytest.mark.parametrize("run", [{"$tuple": []}, {"train": 3}, {"train": {"$tuple": [1]}}, 7])
def test_a_checkpoint_of_a_run_that_is_none(ground: Ground, run: Any) -> None:
    state = copy.deepcopy(ground.state)
    state["extra"]["run"] = run
    at = ground.checkpoint(state_json=json.dumps(state).encode())
    with pytest.raises(CheckpointError, match="is no checkpoint of"):
        position(at, ground.config)


def test_a_generator_that_would_read_behind_its_numbers() -> None:
    state = random_state()
    before = np.random.get_state()[2]
    for at in (-1, 10**6):
        with pytest.raises(ValueError, match="the generator of numpy"):
            set_random_state(state | {"numpy": (*state["numpy"][:2], at, *state["numpy"][3:])})
    assert np.random.get_state()[2] == before


@pytest.mark.parametrize("value", [{"$float": 10**400}, nested(150), nested(150, 1, "x"), {"$dict": [[{"$dict": []}, 1]]}, {"$new": 1}])
def test_values(value: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(value, {})


@pytest.mark.parametrize("content", ["x" * 5000, {"x\n" * 2000: 1}, {"x": {"dtype": "x\n" * 2000, "shape": [], "data_offsets": [0, 0]}}])
def test_what_is_no_header_is_not_said_whole(ground: Ground, content: Any) -> None:
    text, at = json.dumps(content).encode(), ground.fresh()
    (at / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors") as error:
        offload.load_pretrained(ground.model, at)
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "..", "", "../outside/x.safetensors"])
def test_names_in_an_index(ground: Ground, name: str) -> None:
    at = ground.fresh()
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="which is not in") as error:
        offload.load_pretrained(ground.model, at)
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


LINES = {
    "device": ["9" * 400, "0x" + "f" * 20000, "9" * 5000, "[" * 5000 + "]" * 5000, "inf", '"' + "9" * 5000 + '"'],
    "steps": ["9" * 400, "0x" + "f" * 20000, str(10**30)],
    "config": ["{ a = 1979-05-27 }", "{ a = 07:32:00 }", "{ a = " + "9" * 30 + " }", "{ a = " + "[" * 50 + "]" * 50 + " }"],
    "nvme": ['[["a\\u0000b", 1]]', '[["' + "x" * 300 + '", "1PiB"], 3]'],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in LINES.items() for value in values])
def test_values_in_run_files(tmp_path: Path, key: str, value: str) -> None:
    lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in RUN.text.splitlines()]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        RunConfig.load(tmp_path / "run.toml")
    assert len(str(error.value)) < 1000 and "\n" not in str(error.value)
    assert main(["plan", str(tmp_path / "run.toml")]) == 2


@pytest.mark.parametrize("text", [f"[{'9' * 5000}]\n" * 2, f"[{'9' * 5000}]\n", f'"{"x" * 5000}" = 1\n' * 2])
def test_names_in_run_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(RUN.text + text)
    with pytest.raises(ConfigError) as error:
        RunConfig.load(tmp_path / "run.toml")
    assert len(str(error.value)) < 1000 and "\n" not in str(error.value)


@pytest.mark.parametrize("table", [{"type": "x" * 5000}, {"type": "llama", "config": {"x" * 5000: 1}}, {"path": "x" * 5000}])
def test_names_in_a_model_table(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(ModelTable(**table))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("directory", ["~no-such-user/x", "\U0001f600", "\x7f\\", 'a"b', "a\nb"])
def test_paths_in_run_files_come_back(tmp_path: Path, directory: str) -> None:
    text = RUN.text.replace('"swap"', json.dumps(directory, ensure_ascii=False).replace("\x7f", "\\u007f"))
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    config = RunConfig.load(tmp_path / "run.toml")
    assert config.tiers.nvme[0][0] == str(tmp_path / directory)
    with RunDirectory(tmp_path / "out") as run:
        run.begin(config.to_toml())
    assert RunConfig.load(tmp_path / "out/config.toml") == config


@pytest.mark.parametrize("line", ["[" * 100_000, "{}", "[]", '{"step": 1}', '{"step": 1, "loss": "x", "seconds": 1, "tokens": 1}', "7"])
def test_records_of_a_run(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    (tmp_path / "summary.json").write_text(line)
    with RunDirectory(tmp_path) as run:
        assert run.finished(1) is None
        for steps in (1, 1 << 39):
            with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
                run.records(steps)


@pytest.mark.parametrize("text", ["[]", "7", "{", '{"model_type": "llama", "rope_parameters": 3}', '{"model_type": []}', "[" * 100_000])
def test_a_models_configuration(ground: Ground, text: str) -> None:
    at = ground.fresh()
    (at / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_config(ground.config.model.model_copy(update={"path": str(at), "type": None, "config": {}}))


def test_sizes_that_do_not_go_together(ground: Ground) -> None:
    table = ground.config.model
    for sizes in ({"num_hidden_layers": 2, "vocab_size": -1}, {"hidden_size": 10**17}):
        with pytest.raises(ConfigError):
            build(load_config(table.model_copy(update={"config": table.config | sizes})))


def takers(ground: Ground) -> list[Callable[[Path], Any]]:
    """All that takes a directory."""
    model, optimizer = ground.model, ground.optimizer
    return [verify, lambda p: offload.load_pretrained(model, p), lambda p: offload.save_pretrained(model, p),
            lambda p: offload.save(p, model, optimizer), lambda p: offload.load(p, model, optimizer)]  # fmt: skip


@pytest.mark.parametrize("path", ["x" * 300, "x" * 5000, "a/" * 3000])
def test_directories_whose_names_are_too_long(ground: Ground, capsys: pytest.CaptureFixture[str], path: str) -> None:
    for act in takers(ground):
        with pytest.raises(OffloadError):
            act(Path(path))
    run = str(ground.where / "run.toml")
    for argv in (["verify", path], ["clean", path], ["export", path, "out"], ["train", path], ["train", run, "--out", path],
                 ["doctor", "--path", path], ["bench", "--path", path]):  # fmt: skip
        assert main(argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and len([line for line in said.err.splitlines() if line.startswith("error: ")]) == 1


def test_a_zero_byte_in_a_name(ground: Ground, tmp_path: Path) -> None:
    for act in takers(ground):
        with pytest.raises(OffloadError):
            act(tmp_path / "a\0b")


def test_a_name_that_is_no_text(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    at = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(at)
    for argv, code in ((["clean", os.fsdecode(at)], 0), (["verify", os.fsdecode(at)], 2), (["clean", os.fsdecode(at), "--json"], 0)):
        assert main(argv) == code
    Path(os.fsdecode(at + b"/run.toml")).write_text(RUN.text)
    with pytest.raises(ConfigError, match="no path that a run file can have"):
        RunConfig.load(os.fsdecode(at + b"/run.toml"))
