"""The checkpoints of a run: where they lie, which one a run goes on from, which are kept, and what they have beside the model."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.checkpoint import disk, spare
from offload.checkpoint.codec import Encoder, decode
from offload.checkpoint.content import read_state
from offload.checkpoint.manifest import TENSORS, NewerVersion, verify
from offload.checkpoint.save import save_through
from offload.checkpoint.spare import Spare
from offload.config import RunConfig
from offload.dist.world import World
from offload.errors import CheckpointError, ConfigError

_NAME = re.compile(r"step-([0-9]{8,})")
_MAY_DIFFER = {
    "model": {"path"}, "data": {"source", "eval_sequences"}, "optimizer": set(), "precision": {"master"},
    "train": {"steps", "device", "stage", "replicate", "activations", "updates"},
}  # fmt: skip  # of a resumed run; so may all of [tiers] and [checkpoint]. Where a model or texts lie is no part of what they are.
_OF_A_STEP = ("batch_size", "accumulate")  # with the number of ranks; their product stays
_KEYS = {"step", "run", "scaler", "random", "eval_loss_first", "moved_bytes"}


class Checkpoints:
    """`checkpoints/` of a run directory, which only its owner changes."""

    def __init__(self, path: Path) -> None:
        self.path, self.saving = path, path.parent / disk.SAVING
        self.spare = Spare(self.saving / spare.NAME)  # of the newest that was deleted
        self._passed: set[int] = set()  # steps of those that were not whole

    def at(self, step: int) -> Path:
        """That of a number of steps; names sort as they do."""
        return self.path / f"step-{step:08d}"

    def all(self) -> dict[int, Path]:
        """By step, from the oldest."""
        found = {int(m[1]): p for p in self.path.glob("step-*") if (m := _NAME.fullmatch(p.name))}
        return dict(sorted(found.items()))

    def newest_whole(self, note: Callable[[str], None]) -> tuple[int, Path] | None:
        """None where there are none; CheckpointError where none of them is whole, or one is of a newer release. Of those that are not whole the
        user is told."""
        trouble: CheckpointError | None = None
        for step, path in reversed(self.all().items()):
            try:
                verify(path)
                return step, path
            except NewerVersion:  # passed over, it would be deleted with those that are damaged
                raise
            except CheckpointError as error:
                trouble = trouble or error
                self._passed.add(step)
                note(f"passed over: {error}")
        if trouble is not None:
            raise CheckpointError(f"no checkpoint in {self.path} is whole; the newest: {trouble}. Or start another run with --out")
        return None

    def recover(self) -> None:
        """Puts back what a killed save had moved aside. CheckpointError where that cannot be done."""
        try:
            disk.recover(self.path, self.saving)
        except OSError as error:
            raise CheckpointError(
                f"a killed save has moved a checkpoint aside, to {self.saving}, and it cannot be put back: {error.strerror}; mend the drive"
            ) from error

    def sweep(self) -> None:
        """Removes what an interrupted save left, or a run that was killed."""
        shutil.rmtree(self.saving, ignore_errors=True)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any) -> None:
        """Saves that of a number of steps, over what the last one deleted leaves. As `offload.save`."""
        self.spare.make_way()
        save_through(self.saving, self.at(step), model, optimizer, extra, self.spare.take)

    def retain(self, keep: int, newest: int, note: Callable[[str], None], more: bool = False) -> None:
        """Leaves the newest `keep` up to step `newest`, which was just saved; those that were passed over, and those of later steps, go, and leave
        the next save a spare if there are to be `more`. A run does not end by one that cannot be removed."""
        found = self.all()
        self._passed.discard(newest)
        kept = [step for step in found if step <= newest and step not in self._passed][-keep:]
        for step, path in found.items():
            if step not in kept:
                try:
                    disk.remove(path, self.saving, self._salvage if more else lambda gone: None)
                except (OSError, CheckpointError) as error:
                    note(f"cannot remove {path}, which {keep} newer ones have outlived: {getattr(error, 'strerror', None) or error}")
        if not more:
            self.close()

    def _salvage(self, gone: Path) -> None:
        self.spare.keep(gone / TENSORS)

    def close(self) -> None:
        """There are no more saves: what they would have written over is given back."""
        self.spare.give_up()
        disk.tidy(self.saving)


def fixed(config: RunConfig) -> dict[str, Any]:
    """What a run goes on with as it was, by table and key."""
    tables = config.model_dump(include=set(_MAY_DIFFER))
    return {table: {k: v for k, v in tables[table].items() if k not in free} for table, free in _MAY_DIFFER.items()}


def position(checkpoint: Path, config: RunConfig, ranks: int = 1) -> Mapping[str, Any]:
    """What a run's checkpoint has beside the model, but for tensors. ConfigError where the run file is that of another run.

    On another number of ranks a step has as many sequences as before.
    """
    extra: dict[str, Any] = read_state(checkpoint).extra
    good = isinstance(extra, dict) and extra.keys() >= _KEYS and type(extra["step"]) is int and extra["step"] >= 0
    good = good and type(extra.get("ranks", 1)) is int
    was, now = decode(extra["run"], {}) if good else None, fixed(config)
    if not isinstance(was, dict) or not all(isinstance(table, dict) for table in was.values()):
        raise CheckpointError(f"{checkpoint} is no checkpoint of `offload train`; offload.load reads it")
    if extra.get("ranks", 1) != ranks:
        _check_step(checkpoint, was.get("data", {}), extra.get("ranks", 1), now["data"], ranks)
        now["data"] = {key: value for key, value in now["data"].items() if key not in _OF_A_STEP}
    for table, keys in now.items():
        for key, value in keys.items():
            before = was.get(table, {}).get(key, value)
            if before != value:
                raise ConfigError(
                    f"{table}.{key} is {value!r} and was {before!r} in the run that {checkpoint} is of: a run goes on as it was. "
                    "Set it back, or start another run with --out"
                )
    if extra["step"] > config.train.steps:
        raise ConfigError(f"train.steps = {config.train.steps}: {checkpoint} is past that; raise it, or start another run with --out")
    return extra


def go_on_from(extra: Mapping[str, Any], scaler: torch.amp.GradScaler, checkpoint: Path, seed: int, rank: int) -> None:
    """Gives the loss scale back, and tries the rest of what a run's checkpoint has beside the model. CheckpointError for what no run has saved."""
    try:
        if not all(isinstance(value, (int, float)) for value in extra["scaler"].values()):
            raise ValueError("the loss scale is no number")
        if not all(isinstance(value, int) for value in extra["moved_bytes"].values()):
            raise ValueError("bytes moved are no numbers")
        if not isinstance(extra["eval_loss_first"], (float, int, type(None))):
            raise ValueError("the first evaluation is no number")
        scaler.load_state_dict(dict(extra["scaler"]))
        set_random_states(extra, seed, rank)
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} has what no run has saved, so none goes on from it: {error}; take another") from None


