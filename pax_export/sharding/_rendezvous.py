"""Waits for all processes before JAX connects them, and names missing ones.

Process 0 listens at the port of jax's service, where the others send their numbers.
"""

from __future__ import annotations

import os
import socket
import time

from pax_export._errors import ProcessesError

_HELLO, _GO, _NO = "pax_export", "go", "no"
_PATIENCE = 10.0  # seconds more than process 0 waits


def address_of(coordinator: str) -> tuple[str, int]:
    """Host and port of ``"host:port"``."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def await_processes(coordinator: str, count: int, index: int, within: float) -> None:
    """Waits some seconds until all processes are there, this one among them."""
    if index == 0:
        _await_the_others(coordinator, count, within)
    else:
        _attend_process_0(coordinator, count, index, within)


def _await_the_others(coordinator: str, count: int, within: float) -> None:
    end, guests, problem = time.monotonic() + within, dict[int, socket.socket](), None
    with _open_port(coordinator, count) as door:  # jax's service needs the port afterwards
        while problem is None and len(guests) < count - 1:
            guest, words = _next_guest(door, end)
            if guest is None:
                problem = _explain_absence(guests, count, within)
            else:
                problem = _problem_of_guest(words, count, guests)
                guests[int(words[1]) if problem is None else -1] = guest
    for guest in guests.values():
        try:
            guest.sendall(f"{_GO if problem is None else f'{_NO} {problem}'}\n".encode())
            guest.close()
        except OSError:
            pass  # it is gone; jax's runtime will miss it
    if problem is not None:
        raise _refusal_error(problem, count, 0)


def _open_port(coordinator: str, count: int) -> socket.socket:
    port = address_of(coordinator)[1]
    try:
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(("", port), family=family, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ProcessesError(
            "Process 0, which coordinates the others, cannot have its port.",
            where=f"process 0 of {count}",
            got=f"{coordinator}: {os.strerror(error.errno or 0)}",
            write="a port that is free on the host of process 0, in coordinator=",
        ) from error


def _next_guest(door: socket.socket, end: float) -> tuple[socket.socket | None, list[str]]:
    """The next process to come, and its words; None when the time is up."""
    while (left := end - time.monotonic()) > 0:
        door.settimeout(left)
        try:
            guest, _ = door.accept()
        except TimeoutError:
            break
        guest.settimeout(_PATIENCE)
        words = _read_line(guest).split()
        if len(words) == 3 and words[0] == _HELLO and words[1].isdigit():
            return guest, words
        guest.close()  # whoever it was
    return None, []


def _problem_of_guest(words: list[str], count: int, guests: dict[int, socket.socket]) -> str | None:
    """Why this one cannot stay."""
    index = int(words[1])
    if words[2] != str(count):
        return f"Process 0 counts {count} processes, and process {index} counts {words[2]}."
    if index in guests or index == 0:
        return f"Two processes came as process {index} of {count}."
    return None


def _explain_absence(guests: dict[int, socket.socket], count: int, within: float) -> str:
    absent = [str(index) for index in range(1, count) if index not in guests]
    shown = ", ".join(absent[:20]) + (", ..." if len(absent) > 20 else "")
    number = f"{len(guests) + 1} of {count} processes came within {within:g} s"
    return f"Only {number}; not process {shown}."


def _attend_process_0(coordinator: str, count: int, index: int, within: float) -> None:
    address, end = address_of(coordinator), time.monotonic() + within
    while True:
        try:
            seat = socket.create_connection(address, timeout=max(end - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise ProcessesError(
                    f"Process 0 of {count}, which coordinates the others, did not come.",
                    where=f"process {index} of {count}",
                    got=f"{coordinator} within {within:g} s: {error.strerror or error}",
                    write="the host of process 0 in coordinator=, and a port of it that "
                    "this machine may reach",
                ) from error
            time.sleep(0.2)
    with seat:
        seat.settimeout(within + _PATIENCE)
        try:
            seat.sendall(f"{_HELLO} {index} {count}\n".encode())
        except OSError:
            pass  # it does not listen, and will not answer
        answer, _, problem = _read_line(seat).partition(" ")
    if answer != _GO:
        known = answer == _NO and problem
        raise _refusal_error(problem if known else f"{coordinator} is not process 0.", count, index)


def _refusal_error(problem: str, count: int, index: int) -> ProcessesError:
    return ProcessesError(
        problem,
        where=f"process {index} of {count}",
        write=f"start {count} processes with one coordinator= and one count=, each with "
        f"an index= of its own from 0 to {count - 1}",
    )


def _read_line(connection: socket.socket) -> str:
    """Reads a line from a connection; returns an empty one on errors."""
    said = b""
    try:
        while b"\n" not in said and len(said) < 2000:
            part = connection.recv(2000)
            if not part:
                break
            said += part
    except OSError:
        return ""
    return said.partition(b"\n")[0].decode(errors="replace")
