"""Files for onnxruntime and LiteRT: calls of them, beside those that torch.onnx and Keras write.

It needs torch, which no environment of tox installs: ``pip install torch``.  Calls by one thread
are in processor time, so that other programs may use the cores; calls by two are not.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table

Call = Callable[[], Any]


def tables() -> Iterator[str]:
    """Each net with a batch of any size, and of one, by one thread and by two."""
    if importlib.util.find_spec("torch") is None:
        yield "files: torch is not installed\n"
        return
    from benchmarks import keras_nets
    from benchmarks.file_nets import NETS

    for name, make in NETS.items():
        model, inputs, x, other, given = make()
        static = pax.export.spec(", ".join(map(str, x.shape)))
        specs = {"pax_export": inputs, "pax_export, static": static}
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/torch.onnx"
            _of_torch(other, given, path)
            onnx, keras = {"torch.onnx": (path, [given.numpy()])}, f"{folder}/keras.tflite"
            keras_nets.write(name, keras)
            tflite = {"Keras": keras}
            for label, spec in specs.items():
                for form, files in (("onnx", onnx), ("tflite", tflite)):
                    path = f"{folder}/{label}.{form}"
                    write = getattr(pax.export, f"to_{form}")
                    write(model, path, spec, validate=False, card=False)
                    files[label] = (path, [x]) if form == "onnx" else path
            yield from _tables(f"{name}, ONNX", onnx, _onnx)
            last = x if name not in keras_nets.FEATURES_FIRST else x.transpose(0, 2, 3, 1)
            arrays = {path: last if label == "Keras" else x for label, path in tflite.items()}
            pairs = {label: (path, [arrays[path]]) for label, path in tflite.items()}
            yield from _tables(f"{name}, TFLite", pairs, _tflite)
    yield from _language_model()


def _language_model() -> Iterator[str]:
    from benchmarks import smollm2

    for kind in ("decode", "prefill"):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/torch.onnx"
            files = {"torch.onnx": (path, smollm2.write_torch(path, kind))}
            for label, batch in (("pax_export", "batch"), ("pax_export, static", 1)):
                path = f"{folder}/{label}.onnx"
                files[label] = path, smollm2.write(path, kind, batch)
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


def _of_torch(net: Any, given: Any, path: str) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {"x": {0: "batch"}}
        torch.onnx.export(
            net,
            (given,),
            path,
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            dynamic_axes=axes,
        )


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
