"""`offload export`: a checkpoint's weights as a directory that transformers loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload.cli.app import emit
from offload.cli.files import check, checkpoints
from offload.config import ModelTable, RunConfig, format_count, format_size, parse_size
from offload.errors import CheckpointError, ConfigError

_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def _model_table(checkpoint: Path, model: str | None) -> ModelTable:
    """Which model a checkpoint is of: as `--model` says, else the run that it is in."""
    if model is not None:
        return ModelTable(path=str(Path(model).absolute()))
    run = checkpoint.absolute().parent.parent / "config.toml"
    if not os.path.isfile(run):
        raise ConfigError(f"{checkpoint} is in no run directory, so its model is not known; give --model a directory with its config.json")
    return RunConfig.load(run).model


def _check_out(checkpoint: Path, out: str) -> None:
    """ConfigError for what lies in the run, or in the checkpoint: neither goes on with files of others in it."""
    if not out:
        raise ConfigError("OUT has no name: give a directory to write to, as . for this one")
    run, there = checkpoint.absolute().parent.parent, Path(os.path.realpath(out))
    for held, what in ((checkpoint, "checkpoint"), (run, "run")):
        inside = Path(os.path.realpath(held)) in (there, *there.parents)
        if inside and (what == "checkpoint" or os.path.isfile(run / "config.toml")):
            raise ConfigError(f"{out} is in the directory of the {what} {held}, which is to have nothing else in it: give another to write to")


def _config(table: ModelTable) -> Any:
    """As a run has it, but for the cache of keys and values, which training leaves off."""
    from offload.train.model import load_config

    config = load_config(table)
    from transformers import AutoConfig

    given = AutoConfig.from_pretrained(table.path) if table.path is not None else AutoConfig.for_model(str(table.type), **table.config)
    config.use_cache = getattr(given, "use_cache", True)
    return config


def _text(result: dict[str, Any]) -> str:
    return (
        f"{format_count(result['parameters'])} parameters of {result['checkpoint']}, {format_size(result['bytes'])}, are in {result['directory']}"
    )


def export_command(directory: str, out: str, model: str | None, max_shard_size: str, as_json: bool) -> int:
    """Verifies the newest checkpoint of a run, or the one given, and writes its weights to `out`."""
    try:
        parse_size(max_shard_size)
    except ConfigError as error:
        raise ConfigError(f"--max-shard-size: {error}") from None
    *before, checkpoint = checkpoints(directory)
    table = _model_table(checkpoint, model)
    _check_out(checkpoint, out)
    try:
        check(checkpoint)
    except CheckpointError as error:
        raise (CheckpointError(f"{error}. The one before: offload export {before[-1]} {out}") if before else error) from None
    import transformers

    from offload.checkpoint.export import export, saved_tensors
    from offload.train.model import build

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    made = build(_config(table)).eval()
    beside = [p for name in _BESIDE if table.path is not None and (p := Path(table.path) / name).is_file()]
    files = export(made, saved_tensors(checkpoint), out, max_shard_size, beside)
    result = {
        "directory": out,
        "checkpoint": str(checkpoint),
        "parameters": sum(p.numel() for p in made.parameters()),
        "bytes": sum((Path(out) / name).stat().st_size for name in files),
        "files": files,
    }
    emit(result, as_json, _text)
    return 0
