"""Loops over the step of a recurrent layer, whoever wrote it, become one operator."""

import warnings
from collections import Counter

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

import pax_export as pax
from pax_export.export import load, spec, to_onnx, to_tflite
from tests.closeness import assert_close
from tests.export.portable.test_passes import check, random

SIZE = 4
INPUTS = spec("batch, 5, 3")
X = random(2, 5, 3, seed=7) * 2


def weights(*names, rows=3):
    keys = {}
    for seed, name in enumerate(names):
        inside = {"w": rows, "u": SIZE}.get(name[0])
        keys[name] = random(inside, SIZE, seed=seed) if inside else random(SIZE, seed=seed)
    return keys


def over(step, states=1, out=0, **told):
    """A model that goes through the rows of ``[batch, time, features]``."""

    def apply(p, x):
        first = tuple(jnp.zeros((x.shape[0], SIZE)) + i / 4 for i in range(states))
        return lax.scan(
            lambda s, row: ((made := step(p, s, row)), made[out]), first, x.swapaxes(0, 1), **told
        )

    return apply


def lstm(p, state, x):
    c, h = state
    i, f, g, o = (x @ p["w" + k] + h @ p["u" + k] + p["b" + k] for k in "ifgo")
    c = nn.sigmoid(i) * nn.tanh(g) + c * nn.sigmoid(f + 1.0)
    return c, nn.tanh(c) * nn.sigmoid(o)


LSTM = [kind + gate for kind in "wub" for gate in "ifgo"]
GRU = [kind + gate for kind in "wub" for gate in "zrn"]


def gru(mix, reset_first=False):
    def step(p, state, x):
        (h,) = state
        z, r = (nn.sigmoid(x @ p["w" + k] + (h @ p["u" + k] - p["b" + k])) for k in "zr")
        if reset_first:
            n = nn.tanh(p["bn"] + (r * h) @ p["un"] + x @ p["wn"])
        else:
            n = nn.tanh(x @ p["wn"] + r * (h @ p["un"] + p["bn"]))
        return (mix(z, n, h),)

    return step


MIXED = {
    "state by z": lambda z, n, h: (1 - z) * n + z * h,
    "new by z": lambda z, n, h: z * n + h * (1 - z),
    "difference to the state": lambda z, n, h: n + z * (h - n),
    "difference to the new": lambda z, n, h: h + (n - h) * z,
}


def rnn(function):
    return lambda p, s, x: (function(x @ p["w"] + s[0] @ p["u"] + p["b"]),)


def of_pax(cell):
    names = cell.__name__

    def apply(_, x):
        net = NETS[names]
        state, ys = pax.scan(net, net.initial_state(x.shape[0]), x.swapaxes(0, 1))
        return (ys, *state)

    return apply


NETS = {
    each.__name__: each(3, SIZE, rng_key=jax.random.key(1))
    for each in (pax.LSTM, pax.GRU, pax.VanillaRNN)
}


def of_linen(cell, **told):
    net = linen.RNN(cell(SIZE), return_carry=True, **told)
    variables = net.init(jax.random.key(0), X)
    return variables, lambda variables, x: net.apply(variables, x)


def of_equinox(cell, single=False):
    net = cell(3, SIZE, key=jax.random.key(0))
    arrays, rest = eqx.partition(net, eqx.is_array)
    states = 2 if cell is eqx.nn.LSTMCell else 1

    def one(arrays, x):
        cell = eqx.combine(arrays, rest)
        first = (jnp.zeros(SIZE),) * 2 if states == 2 else jnp.zeros(SIZE)

        def step(state, row):
            state = cell(row, state)
            return state, state[0] if states == 2 else state

        return lax.scan(step, first, x)

    return arrays, one if single else jax.vmap(one, (None, 0))