def _check_step(checkpoint: Path, was: Mapping[str, Any], ranks_before: int, now: Mapping[str, Any], ranks: int) -> None:
    def text(data: Mapping[str, Any], ranks: int) -> str:
        return f"{ranks} ranks x data.batch_size {data.get('batch_size')} x data.accumulate {data.get('accumulate')}"

    def sequences(data: Mapping[str, Any], ranks: int) -> int:
        return ranks * math.prod(int(data.get(key, 1)) for key in _OF_A_STEP)

    if sequences(was, ranks_before) != sequences(now, ranks):
        raise ConfigError(
            f"a step of {checkpoint} had {text(was, ranks_before)} sequences, and would have {text(now, ranks)}: a run goes on as it was. "
            "Give data.batch_size and data.accumulate of the same product, or start another run with --out"
        )


def seed_of(seed: int, rank: int) -> int:
    """What a rank's generators start from: the first's from the run's seed, each other's from one of its own."""
    return seed if rank == 0 else int(np.random.default_rng((seed, rank)).integers(1 << 63))


def random_states(world: World) -> dict[str, Any]:
    """What a checkpoint has of generators: `random`, the first rank's, and `random_of_others`."""
    own = random_state()
    if world.size == 1:
        return {"random": own}
    encoder = Encoder()
    text = encoder.encode(own, "generators")
    found = world.share([text, [t.tolist() for t in encoder.tensors]], "the generators")
    states = [decode(text, {i: torch.tensor(t, dtype=torch.uint8) for i, t in enumerate(tensors)}) for text, tensors in found]
    return {"random": states[0], "random_of_others": states[1:]}


def set_random_states(extra: Mapping[str, Any], seed: int, rank: int) -> None:
    """Goes on with what `random_states` gave for a rank; one that there was not starts from a seed of its own."""
    others = extra.get("random_of_others", [])
    if rank == 0:
        set_random_state(extra["random"])
    elif rank <= len(others):
        set_random_state(others[rank - 1])
    else:
        torch.manual_seed(seed_of(seed + extra["step"], rank))
def random_state() -> dict[str, Any]:
    """Of every generator that a model may draw from."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *map(_plain, rest)),
    }


def _plain(number: Any) -> int | float:
    return number.item() if isinstance(number, np.generic) else number  # type: ignore[no-any-return]


def set_random_state(state: Mapping[str, Any]) -> None:
    """As `random_state` gave it; that of GPUs where there are as many."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    kind, keys, at, *rest = state["numpy"]
    if not 0 <= at <= len(keys):  # numpy would read what lies behind
        raise ValueError(f"the generator of numpy is at {at} of {len(keys)}")
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), at, *rest))
