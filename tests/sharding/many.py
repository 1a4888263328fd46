"""Programs that run in several processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from tests.warm import Warm

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 300  # seconds; generous, for a busy machine


def free_port() -> int:
    """A port that nobody uses.

    The kernel hands these out in turn, so that nobody else gets this one soon.
    """
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


# The numbers hardly depend on how well XLA compiles, and it takes less time.
VARIABLES = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


class Process:
    """A process, and what it prints; killed where a test leaves it.

    Args:
        command: what stands behind ``python``.
        devices: how many it has.
        warm: what becomes it, with VARIABLES; None is a new interpreter.
    """

    def __init__(self, command: list[object], devices: int, warm: Warm | None = None):
        # Files cannot fill up, as pipes would that nobody reads.
        self._out, self._err = _file(), _file()
        if warm is not None:
            files = self._out.fileno(), self._err.fileno()
            self._process = warm.start(command, *files, devices=devices)
            return
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=self._out, stderr=self._err,
            env={**os.environ, **VARIABLES, "JAX_NUM_CPU_DEVICES": str(devices)},
        )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._err.close()

    def end(self) -> int:
        """Waits for its end; gives the exit code."""
        return self._process.wait(PATIENCE)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return _read(self._out)

    @property
    def err(self) -> str:
        return _read(self._err)


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
