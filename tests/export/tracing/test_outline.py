"""Repeated layers become one function, and nothing else changes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pax_export as pax
from pax_export._foundations.jaxpr import inner_programs, jaxpr_primitives
from pax_export.export.lowering.lower import lower_traced
from pax_export.export.tracing.outline import LEAST_SAVED, outline
from pax_export.export.tracing.traced import trace, vjp
from tests.closeness import assert_close
from tests.hard.size import runs

(BATCH,) = jax.export.symbolic_shape("batch")
WIDTH = 4
X = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)


def dense(weights, x):
    """Ten operations, with one that defines its derivative."""
    first, second = weights
    mean = x.mean(-1, keepdims=True)
    scaled = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 0.1)
    return x + jax.nn.relu(scaled @ first) @ second


def chain(values, layers):
    """Each layer has two of the weights, and the result of the one before."""
    *weights, x = values
    for i, layer in enumerate(layers):
        x = layer(weights[2 * i : 2 * i + 2], x)
    return x


def in_order(layers):
    return lambda values: [chain(values, layers)]


def layers(count, layer=dense):
    return in_order([layer] * count)


def then(function):
    return lambda weights, x: function(dense(weights, x))


def operands(count, rows=None):
    random = np.random.default_rng(0)
    weights = [random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for _ in range(2 * count)]
    return [*weights, X if rows is None else X[:rows]]


def structs(count, rows=3):
    return [
        *(jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(2 * count)),
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
    ]


def calls(traced):
    text = str(getattr(traced, "program", traced))
    return len(re.findall(r"name=repeated\b", text))


def check(function, count, expected_calls):
    """Outlines a function, and compares its results and gradients with those of before."""
    given = operands(count)
    traced = trace(function, structs(count))
    assert calls(traced) == expected_calls

    def with_gradients(function):
        def total(values):
            results = function(values)
            return sum((each**2).sum() for each in results), results

        (_, results), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(given)
        return results, gradients

    (results, gradients), expected = map(with_gradients, (traced.lowerable, function))
    for got, want in zip(results, expected[0], strict=True):
        assert_close(got, want, rtol=2e-6, atol=2e-6)
    for got, want in zip(gradients, expected[1], strict=True):
        assert_close(got, want, rtol=2e-5, atol=2e-5)


def control_flow(weights, x):
    x = jax.checkpoint(dense)(weights, x)
    x = jax.lax.fori_loop(0, 2, lambda i, x: dense(weights, x) * 0.5, x)
    return jax.lax.cond(x.sum() > 0, jnp.sin, jax.nn.relu, x) + dense(weights, x)


def pair(weights, x):
    return jnp.sin(dense(weights, jnp.cos(dense(weights, x))))


def around(values):
    x = chain([*values[:6], jnp.sin(values[-1])], [dense] * 3)
    y = chain([*values[6:12], jnp.cos(x) @ values[0]], [dense] * 3)
    return [y.sum(), jnp.tanh(y), x, values[2]]


def read_later(values):
    *weights, x = values
    seen = []
    for i in range(6):
        x = dense(weights[2 * i : 2 * i + 2], x)
        seen.append(x)
    return [x, seen[1], seen[4] + seen[0]]


def wired_otherwise(values):
    """The layers add their own input, and one of them the input of all."""
    own = lambda weights, x: dense(weights, x) + x  # noqa: E731
    return [chain(values, [own] * 3 + [then(lambda y: y + values[-1])] + [own] * 4)]


@pytest.mark.parametrize(
    ("function", "count", "expected"),
    [
        (layers(6), 6, 6),
        (lambda v: [chain([v[0], v[1]] * 6 + [v[-1]], [dense] * 6)], 1, 6),
        (layers(4, control_flow), 4, 4),
        (layers(4, pair), 4, 4),
        (around, 6, 6),
        (read_later, 6, 6),
        (in_order([then(lambda y, i=i: y * (1.0 + 0.1 * i)) for i in range(6)]), 6, 0),
        (wired_otherwise, 8, 3 + 4),
    ],
    ids=[
        "layers", "shared weights", "control flow", "layers of layers", "around", "read later",
        "other numbers", "wired otherwise",
    ],
)  # fmt: skip
def test_equal_layers_become_calls_of_one_function(function, count, expected):
    check(function, count, expected)


def test_short_programs_are_left_alone():
    traced = trace(layers(2), structs(2))
    assert len(traced.program.jaxpr.eqns) < 2 * LEAST_SAVED
    assert traced.lowerable is traced.jitted
    assert calls(traced) == 0


def test_symbolic_sizes():
    given = structs(6, BATCH)
    program = trace(layers(6), given)
    assert calls(program) == 6
    module = lower_traced(program, ("cpu", "tpu")).portable
    assert module.module


@pytest.mark.parametrize(
    ("derivative", "scales", "expected"),
    [
        ("jvp", [2] * 6, 6),
        ("jvp", [2, 3] * 3, 3),
        ("vjp", [2, 2, 2, 3, 3, 3], 6),
        ("vjp", [2, 3] * 3, 3),
    ],
)
def test_layers_with_derivatives_of_their_own(derivative, scales, expected):
    """The same function, but another derivative: gradients scaled by layer."""

    def scaled_gradient(scale):
        def plain(x):
            return x * 1.0

        if derivative == "jvp":
            function = jax.custom_jvp(plain)
            function.defjvp(lambda x, t: (x[0] * 1.0, t[0] * scale))
        else:
            function = jax.custom_vjp(plain)
            function.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * scale,))
        return function

    check(in_order([then(scaled_gradient(scale)) for scale in scales]), 6, expected)


def test_second_derivatives_are_compared():
    """Function and derivative are the same; the derivative of the derivative is not."""

    def slope_of(curvature):
        @jax.custom_jvp
        def slope(x):
            return x * 2.0

        slope.defjvp(lambda x, t: (slope(x[0]), t[0] * curvature))

        @jax.custom_jvp
        def square(x):
            return x * x

        square.defjvp(lambda x, t: (square(x[0]), t[0] * slope(x[0])))
        return square

    for last, expected in ((2.0, 5), (5.0, 4)):
        function = in_order([then(slope_of(each)) for each in (2.0, 2.0, 2.0, 2.0, last)])
        assert calls(trace(function, structs(5))) == expected


def test_rules_that_fail_are_left_to_the_export():
    @jax.custom_vjp
    def wrong(x):
        return x * 1.0

    wrong.defvjp(lambda x: (x, None), lambda _, g: 1 / 0)
    assert calls(trace(layers(6, then(wrong)), structs(6))) == 0


def test_arrays_that_layers_close_over_stay_apart():
    held = [jnp.full((WIDTH, 100), float(i)) for i in range(6)]

    function = in_order(
        [lambda w, x, a=a: dense(w, x) + (x @ a).sum(-1, keepdims=True) for a in held]
    )
    traced = trace(function, structs(6))
    assert {id(each) for each in traced.constants} == {id(each) for each in held}
    want = jax.jit(function)(operands(6))[0]
    got = traced.with_constants([*operands(6), *traced.constants])[0]
    assert_close(got, want, rtol=1e-6)


@settings(deadline=None, max_examples=runs(short=6, long=60))
@given(st.lists(st.integers(0, 3), min_size=4, max_size=8))
def test_any_order_of_layers_gives_what_it_gave(order):
    kinds = [
        dense,
        lambda weights, x: dense(weights, x) * 0.5 + x,
        lambda weights, x: dense(weights[::-1], x),
        then(jnp.sin),
    ]
    function = in_order([kinds[kind] for kind in order])
    given = operands(len(order))
    program = trace(function, structs(len(order)))
    want = jax.jit(function)(given)[0]
    assert_close(program.lowerable(given)[0], want, rtol=1e-5, atol=1e-5)


def operations(program, seen):
    """How many operations a program has; those of a function count once, however often called."""
    jaxpr = getattr(program, "jaxpr", program)
    if id(jaxpr) in seen:
        return 0
    seen.add(id(jaxpr))
    inner = [each for equation in jaxpr.eqns for each in inner_programs(equation)]
    return len(jaxpr.eqns) + sum(operations(each, seen) for each in inner)


def test_layers_more_are_a_few_calls_more():
    """In the program, in its gradient, and in the gradient of that."""
    sizes = {}
    for count in (4, 8):
        program = trace(layers(count), structs(count, BATCH))
        sizes[count] = [operations(program.program, set())]
        for _ in range(2):
            program = vjp(program, range(2 * count), range(len(program.results)))
            sizes[count].append(operations(program.program, set()))
    growth = [large - small for small, large in zip(sizes[4], sizes[8], strict=True)]
    assert all(more <= 4 * calls for more, calls in zip(growth, (1, 3, 24), strict=True)), sizes


def test_a_transformer_is_one_layer_and_calls():
    net = pax.nets.Transformer(8, 2, 5, 0.0).eval()
    leaves, tree = jax.tree.flatten(net)
    given = [*leaves, np.ones((2, 3, 8), np.float32)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    traced = trace(lambda values: [tree.unflatten(values[:-1])(values[-1])], like)
    assert calls(traced) == 5
    assert {"dot_general", "rsqrt"} <= jaxpr_primitives(traced.program)
    assert_close(traced.lowerable(given)[0], jax.jit(net)(given[-1]), rtol=1e-5)


def test_nothing_repeats():
    assert outline(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X)) is None
