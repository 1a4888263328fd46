"""Models of equinox and flax, and functions of params that know nothing of quantized weights."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_stablehlo, to_tflite
from pax_export.quantization import QuantizedArray, dequantize, quantize
from tests.closeness import assert_close

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(3, 6, 6, 32)).astype(np.float32)
TOKENS = np.random.default_rng(2).integers(0, 50, (4, 7))

WAYS = {
    "int8": {},
    "asymmetric": {"bits": 4, "scheme": "asymmetric"},
    "float8": {"scheme": "float"},
    "gptq": {"bits": 4, "rounding": "gptq"},
    "static": {"activations": "static"},
    "dynamic": {"activations": "dynamic"},
}


class OfEquinox(eqx.Module):
    """Rows of a weight are outputs; an image has its channels first."""

    conv: eqx.nn.Conv2d
    first: eqx.nn.Linear
    act: object  # a leaf that is no array
    last: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(KEY, 3)
        self.conv = eqx.nn.Conv2d(32, 64, 3, key=keys[0])
        self.first = eqx.nn.Linear(64, 96, key=keys[1])
        self.act = jax.nn.relu
        self.last = eqx.nn.Linear(96, 10, key=keys[2])

    def __call__(self, x):
        def one(x):
            x = self.act(self.conv(x.transpose(2, 0, 1))).mean((1, 2))
            return self.last(self.act(self.first(x)))

        return jax.vmap(one)(x)


def like_equinox(net):
    """The same net of layers of this package."""
    conv = pax.Conv2D(32, 64, 3, padding="VALID")
    first, last = pax.Linear(64, 96), pax.Linear(96, 10)
    conv = conv.replace(
        weight=net.conv.weight.transpose(2, 3, 1, 0), bias=net.conv.bias.reshape(-1)
    )
    first = first.replace(weight=net.first.weight.T, bias=net.first.bias)
    last = last.replace(weight=net.last.weight.T, bias=net.last.bias)
    mean = lambda x: x.mean((1, 2))  # noqa: E731
    return pax.Sequential(conv, jax.nn.relu, mean, first, jax.nn.relu, last)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_of_equinox_has_the_integers_of_layers(way):
    net = OfEquinox()
    (params, function), report = quantize(net, [IMAGES], **WAYS[way])
    same, right = quantize(like_equinox(net), [IMAGES], **WAYS[way])
    assert [leaf.name for leaf in report.leaves] == ["conv.weight", "first.weight", "last.weight"]
    for mine, other in zip(report.leaves, right.leaves):
        got = mine.bits, mine.group, mine.scheme, mine.activations, mine.rounding, mine.after
        assert got == (
            other.bits, other.group, other.scheme, other.activations, other.rounding, other.after,
        )  # fmt: skip
    assert_close(params.last.weight.dequantized().T, same.modules[5].weight.dequantized())
    expected = jax.jit(lambda net, x: net(x))(same, IMAGES)
    assert_close(jax.jit(function)(params, IMAGES), expected, rtol=1e-4, atol=1e-5)
    assert report.after < 0.3 * report.before


class OfNnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(50, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(self.norm(x + self.attention(x)))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(50, 64)(tokens)
        x = linen.RNN(linen.LSTMCell(64))(x)
        return linen.Dense(10, dtype=jnp.bfloat16)(x.mean(1)).astype(jnp.float32)


def of_nnx():
    net = OfNnx()
    graph, state = nnx.split(net)
    return net, lambda params, x: nnx.merge(graph, params)(x), state


def of_linen():
    net = OfLinen()
    variables = net.init(KEY, TOKENS)
    return (net, variables), net.apply, variables


@pytest.mark.parametrize(
    ("make", "way"), [(of_nnx, "int8"), (of_linen, "asymmetric"), (of_linen, "static")]
)
def test_modules_of_flax_compute_with_what_integers_stand_for(make, way):
    net, apply, before = make()
    (params, function), report = quantize(net, [TOKENS], **WAYS[way])
    held = jax.tree.leaves(params, is_leaf=lambda each: isinstance(each, QuantizedArray))
    arrays = [each for each in held if isinstance(each, QuantizedArray)]
    assert len(arrays) == len(report.leaves) == {of_nnx: 5, of_linen: 10}[make]
    assert all("bias" in name for name in report.kept if "scale" not in name)
    assert jax.tree.structure(dequantize(params)) == jax.tree.structure(before)
    assert function.__name__ == type(net[0] if make is of_linen else net).__name__
    rtol = 0.02 if make is of_linen else 1e-4  # a product in bfloat16
    rounds = WAYS[way].get("activations")
    if rounds is None:
        assert_close(function(params, TOKENS), apply(dequantize(params), TOKENS), rtol=rtol)
    else:
        plain = quantize(net, [TOKENS])[0][0]
        apart = np.abs(function(params, TOKENS) - apply(dequantize(plain), TOKENS))
        assert 1e-4 < apart.max() < 0.1
        assert all(each.inputs is not None for each in arrays if each.shape != (50, 64))
    assert report.difference.mean < 0.2 * report.difference.scale


def test_products_in_loops_are_those_of_integers():
    (params, function), _ = quantize(of_linen()[0], [TOKENS])
    text = str(jax.make_jaxpr(function)(params, TOKENS))
    assert "quantized_rows" in text
    assert text.count("quantized_dot[") == 9  # eight of them in the loop of the LSTM
    assert "dequantize[" not in text


def test_layers_of_a_loop_have_scales_of_their_own():
    weights = np.random.default_rng(3).normal(size=(3, 64, 64)).astype(np.float32) / 8

    def function(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    layers = [pax.Linear(64, 64, with_bias=False).replace(weight=each) for each in weights]
    listed = pax.Sequential(*[part for each in layers for part in (each, jnp.tanh)])
    for told in ({}, {"bits": 4, "rounding": "gptq"}, {"activations": "static"}):
        (params, own), _ = quantize(({"w": weights}, function), [X], **told)
        assert_close(own(params, X), quantize(listed, [X], **told)[0](X), rtol=1e-3, atol=1e-5)
    # A weight with other layers than its integers, and one that a loop changes.
    (params, own), _ = quantize(({"w": weights}, function))
    assert params["w"].scales.shape == (1, 1, 64)
    assert_close(own(params, X), function(dequantize(params), X), rtol=1e-4, atol=1e-6)

    def carried(params, x):
        step = lambda _, held: (held[0] * 0.9, jnp.tanh(held[1] @ held[0]))  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, (params, x))[1]

    (params, own), _ = quantize((weights[0], carried))
    assert_close(own(params, X), carried(params.dequantized(), X), rtol=1e-4, atol=1e-6)


def test_functions_of_arrays():
    """Products, batched ones too, rows, and all else, which is given the numbers."""
    params = {"w": X.T[:, :8] / 8, "experts": np.stack([X.T] * 3), "shift": X, "b": np.ones(8)}

    def function(params, x, *, scale=1.0):
        rows = params["w"][jnp.array([0, 63, 99])]  # the last is not there: the nearest
        some = jnp.einsum("bk,ekn->ben", x, params["experts"])
        own = jax.lax.dot_general(params["w"], x, (((0,), (1,)), ((), ())))
        return rows.sum() + some.sum(1) + own[:8].T + params["shift"][:, :8] * scale

    (small, own), report = quantize((params, function), [X])
    assert [leaf.name for leaf in report.leaves] == ["experts", "w"]
    assert report.kept["shift"] == "no product of a call takes it"
    assert small["experts"].scales.shape == (3, 1, 8)
    for scale in (1.0, 2.0):
        right = function(dequantize(small), X, scale=scale)
        assert_close(own(small, X, scale=scale), right, rtol=1e-4, atol=1e-4)
    heads = {"w": X.T[:8] / 8}
    by_head = lambda params, x: jnp.einsum("hd,hd->h", params["w"], x)  # noqa: E731
    (small, own), report = quantize((heads, by_head), [X[:, :8].T])
    assert report.leaves
    assert_close(own(small, X[:, :8].T), by_head(dequantize(small), X[:, :8].T), rtol=1e-4)
    taken = quantize((X, lambda table, x: jnp.take(table, x, axis=0)), [np.array([0, 9])])[0]
    rows = taken[1](taken[0], np.array([0, 9]))
    assert_close(rows[0], X[0], rtol=0.02, atol=0.02)
    assert np.isnan(rows[1]).all()


def test_a_module_of_equinox_is_trained_as_integers():
    net = OfEquinox()
    (params, function), _ = quantize(net, [IMAGES], bits=4, train=True)
    (small, same), _ = quantize((params, function), [IMAGES])
    assert small.last.weight.form.bits == 4
    assert_close(function(params, IMAGES), same(small, IMAGES), rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda params: function(params, IMAGES).sum())(params)
    arrays, rest = eqx.partition(dequantize(small), eqx.is_array)
    right = jax.grad(lambda a: same(eqx.combine(a, rest), IMAGES).sum())(arrays)
    assert_close(gradient.conv.weight.weight, right.conv.weight, rtol=1e-3, atol=1e-5)
    with pytest.raises(errors.QuantizationError, match="already"):
        quantize((small, same), [IMAGES])


FILES = [(to_onnx, "int8"), (to_onnx, "static"), (to_tflite, "asymmetric"), (to_tflite, "static"),
         (to_stablehlo, "asymmetric")]  # fmt: skip


@pytest.mark.parametrize(("write", "way"), FILES)
def test_files(write, way, tmp_path):
    (params, function), _ = quantize(OfEquinox(), [IMAGES], **WAYS[way])
    exactly = {"accuracy_level": 1} if write in (to_onnx, to_tflite) else {}
    report = write((params, function), tmp_path / "m", spec("batch, 6, 6, 32"), **exactly)
    assert report.model == "OfEquinox"
    tolerance = 0.02 if way == "static" and write is to_tflite else 1e-5
    assert_close(load(tmp_path / "m")(IMAGES), function(params, IMAGES), rtol=1e-4, atol=tolerance)
    if exactly:
        assert report.details["quantized"]["weights"] == 3


def test_weights_on_disk(tmp_path):
    params = quantize(OfEquinox(), [IMAGES], **WAYS["static"])[0][0]
    pax.save_weights(params, tmp_path / "w.safetensors")
    again = pax.load_weights(jax.tree.map(jnp.zeros_like, params), tmp_path / "w.safetensors")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, params))


def test_refusals():
    with pytest.raises(errors.InvalidArgumentError, match=r"(?s)OfEquinox without batches.*\[x\]"):
        quantize(OfEquinox())
    with pytest.raises(errors.InvalidArgumentError, match="cannot be called"):
        quantize(OfEquinox(), [X])
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"at='conv'"):
        quantize(OfEquinox(), [IMAGES], at="conv")
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"(?s)\(linen module, module.init"):
        quantize(OfLinen(), [TOKENS])


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
def test_dynamic_products_over_the_first_axis(write, tmp_path):
    """The rows that are rounded are those of the transposed inputs."""
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 8, 8)) * np.exp(random.normal(size=(1, 8, 1)))
    x, params = x.astype(np.float32), {"w": random.normal(size=(8, 8)).astype(np.float32)}

    def function(params, x):
        return jnp.tensordot(x, params["w"], ((1,), (0,)))

    small, _ = quantize((params, function), [x], activations="dynamic")
    write(small, tmp_path / "m", spec("batch, 8, 8"), validate=False)
    expected = np.asarray(small[1](small[0], x))
    assert_close(load(tmp_path / "m")(x), expected, rtol=0, atol=0.02 * np.abs(expected).max())
