"""Leaves frames of this package out of tracebacks, as jax leaves out its own.

In IPython and pytest they have ``__tracebackhide__``; elsewhere they are removed, but for the one
that raised the error. ``JAX_TRACEBACK_FILTERING=off`` and jax's ``jax_traceback_filtering`` show
all frames.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_keeps_frames: ContextVar[bool] = ContextVar("_keeps_frames", default=False)


def hide_frames(error: BaseException | None = None) -> None:
    """Hides the frames of this package on the stack and in an error; call it once per error."""
    if _mode() == "tracebackhide":
        inner = traceback.walk_tb(error and error.__traceback__)
        for frame, _ in itertools.chain(traceback.walk_stack(inspect.currentframe()), inner):
            if _is_ours(frame):
                frame.f_locals["__tracebackhide__"] = True
    elif _mode() != "off" and error is not None and not _keeps_frames.get():
        _remove_frames(error)


@contextmanager
def all_frames() -> Iterator[None]:
    """Context manager in which no frame is removed, for what reads layers from the frames."""
    token = _keeps_frames.set(True)
    try:
        yield
    finally:
        _keeps_frames.reset(token)


def _remove_frames(error: BaseException) -> None:
    # In place: `contextlib` restores the traceback that an error had when it left the block.
    entry = error.__traceback__
    while entry is not None:
        inner = entry.tb_next
        while inner is not None and inner.tb_next is not None and _is_ours(inner.tb_frame):
            inner = inner.tb_next
        entry.tb_next = inner
        entry = inner


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(_PACKAGE) and code.co_name != "<module>"


def _mode() -> str:
    config = getattr(sys.modules.get("jax"), "config", None)
    mode = getattr(config, "jax_traceback_filtering", None) or "auto"
    shell = sys.modules.get("IPython")
    in_notebook = mode == "auto" and shell is not None and shell.get_ipython() is not None
    return "tracebackhide" if in_notebook else mode
