"""Runs a browser folder in headless Chromium, with numpy and without jax.

A server on 127.0.0.1 serves the folder on a free port. Its page requests the next call and posts
the result of the last one.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations.errors import (
    MissingPackageError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export._foundations.files import atomic, system
from pax_export.export.artifact.report import Report, read_report
from pax_export.export.formats.onnx.run import pack_array, unpack_array
from pax_export.export.formats.onnx.web import javascript_name

#: The environment variable with the path of the browser.
PATH = "CHROME_PATH"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
#: Seconds until the page is open, and until it has answered.
START, ANSWER = 60.0, 300.0
#: How often the process is looked at, and how long it may take to end by itself.
_TURN, _END = 0.25, 3.0

_PAGE = b'<!doctype html><meta charset="utf-8"><script type="module" src="turns.js"></script>'
_TURNS = b"""
fetch("alive").then((each) => each.text()).finally(close);  // which ends with the server
const said = (error) => ({error: `${error?.stack ?? error}`});
const post = async (reply) =>
  (await fetch("turn", {method: "POST", body: JSON.stringify(reply)})).json();
try {
  const {answer} = await import("./answer.js");
  let reply = {ready: navigator.userAgent};
  for (;;) {
    const asked = await post(reply);
    try { reply = {answer: await answer(asked)}; } catch (error) { reply = said(error); }
  }
} catch (error) { await post(said(error)); }
"""

#: Returns the page's answer to a question, as JSON.
Ask = Callable[[Any], Any]


def program() -> str | None:
    """Returns the path of Chromium or Chrome, or None."""
    configured = os.environ.get(PATH)
    names = (configured,) if configured else _NAMES
    return next(filter(None, map(shutil.which, names)), None)


def check(purpose: str) -> str:
    """Returns the path of the browser; raises MissingPackageError without one."""
    found = program()
    if found is None:
        raise MissingPackageError(
            f"{purpose} is tested in Chromium, which is not installed.",
            got=f"{PATH}={os.environ[PATH]}" if PATH in os.environ else f"none of {_NAMES} in PATH",
            write=f"Chromium (apt install chromium), or its path in {PATH}; or validate=False",
        )
    return found


@contextmanager
def opened(
    folder: Path, script: str, flags: Sequence[str] = _FLAGS, seconds: float | None = None
) -> Iterator[Ask]:
    """Opens a page in the browser; yields a function that sends it questions.

    Args:
        folder: the folder to serve.
        script: a module with ``export async function answer(question)``.
        flags: command line flags of the browser.
        seconds: the time limit of an answer; default: `ANSWER`.

    Raises:
        MissingPackageError: no browser is installed.
        UnsupportedOperationError: the script raises an error.
        ValidationError: the browser exits, or does not answer in time.
    """
    command = check("A folder for browsers")
    turns = _Turns()
    secret = secrets.token_hex(16)  # other users of this machine can open the port, too
    handler = functools.partial(_Handler, f"/{secret}/", script.encode(), turns, folder)
    with (
        atomic.scratch() as profile,
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as (server),
    ):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(_TURN,), daemon=True).start()
        url, home = f"http://127.0.0.1:{server.server_port}/{secret}/", str(profile)
        process = subprocess.Popen(
            [command, *flags, f"--user-data-dir={profile / 'user'}", url],
            env=os.environ | _short_temporaries() | {"HOME": home, "XDG_CONFIG_HOME": home},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            turns.wait(process, START)
            yield functools.partial(turns.ask, process, seconds or ANSWER)
        finally:
            _kill(process)
            turns.questions.put(None)
            server.shutdown()


def _short_temporaries() -> dict[str, str]:
    """Chromium ends where the path of its socket below TMPDIR has more than 107 bytes."""
    return {"TMPDIR": "/tmp"} if len(os.fsencode(tempfile.gettempdir())) > 60 else {}


class _Turns:
    """Questions to a page and its answers, one after the other."""

    def __init__(self) -> None:
        self.questions: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def ask(self, process: subprocess.Popen[bytes], seconds: float, question: object) -> Any:
        self.questions.put(question)
        return self.wait(process, seconds)

    def wait(self, process: subprocess.Popen[bytes], seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                reply = self.answers.get(timeout=_TURN)
                break
            except queue.Empty:
                if process.poll() is not None:
                    raise _failed(f"it ended with exit code {process.returncode}") from None
                if time.monotonic() > end:
                    raise _failed(f"no answer within {seconds:g} s") from None
        if "lost" in reply:
            raise _failed("the page crashed or was closed")
        if "error" in reply:
            raise UnsupportedOperationError(
                "The browser does not run this model.",
                where="onnxruntime-web in Chromium",
                got=reply["error"][:1500],
                write="another form of the operation; or validate=False to write the file anyway",
            )
        return reply.get("answer", reply.get("ready"))


def _failed(problem: str) -> ValidationError:
    return ValidationError(
        "The browser returned no result.",
        where="onnxruntime-web in Chromium",
        got=problem,
        write="a smaller model or smaller examples, if memory or time is the reason; or "
        "validate=False to write without a test",
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the browser and its children, which are the processes of its session."""
    with suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_END)
    system.kill_session(process)
    process.wait()


