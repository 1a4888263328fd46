"""Runs an ONNX model with onnxruntime and numpy only.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

#: For larger files, a validation does not keep the weights twice in memory.
_LARGE = 1 << 26

#: Types that onnxruntime does not convert to numpy: its name of the type, the dtype's name, the
#: number that ONNX has for it, and whole numbers of as many bits.
_BITS = {
    "tensor(bfloat16)": ("bfloat16", 16, np.uint16),
    "tensor(float8e4m3fn)": ("float8_e4m3fn", 17, np.uint8),
    "tensor(float8e5m2)": ("float8_e5m2", 19, np.uint8),
}


#: Session option for float32 products of quantized weights, as stored in the file.
_EXACTLY = ("session.qdq_matmulnbits_accuracy_level", "1")


def opened(
    file: str, exactly: bool = False, lean: bool = False
) -> tuple[Any, Callable[[str, Arrays], Arrays]]:
    """Returns onnxruntime's session of a file, and a function that calls it.

    A `lean` session does not repack weights, which would double their memory.
    """
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; conversion leaves parts that cause warnings
    options.add_session_config_entry("session.disable_prepacking", str(int(lean)))
    if exactly:
        options.add_session_config_entry(*_EXACTLY)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    input_types = {entry.name: entry.type for entry in session.get_inputs()}
    in_bits = not _BITS.keys().isdisjoint({*input_types.values(), *_types(session)})

    def call(key: str, inputs: Arrays) -> Arrays:
        # An input that the model does not use is missing in the file.
        feed = {name: np.asarray(value) for name, value in inputs.items() if name in input_types}
        if in_bits:
            results = _run_bits(onnxruntime, session, feed, input_types)
        else:
            results = session.run(names, feed)
        return dict(zip(names, results))

    return session, call


def _types(session: Any) -> list[str]:
    return [output.type for output in session.get_outputs()]


def _run_bits(
    onnxruntime: Any, session: Any, feed: Arrays, types: Mapping[str, str]
) -> list[np.ndarray]:
    """A call with numbers that numpy has from another package only, by their bits."""
    make = onnxruntime.OrtValue
    values = {}
    for name, value in feed.items():
        value = np.require(value, requirements="C")  # and a number stays one
        if types[name] in _BITS:
            _, number, bits = _BITS[types[name]]
            values[name] = make.ortvalue_from_numpy_with_onnx_type(value.view(bits), number)
        else:
            values[name] = make.ortvalue_from_numpy(value)
    names = [output.name for output in session.get_outputs()]
    results = session.run_with_ort_values(names, values)
    return [_array(*each) for each in zip(results, _types(session))]


def _array(value: Any, type: str) -> np.ndarray:
    if type not in _BITS:
        return value.numpy()
    importlib.import_module("ml_dtypes")
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(content, np.dtype(_BITS[type][0])).reshape(value.shape()).copy()


def run(file: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    beside = (each for each in Path(file).parent.iterdir() if each.name.startswith(Path(file).name))
    size = sum(each.stat().st_size for each in beside)
    _, call = opened(file, exactly=True, lean=size > _LARGE)
    return [call(case["signature"], case["inputs"]) for case in cases]
