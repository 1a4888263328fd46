"""Two processes that work together: how they begin, and every way in which one ends."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import jax
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError, ProcessesError
from tests.refusals import refused
from tests.sharding.many import Process, free_port

PROGRAM = Path(__file__).with_name("joined.py")


LOST_AFTER = 12


def two(stack, *ends):
    """Two processes with two devices each that end so; killed with the stack."""
    port = free_port()
    commands = [[PROGRAM, port, 2, index, LOST_AFTER, end] for index, end in enumerate(ends)]
    return [stack.enter_context(Process(command, devices=2)) for command in commands]


def name(index, process):
    return f"process {index} of 2 ({socket.gethostname()}, pid {process.pid})"


def message(what, got, index, process):
    """What a process prints last where another one is lost."""
    return (
        f"pax_export: {what}\n"
        f"  where: {name(index, process)}\n"
        f"  got: {got}\n"
        "  write: start all processes again: they go on from the last checkpoint, where the "
        "program saves some (pax.checkpoint)\n"
    )


# One test: what takes time is waiting, and all pairs can do that at once.
def test_every_way_to_end():
    with contextlib.ExitStack() as stack:
        late = [two(stack, "is late", "exits"), two(stack, "", "is late")]
        raising = {0: two(stack, "raises", "goes on"), 1: two(stack, "goes on", "raises")}
        frozen = two(stack, "goes on", "stops")
        lost = [two(stack, "is killed", "goes on"), two(stack, "stops", "goes on")]

        for pair in late:
            the_block_ends_when_all_are_at_its_end(*pair)
        assert "left\n" not in late[0][1].out  # it has called sys.exit
        for index, pair in raising.items():
            the_other_is_told_why(index, pair)
        the_other_misses_it(*frozen)
        for pair in lost:
            the_other_misses_its_coordinator(*pair)


def the_block_ends_when_all_are_at_its_end(zero, one):
    assert (zero.end(), one.end()) == (0, 0), zero.err + one.err
    for process in (zero, one):
        assert "sum 6\n" in process.out  # 1 on each device of the first, 2 of the second
        assert "pax_export:" not in process.err
    assert "left\n" in zero.out


def the_other_is_told_why(index, pair):
    failed, other = pair[index], pair[1 - index]
    assert other.end() == os.EX_TEMPFAIL, other.err
    what = f"{name(index, failed)} stopped."
    assert other.err.endswith(message(what, "ValueError: the data", 1 - index, other))
    assert failed.end() == 1
    assert failed.err.endswith("ValueError: the data\nis gone\n")  # and no word of C++


def the_other_misses_it(other, frozen):
    assert other.end() == os.EX_TEMPFAIL, other.err
    what = f"{name(1, frozen)} is lost."
    assert other.err.endswith(message(what, f"no sign of life for {LOST_AFTER} s", 0, other))
    assert frozen.is_running


def the_other_misses_its_coordinator(coordinator, other):
    assert other.end() == os.EX_TEMPFAIL, other.err
    what = f"{name(0, coordinator)} is lost, which coordinates the others."
    assert f"pax_export: {what}\n" in other.err  # lines of jax's runtime may follow
    assert "write: start all processes again" in other.err


def test_one_process_joins_nothing():
    with pax.sharding.processes(count=1):
        assert not jax.distributed.is_initialized()
    with pytest.raises(KeyError), pax.sharding.processes(count=1, index=0):
        raise KeyError("as it is")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"count": 2}, ["coordinator, count and index"]),
        ({"index": 0}, ["coordinator, count and index"]),
        ({"coordinator": "a:1"}, ["coordinator, count and index"]),
        ({"count": 0}, ["process"]),
        ({"coordinator": "a:1", "count": 2, "index": 2}, ["from 0 to 1"]),
        ({"coordinator": "a", "count": 2, "index": 0}, ["port"]),
        ({"count": 1, "start_within": 0}, ["start_within"]),
    ],
)
def test_invalid_arguments_are_refused(arguments, names):
    with pytest.raises(InvalidArgumentError) as caught, pax.sharding.processes(**arguments):
        pass
    error = caught.value
    assert all(name in error.what for name in names)
    assert error.got.startswith(", ".join([f"{k}={v!r}" for k, v in arguments.items()][:3]))
    assert error.write.startswith('processes("host:1234", count=2, index=0)')


def test_invalid_counts_are_refused():
    with pytest.raises(InvalidArgumentTypeError):
        with pax.sharding.processes("host:1", "2", 0):
            pass


def test_processes_join_before_all_else():
    jax.devices()
    with refused(ProcessesError, "jax has its devices already"):
        with pax.sharding.processes("localhost:1234", 2, 0):
            pass


def test_two_processes():
    with contextlib.ExitStack() as stack:
        commands = [
            ["-m", "tests.sharding.two_processes", rank, f"127.0.0.1:{port}"]
            for port in [free_port()] for rank in range(2)
        ]  # fmt: skip
        started = [stack.enter_context(Process(command, devices=2)) for command in commands]
        assert [process.end() for process in started] == [0, 0], started[0].err + started[1].err
        assert all("all is well" in process.out for process in started)
