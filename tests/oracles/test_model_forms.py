"""Modules of equinox and transforms of haiku, exported as they are."""

import jax
import numpy as np
import pytest

from pax_export import _errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.closeness import assert_close

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")

KEY = jax.random.key(0)
BATCH = spec("batch, 4")
X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
FORMATS = [(to_saved_model, ""), (to_stablehlo, ""), (to_tflite, ".tflite"), (to_onnx, ".onnx")]


class Batched(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, x):
        return jax.vmap(self.mlp)(x)

    def twice(self, x):
        return 2 * self(x)


MLP = eqx.nn.MLP(4, 2, 8, 1, key=KEY)
BATCHED = Batched(MLP)


def _net(image, is_training=False):
    x = hk.BatchNorm(True, True, 0.9)(hk.Linear(5)(image), is_training)
    return hk.Linear(2)(jax.nn.relu(x))


STATEFUL = hk.transform_with_state(_net)
PARAMS, STATE = STATEFUL.init(KEY, X, True)
PLAIN = hk.transform(lambda x: hk.nets.MLP([5, 2])(x))
PLAIN_PARAMS = PLAIN.init(KEY, X)

#: The model, its inputs, its title, one of its leaves, and what it gives for `X`.
MODELS = {
    "MLP of one example": (MLP, spec("4"), "MLP", "layers.0.weight", lambda: MLP(X[0])),
    "module": (BATCHED, BATCH, "Batched", "mlp.layers.0.weight", lambda: BATCHED(X)),
    "method": (BATCHED.twice, BATCH, "Batched", "mlp.layers.0.weight", lambda: 2 * BATCHED(X)),
    "jitted": (
        eqx.filter_jit(BATCHED),
        BATCH,
        "Batched",
        "mlp.layers.0.weight",
        lambda: BATCHED(X),
    ),
    "partial": (eqx.Partial(BATCHED), BATCH, "Batched", "mlp.layers.0.weight", lambda: BATCHED(X)),
    "pair": (
        (MLP, lambda mlp, x: jax.vmap(mlp)(x)),
        BATCH,
        "MLP",
        "layers.0.weight",
        lambda: BATCHED(X),
    ),
    "transform": (
        (PLAIN, PLAIN_PARAMS),
        BATCH,
        "function",
        "linear_0.w",
        lambda: PLAIN.apply(PLAIN_PARAMS, None, X),
    ),
    "without a key": (
        (hk.without_apply_rng(PLAIN), PLAIN_PARAMS),
        BATCH,
        "function",
        "linear_0.w",
        lambda: PLAIN.apply(PLAIN_PARAMS, None, X),
    ),
    "with state": (
        (STATEFUL, PARAMS, STATE),
        BATCH,
        "_net",
        "params.linear.w",
        lambda: STATEFUL.apply(PARAMS, STATE, None, X)[0],
    ),
}


@pytest.mark.parametrize("export, suffix", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_exported_as_they_are(name, export, suffix, tmp_path):
    model, inputs, title, leaf, expected = MODELS[name]
    path = tmp_path / f"net{suffix}"
    report = export(model, path, inputs)
    assert report.model == title
    assert any(entry.name.endswith(leaf) for entry in report.variables)
    x = X[0] if title == "MLP" and inputs.shape == "4" else X
    assert_close(load(path)(x), expected(), rtol=1e-4)


def test_in_train_mode(tmp_path):
    model = (STATEFUL, PARAMS, STATE)
    with pytest.raises(_errors.StateChangeError, match="state.batch_norm"):
        to_onnx(model, tmp_path / "net.onnx", (BATCH, True))
    dropping = eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=KEY), eqx.nn.Dropout(0.5)])
    with pytest.raises(RuntimeError) as caught:
        to_onnx(dropping, tmp_path / "net.onnx", spec("4"))
    assert "equinox.nn.inference_mode(model)" in "".join(caught.value.__notes__)
    to_onnx(eqx.nn.inference_mode(dropping), tmp_path / "net.onnx", spec("4"))
