"""Run files of `offload train` for tests: a small run, changed where a test wants something of it, and what a run left in its directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.config import RunConfig, toml_text
from offload.train.loop import train


def sizes(vocabulary: int = 64, width: int = 32, inner: int = 64, layers: int = 2, heads: int = 4, **more: Any) -> dict[str, Any]:
    """What the configuration of a Llama, or of another model that names its sizes so, says of them; `more` as it is."""
    return {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, **more
    }  # fmt: skip


@dataclass(frozen=True)
class RunFile:
    """A run file, by table and key."""

    tables: Mapping[str, Mapping[str, Any]]

    def but(self, **tables: Mapping[str, Any]) -> RunFile:
        """The same with other keys. Values are replaced whole; None leaves the key out, and its table where no key is left."""
        whole = dict(self.tables)
        for name, table in tables.items():
            merged = {**whole.get(name, {}), **table}
            whole[name] = {key: value for key, value in merged.items() if value is not None}
        return RunFile({name: table for name, table in whole.items() if table})

    @property
    def text(self) -> str:
        return toml_text(self.tables)

    def write(self, where: Path, name: str = "run.toml") -> Path:
        """The file, in a directory that is made if it is not there."""
        where.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(self.text)
        return where / name

    def load(self, where: Path, *overrides: str) -> RunConfig:
        """Written to `where`, and read again."""
        return RunConfig.load(self.write(where), overrides)

    def train(self, where: Path, *overrides: str, out: str = "out", **how: Any) -> dict[str, Any]:
        """Trains in this process, in `where`/`out`; the summary."""
        return train(self.load(where, *overrides), str(where / out), **how)


SMALL = RunFile({
    "model": {"type": "llama", "config": sizes()},
    "data": {"source": "random", "seq_length": 16, "eval_sequences": 1},
    "tiers": {"device": "64MiB", "host": "32MiB", "nvme": [["swap", "64MiB"]]},
    "optimizer": {"lr": 1e-2},
    "train": {"steps": 3, "device": "cpu"},
})  # fmt: skip


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())  # type: ignore[no-any-return]


def records_of(out: Path) -> list[dict[str, Any]]:
    """What a run recorded of each step. ValueError where a number is none that JSON knows."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} in {out / 'metrics.jsonl'}")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]
