"""The dtypes of files by their numbers, as the packages of the formats have them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import onnx

from pax_export._foundations.wire import ONNX_DTYPES, TFLITE_DTYPES


def test_the_numbers_of_onnx_are_those_of_its_package():
    for number, name in ONNX_DTYPES.items():
        assert onnx.helper.tensor_dtype_to_np_dtype(number) == jnp.dtype(name), name
    assert len(ONNX_DTYPES) == len(set(ONNX_DTYPES.values()))


def test_the_dtypes_of_tflite_are_known_to_numpy():
    assert all(np.dtype(jnp.dtype(name)).itemsize for name in TFLITE_DTYPES.values())
    assert len(TFLITE_DTYPES) == len(set(TFLITE_DTYPES.values()))
