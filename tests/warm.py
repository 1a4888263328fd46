"""Programs as forks of a process that has imported already what they import, a second or more each.

A fork ends as any program does: at the top of its interpreter, with what runs at exit.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Warm:
    """A process that has imported some modules, and becomes programs.

    Args:
        modules: what it imports; nothing that starts threads.
        variables: of the environment, beside those of this process; jax reads them once.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]):
        self._door, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.warm import serve; serve({list(modules)})()"],
            env={**os.environ, **variables, "PYTHONPATH": str(ROOT)}, stdin=theirs, cwd=ROOT,
        )  # fmt: skip
        theirs.close()

    def start(
        self, command: Sequence[object], out: int, err: int, cwd: object = None, devices: int = 0
    ) -> Fork:
        """Starts what would stand behind ``python``: a file or ``-m`` and a module, and arguments.

        Args:
            command: the words; or ``-c`` and the lines of a program.
            out: the descriptor of the file for what it prints.
            err: of the file for its errors.
            cwd: the folder that it runs in; None is that of this process.
            devices: how many jax finds; 0 is what the environment says.
        """
        ended, tell = os.pipe()
        request = [[str(word) for word in command], str(cwd or Path.cwd()), devices]
        socket.send_fds(self._door, [json.dumps(request).encode()], [out, err, tell])
        os.close(tell)
        return Fork(ended)

    def close(self) -> None:
        """Ends the process; programs that it became go on."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._process.wait()


class Fork:
    """A program; its methods are those of `subprocess.Popen`."""

    def __init__(self, ended: int):
        self._ended = os.fdopen(ended)
        self.pid = int(self._ended.readline())
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended; less than zero after a signal."""
        if self._code is None and select.select([self._ended], [], [], 0)[0]:
            with self._ended:
                self._code = int(self._ended.readline())
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        if self._code is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- in the other process -----------------------------------------------------------------


def serve(modules: Sequence[str]) -> Callable[[], Any]:
    """Imports, and forks when asked to; gives what is to be run in the end, in each process."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what a fork does not look through it need not copy
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            request, (*descriptors,), _, _ = socket.recv_fds(requests, 1 << 16, 3)
            if not request:
                return lambda: None
            if not os.fork():
                requests.close()
                return _watched(*descriptors, *json.loads(request))
            for descriptor in descriptors:
                os.close(descriptor)


def _watched(
    out: int, err: int, tell: int, command: list[str], cwd: str, devices: int
) -> Callable[[], Any]:
    """Forks once more: one process is the program, the other tells its number and its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if not program:
        os.close(tell)
        return lambda: _become(command, out, err, cwd, devices)
    os.write(tell, f"{program}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os.write(tell, f"{code}\n".encode())
    os._exit(0)


def _become(command: list[str], out: int, err: int, cwd: str, devices: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for given, number in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(given, number)
        os.close(given)
    os.chdir(cwd)
    if devices:
        sys.modules["jax"].config.update("jax_num_cpu_devices", devices)
    main = vars(sys.modules["__main__"])
    if command[0] == "-m":
        sys.argv[:], sys.path[0] = command[1:], cwd
        # What Python itself calls: the module is `__main__`, and stays it to the end.
        runpy._run_module_as_main(command[1])
    elif command[0] == "-c":
        sys.argv[:], sys.path[0] = command[:1], ""
        exec(compile(command[1], "<string>", "exec", dont_inherit=True), main)
    else:
        sys.argv[:], sys.path[0] = command, str(Path(command[0]).parent)
        code = compile(Path(command[0]).read_bytes(), command[0], "exec", dont_inherit=True)
        exec(code, main | {"__file__": command[0]})