MODELS = {
    "lstm": ("lstm", (weights(*LSTM), over(lstm, 2, 1))),
    "lstm backwards": ("lstm", (weights(*LSTM), over(lstm, 2, 1, reverse=True))),
    "lstm of pax": ("lstm", ({}, of_pax(pax.LSTM))),
    "lstm of flax": ("lstm", of_linen(linen.LSTMCell)),
    "joined lstm of flax": ("lstm", of_linen(linen.OptimizedLSTMCell, reverse=True)),
    "lstm of equinox": ("lstm", of_equinox(eqx.nn.LSTMCell)),
    **{
        f"gru, {k}": ("gru", (weights(*GRU), over(gru(mix, reset_first=" by z" in k))))
        for k, mix in MIXED.items()
    },
    "gru of pax": ("gru", ({}, of_pax(pax.GRU))),
    "gru of flax": ("gru", of_linen(linen.GRUCell)),
    "gru of equinox": ("gru", of_equinox(eqx.nn.GRUCell)),
    "rnn": ("rnn", (weights("w", "u", "b"), over(rnn(nn.tanh)))),
    "rnn by relu": ("rnn", (weights("w", "u", "b"), over(rnn(nn.relu), reverse=True))),
    "rnn of pax": ("rnn", ({}, of_pax(pax.VanillaRNN))),
    "rnn of flax": ("rnn", of_linen(linen.SimpleCell)),
}
HOSTILE = X.copy()
HOSTILE[0, 1] = 1e30, -1e30, 1e-40
HOSTILE[1, 3] = 0.0, -0.0, 500.0


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_found_and_compute_the_same(name):
    kind, (params, apply) = MODELS[name]
    found, _ = check(params, apply, INPUTS, (X,), (X[:1] * 9,), (HOSTILE,), rtol=2e-5)
    assert found[kind] == 1
    assert found["scan"] == found["dot_general"] == 0


@pytest.mark.parametrize(
    "name", ["lstm", "lstm backwards", "gru of flax", "gru, new by z", "rnn by relu", "rnn of pax"]
)
def test_onnx_has_operators_for_them(name, tmp_path):
    kind, model = MODELS[name]
    path = tmp_path / "m.onnx"
    report = to_onnx(model, path, INPUTS)
    assert report.validated == "here"
    onnx = pytest.importorskip("onnx")
    counts = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert counts[kind.upper()] == 1
    assert counts["Scan"] == counts["MatMul"] == counts["Sigmoid"] == 0
    expected = jax.tree.leaves(model[1](model[0], HOSTILE))
    for one, other in zip(jax.tree.leaves(load(path)(HOSTILE)), expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["lstm", "gru of pax", "gru, new by z", "rnn"])
def test_tflite_multiplies_all_rows_at_once(name, tmp_path):
    _, model = MODELS[name]
    assert to_tflite(model, tmp_path / "m.tflite", INPUTS).validated == "here"
    assert to_tflite(model, tmp_path / "s.tflite", spec("1, 5, 3")).validated == "here"


def test_a_single_example_and_rows_of_two_inputs():
    params, apply = of_equinox(eqx.nn.GRUCell, single=True)
    found, _ = check(params, apply, spec("5, 3"), (X[0],))
    assert found["gru"] == 1

    def step(p, state, rows):
        return (jnp.tanh(rows[0] @ p["w"] + rows[1] @ p["w2"] + state[0] @ p["u"]),)

    def both(p, x):
        rows, first = x.swapaxes(0, 1), (jnp.ones((x.shape[0], SIZE)),)
        return lax.scan(lambda s, r: ((m := step(p, s, r)), m[0]), first, (rows, jnp.cos(rows)))

    found, _ = check(weights("w", "w2", "u"), both, INPUTS, (X,), rtol=2e-5)
    assert found["rnn"] == 1


def peephole(p, state, x):
    c, h = state
    i, f, g, o = (x @ p["w" + k] + h @ p["u" + k] + p["b" + k] * c for k in "ifgo")
    c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(g)
    return c, nn.sigmoid(o) * nn.tanh(c)


