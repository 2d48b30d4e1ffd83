"""The command line: a user's error is one line and exit code 2; results alone are on standard output."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import offload
from offload.cli import main
from offload.cli.plan import _would_help
from offload.memory.stalls import CAUSES
from runs import SMALL, records_of, sizes, summary_of

ROOT = Path(__file__).parents[1]
SIZES = sizes(128, 64, 128)
RUN = SMALL.but(
    model={"config": SIZES},
    data={"seq_length": 32, "eval_sequences": 2},
    tiers={"device": "48MiB"},
    optimizer={"lr": 1e-3, "clip": 1.0},
)
PATH = {"type": None, "config": None, "path": "model"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RUN.write(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def call(*argv: object) -> str:
        code = main([str(a) for a in argv])
        said = capsys.readouterr()
        assert code == 2 and said.out == ""
        lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in said.err
        return lines[0]

    return call


def command(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "offload", *map(str, argv)], capture_output=True, text=True, cwd=cwd)


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys\nfrom offload.cli import main\nmain(['--help'])\nsys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "doctor" in done.stdout


def test_a_wrong_command_names_its_help(refused) -> None:  # type: ignore[no-untyped-def]
    assert refused("train").endswith("see `offload train --help`")
    assert refused("train", "RUN", "--outt", "x").endswith("see `offload train --help`")
    assert refused("train", "RUN", "--set").endswith("see `offload train --help`")
    assert refused("trian").endswith("see `offload --help`")


def test_no_command_at_all_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "doctor" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"offload {offload.__version__}\n"


@pytest.mark.parametrize("argv", [["plan", "--params", "70e9"], ["plan", "--params", "70e9", "--json"], ["--help"]], ids=" ".join)
def test_a_result_that_is_not_taken(tmp_path: Path, argv: list[str]) -> None:
    """By `head`, which is no error; by a full disk, which is one."""
    call = [sys.executable, "-m", "offload", *argv]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        done = subprocess.run(call, stdout=gone, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "No space left" in done.stderr and done.stderr.count("\n") == 1


def test_a_run_outlives_whoever_reads_what_it_says(run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        call = [sys.executable, "-m", "offload", "train", str(run), "--out", str(run.parent / "out"), "--json"]
        done = subprocess.run(call, stdout=subprocess.PIPE, stderr=gone, text=True)
    assert done.returncode == 0 and json.loads(done.stdout) == summary_of(run.parent / "out")


def test_an_error_of_the_system_names_its_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And says where it came up, if asked."""

    def broken(*given: object, **more: object) -> None:
        Path("/no/where").read_text()

    monkeypatch.setattr("offload.cli.app.app", broken)
    for asked in ("", "1"):
        monkeypatch.setenv("OFFLOAD_TRACEBACK", asked)
        assert main(["doctor"]) == 2
        said = capsys.readouterr().err
        assert "'/no/where'" in said.splitlines()[-1] and ("in broken" in said) == (asked == "1") and (asked or said.count("\n") == 1)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed(closed: str, tmp_path: Path) -> None:
    """No file that it opens takes their numbers, in it or in a child of its own; what it says goes nowhere."""
    (tmp_path / "code.py").write_text(
        "import os, subprocess, sys\n"
        "import offload.cli.app as app\n"
        "from offload.cli import main\n"
        "def called(argv):\n"
        "    print('said'), print('said', file=sys.stderr)\n"
        "    with open('file', 'w') as file:\n"
        "        own = file.fileno()\n"
        "    return max(own < 3, subprocess.call([sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']))\n"
        "app._called = called\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run(["bash", "-c", f"{sys.executable} code.py {closed}"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and (done.stderr == "") == ("2" in closed), done.stderr


@pytest.mark.parametrize(
    "argv",
    [["train"], ["train", "RUN", "--outt", "x"], ["trian"], ["plan"], ["plan", "--params", "many"], ["plan", "--params", "-1"],
     ["doctor", "--path", "/no/where"], ["bench", "disk"], ["bench", "swap", "--path", "/no/where"],
     ["top", "DIR"], ["report", "DIR"], ["verify", "DIR"],
     ["export", "DIR", "OUT"], ["clean", "DIR", "--json"]],
)  # fmt: skip
def test_usage_errors(refused, argv: list[str]) -> None:  # type: ignore[no-untyped-def]
    refused(*argv)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.step=3", "nearest: train.steps"),
        ("tiers.device=24GiBs", "is no size"),
        ("model.type=lama", "nearest: llama"),
        ("model.type=vit", "no causal language model"),
        ("model.config.hiden_size=3", "nearest: hidden_size"),
        ("model.config.vocab_size=0", "vocab_size is 0"),
        ("data.source=texts/*.py", "tokenizer"),
        ("checkpoint.every=0", "checkpoint.every"),
        ("tiers.nvme=[['/proc/swap', '1GiB']]", "/proc/swap"),
        ("tiers.nvme=[['run.toml/swap', '1GiB']]", "run.toml/swap"),
    ],
)
def test_run_files_that_cannot_run(refused, run: Path, override: str, says: str) -> None:  # type: ignore[no-untyped-def]
    tight = ["--set", "tiers.host=2MiB", "--set", "tiers.place={optimizer='nvme'}"] if "nvme" in override else []
    assert says in refused("train", run, "--set", override, *tight, "--out", run.parent / "out")


