"""What jax computes by LAPACK alone: the advice of each exporter is one that works."""

from __future__ import annotations

import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest

from pax_export.errors import UnsupportedOperationError
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.refusals import refused

MODELS = {
    "eig": lambda x: jnp.linalg.eig(x)[0].real,
    "schur": lambda x: jax.scipy.linalg.schur(x)[0],
    "hessenberg": jax.scipy.linalg.hessenberg,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_advice_is_an_exporter_that_takes_it(tmp_path, name):
    for exporter in (to_saved_model, to_onnx, to_tflite):
        with refused(UnsupportedOperationError, name) as error:
            exporter(MODELS[name], tmp_path / "model", spec("4, 4"))
        assert error.value.write.endswith('to_stablehlo(..., platforms=("cpu",))')
    to_stablehlo(MODELS[name], tmp_path / "bundle", spec("4, 4"), platforms=("cpu",))
    assert load(tmp_path / "bundle")(np.eye(4, dtype=np.float32)).shape[0] == 4
