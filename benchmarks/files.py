"""Files for onnxruntime: calls of what `to_onnx` writes, beside what torch.onnx makes of the nets.

It needs torch, which no environment of tox installs: ``pip install torch``.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table

_GOAL = "1.05 times torch.onnx"


def tables() -> Iterator[str]:
    """Each net with a batch of any size, and of one, by one thread and by two."""
    if importlib.util.find_spec("torch") is None:
        yield "files: torch is not installed\n"
        return
    from benchmarks.file_nets import NETS

    for name, make in NETS.items():
        model, inputs, x, other, given = make()
        with tempfile.TemporaryDirectory() as folder:
            files = {"torch.onnx": _of_torch(other, given, folder)}
            static = pax.export.spec(", ".join(map(str, x.shape)))
            for label, spec in (("pax_export", inputs), ("pax_export, static", static)):
                path = f"{folder}/{label}.onnx"
                pax.export.to_onnx(model, path, spec, validate=False, card=False)
                files[label] = path
            for threads in (1, 2):
                arrays = {"torch.onnx": given.numpy()}
                calls = {n: _call(p, threads, arrays.get(n, x)) for n, p in files.items()}
                counts = ", ".join(f"{n} {_operators(p)}" for n, p in files.items())
                rows = compare(calls, rounds=15, least=0.02)
                yield table(f"{name}, {threads} threads; operators: {counts}", rows, _GOAL)


def _of_torch(net: Any, given: Any, folder: str) -> str:
    import torch

    path = str(Path(folder) / "torch.onnx")
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
    return path


def _call(path: str, threads: int, x: np.ndarray) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return lambda: session.run(None, {entry.name: x})


def _operators(path: str) -> int:
    import onnx

    return len(onnx.load(path).graph.node)
