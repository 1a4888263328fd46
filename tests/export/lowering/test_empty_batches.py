"""Batch 0 is a size: exports serve it where nothing is left to compute, and else say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import pax_export as pax
from pax_export import export
from pax_export.errors import InvalidArgumentError
from pax_export.export import spec
from pax_export.export.artifact.calling import Arguments
from pax_export.export.lowering.rewrites import may_be_empty
from tests.closeness import assert_close
from tests.export.models import Counter
from tests.refusals import refused

WRITERS = {
    "saved_model": (export.to_saved_model, "net"),
    "stablehlo": (export.to_stablehlo, "net"),
    "tflite": (export.to_tflite, "net.tflite"),
    "onnx": (export.to_onnx, "net.onnx"),
}
each_writer = pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS)


class Nested(pax.Module):
    def __init__(self):
        super().__init__()
        self.conv = pax.Conv2D(1, 2, 3, rng_key=jax.random.key_data(jax.random.key(0)))

    def __call__(self, images, scale):
        features = jnp.tanh(self.conv(images)) * scale[:, None, None, None]
        return {"mean": features.mean((1, 2)), "rows": [features.reshape(-1, 72)]}


class Total(pax.Module):
    def __call__(self, x):
        return {"rows": 2 * x, "total": x.sum(0)}


def images(batch):
    random = np.random.default_rng(0)
    return random.normal(size=(batch, 6, 6, 1)).astype("float32"), np.ones(batch, np.float32)


def shapes_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


@each_writer
def test_an_empty_batch_gives_empty_results(write, name, tmp_path):
    net = Nested()
    write(net, tmp_path / name, (spec("batch, 6, 6, 1"), spec("batch")))
    loaded = export.load(tmp_path / name)
    expected = jax.eval_shape(net, *images(0))
    assert shapes_of(loaded(*images(0))) == shapes_of(expected)
    assert shapes_of(loaded(*map(jnp.asarray, images(0)))) == shapes_of(expected)
    full = loaded(*images(3))
    assert_close(full["mean"], net(*images(3))["mean"], rtol=1e-4, atol=1e-6)


@each_writer
def test_rests_of_empty_batches_are_refused(write, name, tmp_path):
    # A graph of TensorFlow's operations computes them.
    options = {"operations": "xla"} if write is export.to_saved_model else {}
    write(Total(), tmp_path / name, spec("batch, 3"), **options)
    with refused(
        InvalidArgumentError, got="[0, 3], batch = 0 by x", write="[batch, 3], batch at least 1"
    ):
        export.load(tmp_path / name)(np.zeros((0, 3), np.float32))


def test_tensorflow_alone_serves_it(tmp_path):
    net = pax.Sequential(pax.Linear(3, 4), jax.nn.relu, pax.Linear(4, 2))
    export.to_saved_model(net, tmp_path / "net", spec("2*batch, 3"), vjp_order=1)
    run = tf.saved_model.load(str(tmp_path / "net")).signatures["serving_default"]
    assert run(x=tf.zeros((0, 3)))["output"].shape == (0, 2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(x=tf.zeros((3, 3)))  # the other checks of jax are still there


def test_under_jax_it_has_a_gradient(tmp_path):
    export.to_stablehlo(pax.Linear(3, 2), tmp_path / "net", spec("batch, 3"), vjp_order=1)
    loaded = export.load(tmp_path / "net")
    x = jnp.zeros((0, 3))
    assert jax.jit(loaded)(x).shape == (0, 2)
    gradient = jax.grad(lambda model: model(x).sum())(loaded)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_a_function_that_changes_weights_is_asked_itself(tmp_path):
    export.to_stablehlo(Counter(), tmp_path / "net", spec("batch"), state="update")
    with pytest.raises(InvalidArgumentError):
        export.load(tmp_path / "net").purecall(jnp.zeros(0))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (["b, 3"], {"b"}),
        (["b, n", "n, b"], {"b", "n"}),
        (["b, n", "n"], {"n"}),
        (["b", "3"], set()),
        (["2*b*n, 3"], {"b", "n"}),
        (["b + n"], set()),
        (["b + 1"], set()),
        (["floordiv(b, 2)"], {"b"}),
        (["floordiv(b - 3, 2) + 1, 4"], set()),
        (["floordiv(b, n)"], {"b"}),
        (["max(0, b - n)"], {"b"}),
        (["floordiv(max(0, b - 1), n)", "mod(b, n)"], set()),
    ],
)
def test_which_sizes_leave_nothing(shapes, expected):
    scope = jax.export.SymbolicScope()
    symbolic = [jax.export.symbolic_shape(text, scope=scope) for text in shapes]
    assert may_be_empty(symbolic) == expected


def test_sizes_that_do_not_agree_are_no_empty_batch(tmp_path):
    report = export.to_stablehlo(
        Nested(), tmp_path / "net", (spec("batch, 6, 6, 1"), spec("batch"))
    )
    (info,) = report.signatures.values()
    arguments = Arguments("serving_default", info)
    one, two = (entry.name for entry in info.inputs)
    assert arguments.empty_outputs({one: (0, 6, 6, 1), two: (0,)}) is not None
    for wrong in ({one: (0, 6, 6, 1), two: (2,)}, {one: (0, 6, 5, 1), two: (0,)}):
        assert arguments.empty_outputs(wrong) is None
    assert arguments.empty_outputs({one: (None, 6, 6, 1), two: (0,)}) is None
    assert arguments.empty_outputs({one: (2, 6, 6, 1), two: (2,)}) is None