@pytest.mark.parametrize(("name", "value"), [("OFFLOAD_SIMD", "sse9"), ("OFFLOAD_THREADS", "many"), ("OFFLOAD_IO", "floppy")])
def test_variables_that_ask_for_what_there_is_not(run: Path, name: str, value: str) -> None:
    settings = ["--set", "tiers.place.optimizer=nvme", "train.steps=1"]
    for argv in (["train", run, *settings], *([["plan", run, *settings]] if name != "OFFLOAD_IO" else []), ["doctor", "--path", run.parent]):
        done = subprocess.run(
            [sys.executable, "-m", "offload", *map(str, argv)], capture_output=True, text=True, cwd=run.parent, env=os.environ | {name: value}
        )
        assert "Traceback" not in done.stderr + done.stdout and value in done.stderr + done.stdout
        assert done.returncode == 2 or (name, argv[0]) == ("OFFLOAD_IO", "doctor")


def test_missing_paths(refused, run: Path) -> None:  # type: ignore[no-untyped-def]
    out = ("--out", run.parent / "out")
    assert "cannot read" in refused("train", run.parent / "none.toml", *out)
    RUN.but(model=PATH).write(run.parent)
    assert f"no config.json in {run.parent / 'model'}" in refused("train", run, *out)
    assert "cannot write" in refused("train", run, "--out", run / "out")
    assert "--resume" in refused("train", run, "--resume", run.parent / "out", *out)


def test_a_run_without_checkpoints_has_none(refused, run: Path) -> None:  # type: ignore[no-untyped-def]
    (run.parent / "out").mkdir()
    (run.parent / "out/config.toml").write_text(run.read_text())
    assert "has no checkpoint yet" in refused("verify", run.parent / "out")
    assert "has no checkpoint yet" in refused("export", run.parent / "out", run.parent / "there")
    assert "--max-shard-size: 'lots' is no size" in refused("export", run.parent / "out", run.parent / "there", "--max-shard-size", "lots")


