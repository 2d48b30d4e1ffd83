"""Sizes, tiers, precision and run files: what is accepted, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Precision, RunConfig, Tiers, check_place, format_count, format_size, known_keys, parse_size, precision_of
from offload.errors import ConfigError

RUN = """
[model]
type = "llama"
config = { hidden_size = 64 }
[data]
source = "random"
[tiers]
device = "64MiB"
host = 268435456
nvme = [["swap", "1GiB"]]
[train]
steps = 8
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig.load(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5MiB", 3 << 19),
        ("24 GiB", 24 << 30),
        ("1024", 1024),
        (1024, 1024),
        (24e9, 24 * 10**9),
        ("7B", 7),
        (0, 0),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["24GiBx", "24 GiB of it", "24gib", "24Gi", "-1", -1, "", "GiB", "1.5", 1.5, "1e9", "0x10", float("nan"),
     float("inf"), True, None, [1], "٣GiB", "9999999PiB", 1 << 62],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@given(st.integers(0, (1 << 62) - 1))
def test_numbers_of_bytes_are_exact(nbytes: int) -> None:
    assert parse_size(nbytes) == parse_size(str(nbytes)) == nbytes


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 320 << 20, 2 << 30, 3 << 39)] == ["0 B", "1023 B", "320 MiB", "2 GiB", "1.5 TiB"]


def test_counts_for_people() -> None:
    counts = {70 * 10**9: "70 billion", 134_515_008: "135 million", 10**6: "1 million", 98_624: "98,624", 0: "0"}
    assert {n: format_count(n) for n in counts} == counts


def test_tiers_take_sizes_and_paths() -> None:
    tiers = Tiers("1GiB", 5, [("a", "1MiB"), (Path("b"), 2)])
    assert tiers == Tiers(device=1 << 30, host="5", nvme=[("a", 1 << 20), ("b", "2")])
    assert tiers.budget_bytes() == {"device": 1 << 30, "host": 5, "nvme": (1 << 20) + 2}
    assert Tiers(1, 2).nvme == ()


@pytest.mark.parametrize("nvme", ["a", ["a"], [("a",)], [("a", "1GiB", 3)], [(1, "1GiB")], [("a", "much")], 3])
def test_what_is_no_list_of_directories_is_refused(nvme: object) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.nvme"):
        Tiers(1, 1, nvme)  # type: ignore[arg-type]


def test_precision_and_place_know_their_values() -> None:
    assert Precision() == Precision("bf16", "bf16", "fp32", "fp32")
    with pytest.raises(ConfigError, match="compute"):
        Precision(compute="fp8")  # type: ignore[arg-type]
    assert check_place({"optimizer": "nvme"}) == {"optimizer": "nvme"} and check_place(None) == {}
    with pytest.raises(ConfigError, match="nearest: parameter"):
        check_place({"parameters": "host"})
    with pytest.raises(ConfigError, match="'nvme'"):
        check_place({"optimizer": "disk"})


def test_a_run_file_is_resolved_against_its_directory(run: Path, tmp_path: Path) -> None:
    config = RunConfig.load(run, ["train.steps=3", "optimizer.name=adam", "data.source=['a/**/*.py', '/b']", 'tiers.place={optimizer="nvme"}'])
    assert config.tiers_value() == Tiers("64MiB", "256MiB", [(tmp_path / "swap", "1GiB")])
    assert config.data.source == [str(tmp_path / "a/**/*.py"), "/b"]
    assert (config.train.steps, config.optimizer.name, config.place_value(), config.optimizer.clip) == (3, "adam", {"optimizer": "nvme"}, None)


