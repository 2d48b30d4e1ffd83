"""Mutated files for all that reads files which others may have written: checkpoints, safetensors, run files and what lies in a run directory.

Whatever they hold, there is no other error than an `OffloadError` of one line, nothing is written outside of the directory that was given, no memory
is taken because a file says so, and what was refused has changed nothing.

    python tests/fuzz.py [--seconds 600] [--seed 0] [--only TARGET]

goes round the targets with one seed after another, and says with which of them a target failed; tests/test_fuzz.py runs each for a moment.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import offload
from checkpoints import adam, digest, steps
from helpers import BF16, Prepared, net, noise
from offload.checkpoint.export import saved_tensors
from offload.checkpoint.manifest import verify
from offload.cli import files, main
from offload.config import RunConfig
from offload.train.checkpoints import Checkpoints, fixed, go_on_from, position, random_state
from offload.train.model import load_config
from offload.train.rundir import RunDirectory
from runs import SMALL, sizes

ROOM = 512 << 20  # bytes of address space that reading a file of a few KiB may take
RUN = SMALL.but(
    model={"config": sizes(96, 24, 40, heads=2)},
    data={"held_out": 0.05},
    tiers={"place": {"optimizer": "nvme"}},
    precision={"compute": "bf16"},
    optimizer={"betas": [0.9, 0.95], "clip": 1.0},
    checkpoint={"every": 1},
)

# What may stand anywhere

NUMBERS = [0, -1, 1, 2, 1 << 31, 1 << 53, 1 << 62, 1 << 63, (1 << 64) - 1, 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")]
NAMES = [
    "", ".", "..", "../outside/x.json", "../outside/x.safetensors", "sub/x.json", "a\0b", "a\nb", "\x1b[2J", "é\ud800", "x" * 300, "x" * 5000,
    "~", "~no-such-user/x", "state.json", "manifest.json", "tensors.safetensors", "model.safetensors", "__metadata__", "step", "params", "exp_avg",
    "master/", "tensor/0", "tensor/99999999999999999999", "buffer/x", "F32", "BF16", "F8_E4M3", "fp32", "int8", "split", "$tuple", "$dict", "$float",
    "$bytes", "$tensor", "$int",
]  # fmt: skip


def nested(depth: int, inner: Any = None, key: str | None = None) -> Any:
    for _ in range(depth):
        inner = [inner] if key is None else {key: inner}
    return inner


SCALARS = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(NAMES) | st.integers() | st.text(max_size=5)
KEYS = st.sampled_from(NAMES) | st.text(max_size=3)
ANYTHING = st.one_of(
    SCALARS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6),
    st.sampled_from([[], {}, [[]], nested(90), nested(150), nested(400), nested(150, 1, "x"), nested(90, [], "$tuple")]),
    st.sampled_from([{"$tensor": 0}, {"$float": "nan"}, {"$float": 10**400}, {"$dict": [[[], 1]]}]),
)
BYTES_KINDS = st.sampled_from(["flip", "cut", "insert", "drop", "repeat", "length"])
BYTES_EDITS = st.lists(st.tuples(st.integers(0, 1 << 20), BYTES_KINDS, st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)
JSON_KINDS = st.sampled_from(["replace", "replace", "delete", "rename", "copy", "add", "twice"])
JSON_EDITS = st.lists(st.tuples(st.integers(0, 1 << 40), JSON_KINDS, ANYTHING), min_size=1, max_size=3)


def edited_bytes(data: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    for n, kind, new in edits:
        at = n % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ new[0]]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "drop":
            data = data[:at] + data[at + len(new) :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 40] * 2 + data[at + 40 :]
        elif kind == "length":
            data = new[:8].ljust(8, b"\0") + data[8:]
    return data


def edited_json(base: Any, edits: list[tuple[int, str, Any]]) -> str:
    """JSON of `base` after edits, each in a place that is found by walking down from the root as the digits of its number say."""
    whole = [copy.deepcopy(base)]
    twice = ""
    for n, kind, new in edits:
        container, key = whole, 0
        while isinstance(container[key], (dict, list)) and container[key] and (n % 5 or container is whole):
            container = container[key]
            n //= 5
            key = sorted(container, key=str)[n % len(container)] if isinstance(container, dict) else n % len(container)
            n //= max(len(container), 1)
        if kind == "replace":
            container[key] = copy.deepcopy(new)
        elif kind == "copy":
            container[key] = copy.deepcopy(whole[0])
        elif kind == "delete" and container is not whole:
            del container[key]
        elif kind == "rename" and isinstance(container, dict):
            container[new if isinstance(new, str) else "x"] = container.pop(key)
        elif kind == "add" and isinstance(container[key], list):
            container[key].append(copy.deepcopy(new))
        elif kind == "add" and isinstance(container[key], dict):
            container[key]["x" if not isinstance(new, str) else new] = copy.deepcopy(new)
        elif kind == "twice" and isinstance(container[key], dict) and container[key]:
            twice = f'{{{json.dumps(next(iter(container[key])))}: {json.dumps(new)}, '
    text = json.dumps(whole[0])
    return twice + text[1:] if twice and text.startswith("{") and len(text) > 2 else text


LITERALS = [
    "1e400", "-1e400", "nan", "-1", "0", "1", "9" * 19, "9" * 40, "9" * 5000, "0x" + "f" * 20000, "1e999999", "true", '""', '"../x"', '"/"',
    '"a\\u0000b"', '"a\\nb"', '"~no-such-user/x"', '"\\U0001F600"', f'"{"x" * 5000}"', '"random"', '"cpu"', '"\\u007f\\\\"', "[]", "{}", "[[]]",
    "[" * 200 + "]" * 200, "[" * 5000 + "]" * 5000, '[["swap"]]', '[["swap", "1GiB"], ["swap", -1]]', '[["a\\u0000b", 1]]', '"9999999999999999PiB"',
    '"1.5"', '"GiB"', "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "{ a = { b = { c = 1 } } }", "{ vocab_size = -1 }", '{ vocab_size = "x" }',
    "{ num_hidden_layers = 1e400 }", "{ hidden_size = 7, num_attention_heads = 0 }", "{ a = 1979-05-27 }", f"{{ a = {'9' * 30} }}",
    '{ "\\u0000" = 1 }', '{ "é" = 1 }', '{ torch_dtype = "x" }', "{ rope_scaling = 3 }", "[1, 2, 3]", "[0.9]", "[0.9, nan]",
]  # fmt: skip
TOML_KINDS = st.sampled_from(["value", "value", "value", "key", "drop", "repeat", "table"])
TOML_EDITS = st.lists(st.tuples(st.integers(0, 1 << 20), TOML_KINDS, st.sampled_from(LITERALS), st.text(max_size=4)), min_size=1, max_size=3)


def edited_toml(base: str, edits: list[tuple[int, str, str, str]]) -> str:
    lines = [line for line in base.splitlines() if line]
    for n, kind, literal, word in edits:
        at = n % len(lines)
        key = lines[at].partition(" = ")[0]
        if kind == "value" and " = " in lines[at]:
            lines[at] = f"{key} = {literal}"
        elif kind == "key":
            lines[at] = lines[at].replace(key, word or literal, 1)
        elif kind == "drop" and len(lines) > 1:
            del lines[at]
        elif kind == "repeat":
            lines.insert(at, lines[at])
        elif kind == "table":
            lines.insert(at, f"[{literal if n % 2 else word}]")
    return "\n".join(lines) + "\n"


# What must hold

_watched: list[Path] = []
_strays: list[str] = []
_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "shutil.rmtree"}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched or (event != "open" and event not in _WRITES):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)):
        return
    for path in args[:2] if event in ("os.rename", "os.link") else args[:1]:
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path) != os.devnull and "__pycache__" not in os.fsdecode(path):
            where = Path(os.path.abspath(os.fsdecode(path)))
            if not any(where.is_relative_to(allowed) for allowed in _watched):
                _strays.append(f"{event} of {where}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def confined(*directories: Path) -> Iterator[None]:
    """AssertionError where something is written elsewhere. Address space is limited, so what is too large cannot be allocated."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as statm:
        have = int(statm.read().split()[0]) * resource.getpagesize()
    _strays.clear()
    _watched.extend(directories)
    resource.setrlimit(resource.RLIMIT_AS, (have + ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        _watched.clear()
    assert not _strays, _strays


def refusal(act: Callable[[], Any]) -> str | None:
    """What an OffloadError says, one line; None where there is none. Any other error is a failure."""
    try:
        act()
    except offload.OffloadError as error:
        assert "\n" not in str(error) and 0 < len(str(error)) < 3000, str(error)[:3000]
        return str(error)
    return None


def forge(directory: Path) -> None:
    """Writes the manifest that what is there now would have had."""
    listed = {}
    for name in ("state.json", "tensors.safetensors"):
        data = (directory / name).read_bytes()
        listed[name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    (directory / "manifest.json").write_text(manifest_text({"format": "offload checkpoint", "version": 1, "files": listed}))


def manifest_text(content: Any) -> str:
    own = xxhash.xxh3_128_hexdigest((json.dumps(content, indent=1) + "\n").encode())
    return json.dumps(content | {"xxh3_128": own} if isinstance(content, dict) else content, indent=1) + "\n"


class Ground(contextlib.ExitStack):
    """Good files of every kind in `where`, a model to load them into, and a target for each kind."""

    def __init__(self, where: Path) -> None:
        super().__init__()
        logging.getLogger("offload").addHandler(logging.NullHandler())
        self.where, self.prepared = where, self.enter_context(Prepared(where))
        (where / "outside").mkdir()
        self.config = RUN.load(where)
        self.model = self.prepared(net(), precision=BF16)
        self.model.register_buffer("mask", torch.ones(3))
        self.optimizer = adam(self.model)
        steps(self.model, self.optimizer, 0, 2)
        self.scaler = torch.amp.GradScaler("cpu")
        extra = {"step": 2, "run": fixed(self.config), "scaler": self.scaler.state_dict(), "random": random_state(), "eval_loss_first": None,
                 "moved_bytes": {"h2d": 1}, "mine": [(1, b"x"), {2: noise((2,))}]}  # fmt: skip
        offload.save(where / "good", self.model, self.optimizer, extra)
        self.good = {path.name: path.read_bytes() for path in (where / "good").iterdir()}
        self.state = json.loads(self.good["state.json"])
        data = self.good["tensors.safetensors"]
        self.header_bytes = int.from_bytes(data[:8], "little")
        self.header = json.loads(data[8 : 8 + self.header_bytes])
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        save_file(self.weights, where / "model.safetensors", metadata={"format": "pt"})
        self.records = [
            {"step": i, "loss": 1.0, "lr": 0.1, "seconds": 0.1, "tokens": 16, "compute_seconds": 0.1, "stall_seconds": {"fetch": 0.0}} for i in (1, 2)
        ]
        self.targets: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
            "manifest": (JSON_EDITS, self.manifest), "bytes": (st.tuples(st.sampled_from(sorted(self.good)), st.booleans(), BYTES_EDITS), self.bytes),
            "state": (JSON_EDITS, self.states), "header": (JSON_EDITS, self.headers), "weights": (JSON_EDITS, self.weight_header),
            "weight bytes": (BYTES_EDITS, self.weight_bytes), "index": (JSON_EDITS, self.index), "run file": (TOML_EDITS, self.run_file),
            "run bytes": (BYTES_EDITS, self.run_bytes), "override": (st.tuples(st.text(max_size=12), st.sampled_from(LITERALS)), self.override),
            "records": (JSON_EDITS, self.run_records), "model config": (JSON_EDITS, self.model_config), "command": (JSON_EDITS, self.command),
        }  # fmt: skip

    def fresh(self, name: str = "at") -> Path:
        path = self.where / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def checkpoint(self, **changed: bytes) -> Path:
        at = self.fresh()
        for name, data in (self.good | {n.replace("_", "."): d for n, d in changed.items()}).items():
            (at / name).write_bytes(data)
        return at

    def read(self, at: Path) -> None:
        """All that reads a checkpoint."""
        before = digest(self.model)
        with confined(at):
            said = refusal(lambda: verify(at))
            said = refusal(lambda: offload.load(at, self.model, self.optimizer)) or said
            if said is None:
                refusal(lambda: position(at, self.config))
                refusal(lambda: self._all_of(at))
                refusal(lambda: go_on_from(offload.load(at, self.model, self.optimizer), self.scaler, at, seed=0, rank=0))
        if said is not None:
            assert digest(self.model) == before, said
        assert offload.load(self.where / "good", self.model, self.optimizer)["step"] == 2

    def _all_of(self, at: Path) -> None:
        for tensor in saved_tensors(at).values():
            assert sum(part.numel() for part in tensor.read(0, tensor.shape.numel())) == tensor.shape.numel()

    def manifest(self, edits: Any) -> None:
        base = json.loads(self.good["manifest.json"])
        del base["xxh3_128"]
        text = edited_json(base, edits)
        for right in (False, True):
            try:
                self.read(self.checkpoint(manifest_json=(manifest_text(json.loads(text)) if right else text).encode()))
            except ValueError:
                continue  # no JSON of Python's

    def bytes(self, change: Any) -> None:
        name, right, edits = change
        at = self.checkpoint(**{name.replace(".", "_"): edited_bytes(self.good[name], edits)})
        if right and name != "manifest.json":
            forge(at)
        self.read(at)

    def states(self, edits: Any) -> None:
        at = self.checkpoint(state_json=edited_json(self.state, edits).encode())
        forge(at)
        self.read(at)

    def headers(self, edits: Any) -> None:
        text = edited_json(self.header, edits).encode()
        at = self.checkpoint(tensors_safetensors=len(text).to_bytes(8, "little") + text + self.good["tensors.safetensors"][8 + self.header_bytes :])
        forge(at)
        self.read(at)

    def take(self, at: Path) -> None:
        """Weights, into the model."""
        before = digest(self.model)
        with confined(at):
            for strict in (True, False):
                said = refusal(lambda strict=strict: offload.load_pretrained(self.model, at, strict=strict))
                if said is not None:
                    assert digest(self.model) == before, said
        offload.load(self.where / "good", self.model, self.optimizer)

    def weight_bytes(self, edits: Any) -> None:
        at = self.fresh()
        (at / "model.safetensors").write_bytes(edited_bytes((self.where / "model.safetensors").read_bytes(), edits))
        self.take(at)

    def weight_header(self, edits: Any) -> None:
        data, at = (self.where / "model.safetensors").read_bytes(), self.fresh()
        length = int.from_bytes(data[:8], "little")
        text = edited_json(json.loads(data[8 : 8 + length]), edits).encode()
        text += b" " * (-len(text) % 8)
        (at / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        self.take(at)

    def index(self, edits: Any) -> None:
        at = self.fresh()
        names = list(self.weights)
        for i, part in enumerate((names[:3], names[3:])):
            save_file({n: self.weights[n] for n in part}, at / f"model-{i}.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": {n: f"model-{int(i > 2)}.safetensors" for i, n in enumerate(names)}}
        (at / "model.safetensors.index.json").write_text(edited_json(index, edits))
        self.take(at)

    def _run(self, data: bytes) -> None:
        at = self.fresh()
        (at / "config.toml").write_bytes(data)
        with confined(at):
            if refusal(lambda: RunConfig.load(at / "config.toml")) is None:
                config = RunConfig.load(at / "config.toml")
                (at / "again.toml").write_text(config.to_toml(), encoding="utf-8")
                again = RunConfig.load(at / "again.toml")
                assert again.to_toml() == config.to_toml()
                refusal(config.tiers_value)
                refusal(lambda: files._swap_directories(str(at)))
                refusal(lambda: load_config(config.model))

    def run_file(self, edits: Any) -> None:
        self._run(edited_toml(RUN.text, edits).encode(errors="replace"))

    def run_bytes(self, edits: Any) -> None:
        self._run(edited_bytes(RUN.text.encode(), edits))

    def override(self, change: Any) -> None:
        word, literal = change
        for key in (word, "train.steps", "model.config.x", "tiers.nvme", f"train.{word}", "tiers.place"):
            with confined():
                refusal(lambda key=key: RunConfig.load(self.where / "run.toml", [f"{key}={literal}"]))

    def run_records(self, edits: Any) -> None:
        at = self.fresh()
        found = json.loads(edited_json(self.records, edits))
        lines = "".join(json.dumps(r) + "\n" for r in (found if isinstance(found, list) else [found]))
        (at / "metrics.jsonl").write_text(lines)
        (at / "summary.json").write_text(edited_json({"steps": 2, "interrupted": False}, edits))
        with confined(at), RunDirectory(at) as run:
            refusal(lambda: run.records(2))
            refusal(lambda: run.finished(2))
            Checkpoints(at / "checkpoints").all()

    def model_config(self, edits: Any) -> None:
        at = self.fresh()
        base = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        (at / "config.json").write_text(edited_json(base, edits))
        with confined(at):
            refusal(lambda: load_config(self.config.model.model_copy(update={"path": str(at), "type": None, "config": {}})))

    def command(self, edits: Any) -> None:
        """One line, and no traceback."""
        at = self.fresh("run")
        checkpoint = at / "checkpoints/step-00000002"
        checkpoint.mkdir(parents=True)
        RUN.write(at, "config.toml")
        for name, data in self.good.items():
            (checkpoint / name).write_bytes(data)
        (checkpoint / "state.json").write_text(edited_json(self.state, edits))
        forge(checkpoint)
        for argv, right in ((["verify", str(at)], {0}), (["export", str(at), str(at / "out")], {2}), (["clean", str(at)], {0})):
            out, err = io.StringIO(), io.StringIO()
            with confined(at), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(argv)
            said = err.getvalue()
            assert code in right and (code == 0 or (said.startswith("error: ") and said.count("\n") == 1 and not out.getvalue())), (argv, code, said)
        assert not (at / "out").exists()


def property_of(ground: Ground, name: str, examples: int, **over: Any) -> Callable[[], None]:
    strategy, target = ground.targets[name]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None, **over)
    @given(change=strategy)
    def holds(change: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target(change)

    return holds  # type: ignore[no-any-return]


def run(seconds: float, first: int, only: str | None) -> int:
    """Goes round until the time is over; returns how many runs of a target failed."""
    failed, number = 0, first
    with tempfile.TemporaryDirectory() as where, Ground(Path(where)) as ground:
        names, stop = [only] if only else list(ground.targets), time.monotonic() + seconds
        while time.monotonic() < stop:
            for name in names:
                try:
                    seed(number)(property_of(ground, name, 100, phases=[Phase.generate, Phase.shrink]))()
                except Exception:  # of any kind: they are what is looked for
                    failed += 1
                    print(f"FAILED: --only {name!r} --seed {number}\n{traceback.format_exc()}", flush=True)
                if time.monotonic() >= stop:
                    break
            number += 1
    print(f"{len(names)} targets, seeds {first} to {number - 1}, 100 examples each: {failed} failed")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only")
    given_ = parser.parse_args()
    sys.exit(min(run(given_.seconds, given_.seed, given_.only), 1))
