"""Graphs of TensorFlow's operations in all uses of a SavedModel, and in the order of numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.errors import UnsupportedOperationError
from pax_export.export import load, spec, to_saved_model
from pax_export.export.artifact.formats import WARMUP_REQUESTS
from tests.closeness import assert_close
from tests.export.formats.saved_model.test_operations import _exported, _operators
from tests.export.models import random

tf = pytest.importorskip("tensorflow")


def test_a_step_of_training_assigns_the_variables(tmp_path):
    rule = optax.adam(0.1)

    def step(net, state, x):
        value, slope = pax.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        updates, state = rule.update(slope, state, net)
        return optax.apply_updates(net, updates), state, value

    net = pax.Sequential(pax.Linear(3, 4), jax.nn.relu, pax.Linear(4, 1))
    state, x = rule.init(net), random(5, 3)
    to_saved_model(
        net, tmp_path / "m", spec("n, 3"), operations="tensorflow", trainable=True,
        train_step=step, optimizer=state, train_inputs=spec("n, 3"),
    )  # fmt: skip
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    loaded = load(tmp_path / "m")
    for _ in range(3):
        net, state, value = step(net, state, x)
        assert_close(loaded.signatures["train_step"](x), value, rtol=1e-4)
    assert_close(loaded(x), net(x), atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_stay_small(bits, tmp_path):
    net = pax.Sequential(pax.Linear(64, 32), jax.nn.relu, pax.Linear(32, 4))
    small, _ = pax.quantize(net, bits=bits)
    report = to_saved_model(small, tmp_path / "m", spec("b, 64"), operations="tensorflow")
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    assert not report.differs
    stored = {each.name: (each.dtype, each.shape) for each in report.variables}
    assert stored["modules.0.weight.integers"] == ("int8", (64 * bits // 8, 32))


def test_a_layer_of_keras_trains_as_jax(tmp_path):
    keras = pytest.importorskip("keras")
    net = pax.Sequential(pax.Linear(4, 8), jnp.tanh, pax.Linear(8, 2))
    to_saved_model(net, tmp_path / "m", spec("b, 4"), operations="tensorflow", trainable=True)
    layer = keras.layers.TFSMLayer(str(tmp_path / "m"), call_endpoint="serving_default")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("only Keras on TensorFlow has the layer")
    given = keras.Input((4,))
    model = keras.Model(given, layer(given)["output"])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = random(8, 4), random(8, 2)
    losses = [model.train_on_batch(x, y) for _ in range(3)]

    def loss(net):
        return jnp.mean((net(x) - y) ** 2)

    for found in losses:
        value, slopes = pax.value_and_grad(loss)(net)
        assert_close(found, value, rtol=1e-5)
        net = jax.tree.map(lambda w, slope: w - 0.1 * slope, net, slopes)
    assert_close(model(x), net(x), atol=1e-6)


def test_methods_over_shared_variables_in_a_session(tmp_path):
    class Both(pax.Module):
        def __init__(self):
            super().__init__()
            self.dense = pax.Linear(3, 3)

        def encode(self, text_x):
            return self.dense(text_x)

        def encode_text(self, x):
            return self.dense(self.dense(x))

    net, keys = Both(), ("encode", "encode_text")
    report = to_saved_model(
        net, tmp_path / "m", dict.fromkeys(keys, spec("n, 3")), methods=dict(zip(keys, keys)),
        operations="tensorflow", warmup=[1, 8],
    )  # fmt: skip
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    x = random(2, 3)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "m"))
        for key in keys:
            signature = graph.signature_def[key]
            (given,), (wanted,) = signature.inputs.values(), signature.outputs.values()
            assert_close(session.run(wanted.name, {given.name: x}), getattr(net, key)(x), atol=1e-6)
    assert len(report.variables) == 2
    assert len(list(tf.data.TFRecordDataset(str(tmp_path / "m" / WARMUP_REQUESTS)))) == 4


def test_inputs_of_few_bits(tmp_path):
    def doubled(x):
        return 2 * x.astype("float32")

    for dtype in ("int4", "uint4"):
        with pytest.raises(UnsupportedOperationError, match=dtype) as error:
            to_saved_model(doubled, tmp_path / "m", spec("b, 3", dtype), operations="tensorflow")
        assert "test_operations_uses.py:" in error.value.where
    assert not _exported(doubled, tmp_path / "m", spec("b, 3", "float8_e4m3fn")).differs


def test_xla_compiles_loops_that_write_into_an_array(tmp_path):
    def run(x):
        def write(turn, rows):
            return jax.lax.dynamic_update_slice(rows, x[:, :1] * turn, (0, turn))

        return jax.lax.fori_loop(0, 5, write, jnp.zeros((x.shape[0], 5)))

    to_saved_model(
        run, tmp_path / "m", spec("b, 3"), operations="tensorflow", validate=False, vjp_order=0
    )
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    x = random(2, 3)
    for jit_compile in (False, True):
        call = tf.function(loaded.signatures["serving_default"], jit_compile=jit_compile)
        (found,) = call(x=tf.constant(x)).values()
        assert_close(found, run(x), atol=1e-6)


# --- results that depend on the order of numbers ------------------------------

NAN, INF = np.nan, np.inf
FLOATS = np.array(
    [[1, NAN, 3, NAN], [INF, -INF, INF, 0], [-0.0, 0, -0.0, 0], [-INF] * 4, [NAN] * 4], np.float32
)
INTEGERS = np.array([[2**31 - 1, -(2**31), 2**31 - 1, 5], [-(2**31)] * 4], np.int32)


def _extremes(x):
    return jnp.argmax(x, -1), jnp.argmin(x, -1), jnp.argmax(x), jnp.argmin(x)


def _of_halves(x):
    return jnp.argmax(x.astype("bfloat16"), -1), jnp.argmin(x.astype("float16"), 0)


def _of_rows(x):
    return jnp.argmax(x, -1), jnp.cumprod(x, 0), jnp.cumprod(x, 1)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (_extremes, FLOATS),
        (_of_halves, FLOATS),
        (_extremes, INTEGERS),
        (_extremes, INTEGERS.view(np.uint32)),
        (_extremes, INTEGERS > 0),
        (_of_rows, FLOATS[:2]),
        (_of_rows, np.zeros((0, 4), np.float32)),
        (_of_rows, INTEGERS),
        (lambda x: jax.lax.cumprod(x, 1, reverse=True), FLOATS),
        (lambda x: x // jnp.uint32(3), INTEGERS.view(np.uint32)),
    ],
)
def test_results_are_those_of_jax(tmp_path, function, x):
    inputs = spec("b, 4", x.dtype.name)
    to_saved_model(function, tmp_path / "m", inputs, operations="tensorflow", validate=False)
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    found = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"](tf.constant(x))
    for name, value in zip(sorted(found), jax.tree.leaves(jax.jit(function)(x)), strict=True):
        assert found[name].dtype.name == value.dtype.name
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(("shape", "mode"), [("b, 5, 3", "reduced"), ("b, 3, 5", "complete")])
def test_qr_has_a_kernel(tmp_path, shape, mode):
    def factors(x):
        return jnp.linalg.qr(x, mode=mode)

    to_saved_model(factors, tmp_path / "m", spec(shape), operations="tensorflow")
    assert "Qr" in _operators(tmp_path / "m")
