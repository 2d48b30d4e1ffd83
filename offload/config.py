"""Settings: byte sizes, tiers, precision, and the schema of a run file.

Nothing here imports torch, so that the command line checks a run file at once. Every refusal is a `ConfigError` of one line.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from offload.errors import SHOWN_MOST, ConfigError, named

_UNITS = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGTP", 1)} | {f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)}
_UNITS["KB"] = 1000
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
_SIZE_MAX = 1 << 62

Compute = Literal["bf16", "fp16", "fp32"]
Master = Literal["fp32", "split"]
Moments = Literal["fp32", "bf16", "int8"]
CHECKSUM_PAGE = 128 << 10  # bytes a drive above a sum of 4 bytes for each 4096: sums are held in pages
Activations = Literal["auto", "keep", "recompute", "host", "nvme"]
Updates = Literal["forward", "backward"]
TierName = Literal["device", "host", "nvme"]

Place = dict[Literal["parameter", "gradient", "optimizer"], TierName]


def shown(value: object) -> str:
    """A value from a file, which may be anything, as part of a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of numbers with too many digits, and of what is nested too deep
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}..."


def parse_size(value: object) -> int:
    """Bytes of `"24GiB"`, `"24GB"`, `"1.5 MiB"`, `"1024"` or a whole number; anything else, trailing text included, is a `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f'{shown(value)} is no size; write "24GiB", "24GB" or a number of bytes')
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if not match or (match[2] and match[2] not in _UNITS):
            raise ConfigError(f'{shown(value)} is no size; write "24GiB", "24GB" or a number of bytes')
        if "." in match[1] and not match[2]:
            raise ConfigError(f"{shown(value)} is no whole number of bytes")
        number = float(match[1]) if "." in match[1] or len(match[1]) > 30 else int(match[1])
        value = int(min(number * _UNITS[match[2] or "B"], _SIZE_MAX))
    if isinstance(value, float) and not value.is_integer():
        raise ConfigError(f"{value!r} is no whole number of bytes")
    if not 0 <= value < _SIZE_MAX:
        raise ConfigError(f"{shown(value)} bytes is out of range; give 0 or more")
    return int(value)


def format_size(nbytes: float) -> str:
    """`nbytes` for people: 336 MiB, 1.9 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"


