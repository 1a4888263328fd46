"""Modules of equinox and transforms of haiku, exported as they are."""

import jax
import numpy as np
import pytest

from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.quantization import quantize
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


@pytest.mark.parametrize("told", [{}, {"activations": "static"}, {"scheme": "float"}])
@pytest.mark.parametrize("name", ["transform", "without a key", "with state"])
def test_quantized_as_they_are(name, told, tmp_path):
    model, inputs, _, leaf, expected = MODELS[name]
    (params, function), report = quantize(model, [X], **told)
    assert any(each.name.endswith(leaf) for each in report.leaves)
    assert report.difference.mean < 0.08 * np.abs(expected()).mean()
    to_onnx((params, function), tmp_path / "net.onnx", inputs, accuracy_level=1)
    assert_close(load(tmp_path / "net.onnx")(X), function(params, X), rtol=1e-4, atol=1e-5)


def test_in_train_mode(tmp_path):
    model = (STATEFUL, PARAMS, STATE)
    with pytest.raises(errors.StateChangeError, match="state.batch_norm"):
        to_onnx(model, tmp_path / "net.onnx", (BATCH, True))
    dropping = eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=KEY), eqx.nn.Dropout(0.5)])
    with pytest.raises(RuntimeError) as caught:
        to_onnx(dropping, tmp_path / "net.onnx", spec("4"))
    assert "equinox.nn.inference_mode(model)" in "".join(caught.value.__notes__)
    to_onnx(eqx.nn.inference_mode(dropping), tmp_path / "net.onnx", spec("4"))
    noisy = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))
    with pytest.raises(Exception, match="PRNGKey") as no_key:
        to_onnx((noisy, noisy.init(KEY, X)), tmp_path / "noisy.onnx", BATCH)
    assert "is_training=False" in "".join(no_key.value.__notes__)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        each = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return each(x, state)


class Noisy(eqx.Module):
    drop: eqx.nn.Dropout
    key: jax.Array

    def __init__(self):
        self.drop, self.key = eqx.nn.Dropout(0.5), jax.random.key(1)

    def __call__(self, x):
        return self.drop(x, key=self.key)


NOISY = Noisy()
NORMED, NORMED_STATE = eqx.nn.make_with_state(Normed)()
NOISE = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(4)(x)))
NOISE_PARAMS = NOISE.init(KEY, X)
#: What is in train mode, and what a refusal names.
TRAINING = {
    "a key in a module": (NOISY, "key"),
    "a key in a module of a pair": ((NOISY, lambda net, x: net(x)), "key"),
    "a module that is closed over": (lambda x: NOISY(x), "a key that the function"),
    "statistics of a pair": (
        ((NORMED, NORMED_STATE), lambda both, x: both[0](x, both[1])[0]),
        "_batch_norm.py",
    ),
    "statistics that are closed over": (lambda x: NORMED(x, NORMED_STATE)[0], "_batch_norm.py"),
    "statistics of haiku": (
        lambda x: STATEFUL.apply(PARAMS, STATE, None, x, True)[0],
        "an array that the function closes over",
    ),
    "a key of haiku": (
        (NOISE_PARAMS, lambda params, x: NOISE.apply(params, KEY, x)),
        "a key that the function closes over",
    ),
}


@pytest.mark.parametrize("export, suffix", FORMATS)
@pytest.mark.parametrize("name", TRAINING)
def test_train_mode_is_refused(name, export, suffix, tmp_path):
    model, named = TRAINING[name]
    with pytest.raises(errors.StateChangeError, match=named) as caught:
        export(model, tmp_path / f"net{suffix}", spec("3, 4"))
    assert "equinox.nn.inference_mode(model), is_training=False" in str(caught.value)


@pytest.mark.parametrize("export, suffix", FORMATS)
def test_statistics_of_a_symbolic_batch(export, suffix, tmp_path):
    model = ((NORMED, NORMED_STATE), lambda both, x: both[0](x, both[1])[0])
    with pytest.raises(errors.SymbolicDimensionError) as caught:
        export(model, tmp_path / f"net{suffix}", BATCH)
    assert "equinox.nn.inference_mode(model)" in "".join(caught.value.__notes__)
    served = (eqx.nn.inference_mode(model[0]), model[1])
    assert export(served, tmp_path / f"net{suffix}", BATCH).validated == "here"
