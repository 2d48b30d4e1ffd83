"""What torch.compile is to leave alone, and what it compiles again.

[Note: compiled]
Hooks move parameters, so they run as they are: the graph breaks where one is called, and nothing that it calls is compiled. Here and not by
torch.compiler.disable, which would import the compiler into every process. What is computed again in backward must save what its first forward saved,
so it is run by the compiler, if any, that was at work around the hook that its forward began with.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_frames: Any = torch._C._dynamo.eval_frame
_around = threading.local()


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which the compiler is told not to look into."""
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, "offload moves parameters here"
    _frames.set_code_exec_strategy(marks.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT))
    return function


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with no compiler at work while it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, _around.compiler = compiler(), _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(_around.compiler)
            _around.compiler = before

    return alone(run)


def compiler() -> Any:
    """What is at work around the innermost eager function of this thread; None where nothing is."""
    return getattr(_around, "compiler", None)


@contextmanager
def compiled_by(compiler: Any) -> Iterator[None]:
    """What is called while the context lasts is compiled, or found compiled, as around an eager function."""
    before = _frames.set_eval_frame(compiler)
    try:
        yield
    finally:
        _frames.set_eval_frame(before)
