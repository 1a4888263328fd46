"""Hides frames of this package in tracebacks of IPython and pytest, by ``__tracebackhide__``.

``JAX_TRACEBACK_FILTERING=off`` and jax's ``jax_traceback_filtering`` show all frames.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import traceback

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def hide_frames(error: BaseException | None = None) -> None:
    """Marks the frames of this package on the stack and in an error; call it once per error."""
    if not _are_hidden():
        return
    inner = traceback.walk_tb(error and error.__traceback__)
    for frame, _ in itertools.chain(traceback.walk_stack(inspect.currentframe()), inner):
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and code.co_name != "<module>":
            frame.f_locals["__tracebackhide__"] = True


def _are_hidden() -> bool:
    config = getattr(sys.modules.get("jax"), "config", None)
    mode = getattr(config, "jax_traceback_filtering", None) or "auto"
    if mode != "auto":
        return mode == "tracebackhide"
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None