class _Handler(SimpleHTTPRequestHandler):
    """Serves the folder, and below a secret path the page and its turns."""

    def __init__(self, secret: str, script: bytes, turns: _Turns, folder: Path, *args: Any):
        self.secret, self.turns = secret, turns
        kinds = {".js": "text/javascript", ".wasm": "application/wasm"}
        self.extensions_map = {**SimpleHTTPRequestHandler.extensions_map, **kinds}
        self.pages = {
            "": ("text/html", _PAGE),
            "turns.js": ("text/javascript", _TURNS),
            "answer.js": ("text/javascript", script),
        }
        super().__init__(*args, directory=str(folder))

    def do_GET(self) -> None:
        name = self.path.removeprefix(self.secret)
        if name == self.path:
            super().do_GET()
        elif name == "alive":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                self.rfile.read(1)  # until the page is gone
            self.turns.answers.put({"lost": True})
        else:
            self._send(*self.pages.get(name, ("text/plain", b"")))

    def do_POST(self) -> None:
        if self.path != self.secret + "turn":
            self.send_error(404)
            return
        size = int(self.headers["Content-Length"])
        self.turns.answers.put(json.loads(self.rfile.read(size)))
        question = self.turns.questions.get()
        if question is not None:
            self._send("application/json", json.dumps(question).encode())

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses the log of requests."""


# --- Runs a browser folder in headless Chromium, with numpy and without jax ---


Arrays = dict[str, np.ndarray]


def page_file(name: str) -> str:
    return Path(__file__).with_name("page").joinpath(name).read_text(encoding="utf-8")


def model_file(key: str, keys: Sequence[str]) -> str:
    """The name of the file of a signature.

    Example:
        >>> keys = ["encode", "Encode"]
        >>> [model_file(key, keys) for key in keys], model_file("encode", ["encode"])
        (['encode.onnx', 'model_1.onnx'], 'model.onnx')
    """
    if len(keys) == 1:
        return "model.onnx"
    plain = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z]+)*", key)  # and no model_1
    return f"{key}.onnx" if plain else f"model_{list(keys).index(key)}.onnx"


def run(path: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    """Returns the module's results in the browser, call by call."""
    report = read_report(path)
    with opened(Path(path), page_file("answer.js")) as ask:
        return [_call(ask, report, case["signature"], case["inputs"]) for case in cases]


def _call(ask: Ask, report: Report, key: str, inputs: Arrays) -> Arrays:
    arrays = {name: pack_array(value) for name, value in inputs.items()}
    found = ask({"key": javascript_name(key, report.signatures), "inputs": arrays})
    return {
        each.name: unpack_array(each.dtype, shape, text)
        for each in report.signatures[key].outputs
        for shape, text in [found[each.name]]
    }