def crossed(p, state, x):
    """Takes the cell where a layer takes its output."""
    c, h = state
    i, f, g, o = (x @ p["w" + k] + c @ p["u" + k] + p["b" + k] for k in "ifgo")
    c = nn.sigmoid(f) * h + nn.sigmoid(i) * nn.tanh(g)
    return c, nn.sigmoid(o) * nn.tanh(c)


def before(p, state, x):
    c, h = lstm(p, state[:2], x)
    return c, h, state[1]


def other_gate(p, state, x):
    (h,) = state
    z, r = (nn.sigmoid(x @ p["w" + k] + h @ p["u" + k]) for k in "zr")
    n = nn.tanh(x @ p["wn"] + r * (h @ p["un"]))
    return ((1 - r) * n + z * h,)


ALIKE = {
    "an lstm that looks at its cell": (weights(*LSTM), over(peephole, 2, 1)),
    "a crossed lstm": (weights(*LSTM), over(crossed, 2, 1)),
    "an lstm that gives its cell": (weights(*LSTM), over(lstm, 2, 0)),
    "an lstm that gives what was": (weights(*LSTM), over(before, 3, 2)),
    "two gates that do not add up": (weights(*GRU), over(other_gate)),
    "another mix": (weights(*GRU), over(gru(lambda z, n, h: (2 - z) * n + z * h))),
    "a doubled state": (
        weights("w", "u"),
        over(lambda p, s, x: (jnp.tanh(x @ p["w"] + 2 * s[0]),)),
    ),
    "a leaky relu": (weights("w", "u", "b"), over(rnn(nn.leaky_relu))),
    "relu above one": (weights("w", "u", "b"), over(rnn(lambda x: jnp.maximum(x, 1.0)))),
    "a normed state": (
        weights("w", "u"),
        over(lambda p, s, x: (jnp.tanh(x @ p["w"] + (s[0] / 2) @ p["u"]),)),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_only_looks_like_them_is_not(name):
    params, apply = ALIKE[name]
    found, _ = check(params, apply, INPUTS, (X,), (HOSTILE,), rtol=2e-5)
    assert found["scan"] == 1


def test_exact_files_have_the_loop(tmp_path):
    onnx = pytest.importorskip("onnx")
    _, model = MODELS["lstm"]
    to_onnx(model, tmp_path / "m.onnx", INPUTS, exact=True)
    assert "Scan" in {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    report = to_onnx(model, tmp_path / "kept.onnx", INPUTS, fold=False)
    stored = {each.name for each in onnx.load(tmp_path / "kept.onnx").graph.initializer}
    assert {each.name for each in report.variables} <= stored


def test_the_arrays_of_a_layer_are_computed_while_it_is_exported():
    params = {name: np.tile(each, (9, 9)[: each.ndim]) for name, each in weights(*LSTM).items()}

    def apply(p, x):
        first = (jnp.zeros((x.shape[0], 9 * SIZE)),) * 2
        return lax.scan(lambda s, r: ((m := lstm(p, s, r)), m[1]), first, x.swapaxes(0, 1))[1]

    _, made = check(params, apply, spec("batch, 5, 27"), (random(2, 5, 27),), rtol=2e-5)
    shapes = sorted(np.shape(each.array) for each in made.weights)
    assert shapes == [(1, 144, 27), (1, 144, 36), (1, 288)]


@pytest.mark.parametrize("start", [False, 0, 0.0])
def test_a_loop_that_starts_from_a_python_number_is_written_without_a_warning(tmp_path, start):
    x = np.asarray([[1, 0, 1]] * 2, jnp.result_type(start))

    def loop(x):
        return lax.scan(lambda c, row: (jnp.maximum(c, row.max()), c), start, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = to_onnx(loop, tmp_path / "m.onnx", (x,))
    assert report.validated
