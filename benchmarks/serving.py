"""Calls of an ONNX file in onnxruntime by batch and threads, alone and behind HTTP on 127.0.0.1.

The net is the convolutional one for 8x8 digits.  Alone, throughput is that of one caller.  Behind
HTTP, a server in a process of its own has one session, and a thread for each connection; clients
in this process send a bounded number of calls, each when the answer to its last one is there.
"""

from __future__ import annotations

import http.client
import http.server
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

CALLS, CLIENTS = 400, 4
BATCHES, THREADS = (1, 8, 64), (1, 2)


def tables() -> Iterator[str]:
    """Throughput alone; throughput and latency behind HTTP."""
    import jax

    import pax_export as pax

    net = pax.Sequential(
        pax.Conv2D(1, 32, 3), jax.nn.relu, pax.Conv2D(32, 64, 3), jax.nn.relu,
        lambda x: x.reshape(x.shape[0], -1), pax.Linear(8 * 8 * 64, 10),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/digits.onnx"
        pax.export.to_onnx(net.eval(), path, pax.export.spec("batch, 8, 8, 1"), card=False)
        yield _alone(path)
        yield _behind_http(path)


def session(path: str, threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function of one batch; other threads may call it at once."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    opened = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in opened.get_inputs())
    return lambda x: opened.run(None, {name: x})[0]


def _alone(path: str) -> str:
    lines = ["| batch | threads of onnxruntime | images a second | one call |", "|---|---|---|---|"]
    for batch in BATCHES:
        x = np.random.default_rng(0).normal(size=(batch, 8, 8, 1)).astype(np.float32)
        for threads in THREADS:
            call = session(path, threads)
            seconds = [_timed(call, x) for _ in range(CALLS)][CALLS // 10 :]  # warm by then
            rate = batch * len(seconds) / sum(seconds)
            lines.append(
                f"| {batch} | {threads} | {rate:,.0f} | {1e3 * np.median(seconds):.2f} ms |"
            )
    return f"onnxruntime in Python, {CALLS} calls one after the other\n\n" + "\n".join(lines) + "\n"


def _behind_http(path: str) -> str:
    lines = [
        "| batch | threads | images a second | 50 % | 90 % | 99 % |",
        "|---|---|---|---|---|---|",
    ]
    for batch in BATCHES:
        for threads in THREADS:
            seconds, latencies = _load_test(path, batch, threads)
            rate = batch * len(latencies) / seconds
            shown = (f"{1e3 * each:.1f} ms" for each in np.percentile(latencies, (50, 90, 99)))
            lines.append(f"| {batch} | {threads} | {rate:,.0f} | {' | '.join(shown)} |")
    what = f"Behind HTTP on 127.0.0.1, {CALLS} calls by {CLIENTS} clients: latency of a call"
    return f"{what}\n\n" + "\n".join(lines) + "\n"


def _load_test(path: str, batch: int, threads: int) -> tuple[float, list[float]]:
    """The seconds that all calls took together, and those of each."""
    x = np.random.default_rng(0).normal(size=(batch, 8, 8, 1)).astype(np.float32)
    command = [sys.executable, "-m", "benchmarks.serving", path, str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            with ThreadPoolExecutor(CLIENTS) as pool:
                ask = [_client(port, x) for _ in range(CLIENTS)]
                list(pool.map(lambda call: [call() for _ in range(10)], ask))  # warm
                begin = time.perf_counter()
                each = CALLS // CLIENTS
                found = list(pool.map(lambda call: [_timed(call) for _ in range(each)], ask))
                seconds = time.perf_counter() - begin
        finally:
            server.kill()
    return seconds, [latency for client in found for latency in client]


def _client(port: int, x: np.ndarray) -> Callable[[], np.ndarray]:
    """A function that asks a server, by one connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    file = io.BytesIO()
    np.save(file, x)

    def call() -> np.ndarray:
        connection.request("POST", "/", file.getvalue())
        return np.load(io.BytesIO(connection.getresponse().read()))

    return call


def _timed(call: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


def serve(path: str, threads: int) -> None:
    """Answers arrays in numpy's format, and prints its port first."""
    run = session(path, threads)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # a connection stays open
        wbufsize = -1  # headers and body leave in one packet

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            file = io.BytesIO()
            np.save(file, run(np.load(io.BytesIO(body), allow_pickle=False)))
            self.send_response(200)
            self.send_header("Content-Length", str(file.tell()))
            self.end_headers()
            self.wfile.write(file.getvalue())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
