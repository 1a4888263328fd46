"""Files for onnxruntime, LiteRT and TensorFlow: calls of them, beside those of their peers.

Files of ONNX beside those that torch.onnx writes, of TFLite beside those of Keras' converter,
SavedModels beside `jax.jit`.  The rows of ONNX need torch, which no environment of tox installs:
``.tox/bench/bin/python -m pip install torch`` after ``tox -e bench --notest``.

Calls by one thread are in processor time, so that other programs may use the cores; calls by two
are not.  XLA has its threads from the start, so SavedModels are in the processor time of all
threads, and then in time.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table

Call = Callable[[], Any]


def tables() -> Iterator[str]:
    """Each net with a batch of any size, and of one, by one thread and by two."""
    from benchmarks.file_nets import NETS

    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        yield "ONNX: torch is not installed\n"
    for name, make in NETS.items():
        model, inputs, x = make()
        static = pax.export.spec(", ".join(map(str, x.shape)))
        specs = {"pax_export": inputs, "pax_export, static": static}
        with tempfile.TemporaryDirectory() as folder:
            if has_torch:
                yield from _beside_torch(name, folder, model, specs, x)
            yield from _beside_keras(name, folder, model, specs, x)
            yield from _beside_jax(name, folder, model, specs, x)
    if has_torch:
        yield from _language_model()


def _written(folder: str, form: str, model: Any, specs: Any) -> dict[str, str]:
    paths = {label: f"{folder}/{label}.{form}" for label in specs}
    for label, spec in specs.items():
        write = getattr(pax.export, f"to_{form}")
        write(model, paths[label], spec, validate=False, card=False)
    return paths


def _beside_torch(name: str, folder: str, model: Any, specs: Any, x: np.ndarray) -> Iterator[str]:
    from benchmarks import torch_nets

    path = f"{folder}/torch.onnx"
    files = {"torch.onnx": (path, [torch_nets.write(name, path, x)])}
    for label, path in _written(folder, "onnx", model, specs).items():
        files[label] = path, [x]
    yield from _tables(f"{name}, ONNX", files, _onnx)


def _beside_keras(name: str, folder: str, model: Any, specs: Any, x: np.ndarray) -> Iterator[str]:
    from benchmarks import keras_nets
    from benchmarks.file_nets import FEATURES_FIRST

    path = f"{folder}/keras.tflite"
    keras_nets.write(name, path)
    last = x.transpose(0, 2, 3, 1) if name in FEATURES_FIRST else x
    files = {"Keras": (path, [last])}
    for label, path in _written(folder, "tflite", model, specs).items():
        files[label] = path, [x]
    yield from _tables(f"{name}, TFLite", files, _tflite)


def _beside_jax(name: str, folder: str, model: Any, specs: Any, x: np.ndarray) -> Iterator[str]:
    import tensorflow as tf

    params, function = model if isinstance(model, tuple) else (model, lambda net, x: net(x))
    params, jitted, array = jax.device_put(params), jax.jit(function), jax.device_put(x)
    calls: dict[str, Call] = {"jax.jit": lambda: jitted(params, array).block_until_ready()}
    tensor = tf.constant(x)
    for label, path in _written(folder, "saved_model", model, specs).items():
        loaded = pax.export.load(path)
        calls[label] = lambda loaded=loaded: loaded(tensor)
    for title, clock in (("processor", time.process_time), ("time", time.perf_counter)):
        rows = compare(calls, rounds=15, least=0.02, clock=clock)
        yield table(f"{name}, SavedModel, {title}", rows, "1.05 times jax.jit")


def _language_model() -> Iterator[str]:
    from benchmarks import smollm2

    for kind in ("decode", "prefill"):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/torch.onnx"
            files = {"torch.onnx": (path, smollm2.write_torch(path, kind))}
            for label, batch in (("pax_export", "batch"), ("pax_export, static", 1)):
                path = f"{folder}/{label}.onnx"
                files[label] = path, smollm2.write(path, kind, batch)
            path = f"{folder}/growing.onnx"
            files["pax_export, a cache that grows"] = path, smollm2.write_growing(path, kind)
            yield from _tables(f"SmolLM2, {kind}, ONNX", files, _onnx)


def _tables(title: str, files: Any, load: Callable[..., tuple[Call, int]]) -> Iterator[str]:
    for threads in (1, 2):
        loaded = {name: load(path, threads, given) for name, (path, given) in files.items()}
        counts = ", ".join(f"{name} {count}" for name, (_, count) in loaded.items())
        calls = {name: call for name, (call, _) in loaded.items()}
        clock = time.process_time if threads == 1 else time.perf_counter
        rows = compare(calls, rounds=15, least=0.02, clock=clock)
        goal = f"1.05 times {next(iter(files))}"
        yield table(f"{title}, {threads} threads; operators: {counts}", rows, goal)


def _onnx(path: str, threads: int, given: list[np.ndarray]) -> tuple[Call, int]:
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = dict(zip((each.name for each in session.get_inputs()), given, strict=True))
    return lambda: session.run(None, feed), len(onnx.load(path).graph.node)


def _tflite(path: str, threads: int, given: list[np.ndarray]) -> tuple[Call, int]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path, num_threads=threads)
    (entry,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(entry["index"], given[0].shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(entry["index"], given[0])
    names = [each["op_name"] for each in interpreter._get_ops_details()]
    return interpreter.invoke, len(names) - names.count("DELEGATE")
