"""Heartbeats between processes: detect and report lost ones.

A process whose peer is lost waits in a collective forever. So threads listen for failures, poll all
processes, and check process 0, which runs jax's coordination service; each ends this process with
an error that names the lost one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from pax_export._errors import ProcessesError
from pax_export.sharding._rendezvous import address_of

#: The exit code of a process that stops because another one is lost: "try again".
LOST = os.EX_TEMPFAIL

_HERE, _NEWS, _DONE = "pax_export/here", "pax_export/news", "pax_export/done"
_START, _END = "pax_export start", "pax_export end"

_EVERY = 1.0  # seconds between two roll calls
_FAREWELL = 10.0  # seconds to report to the others before the exit
_LONG = 2**31 - 1  # milliseconds


class Heartbeat:
    """The heartbeat of one process, and the threads that watch the others."""

    def __init__(self, client: Any, coordinator: str, count: int, index: int, lost_after: float):
        """Takes the client of jax's coordination service, which is at ``"host:port"``."""
        self._client, self._count, self._index = client, count, index
        self._address = address_of(coordinator)
        self._lost_after = lost_after
        self._names: dict[int, str] = {}
        self._ended = threading.Event()
        self._stopping = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Begins, when all are there."""
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        self._client.key_value_set(f"{_HERE}/{self._index}", name)
        self._client.wait_at_barrier(_START, int(self._lost_after * 1000))
        self._names = self._read(_HERE)
        look_outs = [self._listen, self._call_the_roll]
        if self._index:
            _hold_aborts()
            self._answered = time.monotonic()
            look_outs += [self._ask, self._knock]
        for look_out in look_outs:
            self._threads.append(threading.Thread(target=look_out, daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """Waits until all are done, and ends."""
        name = f"process {self._index} of {self._count}"
        text = f"pax_export: {name} is done, and waits for the others to be.\n"
        notice = threading.Timer(self._lost_after, _print_now, [text])
        notice.daemon = True
        notice.start()
        try:
            self._client.wait_at_barrier(_END, _LONG)
        except jax.errors.JaxRuntimeError:
            # A process is lost; polling finds out which.
            time.sleep(self._lost_after + _FAREWELL)
            raise
        finally:
            notice.cancel()
        self._client.key_value_set(f"{_DONE}/{self._index}", "")
        self._tell("")
        self._end()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process stops, and ends."""
        words = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0][:500]
        try:
            self._tell(f"{self._index}\n{words}")
            self._end()
        except jax.errors.JaxRuntimeError:
            pass  # `error` is reported instead

    def await_news(self, error: BaseException) -> None:
        """After a broken connection, waits until the threads end the process with a reason."""
        traceback.print_exception(error)
        sys.stderr.flush()
        time.sleep(self._lost_after + 5 * _EVERY)

    def _tell(self, news: str) -> None:
        """Sends a message to all processes, unless one was sent before."""
        try:
            self._client.key_value_set(f"{_NEWS}/0", news)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _end(self) -> None:
        self._ended.set()
        self._leave()
        for thread in self._threads:
            thread.join(_FAREWELL)

    def _leave(self) -> None:
        """Leaves without being reported as lost: process 0, which all need, last."""
        if self._index == 0:
            _in_time(self._await_the_others)
        _in_time(jax.distributed.shutdown)

    def _await_the_others(self) -> None:
        # This waits for the calls of all that are still there, or for their leaving.
        while len(self._client.get_live_nodes(list(range(self._count)))) > 1:
            time.sleep(0.05)

    def _listen(self) -> None:
        """A thread: waits for news."""
        while True:
            try:
                news = self._client.blocking_key_value_get(f"{_NEWS}/0", _LONG)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return self._without_coordinator(str(error))
            return self._heard(news)

    def _heard(self, news: str) -> None:
        index, _, words = news.partition("\n")
        if words and int(index) != self._index:
            self._stop(f"{self._name(int(index))} stopped.", words)

    def _call_the_roll(self) -> None:
        """A thread: detects processes that do not answer."""
        while not self._ended.wait(_EVERY):
            try:
                alive = self._client.get_live_nodes(list(range(self._count)))
                done = self._read(_DONE) if len(alive) < self._count else {}
                news = self._read(_NEWS) if len(alive) < self._count else {}
            except jax.errors.JaxRuntimeError as error:
                return self._without_coordinator(str(error))
            if news:
                return self._heard(news[0])
            lost = [i for i in range(self._count) if i not in alive and i not in done]
            if lost:
                names = ", ".join([self._name(index) for index in lost])
                self._stop(
                    f"{names} {'is' if len(lost) == 1 else 'are'} lost.",
                    f"no sign of life for {self._lost_after:g} s",
                )

    def _ask(self) -> None:
        """A thread: polls process 0, independently of other processes."""
        while not self._ended.wait(_EVERY):
            try:
                self._read(_NEWS)
            except jax.errors.JaxRuntimeError as error:
                return self._without_coordinator(str(error))
            self._answered = time.monotonic()

    def _knock(self) -> None:
        """The thread that checks process 0; if it dies, jax's runtime aborts this one or hangs."""
        while not self._ended.wait(_EVERY):
            try:
                socket.create_connection(self._address, timeout=_EVERY).close()
            except ConnectionRefusedError as error:
                return self._without_coordinator(str(error))
            except OSError:
                pass  # a busy network
            # After jax's own timeout, and before `_hold_aborts` ends.
            if time.monotonic() - self._answered > self._lost_after + 3 * _EVERY:
                self._without_coordinator(f"no answer for {self._lost_after:g} s")

    def _without_coordinator(self, reason: str) -> None:
        if not self._ended.is_set():
            what = f"{self._name(0)} is lost, which coordinates the others."
            self._stop(what, reason.splitlines()[0].partition(";")[0], leave=False)

    def _stop(self, what: str, got: str, leave: bool = True) -> NoReturn:
        """Ends this process, even if its main thread is blocked."""
        self._stopping.acquire()  # never released: one of the threads speaks
        error = ProcessesError(
            what,
            where=self._name(self._index),
            got=got,
            write="start all processes again: they go on from the last checkpoint, where the "
            "program saves some (pax.checkpoint)",
        )
        sys.stdout.flush()
        _print_now(f"\npax_export: {error}\n")
        self._ended.set()
        if leave:
            self._leave()
        os._exit(LOST)

    def _read(self, folder: str) -> dict[int, str]:
        entries = self._client.key_value_dir_get(folder)
        return {int(key.rsplit("/", 1)[1]): value for key, value in entries}

    def _name(self, index: int) -> str:
        return f"process {index} of {self._count} ({self._names[index]})"


def _print_now(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _in_time(action: Callable[[], object]) -> None:
    """Tries something that may hang where others are lost."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(_FAREWELL)


def _hold_aborts() -> None:
    """Delays an abort by six seconds, in which `_knock` reports and ends the process.

    Python's handlers would run in the main thread only, which waits in a collective. C's
    `sleep` needs no thread: as a handler, it sleeps for the number of the signal.
    """
    c: Any = ctypes.CDLL(None)
    c.signal(ctypes.c_int(signal.SIGABRT), c.sleep)
