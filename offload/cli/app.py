"""Commands, and what they have in common: a user's error is one line on standard error and exit code 2; results alone go to standard output."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, TextIO

import typer

from offload import __version__
from offload.errors import ConfigError, OffloadError

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Trains PyTorch models whose state does not fit the GPU, through GPU memory, RAM and NVMe.",
)

Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": False}


def emit(result: dict[str, Any], as_json: bool, text: Callable[[dict[str, Any]], str], gone: Callable[[], bool] = lambda: False) -> None:
    """Prints a command's result, for programs or for people."""
    said = json.dumps(result, indent=1) if as_json else text(result)
    write(said.encode(errors="backslashreplace").decode(), gone)  # names of files may be no text


def write(text: str, gone: Callable[[], bool] = lambda: False) -> None:
    """Prints a result whole; where standard output does not take it, the command ends, unless whoever would read it is known to be `gone`."""
    try:
        print(text, flush=True)
    except OSError as error:
        if gone():
            _give_up(sys.stdout)
            return
        raise typer.Exit(_unwritten(error)) from None  # main() finds that it still does not


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True, callback=_tell_version)] = False,
) -> None:
    """What all commands have."""


@app.command(context_settings=_EXTRA)
def train(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN.toml", help="the run file")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE ...", help="replaces a key of the run file, as train.steps=10")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="the run directory (default: runs/NAME OF THE RUN FILE)")] = None,
    resume: Annotated[str | None, typer.Option(metavar="DIR", help="go on from the newest checkpoint of a run directory")] = None,
    as_json: Json = False,
) -> int:
    """Train, and write a run directory."""
    if resume is not None and out is not None:
        raise ConfigError("--resume names the run directory: leave --out away")
    from offload.cli.train import train_command

    return train_command(run, [*(set_ or []), *ctx.args], out, resume, as_json)


@app.command(context_settings=_EXTRA)
def plan(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="[RUN.toml]", help="the run file to plan for")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE ...", help="replaces a key of the run file")] = None,
    params: Annotated[
        float | None, typer.Option(help="number of parameters, as 70e9, instead of a run file: arithmetic alone (--set precision.*)")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="how many train together; figures are one's")] = 1,
    stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="of several ranks: 1 divides optimizer state, 2 gradients too, 3 parameters too (the default)")
    ] = None,
    replicate: Annotated[int | None, typer.Option(min=1, help="of several ranks: so many groups, each of which divides all state (1)")] = None,
    as_json: Json = False,
) -> int:
    """Say what would go where, or what a number of parameters needs."""
    from offload.cli.plan import plan_command

    return plan_command(run, [*(set_ or []), *ctx.args], params, ranks, stage, replicate, as_json)


@app.command()
def doctor(
    path: Annotated[str, typer.Option(metavar="DIR", help="a directory on the disk that swap files would be on")] = ".",
    as_json: Json = False,
) -> int:
    """Say what this machine has, what is degraded, and how to mend it."""
    from offload.cli.doctor import doctor_command

    return doctor_command(path, as_json)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(metavar="[copy|swap|adam|step|all]", help="what to measure")] = "all",
    path: Annotated[str, typer.Option(metavar="DIR", help="a directory on the drive to measure")] = ".",
    as_json: Json = False,
) -> int:
    """Measure this machine's links and kernels against their limits and peers, in under two minutes."""
    from offload.cli.bench import bench_command

    return bench_command(what, path, as_json)


@app.command()
def verify(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="a checkpoint, or a run directory: all of its checkpoints")], as_json: Json = False
) -> int:
    """Compare every byte of a checkpoint with its checksums."""
    from offload.cli.files import verify_command

    return verify_command(directory, as_json)


@app.command()
def export(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="a run directory (its newest checkpoint) or a checkpoint")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="the directory to write")],
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="a Hugging Face directory with the model's config.json, for a checkpoint of no run")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="what a file may have at most")] = "5GB",
    as_json: Json = False,
) -> int:
    """Write a checkpoint's weights as a directory that transformers loads."""
    from offload.cli.export import export_command

    return export_command(directory, out, model, max_shard_size, as_json)


@app.command()
def clean(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="a swap directory, or a run directory: its swap directories")], as_json: Json = False
) -> int:
    """Remove swap files of runs that are no longer alive."""
    from offload.cli.files import clean_command

    return clean_command(directory, as_json)


def _later(name: str, text: str) -> None:
    @app.command(name, help=f"{text} (not available in this version)", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def refuse(as_json: Json = False) -> int:
        raise ConfigError(f"offload {name} is not available in this version; a run's figures are in metrics.jsonl and summary.json")


for _name, _text in {
    "top": "Watch a run.",
    "report": "Write a run's report.",
}.items():
    _later(_name, _text)


def fail(text: object) -> int:
    """Says what went wrong; the exit code for it."""
    with suppress(OSError):  # nobody may be there to hear it
        print(f"error: {' '.join(str(text).split())}", file=sys.stderr, flush=True)
    return 2


def _usage(error: Exception, argv: Sequence[str]) -> str | None:
    """What typer finds wrong with a command, and where to look; None for other errors. Its classes have no common base across its versions."""
    said = getattr(error, "format_message", None)
    if said is None:
        return None
    text, known = said().rstrip("."), {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    name = next((f"{word} " for word in argv if word in known), "")
    return f"{text}{'' if text.endswith('?') else ';'} see `offload {name}--help`"


def _give_up(stream: TextIO) -> None:
    """Python writes what is left in a stream as it ends; what nobody takes goes nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _unwritten(error: OSError) -> int:
    """The exit code where standard output takes nothing more: whoever read it is gone, as `head` is, or its disk is full."""
    return UNREAD if isinstance(error, BrokenPipeError) else fail(f"cannot write the result to standard output: {error.strerror}; make room for it")


def _called(argv: Sequence[str]) -> int:
    try:
        return int(app(args=argv, prog_name="offload", standalone_mode=False) or 0)
    except OffloadError as error:
        return fail(error)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return UNREAD  # as what writes help and tables ends where nobody reads them
    except OSError as error:
        if error.errno is None:
            raise
        if os.environ.get("OFFLOAD_TRACEBACK"):
            with suppress(OSError):  # as in fail()
                traceback.print_exception(error)
        return fail(f"{error}; mend that, or give another directory (OFFLOAD_TRACEBACK=1 shows where it came up)")
    except Exception as error:
        usage = _usage(error, argv)
        if usage is None:
            raise
        return fail(usage)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, 2 for a user's error, 128 and the number of a signal that ended it, as 130 and 143."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    code = _called((sys.argv[1:] if argv is None else list(argv)) or ["--help"])
    try:
        print(end="", flush=True)
    except OSError as error:
        code = code or _unwritten(error)
        _give_up(sys.stdout)
    try:
        print(end="", file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)
    return code
