"""The sizes with which an export is called are sizes that the model can take."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.export import spec, to_onnx, to_tflite
from pax_export.export.validation.recheck import Rechecked

windows = pax.Sequential(
    pax.Conv2D(3, 4, 3, padding="VALID", rng_key=jax.random.key_data(jax.random.key(0))),
    lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    lambda x: x.mean((1, 2)),
)
MODELS = {
    "windows": (windows, "b, h, w, 3", 3),
    "a mean of the rest": (lambda x: x[:, 7:].mean(1), "b, t", 7),
    "halves": (lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).mean(3), "h, w", 1),
}


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
@pytest.mark.parametrize("name", MODELS)
def test_no_array_of_the_model_is_empty(write, name, tmp_path):
    model, shape, smallest = MODELS[name]
    path = tmp_path / f"net.{write.__name__[3:]}"
    report = write(model, path, spec(shape), card=False)
    (info,) = report.signatures.values()
    assert len(info.sizes) == 3
    assert all(size > smallest for each in info.sizes for key, size in each.items() if key != "b")
    assert not any(check.problem for check in Rechecked(path).checks)
