"""Two processes that work together compute what one does."""

from __future__ import annotations

import contextlib

from tests.sharding.many import VARIABLES, Process, free_port
from tests.warm import Warm

IMPORTS = ["optax", "pax_export.optim", "pax_export.sharding", "tests.closeness"]


def test_two_processes_compute_bit_for_bit_what_one_does():
    program = ["-m", "tests.sharding.two_processes"]
    with contextlib.ExitStack() as stack:
        warm = stack.enter_context(contextlib.closing(Warm(IMPORTS, VARIABLES)))
        port = free_port()
        commands = [[*program, 2, rank, f"127.0.0.1:{port}"] for rank in range(2)]
        two = [stack.enter_context(Process(command, 2, warm)) for command in commands]
        one = stack.enter_context(Process([*program, 1, 0, ""], 4, warm))
        for process in (one, *two):
            assert process.end() == 0, process.err
        (expected,) = one.out.splitlines()[-1:]
        assert "all is well" in expected
        assert [process.out.splitlines()[-1] for process in two] == [expected] * 2
