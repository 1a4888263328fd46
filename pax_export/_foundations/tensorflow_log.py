"""Suppresses log lines of TensorFlow's import, saving and conversion.

They come from C++, so stderr's file descriptor is redirected and filtered.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_LINE = r"(?:\d{4}-\d\d-\d\d [\d:.]+: |(?=[IWEF]\d{4} [\d:.]+))"
_INFO = re.compile(_LINE + r"I")
_START = re.compile(
    r"All log messages before absl::InitializeLog"
    r"|To enable the following instructions"
    r"|failed call to cuInit"
    r"|Unable to register cu\w+ factory"
    r"|Could not find TensorRT"
    r"|computation placer already registered"
    r"|Cannot dlopen some GPU libraries"
    r"|Skipping registering GPU devices"
    # Of each conversion to TFLite, and of the first interpreter of a process.
    r"|Ignored (?:output_format|drop_control_dependency)\."
    r"|Created TensorFlow Lite XNNPACK delegate for CPU"
)
_lock = threading.Lock()


def is_start_line(line: str) -> bool:
    """Whether a line only reports that TensorFlow starts.

    Example:
        >>> is_start_line("I0000 00:00:1.2  3 cudart_stub.cc:31] Could not find cuda drivers")
        True
        >>> is_start_line("W0000 00:00:1.2  3 allocator.cc:1] Out of memory")
        False
    """
    return bool(_INFO.match(line) or _START.search(line))


@contextmanager
def quiet_start(failures_tell: bool = True) -> Iterator[None]:
    """Drops start lines from stderr, unless ``TF_CPP_MIN_LOG_LEVEL=0`` or the block raises."""
    if os.environ.get(_LEVEL) == "0" or not _lock.acquire(blocking=False):
        yield
        return
    try:
        with _turned_aside(failures_tell):
            yield
    finally:
        _lock.release()


@contextmanager
def quiet_save() -> Iterator[None]:
    """Hides messages of TensorFlow below warnings in this thread, such as temporary paths."""
    if os.environ.get(_LEVEL) == "0":
        yield
        return
    logger, thread = logging.getLogger("tensorflow"), threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.thread != thread

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


@contextmanager
def _turned_aside(failures_tell: bool) -> Iterator[None]:
    try:
        stderr = os.dup(2)
    except OSError:  # a process without stderr
        yield
        return
    tell_all = failures_tell
    with tempfile.TemporaryFile() as written:
        _flush_log()
        os.dup2(written.fileno(), 2)
        try:
            yield
            tell_all = False
        finally:
            _flush_log()
            os.dup2(stderr, 2)
            written.seek(0)
            lines = written.read().decode(errors="replace").splitlines(keepends=True)
            shown = "".join(line for line in lines if tell_all or not is_start_line(line))
            os.write(stderr, shown.encode())
            os.close(stderr)


def _flush_log() -> None:
    with suppress(AttributeError, OSError, ValueError):  # no stderr, or a closed one
        sys.stderr.flush()
