"""Python in a process of its own, on the sources of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def python(
    *arguments: object,
    check: bool = True,
    env: Mapping[str, Any] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; where it fails, so does the test, with what it printed.

    Args:
        arguments: behind ``python``.
        check: whether it must exit with 0.
        env: variables beside those of this process; None removes one.
        options: of `subprocess.run`.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: value for name, value in variables.items() if value is not None},
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 900, **options},
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def printed(code: str, *arguments: object, **options: Any) -> str:
    """What a program prints, in which every warning is an error."""
    return python("-W", "error", "-c", code, *arguments, **options).stdout
