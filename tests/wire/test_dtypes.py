"""The dtypes of files by their numbers, as the packages of the formats have them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import onnx
from pax_export.inspection._onnx_graph import program_of

from pax_export._wire import ONNX_DTYPES, TFLITE_DTYPES, Memory, Message
from tests.wire.test_protobuf import field


def test_the_numbers_of_onnx_are_those_of_its_package():
    for number, name in ONNX_DTYPES.items():
        assert onnx.helper.tensor_dtype_to_np_dtype(number) == jnp.dtype(name), name
    assert len(ONNX_DTYPES) == len(set(ONNX_DTYPES.values()))


def test_the_dtypes_of_tflite_are_known_to_numpy():
    assert all(np.dtype(jnp.dtype(name)).itemsize for name in TFLITE_DTYPES.values())
    assert len(TFLITE_DTYPES) == len(set(TFLITE_DTYPES.values()))


def test_inspection_names_small_floats():
    tensor = field(1, 4) + field(2, 17) + field(8, b"w") + field(9, bytes(4))
    assert Message(Memory(tensor)).first(8).text() == "w"
    graph = program_of(memoryview(field(7, field(5, tensor)))).graph
    assert (graph.facts["w"].shape, graph.facts["w"].dtype) == ((4,), "float8_e4m3fn")
