"""Starts and stops programs of several processes together."""

from __future__ import annotations

import atexit
import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError, ProcessesError
from pax_export._jax import devices_are_known, join_processes
from pax_export.sharding._heartbeat import Heartbeat
from pax_export.sharding._rendezvous import await_processes

_WRITE = 'processes("host:1234", count=2, index=0), and index=1 in the other process'
_OF_COLLECTIVES = ("Gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
_EXIT = 30  # seconds in which an interpreter that failed must be gone


@contextmanager
def processes(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    start_within: float = 300,
    lost_after: float = 100,
) -> Iterator[None]:
    """Context manager that joins this process to others that run the same program.

    It is `jax.distributed.initialize` and `shutdown` with an exit for each kind of failure.
    In the block, `jax.devices()` are those of all processes.  If a process raises, the others
    print its error and exit with code 75.  If one is killed, or its machine is lost, the others
    notice after ``lost_after`` seconds (for process 0 immediately), print which one it was, and
    exit with code 75, too.  The block ends when all processes have reached its end.

    Args:
        coordinator: ``"host:port"`` of process 0, with a port that is free there.
        count: the number of processes.  With 1 the block runs without others.
        index: the index of this process, from 0.
        start_within: the time for all processes to start, in seconds.
        lost_after: the time without a heartbeat until a process is lost, in seconds.

    Without ``coordinator``, ``count`` and ``index``, jax takes them from the cluster that
    started the process: SLURM, Open MPI, GKE, Cloud TPU.

    Raises:
        ProcessesError: (a RuntimeError) a process did not start; jax detects no cluster; or
            devices or arrays of jax were used before.
        InvalidArgumentError: (a ValueError) the arguments are inconsistent.

    Example:
        >>> import jax, pax_export as pax
        >>> with pax.sharding.processes(count=1):  # "host:1234", 2, 0 for the first of two
        ...     jax.process_count()
        1

    """
    seconds = {"start_within": start_within, "lost_after": lost_after}
    _require_fitting(coordinator, count, index, seconds)
    if count == 1:
        yield
        return
    heartbeat = _join_others(coordinator, count, index, start_within, lost_after)
    if heartbeat is None:
        with _left_to_jax():
            yield
        return
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            heartbeat.finish()
        else:
            if _is_broken_connection(error):
                heartbeat.await_news(error)
            heartbeat.fail(error)
            atexit.register(_exit_in_time)
        raise
    heartbeat.finish()


def _require_fitting(coordinator: object, count: Any, index: Any, seconds: dict[str, Any]) -> None:
    """Raises where the arguments of `processes` cannot be meant."""
    for name, value in {"count": count, "index": index}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise InvalidArgumentTypeError(
                f"{name} must be an integer.",
                where="processes",
                got=f"{type(value).__name__}: {value!r}",
                write=_WRITE,
            )
    given = {"coordinator": coordinator, "count": count, "index": index}
    given = {name: value for name, value in given.items() if value is not None}
    problem = None
    if count is not None and count < 1:
        problem = "There is at least one process."
    elif count is not None and index is not None and not 0 <= index < count:
        problem = f"{count} processes are numbered from 0 to {count - 1}."
    elif count != 1 and len(given) in (1, 2):
        problem = "A process needs all of coordinator, count and index, or none of them."
    elif coordinator is not None and not str(coordinator).rpartition(":")[2].isdigit():
        problem = "The coordinator is the host of process 0 and a port that is free there."
    for name, value in seconds.items():
        if problem is None and (not isinstance(value, (int, float)) or not value >= 1):
            problem = f"{name} is a number of seconds, 1 or more."
    if problem is not None:
        text = ", ".join([f"{name}={value!r}" for name, value in (given | seconds).items()])
        raise InvalidArgumentError(problem, where="processes", got=text, write=_WRITE)


def _join_others(
    coordinator: str | None,
    count: int | None,
    index: int | None,
    start_within: float,
    lost_after: float,
) -> Heartbeat | None:
    """Starts the heartbeat with the other processes; None if jax does not support it."""
    if devices_are_known() or jax.distributed.is_initialized():
        raise _late_error()
    if coordinator is not None and count is not None and index is not None:
        await_processes(coordinator, count, index, start_within)
    try:
        joined = join_processes(
            coordinator, count, index, within=start_within, lost_after=lost_after
        )
    except (RuntimeError, ValueError) as error:
        if "before any JAX" in str(error):
            raise _late_error() from error
        raise ProcessesError(
            "This process could not join the others.",
            where=f"process {index} of {count}" if coordinator else None,
            got=str(error).splitlines()[0],
            write='processes("host:1234", count=2, index=0), if jax detects no cluster; or count=1',
        ) from error
    if joined is None:
        return None
    heartbeat = Heartbeat(*joined, lost_after)
    heartbeat.begin()
    return heartbeat


def _late_error() -> ProcessesError:
    return ProcessesError(
        "Processes must join before jax is used.",
        got="jax has its devices already: an array, a model or jax.devices() came first",
        write="with pax.sharding.processes(...) around all of the program that uses jax",
    )


@contextmanager
def _left_to_jax() -> Iterator[None]:
    """Runs the block if processes cannot exchange messages."""
    try:
        yield
    except BaseException:
        atexit.register(_exit_in_time)
        raise
    jax.distributed.shutdown()


def _is_broken_connection(error: BaseException | None) -> bool:
    """True for the errors that a collective raises when a peer is lost."""
    while error is not None:
        if any(word in str(error) for word in _OF_COLLECTIVES):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit_in_time() -> None:
    """Ends the interpreter even if results that others should have sent are waited for."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(_EXIT, exit=True, file=sys.__stderr__)
