"""Placing, training and disagreement in two processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def test_two_processes():
    address = free_address()
    command = [sys.executable, "-m", "tests.sharding.two_processes"]
    started = [
        subprocess.Popen(
            [*command, str(rank), address],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(texts)
    assert all("all is well" in text for text in texts)
