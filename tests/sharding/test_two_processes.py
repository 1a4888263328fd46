"""Placing, training and disagreement in two processes on this machine."""

from __future__ import annotations

import contextlib

from tests.sharding.many import Process, free_port


def test_two_processes():
    with contextlib.ExitStack() as stack:
        commands = [
            ["-m", "tests.sharding.two_processes", rank, f"127.0.0.1:{port}"]
            for port in [free_port()] for rank in range(2)
        ]  # fmt: skip
        started = [stack.enter_context(Process(command, devices=2)) for command in commands]
        assert [process.end() for process in started] == [0, 0], started[0].err + started[1].err
        assert all("all is well" in process.out for process in started)
