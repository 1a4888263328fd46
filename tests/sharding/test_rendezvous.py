"""The rendezvous before processes are joined; here the processes are threads."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pax_export.errors import ProcessesError
from pax_export.sharding._rendezvous import await_processes
from tests.refusals import fields
from tests.sharding.many import free_port


def outcome(coordinator, count, index, within):
    try:
        return await_processes(coordinator, count, index, within)
    except ProcessesError as error:
        return error


def outcomes(*guests, within=30.0, port=None):
    """What becomes of those who come, each with a count and an index."""
    coordinator = f"localhost:{port or free_port()}"
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(outcome, coordinator, *guest, within) for guest in guests]
        return [each.result() for each in found]


def test_all_come():
    assert outcomes((3, 2), (3, 0), (3, 1)) == [None, None, None]


def test_the_port_is_free_afterwards():
    port = free_port()
    assert outcomes((2, 0), (2, 1), port=port) == [None, None]
    assert outcomes((2, 0), (2, 1), port=port) == [None, None]


def test_some_do_not_come():
    came = outcomes((5, 0), (5, 3), within=2.0)
    for error, index in zip(came, (0, 3)):
        assert error == fields(where=f"process {index} of 5")
        assert "2 of 5" in str(error) and "1, 2, 4" in str(error)


def test_the_coordinator_does_not_come():
    (error,) = outcomes((2, 1), within=0.5)
    assert error == fields(where="process 1 of 2")
    assert error.got.endswith(" within 0.5 s: Connection refused")


def test_two_come_with_one_number():
    came = outcomes((3, 0), (3, 1), (3, 1))
    assert all("process 1 of 3" in str(error) for error in came)


def test_processes_with_another_count():
    came = outcomes((3, 0), (2, 1))
    assert all("3 processes" in str(error) and "process 1" in str(error) for error in came)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        (error,) = outcomes((2, 0), port=other.getsockname()[1])
    assert error.got.endswith(": Address already in use")


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n", b"", b"pax_export x 2\n"])
def test_other_connections_are_ignored(words):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        zero = pool.submit(outcome, f"localhost:{port}", 2, 0, 30.0)
        while True:
            try:
                stranger = socket.create_connection(("localhost", port))
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        with stranger:
            stranger.sendall(words)
        assert outcome(f"localhost:{port}", 2, 1, 30.0) is None
        assert zero.result() is None


def test_a_coordinator_that_is_something_else():
    with socket.create_server(("localhost", 0)) as server, ThreadPoolExecutor() as pool:
        port = server.getsockname()[1]
        found = pool.submit(outcome, f"localhost:{port}", 2, 1, 30.0)
        guest, _ = server.accept()
        with guest:
            guest.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            guest.recv(100)
        assert f"localhost:{port}" in str(found.result())