def test_no_text_found(refused, run: Path) -> None:  # type: ignore[no-untyped-def]
    RUN.but(model=PATH, data={"source": "texts/*.md"}).write(run.parent)
    (run.parent / "model").mkdir()
    (run.parent / "model/config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (run.parent / "model/tokenizer.json").write_text("{}")
    assert f"no file matches {run.parent / 'texts/*.md'}" in refused("train", run, "--out", run.parent / "out")
    (run.parent / "texts").mkdir()
    (run.parent / "texts/a.md").write_text("")
    assert "no text found" in refused("train", run, "--out", run.parent / "out")
    assert not list((run.parent / "out").glob(".tokens-*"))


def test_what_cannot_fit_is_refused_with_numbers(refused, run: Path) -> None:  # type: ignore[no-untyped-def]
    said = refused("train", run, "--set", "tiers.device=1KiB", "tiers.host=1KiB", "--out", run.parent / "out")
    assert "KiB" in said or "MiB" in said


def test_a_live_run_in_the_same_directory(refused, run: Path) -> None:  # type: ignore[no-untyped-def]
    from offload.train.rundir import RunDirectory

    with RunDirectory(run.parent / "out"):
        assert f"process {os.getpid()}" in refused("train", run, "--out", run.parent / "out")


@pytest.mark.parametrize(("stage", "per_rank"), [(0, 1120e9), (1, 70e9 * (4 + 12 / 64)), (2, 70e9 * (2 + 14 / 64)), (3, 17.5e9)])
def test_arithmetic_of_stages(capsys: pytest.CaptureFixture[str], stage: int, per_rank: float) -> None:
    assert main(["plan", "--params", "70e9", "--ranks", "64", "--stage", str(stage), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_bytes_per_rank"] == pytest.approx(per_rank)


def test_arithmetic_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "70e9", "--ranks", "64", "--replicate", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_bytes_per_rank"] == pytest.approx(140e9)
    assert main(["plan", "--params", "70e9", "--ranks", "64", "--replicate", "8"]) == 0 and "in 8 groups" in capsys.readouterr().out
    assert main(["plan", "--params", "70e9", "--ranks", "64", "--replicate", "5"]) == 2 and "5 equal groups" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--path", str(tmp_path), "--json"]) == 0
    names = {f["name"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert {"torch", "instruction set", "I/O engine", "direct I/O", "memory"} <= names and not list(tmp_path.iterdir())
    assert main(["doctor", "--path", str(tmp_path)]) == 0 and "ok" in capsys.readouterr().out


def test_doctor_tells_what_is_degraded_and_how_to_mend_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One thread, little memory that may be locked, a plain instruction set: each with a way out, and the exit code stays 0."""
    import torch

    from offload import _core
    from offload.memory import limits

    few = dataclasses.replace(limits.host_limits(), locked=64 << 10)
    monkeypatch.setattr(limits, "host_limits", lambda: few)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(_core, "default_threads", lambda: 1)
    monkeypatch.setattr(_core, "simd_level", lambda: "scalar")
    assert main(["doctor", "--path", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    mend = {f["name"]: f["mend"] for f in result["findings"]}
    for name, way in {
        "threads of torch": "OMP_NUM_THREADS", "threads of the optimizer": "OFFLOAD_THREADS", "memory that may be locked": "ulimit -l",
        "instruction set": "OFFLOAD_SIMD",
    }.items():  # fmt: skip
        assert name in result["degraded"] and way in mend[name]
    assert main(["doctor", "--path", str(tmp_path)]) == 0 and "degraded  memory that may be locked" in capsys.readouterr().out


def test_what_a_plan_says_of_wear_is_what_a_run_writes(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """Bytes to the drive, and how many steps its rating allows."""
    settings = ["--set", "tiers.place={parameter='nvme', gradient='nvme', optimizer='nvme'}", "train.steps=4", "data.eval_sequences=0"]
    assert main(["plan", str(run), "--json", *settings]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["train", str(run), "--json", "--out", str(run.parent / "out"), *settings]) == 0
    assert json.loads(capsys.readouterr().out)["moved_bytes"]["nvme_write"] == 4 * planned["written_bytes_per_step"]
    assert planned["steps_per_100_tb_written"] == 10**14 // planned["written_bytes_per_step"]
    assert main(["plan", str(run), *settings]) == 0 and "of its rated endurance (TBW)" in capsys.readouterr().out


def test_a_plan(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    assert main(["plan", str(run), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["state_bytes"] > 0 and set(made["placement"]) == {"parameter", "gradient", "optimizer"}
    peak = made["peak_bytes"]
    assert set(peak) == {"device", "host", "nvme", "rss"} and peak["device"] + peak["host"] < peak["rss"]
    documented = (ROOT / "docs/run-file.md").read_text()
    assert not [name for name in made if f"`{name}`" not in documented]
    assert main(["plan", str(run)]) == 0 and "MiB" in capsys.readouterr().out


def test_what_would_help() -> None:
    """By what holds the step; nothing where only a faster machine would."""

    def plan(fixed: int = 0, asked: str = "auto", away: int = 0, recomputed: tuple[int, ...] = (), stays: bool = True) -> SimpleNamespace:
        place = {"optimizer": "nvme"} if fixed else {}
        request = SimpleNamespace(place=place, fixed=lambda tier: fixed, may_stay=stays, may_sum=False)
        boundaries = SimpleNamespace(by_tier={"nvme": away})
        return SimpleNamespace(peak_bytes={"nvme": 3 << 30}, recomputed=recomputed, asked=asked, request=request, boundaries=boundaries)

    given = SimpleNamespace(compute="bf16", master="fp32", moments="fp32")
    ways = _would_help("nvme", plan(), given)
    assert "3 GiB more in tiers.host" in ways[0] and "int8" in ways[1] and "split" in ways[1]
    small = SimpleNamespace(compute="bf16", master="fp32", moments="int8")
    assert len(_would_help("nvme", plan(), small)) == 1
    placed = _would_help("nvme", plan(fixed=3 << 30), small)
    assert len(placed) == 1 and "optimizer placed elsewhere" in placed[0]
    partly = _would_help("nvme", plan(fixed=1 << 30), small)
    assert "2 GiB more in tiers.host" in partly[0] and "but what is placed there" in partly[0]
    assert _would_help("nvme", plan(asked="nvme", away=3 << 30), given) == ['train.activations = "auto"']
    assert "tiers.device" in _would_help("h2d", plan(), given)[0] and not _would_help("h2d", plan(stays=False), given)
    again = plan(recomputed=(0, 1))
    assert "tiers.device, so that fewer than 2 units" in _would_help("compute", again, given)[0]
    assert not _would_help("compute", plan(), given) and not _would_help("update", again, given)
    assert "tiers" not in _would_help("compute", plan(asked="recompute", recomputed=(0,)), given)[0]


def test_treatments_of_activations(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """The plan shows where they go, and a run computes the same wherever they are."""
    results = {}
    for mode in ("keep", "host", "nvme"):
        settings = ["--set", f"train.activations={mode}", "data.seq_length=256", "train.steps=2", "data.eval_sequences=0"]
        assert main(["plan", str(run), "--json", *settings]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert main(["train", str(run), "--json", "--out", str(run.parent / mode), *settings]) == 0
        results[mode] = summary = json.loads(capsys.readouterr().out)
        assert planned["activations"] == summary["activations"] == mode
        assert planned["activation_bytes"] == summary["activation_bytes"]
        assert all(summary["peak_bytes"][tier] == planned["peak_bytes"][tier] for tier in ("host", "nvme"))
        if mode != "keep":
            assert planned["activation_bytes"][mode] > 0
            assert main(["plan", str(run), *settings]) == 0 and f" {mode})" in capsys.readouterr().out
            assert summary["stall_seconds"]["activation"] > 0
    assert len({(tuple(r["losses"]), r["digest"]) for r in results.values()}) == 1
    moved = {mode: r["moved_bytes"] for mode, r in results.items()}
    assert moved["nvme"]["nvme_write"] - moved["keep"]["nvme_write"] == 2 * results["nvme"]["activation_bytes"]["nvme"]


def test_what_stays_on_the_device(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """The plan says what is summed there and how often units are fetched; a run does that, and computes what it does with less room."""
    RUN.but(model={"config": SIZES | {"num_hidden_layers": 6}}).write(run.parent)
    settings = ["train.device=sim", "data.accumulate=4", "precision.compute=fp32", "tiers.place.optimizer=host", "data.eval_sequences=0"]
    results = []
    for place, there in (("host", False), (None, True)):
        given = [*settings, *([f"tiers.place.{role}={place}" for role in ("parameter", "gradient")] if place else [])]
        assert main(["plan", str(run), "--json", "--set", *given]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert main(["plan", str(run), "--set", *given]) == 0
        text = capsys.readouterr().out
        assert (planned["summed_units"] > 0, planned["sum_bytes"] > 0, "summed on the device" in text) == (there,) * 3
        assert f"{planned['fetches_per_step']} fetches" in text
        assert main(["train", str(run), "--json", "--out", str(run.parent / str(there)), "--set", *given]) == 0
        results.append(json.loads(capsys.readouterr().out) | {"planned": planned})
        assert results[-1]["summed_units"] == planned["summed_units"]
    assert len({(tuple(r["losses"]), r["digest"]) for r in results}) == 1
    apart, there_too = results
    assert apart["moved_bytes"]["d2h"] == 4 * there_too["moved_bytes"]["d2h"]
    assert there_too["moved_bytes"]["h2d"] < apart["moved_bytes"]["h2d"]
    assert there_too["fetches"] < apart["fetches"]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_updates_in_the_backward(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path, device: str) -> None:
    """Chosen by itself where nothing needs all gradients first; the same bits, for as many units as the schedule says."""
    from offload.train.estimate import Estimate

    RUN.but(optimizer={"clip": None}).write(run.parent)
    results = []
    for updates, units in (("forward", 0), ("auto", 2), ("backward", 99)):
        monkeypatch.setattr(Estimate, "early", lambda *_, units=units, **__: units)
        settings = [f"train.updates={updates}", f"train.device={device}", "tiers.place.optimizer=nvme", "data.accumulate=2"]
        assert main(["train", str(run), "--set", *settings, "--json", "--out", str(run.parent / updates)]) == 0
        said = capsys.readouterr()
        results.append(json.loads(said.out))
        assert (f"updates of {units} of" in said.err) == (units > 0)
    assert len({(tuple(r["losses"]), r["digest"]) for r in results}) == 1


def test_a_run_from_the_command(run: Path) -> None:
    cwd = run.parent
    done = command("train", run, "--set", "data.accumulate=2", "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == summary_of(cwd / "runs/run")
    wanted = {
        "steps", "tokens", "loss_first", "loss_last", "losses", "eval_loss_first", "eval_loss_last", "parameters", "state_bytes",
        "step_seconds_median", "tokens_per_second", "budget_bytes", "peak_bytes", "moved_bytes", "stall_seconds", "predicted_step_seconds",
        "bound_step_seconds", "limiting_link", "digest", "base_bytes",
    }  # fmt: skip
    assert wanted <= set(summary) and set(summary["peak_bytes"]) == {"device", "host", "nvme", "rss"}
    assert summary["bound_step_seconds"] > 0 and summary["predicted_step_seconds"] > 0 and summary["limiting_link"] in ("compute", "nvme")
    assert summary["steps"] == 3 == len(summary["losses"]) and summary["tokens"] == 3 * 2 * 32 and not summary["interrupted"]
    lines = records_of(cwd / "runs/run")
    assert [m["step"] for m in lines] == [1, 2, 3] and [m["loss"] for m in lines] == summary["losses"]
    for m in lines:  # where each step's time went, and the whole run's
        assert set(m["stall_seconds"]) == set(CAUSES) and min(m["stall_seconds"].values()) >= 0
        assert m["compute_seconds"] + sum(m["stall_seconds"].values()) == pytest.approx(m["seconds"])
    assert all(summary["stall_seconds"][c] == pytest.approx(sum(m["stall_seconds"][c] for m in lines)) for c in CAUSES)
    documented = (ROOT / "docs/run-file.md").read_text()
    assert not [name for name in (*summary, *lines[0]) if f"`{name}`" not in documented]
    trace = json.loads(gzip.decompress((cwd / "runs/run/trace.json.gz").read_bytes()))
    held = [e["args"] for e in trace["traceEvents"] if e["name"] == "bytes"]
    assert held and all(0 <= b[tier] <= summary["budget_bytes"][tier] for b in held for tier in summary["budget_bytes"])
    assert "step 3/3" in done.stderr and "held-out loss after" in done.stderr
    assert not list((cwd / "swap").glob("*"))

    again = command("train", cwd / "runs/run/config.toml", "--out", "runs/run", "--set", "data.accumulate=2", cwd=cwd)
    assert again.returncode == 0 and summary["digest"] in again.stdout and "is replaced" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_a_run_at_once(run: Path, number: signal.Signals) -> None:
    """And leaves the run that was in its directory."""
    out = run.parent / "out"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    hook = f"import os, offload.train.loop as loop\nloop._sequences = lambda *_: os.kill(os.getpid(), {int(number)})\n"
    code = f"{hook}import sys\nfrom offload.cli import main\nsys.exit(main(['train', {str(run)!r}, '--out', {str(out)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "stopping before the first step\n")
    assert sorted(p.name for p in out.iterdir()) == [".lock", "summary.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_cleanly(run: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "offload", "train", str(run), "--set", "train.steps=100000", "--out", str(run.parent / "out")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/"):
                process.send_signal(number)
                break
        said = process.stderr.read()
    assert process.returncode == 128 + number and "Traceback" not in said and "stopping after this step" in said
    summary = summary_of(run.parent / "out")
    assert summary["interrupted"] and summary["steps"] == len(records_of(run.parent / "out")) >= 2
    assert not list((run.parent / "swap").glob("*"))


def test_a_terminal_that_closes_ends_a_run_cleanly(run: Path) -> None:
    """Its shell sends SIGHUP, and the kernel once more; nothing that is written to it arrives, which is no error."""
    RUN.but(checkpoint={"every": 100000}, train={"steps": 100000}).write(run.parent)
    master, terminal = os.openpty()
    argv = [sys.executable, "-m", "offload", "train", str(run), "--out", str(run.parent / "out")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=terminal, text=True) as process:
        os.close(terminal)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/"):
                os.close(master)
                process.send_signal(signal.SIGHUP)
            elif line.startswith("stopping after this step"):
                process.send_signal(signal.SIGHUP)
                break
        said = process.stderr.read()
    assert process.returncode == 0 and not any(word in said for word in ("Traceback", "error", "at once")), said
    summary = summary_of(run.parent / "out")
    assert summary["interrupted"] and summary["checkpoint"] == f"step-{summary['steps']:08d}"
