"""Decompositions in the runtimes whose formats lack the primitive."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.scipy import special

from pax_export.errors import UnsupportedOperationError, ValidationError
from pax_export.export import load, spec, to_onnx, to_tflite
from pax_export.export.validation.validate import Case, compare_either
from tests.closeness import assert_close


@pytest.mark.parametrize(("write", "suffix"), [(to_onnx, ".onnx"), (to_tflite, ".tflite")])
def test_runtimes_run_them(write, suffix, tmp_path):
    def apply(_, x):
        return special.i0e(x), special.gammainc(x, x[::-1]), special.polygamma(1, x)

    x = np.float32([0.3, 1.2, 5.0])
    write(({}, apply), tmp_path / f"m{suffix}", spec("n"), examples=[x])
    for one, other in zip(load(tmp_path / f"m{suffix}")(x), apply({}, x)):
        assert_close(one, other, rtol=1e-4)


def test_what_is_not_exact_enough_is_refused(tmp_path):
    with jax.enable_x64(True), pytest.raises(UnsupportedOperationError, match="bessel_i0e"):
        to_onnx(({}, lambda _, x: special.i0e(x)), tmp_path / "m.onnx", spec("n", "float64"))


def test_an_example_that_is_no_number_is_named_as_a_reason():
    case = Case("f", {"x": np.float32([1, np.inf])}, {"y": np.zeros(2, np.float32)})
    with pytest.raises(ValidationError) as caught:
        compare_either(case, {"y": np.ones(2, np.float32)})
    assert caught.value.write.startswith("an example without NaN and infinity: of these, decomp")
