"""A training run, from a checked run file to its summary."""

from __future__ import annotations

import gc
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.checkpoint.load import restore
from offload.config import RunConfig
from offload.dist.world import World
from offload.errors import ConfigError, OffloadError, PlanError, StepError
from offload.observe import base
from offload.observe.metrics import MetricsWriter
from offload.planner.cost import Traffic, traffic_of
from offload.planner.placement import Plan, keeping
from offload.train import loss, model
from offload.train.checkpoints import Checkpoints, fixed, go_on_from, position, random_states, seed_of, set_random_states
from offload.train.data import PackedSequences, RandomSequences, Source, find_files, has_tokenizer, micro_batch, split
from offload.train.estimate import Estimate, estimate
from offload.train.progress import Reporter
from offload.train.rundir import CHECKPOINTS, METRICS, SUMMARY, RunDirectory
from offload.train.schedule import learning_rate
from offload.train.tokenize import Tokenizing, take

TRACED_STEPS = 8  # the newest, in trace.json.gz
TRACED_EVENTS = 4096  # of each source: about a MiB, which a budget must have room for


def compute_device(name: str) -> str:
    """The device that `[train] device` means here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda': torch finds no CUDA device; give 'cpu', 'sim' or 'auto'")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _number(value: float) -> float | None:
    """As JSON has it, which knows no infinity."""
    return value if math.isfinite(value) else None


@contextmanager
def _sequences(
    config: RunConfig, vocab_size: int, directory: Path, world: World, note: Callable[[str], None]
) -> Iterator[Callable[[], tuple[Source, Source | None, int]]]:
    """Starts making data; the value, called, waits for it: training source, held-out source, number of held-out sequences.

    Of several ranks the first has texts tokenized, for all.
    """
    data, seed = config.data, config.train.seed
    if vocab_size < 1:
        raise ConfigError(f"the model's vocab_size is {vocab_size}: a language model knows 1 token or more")
    if data.source == "random":
        sources = [RandomSequences(vocab_size, data.seq_length, seed, held_out) for held_out in (False, True)]
        yield lambda: (sources[0], sources[1], data.eval_sequences)
        return
    if config.model.path is None or not has_tokenizer(Path(config.model.path)):
        raise ConfigError('data.source: text needs a tokenizer in the directory of model.path; without one, give "random"')
    child = None
    if world.rank == 0:
        trained, kept = split(find_files([data.source] if isinstance(data.source, str) else data.source), data.held_out, seed)
        count = config.train.steps * data.accumulate * data.batch_size * world.size
        jobs = {"train": (trained, count), "held-out": (kept, data.eval_sequences)}
        child = Tokenizing(Path(config.model.path), jobs, data.seq_length, seed, directory, vocab_size)

    def wait() -> tuple[Source, Source | None, int]:
        where = Path(world.broadcast(str(child.wait(note)) if child is not None else None, what="the tokenized texts"))
        tokens, held_out = take(where, "train"), take(where, "held-out")
        if not len(tokens):
            raise ConfigError(
                f"data.source: the text to learn from is shorter than one sequence of {data.seq_length} tokens; give more text, or lower "
                "data.seq_length or data.held_out"
            )
        return PackedSequences(tokens, seed), PackedSequences(held_out, seed), len(held_out)

    try:
        yield wait
    finally:
        if child is not None:
            child.close()


class Trainer:
    """One run, or one rank's part in it: built by `open`, trained by `run`.

    Every rank does the same, but for its slices of the data; files in `path` are the first rank's to write, which alone has a `directory` and
    `metrics`.
    """

    def __init__(
        self, config: RunConfig, world: World, checkpoints: Checkpoints, reporter: Reporter, directory: RunDirectory | None,
        metrics: MetricsWriter | None,
    ) -> None:  # fmt: skip
        self._config, self._world, self._path, self._reporter = config, world, checkpoints.path.parent, reporter
        self._directory, self._metrics = directory, metrics
        self._device = compute_device(config.train.device)
        self._scaled = "fp16" in (config.precision.compute, config.precision.grad)
        self._scaler = torch.amp.GradScaler("cuda" if self._device == "cuda" else "cpu", enabled=self._scaled)
        self._said_small = self._said_lost = False
        self._runs_early = config.updates_value(world.size) == "backward"
        self._checkpoints = checkpoints
        self._records: list[dict[str, Any]] = []  # of the whole run; on other ranks than the first, of what they trained
        self._done = 0  # steps of the whole run
        self._resumed: dict[str, Any] = {"step": 0}  # what the checkpoint that this goes on from has beside the model
        self._saved: int | None = None  # the step of the newest checkpoint
        # the step whose seconds are not known yet, its start, and the stalls until then
        self._pending: tuple[dict[str, Any], float, dict[str, float]] | None = None

    def open(self, closing: ExitStack, checkpoint: Path | None = None) -> None:
        """Measures the base, builds the model in its tiers and the optimizer over it, with what a verified `checkpoint` has where one is given;
        `closing` takes what must be closed."""
        config, data = self._config, self._config.data
        model_config = model.load_config(config.model)
        vocab_size = int(model_config.get_text_config().vocab_size)
        wait = closing.enter_context(_sequences(config, vocab_size, self._path, self._world, self._reporter.note))
        toy = model.Toy(model_config, torch.float16 if config.precision.compute == "fp16" else torch.bfloat16)
        base.measure(toy.step)
        in_chunks = self._world.broadcast(toy.in_chunks, what="how the loss is taken")
        self._source, self._held_out, self._held_out_count = wait()
        if not self._held_out_count and data.eval_sequences:
            self._reporter.note(f"no held-out text of {data.seq_length} tokens, so nothing is evaluated; a greater data.held_out keeps more apart")

        planned = model.plan(model_config, config, self._device, in_chunks, ranks=self._world.size, rank=self._world.rank)
        self._estimate = self._measured(model_config, planned, in_chunks)
        base.measure()  # with the kernels that libraries have made by now for the shapes of the model's own units
        planned = self._fastest(planned)
        torch.manual_seed(seed_of(config.train.seed, self._world.rank))
        self._model: Any = offload.prepare(
            model.build(model_config),
            config.tiers_value(),
            device=self._device,
            precision=config.precision_value(),
            activations=config.train.activations,
            batch=planned.batch,
            accumulate=config.data.accumulate,
            updates=config.updates_value(self._world.size),
            stage=config.train.stage,
            plan=planned,
            seed=config.train.seed,
        )
        self._runtime: Any = offload.runtime(self._model)
        closing.callback(self._runtime.close)
        self._predicted = self._prediction()
        if config.model.path is not None and checkpoint is None:
            offload.load_pretrained(self._model, config.model.path)
        chosen = config.optimizer
        kind = offload.optim.AdamW if chosen.name == "adamw" else offload.optim.Adam
        self._optimizer: Any = kind(
            self._model.parameters(), lr=chosen.lr, betas=(chosen.betas[0], chosen.betas[1]), eps=chosen.eps, weight_decay=chosen.weight_decay
        )
        if checkpoint is not None:
            self._resume(checkpoint)
        if config.precision.compute == "fp16" and self._device != "cuda":
            self._reporter.note("fp16 on a CPU is for trials: most have no fp16 arithmetic, and bf16 is several times as fast")
        self._head: nn.Linear | None = loss.plain_head(self._model) if in_chunks else None
        if self._head is None:
            why = f" (a small model of the kind: {toy.trouble})" if toy.trouble else ""
            self._reporter.note(f"{model_config.model_type}: the loss is computed from all logits at once{why}")

    def _resume(self, checkpoint: Path) -> None:
        self._resumed = restore(checkpoint, self._model, self._optimizer)
        self._saved = self._done = int(self._resumed["step"])
        learned_from = self._source.digest(self._sequences(self._done))
        if self._resumed.get("learned_from", learned_from) != learned_from:
            raise ConfigError(
                f"data.source has other texts than those that {checkpoint} has learned from, or its tokens are others: a run goes on as it was. "
                "Put them back, or start another run with --out"
            )
        if self._directory is not None:
            self._records = self._directory.records(self._saved)
        go_on_from(self._resumed, self._scaler, checkpoint, self._config.train.seed, self._world.rank)
        self._reporter.note(f"goes on from {checkpoint}")

    def _sequences(self, steps: int) -> int:
        """How many sequences so many steps take, on all ranks."""
        return steps * self._config.data.accumulate * self._config.data.batch_size * self._world.size

    def begin(self) -> None:
        """The run can start, or go on: an earlier one is replaced, or what it did after the checkpoint."""
        if self._directory is None or self._metrics is None:
            return
        self._checkpoints.sweep()
        if self._saved is not None:
            self._directory.resume(self._config.to_toml(), self._records)
        elif self._directory.begin(self._config.to_toml()):
            self._reporter.note(f"{self._directory.path}: the run that was there is replaced")
        self._metrics.sync()  # from here on the file is this run's, whatever becomes of its name

    def _measured(self, model_config: Any, planned: Plan, in_chunks: bool) -> Estimate | None:
        """What a step may take here, or None, said aloud, where that cannot be found out. Ranks measure at once, as they will train."""
        self._world.barrier("the start of measuring")
        try:
            device = torch.device("cuda" if self._device == "cuda" else "cpu")
            return estimate(model_config, self._config, planned, in_chunks, device, self._world.local_size)
        except Exception as error:  # of any kind: what a model's code does with one block alone is its own
            self._reporter.note(f"the bound of a step is not known: {type(error).__name__}: {error}")
            return None

    def _fastest(self, planned: Plan) -> Plan:
        """The plan whose units keep their activations as the first rank's estimate has it best: all ranks compute the same units again."""
        chosen = planned
        if self._estimate is not None and self._world.rank == 0:
            direct, accumulate = self._device == "cpu", self._config.data.accumulate
            chosen = self._estimate.fastest(planned, direct=direct, accumulate=accumulate, early=self._runs_early)
        kept = self._world.broadcast(chosen.kept_least, what="how many units keep their activations")
        return chosen if chosen.kept_least == kept else keeping(planned, kept)

    def _prediction(self) -> float | None:
        """Seconds that a step will take by the plan's schedule, which also says how many units are updated early."""
        plan, direct, accumulate = self._runtime.plan, self._device == "cpu", self._config.data.accumulate
        early = None
        if self._estimate is not None:
            early = self._estimate.early(plan, direct=direct, accumulate=accumulate) if self._runs_early else 0
        early = self._world.broadcast(early, what="how many units are updated early")
        if early is not None:
            self._runtime.start_early(early, keep_gradients=False)
        if self._estimate is None or early is None:
            return None
        seconds = self._estimate.predicted(plan, direct=direct, accumulate=accumulate, early=early)
        under = f", with the updates of {early} of {len(plan.layouts)} units under the backward" if early else ""
        self._reporter.note(f"a step is expected to take {seconds:.3g} s{under}")
        return seconds

    def run(self, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Trains until the last step or until `stopped()`; returns the summary, which is written too."""
        stats = self._runtime.stats()
        for note in stats["notes"]:
            self._reporter.note(note)
        self._first = self._evaluate("before") if self._saved is None else self._resumed["eval_loss_first"]
        self._runtime.fill()  # a step moves no first values, where there was no evaluation either
        self._runtime.reset_counters()
        if self._saved is not None:
            set_random_states(self._resumed, self._config.train.seed, self._world.rank)
        with self._traced():
            for step in range(self._resumed["step"], self._config.train.steps):
                if any(self._world.share(stopped(), "whether to stop")):  # so that all end with the same step
                    break
                try:
                    self._step(step)
                except StepError as error:
                    raise StepError(f"step {step + 1}: {error}") from None
                if self._config.checkpoint is not None and (step + 1) % self._config.checkpoint.every == 0:
                    self._save(more=step + 1 < self._config.train.steps)
            self._settle()
        if self._config.checkpoint is not None and self._done and self._saved != self._done:
            self._save(more=False)
        interrupted = self._done < self._config.train.steps
        last = None if interrupted else self._evaluate("after")
        summary = self._summary(last, interrupted)
        if self._metrics is not None:
            self._metrics.close()
        if self._directory is not None:
            self._directory.check()
            self._directory.write_json(SUMMARY, summary)
        return summary

    def say_way_back(self, error: BaseException) -> None:
        """What is left of a run that ends before its time, by `error`."""
        if self._directory is not None and self._saved is not None:
            how = " --set train.updates=forward" if isinstance(error, StepError) else ""
            self._reporter.note(f"--resume {self._directory.path}{how} goes on from {self._checkpoints.at(self._saved).name}")

    def _settle(self) -> None:
        """Returns when the last step is over, and its record written."""
        self._runtime.synchronize()
        self._finish_step(time.perf_counter())

    def _save(self, more: bool) -> None:
        """Saves a checkpoint of the steps so far; whether there will be `more`. CheckpointError where that cannot be done; the one before is then as
        it was."""
        assert self._config.checkpoint is not None
        self._settle()
        if self._directory is not None:
            self._directory.check()
        if self._metrics is not None:
            self._metrics.sync()
        step = self._done
        extra = {
            "step": step,
            "run": fixed(self._config),
            "ranks": self._world.size,
            "scaler": self._scaler.state_dict(),
            **random_states(self._world),
            "eval_loss_first": self._first,
            "moved_bytes": self._moved(),
            "learned_from": self._source.digest(self._sequences(step)),
        }
        with self._runtime.uncounted():
            self._checkpoints.save(step, self._model, self._optimizer, extra)
        self._saved = step
        if self._directory is not None:
            self._checkpoints.retain(self._config.checkpoint.keep, step, self._reporter.note, more)

    def _moved(self) -> dict[str, int]:
        """Bytes moved by the whole run's steps, by link, of one rank."""
        before, now = self._resumed.get("moved_bytes", {}), self._runtime.stats()["moved_bytes"]
        return {link: now.get(link, 0) + before.get(link, 0) for link in now | before}

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Records a trace; a run goes on without one that cannot be written."""
        if self._directory is None:
            yield
            return
        trace = self._runtime.trace(self._path / "trace.json.gz", steps=TRACED_STEPS, events=TRACED_EVENTS)
        try:
            yield
        finally:
            try:
                trace.close()
            except OffloadError as error:
                self._reporter.note(str(error))

    def _loss(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Mean loss of `ids` [B, L] times `scale`."""
        if self._head is None:
            return loss.full_causal_loss(self._model, ids, scale)
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        with self._runtime.lease(self._head):
            return loss.chunked_causal_loss(hidden, self._head.weight, ids, scale)

    def _ids(self, source: Source, step: int, micro: int, accumulate: int) -> torch.Tensor:
        """This rank's token ids [batch_size, seq_length] on the compute device."""
        size, world = self._config.data.batch_size, self._world
        ids = micro_batch(source, step, micro, batch_size=size, accumulate=accumulate, rank=world.rank, ranks=world.size)
        return torch.from_numpy(ids).to("cuda" if self._device == "cuda" else "cpu")

    def _loss_scale(self) -> float:
        """What the loss is multiplied by: 1 without fp16."""
        scale = float(self._scaler.scale(torch.ones((), device="cuda" if self._device == "cuda" else "cpu")))
        if scale < 1 and not self._said_small:
            self._said_small = True
            self._reporter.note("the loss scale fell below 1: gradients overflow fp16 whatever it is; lower the rate, or compute in bf16")
        return scale

    def _step(self, step: int) -> None:
        config, accumulate = self._config, self._config.data.accumulate
        start = time.perf_counter()
        stalled = self._finish_step(start)

        # rates
        chosen = config.optimizer
        rate = learning_rate(step, peak=chosen.lr, steps=config.train.steps, warmup=chosen.warmup, schedule=chosen.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

        # gradients
        loss_scale = self._loss_scale()
        total = 0.0
        for micro in range(accumulate):
            value = self._loss(self._ids(self._source, step, micro, accumulate), loss_scale / accumulate)
            with self._runtime.no_sync() if micro < accumulate - 1 else nullcontext():
                torch.autograd.backward(value)
            total += float(value.detach()) / loss_scale

        # update
        norm = None
        if chosen.clip is not None:
            self._scaler.unscale_(self._optimizer)
            total_norm = float(offload.clip_grad_norm_(self._model, chosen.clip))
            norm = _number(total_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

        total = statistics.fmean(self._world.share(total, f"the loss of step {step + 1}"))
        if not math.isfinite(total) and not self._said_lost:
            self._said_lost = True
            self._reporter.note(
                f"step {step + 1}: the loss is {total}; steps are skipped while gradients are not finite. If it stays so, a lower optimizer.lr or "
                "optimizer.clip may help, from a checkpoint before or from the start"
            )
        tokens = accumulate * config.data.batch_size * config.data.seq_length * self._world.size
        record = {"step": step + 1, "loss": _number(total), "lr": rate, "grad_norm": norm, "tokens": tokens}
        record |= {"loss_scale": loss_scale if self._scaled else None, "skipped": int(self._optimizer.skipped)}
        self._pending = (record | {"tier_bytes": self._runtime.tier_bytes()}, start, stalled)

    def _finish_step(self, now: float) -> dict[str, float]:
        """A step lasts until the next one starts: only then is its record whole. Gives the stalls until now."""
        stalled: dict[str, float] = self._runtime.stalls()
        if self._pending is None:
            return stalled
        (record, start, before), self._pending = self._pending, None
        seconds, stalls = now - start, {cause: stalled[cause] - before[cause] for cause in stalled}
        record |= {"seconds": seconds, "tokens_per_second": record["tokens"] / seconds}
        record |= {"stall_seconds": stalls, "compute_seconds": seconds - sum(stalls.values())}
        self._records.append(record)
        self._done += 1
        if self._metrics is not None:
            self._metrics.write(record)
        self._reporter.step(record, self._config.tiers_value().budget_bytes())
        return stalled

    def _evaluate(self, when: str) -> float | None:
        """Mean loss over the held-out sequences, some at a time as in training, divided over ranks."""
        size, count, world = self._config.data.batch_size, self._held_out_count, self._world
        if self._held_out is None or not count:
            return None
        total = 0.0
        self._model.eval()
        with torch.no_grad(), self._runtime.uncounted():
            for group in range(-(-count // (size * world.size))):
                rows = min(max(count - (group * world.size + world.rank) * size, 0), size)
                ids = self._ids(self._held_out, group, 0, 1)[: max(rows, 1)]  # one that has none left goes along, as all gather units together
                total += float(self._loss(ids)) * rows
            total = math.fsum(world.share(total, f"the held-out loss {when}"))
        self._model.train()
        self._reporter.note(f"held-out loss {when}: {total / count:.4f}")
        return _number(total / count)

    def _summary(self, eval_last: float | None, interrupted: bool) -> dict[str, Any]:
        records, runtime = self._records, self._runtime
        losses, seconds = [r["loss"] for r in records], [r["seconds"] for r in records]
        tokens = sum(r["tokens"] for r in records)
        with runtime.uncounted():
            digest = None if interrupted else runtime.digest()
        counters = runtime.stats() | self._of_ranks(runtime.stats())
        return {
            "steps": self._done,
            "tokens": tokens,
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "losses": losses,
            "eval_loss_first": self._first,
            "eval_loss_last": eval_last,
            "step_seconds_median": statistics.median(seconds) if seconds else None,
            "tokens_per_second": tokens / sum(seconds) if seconds else None,
            "interrupted": interrupted,
            "digest": digest,
            "predicted_step_seconds": self._predicted,
            **self._bound(counters["moved_bytes"]),
            **counters,
            "stall_seconds": {cause: sum(r["stall_seconds"][cause] for r in records) for cause in counters["stall_seconds"]},
            "compute_seconds": sum(r["compute_seconds"] for r in records),
            "moved_bytes": self._moved(),
            "checkpoint": self._checkpoints.at(self._saved).name if self._saved is not None else None,
            "version": offload.__version__,
        }

    def _of_ranks(self, counters: Mapping[str, Any]) -> dict[str, Any]:
        """What a summary has of all ranks: the peaks of the worst, and every one's state."""
        world = self._world
        shared = world.share([counters["peak_bytes"], counters["state_bytes_per_rank"]], "the peaks")
        return {
            "ranks": world.size,
            "stage": self._config.train.stage,
            "replicate": world.replicas,
            "peak_bytes": {tier: max(peaks[tier] for peaks, _ in shared) for tier in counters["peak_bytes"]},
            "state_bytes_per_rank": [held for _, held in shared],
        }

    def _bound(self, moved: Mapping[str, int]) -> dict[str, Any]:
        """The least a step of this run can take, by the bytes that it moved."""
        steps = self._done - int(self._resumed["step"])
        if self._estimate is None or not steps:
            return dict.fromkeys(("bound_step_seconds", "limiting_link"))
        plan, accumulate = self._runtime.plan, self._config.data.accumulate
        updated = traffic_of(plan, direct=self._device == "cpu", accumulate=accumulate).updated
        links = {link: moved[link] // steps for link in ("nvme_read", "nvme_write", "h2d", "d2h")}
        return self._estimate.bound(Traffic(**links, updated=updated), recomputed=plan.recomputed, accumulate=accumulate)


def _start(
    out: str, directory: RunDirectory, config: RunConfig, resume: bool, world: World, reporter: Reporter
) -> tuple[Checkpoints, dict[str, Any]]:  # fmt: skip
    """The run's checkpoints, and how it begins: `finished`, the summary of one that needs no more, or `checkpoint`, the name of the one that it goes
    on from."""
    checkpoints = Checkpoints(directory.path / CHECKPOINTS)
    checkpoints.recover()
    if not resume and checkpoints.all():
        raise ConfigError(
            f"{directory.path} has checkpoints: --resume {out} goes on from them; or delete {checkpoints.path}, or give another --out"
        )
    finished = directory.finished(config.train.steps) if resume else None
    if finished is not None:
        reporter.note(f"{directory.path}: the run is finished")
        return checkpoints, {"finished": finished}
    newest = checkpoints.newest_whole(reporter.note) if resume else None
    if resume and newest is None:
        reporter.note(f"{directory.path} has no checkpoint yet: the run starts from the start")
    if newest is not None:
        position(newest[1], config, world.size)
    return checkpoints, {"finished": None, "checkpoint": newest[1].name if newest is not None else None}


def _give_back(directory: RunDirectory, checkpoints: Checkpoints) -> None:
    """At the end of a run, however it ends, but where another one has its place."""
    with suppress(ConfigError):
        directory.check()
        checkpoints.close()


def _attempt(
    config: RunConfig, out: str, resume: bool, stopped: Callable[[], bool], world: World, directory: RunDirectory | None, reporter: Reporter,
    closing: ExitStack,
) -> dict[str, Any]:  # fmt: skip
    """The run, from its start or newest checkpoint to its summary. StepError where updates in a backward have spoilt a step."""
    own, start = _start(out, directory, config, resume, world, reporter) if directory is not None else (None, None)
    start = world.broadcast(start, what="how the run begins")
    if start["finished"] is not None:
        return dict(start["finished"])
    path = Path(world.broadcast(str(directory.path.absolute()) if directory is not None else None, what="the run directory"))
    checkpoints = own if own is not None else Checkpoints(path / CHECKPOINTS)
    metrics = None
    if directory is not None:
        closing.callback(_give_back, directory, checkpoints)
        metrics = closing.enter_context(MetricsWriter(directory.path / METRICS, checkpoints.spare.give_up))
    trainer = Trainer(config, world, checkpoints, reporter, directory, metrics)
    trainer.open(closing, checkpoints.path / start["checkpoint"] if start["checkpoint"] is not None else None)
    trainer.begin()
    try:
        summary = trainer.run(stopped)
    except (OffloadError, KeyboardInterrupt) as error:
        if directory is not None:
            directory.check()  # where it is gone, that is what went wrong
        if not _goes_back(config, error):
            trainer.say_way_back(error)
        raise
    return dict(world.broadcast(summary, what="the summary"))


def _goes_back(config: RunConfig, error: BaseException) -> bool:
    """Whether a run goes on after `error`: it was not the user who chose when updates start."""
    return isinstance(error, StepError) and config.train.updates == "auto"


def _run(config: RunConfig, out: str, resume: bool, stopped: Callable[[], bool], world: World, closing: ExitStack) -> dict[str, Any]:
    world.agree(hashlib.sha256(config.to_toml().encode()).hexdigest(), "the run file")
    directory = closing.enter_context(RunDirectory(out)) if world.rank == 0 else None
    reporter = Reporter(config.train.steps, silent=directory is None)
    closing.callback(reporter.close)
    opened = closing.enter_context(ExitStack())
    try:
        return _attempt(config, out, resume, stopped, world, directory, reporter, opened)
    except StepError as error:
        if not _goes_back(config, error):
            raise
        reporter.note(f"{error}. The run does so by itself")
    opened.close()
    gc.collect()  # what the spoilt step left goes before another model takes its place
    config = config.model_copy(update={"train": config.train.model_copy(update={"updates": "forward"})})
    try:
        return _attempt(config, out, True, stopped, world, directory, reporter, closing)
    except PlanError as error:
        raise PlanError(f"the run cannot go on with updates under the forward, which would skip the step that was spoilt: {error}") from None


def train(
    config: RunConfig, out: str, *, resume: bool = False, stopped: Callable[[], bool] = lambda: False,
    failing: Callable[[BaseException], None] = lambda error: None,
) -> dict[str, Any]:  # fmt: skip
    """Trains as `config` says and leaves the run in directory `out`; returns the summary. Under torchrun every rank does, with the same arguments.

    `stopped` is asked before each step, on all ranks; a run that it ends has a summary marked `interrupted`, without digest and last evaluation, and
    a checkpoint of its last step if it has any. An earlier run in `out` is replaced once this one is ready to start, unless it has checkpoints, which
    is a ConfigError. With `resume` the run goes on from the newest checkpoint that is whole, or starts where there is none; one that came to its end
    is left as it is. `failing` is given an error before other ranks hear of it.

    Where it was not the run file that had updates start in the backward, a step that they spoil (StepError) ends no run: it goes back to its newest
    checkpoint, or to its start, and on with updates under the forward, to the bits of a run that had them so from the start.
    """
    with ExitStack() as closing:
        world = World.current(device="cuda" if compute_device(config.train.device) == "cuda" else "cpu")
        closing.callback(world.close)
        try:
            world.divide(config.train.replicate)
            return _run(config, out, resume, stopped, world, closing)
        except BaseException as error:
            failing(error)
            world.fail(error)  # before anything closes that others may be sending to
            raise