def format_count(n: int) -> str:
    """A number of parameters for people: 70 billion, 135 million, 98,624."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if n >= size:
            return f"{n / size:.3g} {name}"
    return f"{n:,}"


def _disks(value: object) -> list[tuple[str, int]]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f'{shown(value)} is no list of [directory, size] pairs, as [["/mnt/nvme0", "400GiB"]]')
    disks = []
    for pair in value:
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], (str, os.PathLike)):
            raise ConfigError(f'{shown(pair)} is no [directory, size] pair, as ["/mnt/nvme0", "400GiB"]')
        disks.append((os.fspath(pair[0]), parse_size(pair[1])))
    return disks


def _sources(value: object) -> str | list[str]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(x, str) and x for x in value):
        return value
    raise ConfigError(f'{shown(value)}: give files or globs, as ["texts/**/*.py"], or "random"')


@dataclass(frozen=True)
class Tiers:
    """The budgets of one process: what each tier may hold, in bytes.

    `device` and `host` are sizes (`"24GiB"`, `"24GB"`, a number of bytes); `nvme` lists (directory, size) pairs, over which state is striped.
    With `checksum`, what is read from them is compared with what was written, and a byte that differs is a `SwapError`.
    Once built, sizes are integers and `nvme` is a tuple of (str, int). Raises `ConfigError` for what is no size.
    """

    device: int
    host: int
    nvme: tuple[tuple[str, int], ...]
    checksum: bool

    def __init__(
        self, device: str | int, host: str | int, nvme: Iterable[tuple[str | os.PathLike[str], str | int]] = (), *, checksum: bool = False
    ) -> None:
        parsers: dict[str, tuple[Callable[[object], object], object]] = {
            "device": (parse_size, device),
            "host": (parse_size, host),
            "nvme": (lambda x: tuple(_disks(x)), nvme),
        }
        for name, (parse, value) in parsers.items():
            try:
                object.__setattr__(self, name, parse(value))
            except ConfigError as error:
                raise ConfigError(f"tiers.{name}: {error}") from None
        if not isinstance(checksum, bool):
            raise ConfigError(f"tiers.checksum = {checksum!r}: give true or false")
        object.__setattr__(self, "checksum", checksum)

    def checksum_bytes(self, nbytes: int) -> int:
        """Host memory that checksums of `nbytes` on nvme take."""
        return (nbytes >> 10) + len(self.nvme) * CHECKSUM_PAGE if self.checksum and nbytes else 0

    @property
    def nvme_bytes(self) -> int:
        """The bytes of all swap directories together."""
        return sum(size for _, size in self.nvme)

    def budget_bytes(self) -> dict[str, int]:
        """The three budgets by tier name."""
        return {"device": self.device, "host": self.host, "nvme": self.nvme_bytes}


@dataclass(frozen=True)
class Precision:
    """The dtypes of compute, of one micro-batch's gradient as it moves, of the master weights and of Adam's moments.

    With fp32 compute the parameter is its own master. `master="split"` keeps the lower half of the fp32 master alone: its upper half is the bf16
    parameter, rounded to nearest with ties away from zero. `moments`: fp32, or rounded at random to bf16, or to int8 with two fp32 scales for each
    256 elements. State in bytes an element beside parameter and gradient: 12, 8 or 6 1/32; split 10, 6 or 4 1/32; fp32 compute 8, 4 or 2 1/32.
    fp16, whose range is small, wants its loss scaled: `offload train` does so by itself, a loop of one's own has `torch.amp.GradScaler`; fp16
    compute wants trained parameters in fp32.
    Raises `ConfigError` for unknown values, and for a split master without bf16 compute.
    """

    compute: Compute = "bf16"
    grad: Compute = "bf16"
    master: Master = "fp32"
    moments: Moments = "fp32"

    def __post_init__(self) -> None:
        for name, allowed in (("compute", Compute), ("grad", Compute), ("master", Master), ("moments", Moments)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"precision.{name} = {getattr(self, name)!r}: give one of {', '.join(map(repr, get_args(allowed)))}")
        if self.master == "split" and self.compute != "bf16":
            why = "with fp32 compute the parameter is its own master" if self.compute == "fp32" else "an fp16 parameter is no half of an fp32 master"
            raise ConfigError(f"precision.master = 'split' needs compute = 'bf16': {why}; leave precision.master out")


def check_place(place: Mapping[str, str] | None) -> dict[str, str]:
    """`place` as a dict, its roles and tiers known; `ConfigError` otherwise."""
    roles, tiers = ("parameter", "gradient", "optimizer"), get_args(TierName)
    for role, tier in (place or {}).items():
        if role not in roles:
            raise ConfigError(f"tiers.place.{role}: no such role{_nearest(role, roles)}; the roles are {', '.join(roles)}")
        if tier not in tiers:
            raise ConfigError(f"tiers.place.{role} = {tier!r}: give one of {', '.join(map(repr, tiers))}")
    return dict(place or {})


def check_updates(updates: str, precision: Precision) -> None:
    """`ConfigError` unless updates may start when `updates` says."""
    if updates not in get_args(Updates):
        raise ConfigError(f"updates = {updates!r}: give one of {', '.join(map(repr, get_args(Updates)))}")
    if updates == "backward" and "fp16" in (precision.compute, precision.grad):
        raise ConfigError(
            "updates = 'backward' starts updates before all gradients are known, and with fp16 a step that overflows must be skipped whole: "
            "give 'forward', or precision.compute and precision.grad 'bf16'"
        )


Size = Annotated[int, BeforeValidator(parse_size)]
Sources = Annotated[str | list[str], BeforeValidator(_sources)]
Disks = Annotated[list[tuple[str, int]], Field(strict=False), BeforeValidator(_disks)]
Count = Annotated[int, Field(ge=1, lt=1 << 40)]
CountOrZero = Annotated[int, Field(ge=0, lt=1 << 40)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_setting(name: str, value: object, depth: int = 0) -> None:
    """ValueError for what TOML has and a model's configuration has not."""
    if depth > 20:
        raise ValueError(f"{name:.80}... is nested more than 20 deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_setting(f"{name}.{named(key)}", inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_setting(name, inner, depth + 1)
    elif not isinstance(value, (str, int, float)) or (isinstance(value, int) and abs(value) >= _SIZE_MAX):
        raise ValueError(f"{name} = {shown(value)}: give a string, a number, true or false, or a list or table of these")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelTable(_Table):
    """`[model]`: a Hugging Face directory, or a type and its configuration for seeded random weights."""

    path: str | None = None
    type: str | None = None
    config: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_of(self) -> ModelTable:
        if (self.path is None) == (self.type is None):
            raise ValueError(f"give either model.path or model.type; {'neither is' if self.path is None else 'both are'} there")
        if self.path is not None and self.config:
            raise ValueError("model.config goes with model.type; with model.path the directory's own is used")
        _check_setting("model.config", self.config)
        return self


class DataTable(_Table):
    """`[data]`: what is read, what is kept apart for evaluation, and the shape of a step."""

    source: Sources
    held_out: Share = 0.05
    eval_sequences: CountOrZero = 8
    seq_length: Annotated[int, Field(ge=2, lt=1 << 40)] = 512
    batch_size: Count = 1
    accumulate: Count = 1


class TiersTable(_Table):
    """`[tiers]`: the budgets, and roles fixed to tiers."""

    device: Size
    host: Size
    nvme: Disks = []
    checksum: bool = False
    place: Place = {}


class PrecisionTable(_Table):
    """`[precision]`: as `Precision`."""

    compute: Compute = "bf16"
    grad: Compute = "bf16"
    master: Master = "fp32"
    moments: Moments = "fp32"


class _PrecisionAlone(_Table):
    precision: PrecisionTable = PrecisionTable()


def precision_of(overrides: Sequence[str]) -> Precision:
    """The precision that `precision.key=value` overrides make of the defaults. `ConfigError` for other keys and wrong values."""
    tables: dict[str, Any] = {}
    for text in overrides:
        _override(tables, text)
        if list(tables) != ["precision"]:
            raise ConfigError(f"--set {shown(text)}: without a run file only keys of precision mean anything")
    try:
        return Precision(**_PrecisionAlone.model_validate(tables).precision.model_dump())
    except ValidationError as error:
        raise ConfigError(f"--set: {_explain(error)}") from None


class OptimizerTable(_Table):
    """`[optimizer]`: Adam or AdamW, clipping and the learning-rate schedule."""

    name: Literal["adamw", "adam"] = "adamw"
    lr: NotNegative = 1e-4
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    clip: Positive | None = None
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: CountOrZero = 0


class TrainTable(_Table):
    """`[train]`: how long, from which seed, and where."""

    steps: Count
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    device: Literal["auto", "cuda", "cpu", "sim"] = "auto"
    stage: Annotated[int, Field(ge=0, le=3)] = 3
    replicate: Annotated[int, Field(ge=1)] = 1
    activations: Activations = "auto"
    updates: Literal["auto", "forward", "backward"] = "auto"


class CheckpointTable(_Table):
    """`[checkpoint]`: how often a checkpoint is written and how many are kept."""

    every: Count
    keep: Count = 2


class RunConfig(_Table):
    """A run file, checked; its paths are absolute once loaded."""

    model: ModelTable
    data: DataTable
    tiers: TiersTable
    precision: PrecisionTable = PrecisionTable()
    optimizer: OptimizerTable = OptimizerTable()
    train: TrainTable
    checkpoint: CheckpointTable | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
        """Reads the TOML file at `path` with `table.key=value` `overrides` on top; paths in it are relative to its directory.

        Raises `ConfigError`, one line, for a file that cannot be read, an unknown key (naming the nearest known one), a wrong value,
        or values that do not go together.
        """
        tables = _read(Path(path))
        for text in overrides:
            _override(tables, text)
        try:
            config = cls.model_validate(tables)
        except ValidationError as error:
            raise ConfigError(f"{path}: {' '.join(_explain(error).split())}") from None
        try:
            config = config._resolved(Path(path).resolve().parent)
            config._refuse()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        return config

    def _resolved(self, base: Path) -> RunConfig:
        def absolute(text: str) -> str:
            path = os.path.normpath(base / os.path.expanduser(text))
            try:
                good = "\0" not in path and path.encode() != b""
            except UnicodeEncodeError:
                good = False
            if not good:
                raise ConfigError(f"{shown(path)} is no path that a run file can have: it has a zero byte, or is no UTF-8")
            return path

        source: str | list[str] = self.data.source
        if source != "random":
            source = [absolute(x) for x in ([source] if isinstance(source, str) else source)]
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"path": absolute(self.model.path) if self.model.path is not None else None}),
                "data": self.data.model_copy(update={"source": source}),
                "tiers": self.tiers.model_copy(update={"nvme": [(absolute(d), size) for d, size in self.tiers.nvme]}),
            }
        )

    def _refuse(self) -> None:
        check_updates(self.updates_value(), self.precision_value())
        if self.updates_value() == "backward" and self.optimizer.clip is not None:
            raise ConfigError(
                "train.updates = 'backward' starts updates before the norm of all gradients is known, which optimizer.clip needs: "
                "leave one of the two out"
            )

    def tiers_value(self) -> Tiers:
        """The budgets as `prepare` takes them."""
        return Tiers(self.tiers.device, self.tiers.host, self.tiers.nvme, checksum=self.tiers.checksum)

    def place_value(self) -> dict[str, str] | None:
        """The roles fixed to tiers; None where there are none."""
        return {str(role): str(tier) for role, tier in self.tiers.place.items()} or None

    def updates_value(self, ranks: int = 1) -> Updates:
        """When updates start: during the backward, unless the run file says otherwise, something needs all gradients first, or there are several
        ranks."""
        needs_all = self.optimizer.clip is not None or "fp16" in (self.precision.compute, self.precision.grad) or ranks > 1
        return ("forward" if needs_all else "backward") if self.train.updates == "auto" else self.train.updates

    def precision_value(self) -> Precision:
        """The dtypes as `prepare` takes them."""
        return Precision(**self.precision.model_dump())

    def to_toml(self) -> str:
        """The resolved run file: defaults filled in, paths absolute."""
        return toml_text(self.model_dump(exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # numbers with too many digits and lists in lists in lists among them
        raise ConfigError(f"{path} is no TOML: {named(' '.join(str(error).split()))}") from None


def _override(tables: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(f"--set {shown(text)}: write table.key=value")
    try:
        parsed: object = tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        parsed = value.strip()  # a bare word is a string, as shells eat quotes
    table = tables
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {shown(text)}: {named(name)} is no table")
    table[names[-1]] = parsed


def known_keys() -> dict[str, type[BaseModel]]:
    """Every key of a run file as `table.key`, and the class of its table."""
    keys: dict[str, type[BaseModel]] = {}
    for name, field in RunConfig.model_fields.items():
        (table,) = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        keys |= {f"{name}.{key}": table for key in table.model_fields}
    return keys


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" (nearest: {close[0]})" if close else ""


def _unknown(loc: str) -> str:
    table, _, key = loc.partition(".")
    tables = {k.partition(".")[0] for k in known_keys()}
    if not key:
        return f"[{table}] is no known table{_nearest(table, tables)}"
    same = {k.partition(".")[2]: k for k in known_keys() if k.startswith(table + ".")}
    elsewhere = [k for k in known_keys() if k.partition(".")[2] == key]
    close = elsewhere or [same[k] for k in difflib.get_close_matches(key, same, 1, 0.6)]
    near = f" (nearest: {close[0]})" if close else f" (known there: {', '.join(same)})"
    return f"{loc} is no known key{near}"


def _explain(error: ValidationError) -> str:
    details: list[ErrorDetails] = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])  # a misspelt key also goes missing: name the misspelling
    loc = ".".join(named(str(x)) for x in first["loc"] if not str(x).endswith("]"))
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    message = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
    if first["type"] in ("dict_type", "model_type"):  # as of '{key=text}', when a shell took the quotes
        message = f"input should be a table; --set {loc}.KEY=VALUE sets one of its keys"
    if first["type"] == "extra_forbidden":
        return _unknown(loc) + more
    if first["type"] == "missing":
        return f"{loc if '.' in loc else f'[{loc}]'} is missing{more}"
    if isinstance(first["input"], dict) or first["type"] == "value_error":
        return (message if message.startswith("give ") or not loc else f"{loc}: {message}") + more
    return f"{loc} = {shown(first['input'])}: {message[0].lower()}{message[1:]}{more}"


def toml_text(tables: Mapping[str, Mapping[str, object]]) -> str:
    """A run file of these tables, a line for each key."""
    return "\n".join(f"[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items()) for name, table in tables.items())


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key, re.ASCII) else _toml_string(key)


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no escapes of surrogates


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(str(k))} = {_toml(v)}" for k, v in value.items() if v is not None) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return _toml_string(value) if isinstance(value, str) else repr(value)