def test_the_resolved_file_loads_to_the_same(run: Path, tmp_path: Path) -> None:
    config = RunConfig.load(run, ["optimizer.lr=3e-5", "optimizer.clip=1", 'model.config={rope_parameters={"a.b"=[1.5, true, "x"]}}'])
    (tmp_path / "elsewhere").mkdir()
    resolved = tmp_path / "elsewhere" / "config.toml"
    resolved.write_text(config.to_toml())
    assert RunConfig.load(resolved) == config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.step=3", "train.step is no known key (nearest: train.steps)"),
        ("train.lr=3", "(nearest: optimizer.lr)"),
        ("trian.steps=3", "[trian] is no known table (nearest: train)"),
        ("train.zzz=3", "known there: steps, seed"),
        ("tiers.device=24GiBs", "tiers.device: '24GiBs' is no size"),
        ("train.steps=0", "train.steps = 0"),
        ("train.steps=many", "train.steps = 'many'"),
        ("train.steps=true", "train.steps = True"),
        ("optimizer.name=sgd", "'adamw' or 'adam'"),
        ("optimizer.lr=nan", "optimizer.lr"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("data.held_out=1", "data.held_out"),
        ("data.source=3", "data.source"),
        ("model.path=x", "either model.path or model.type; both are there"),
        ("tiers.place={optimizer=nvme}", "a table; --set tiers.place.KEY=VALUE"),
        ("optimizer.betas=[0.9]", "should have at least 2 items, not 1"),
        ("tiers.place.optimizer=disk", "tiers.place.optimizer"),
        ("tiers.place.moments=host", "tiers.place.moments"),
        ("train", "write table.key=value"),
        ("steps=3", "write table.key=value"),
        ("train.steps.more=3", "steps is no table"),
    ],
)
def test_refusals_name_the_key(run: Path, override: str, says: str) -> None:
    assert says in refusal(run, override)


def test_stages(run: Path) -> None:
    assert [RunConfig.load(run, [f"train.stage={stage}"]).train.stage for stage in range(4)] == [0, 1, 2, 3]
    assert "train.stage = 4" in refusal(run, "train.stage=4")


@pytest.mark.parametrize("mode", ["auto", "keep", "recompute", "host", "nvme"])
def test_treatments_of_activations(run: Path, mode: str) -> None:
    assert RunConfig.load(run, [f"train.activations={mode}"]).train.activations == mode
    assert "train.activations = 'disk'" in refusal(run, "train.activations=disk")


def test_updates_start_in_the_backward_where_nothing_needs_all_gradients(run: Path) -> None:
    def when(*overrides: str) -> str:
        return RunConfig.load(run, overrides).updates_value()

    clipped = "optimizer.clip=1.0"
    assert [when(), when(clipped), when("precision.compute=fp16"), when("train.updates=forward")] == ["backward", "forward", "forward", "forward"]
    assert when("train.updates=backward") == "backward" and RunConfig.load(run).updates_value(2) == "forward"
    explicit = "train.updates=backward"
    assert "optimizer.clip" in refusal(run, explicit, clipped) and "fp16" in refusal(run, explicit, "precision.grad=fp16")
    assert "train.updates = 'never'" in refusal(run, "train.updates=never")


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_split_master_needs_bf16_compute(run: Path, compute: str) -> None:
    with pytest.raises(ConfigError, match="needs compute = 'bf16'"):
        Precision(compute=compute, master="split")  # type: ignore[arg-type]
    assert "needs compute = 'bf16'" in refusal(run, f"precision.compute={compute}", "precision.master=split")


def test_precision_alone() -> None:
    assert precision_of(["precision.master=split", "precision.moments=int8"]) == Precision(master="split", moments="int8")
    assert precision_of([]) == Precision()
    for override in ("train.steps=3", "precision.moment=int8", "precision.moments=int4", "precision"):
        with pytest.raises(ConfigError):
            precision_of([override])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "none.toml")
    assert "cannot read" in refusal(tmp_path)
    (tmp_path / "bad.toml").write_text("[a\n")
    assert "is no TOML" in refusal(tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    assert "[model] is missing" in refusal(tmp_path / "empty.toml")


def test_there_are_few_keys() -> None:
    assert len(known_keys()) < 40
