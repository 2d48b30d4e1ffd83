"""What the documents say of keys, options and names is what the code has."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import typer

import offload
from offload.cli.app import app
from offload.config import RunConfig, known_keys

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RUN_FILE = (ROOT / "docs/run-file.md").read_text()


def documented_keys() -> dict[str, str]:
    """Each key of docs/run-file.md as `table.key`, and what it says that it is unless given."""
    keys: dict[str, str] = {}
    table = ""
    for line in RUN_FILE.partition("## The run directory")[0].splitlines():
        if heading := re.match(r"### `\[(\w+)\]`", line):
            table = heading[1]
        elif row := re.match(r"\| `(\w+)` \|([^|]*)\|", line):
            keys[f"{table}.{row[1]}"] = row[2].strip()
    return keys


def test_every_key_of_a_run_file_is_documented_with_its_default() -> None:
    said = documented_keys()
    assert list(said) == list(known_keys())
    for key, table in known_keys().items():
        field = table.model_fields[key.partition(".")[2]]
        if field.is_required():
            assert said[key] == "needed", key
        elif field.default is None:
            assert said[key] == "", key
        else:
            assert tomllib.loads(f"x = {said[key].strip('`')}")["x"] == field.default, key
    for name, field in RunConfig.model_fields.items():
        assert (f"### `[{name}]`, needed" in RUN_FILE) is field.is_required(), name


def test_every_command_and_option_is_in_the_readme() -> None:
    table = README.partition("## From the command line")[2].partition("\n## ")[0]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"`offload {name}" in table, name
        row = "\n".join(line for line in table.splitlines() if f"`offload {name}" in line)
        for option in (o for p in command.params for o in p.opts if o.startswith("--")):
            assert option in row or option in ("--json", "--help"), f"offload {name} {option}"


def test_every_public_name_is_in_the_readme() -> None:
    assert not [name for name in offload.__all__ if name not in README]


def test_named_results_and_scripts_are_there() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = set(re.findall(r"\b(?:bench|tests|examples|docs)/[\w/-]+\.(?:py|md|json|svg|toml)", texts))
    assert named and not [name for name in named if not (ROOT / name).exists()]
    code = set(re.findall(r"`((?:cpp|api|checkpoint|cli|dist|engine|memory|observe|optim|planner|train|transfer)/[\w/]+\.(?:py|h|cpp|inl))`", texts))
    assert code and not [name for name in code if not (ROOT / name).exists() and not (ROOT / "offload" / name).exists()]


def test_results_say_how_they_came_about() -> None:
    for path in (ROOT / "bench/results").glob("*.json"):
        assert {"machine", "versions", "commit", "command"} <= set(json.loads(path.read_text())), path.name
