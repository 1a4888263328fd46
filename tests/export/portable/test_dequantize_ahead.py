"""Numbers of quantized weights as operands, in the place of their integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import pax_export as pax
from pax_export._foundations.jaxpr import jaxpr_primitives
from pax_export.export.portable.for_xla import dequantized_ahead
from pax_export.precision.quantized import rows, times, times_transposed
from tests.closeness import assert_close

X = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)


def weights(*shape, dtype=jnp.float32, **scheme):
    array = jax.random.normal(jax.random.key(len(shape)), shape, dtype)
    return pax.quantize(({"w": array}, lambda params, x: x), **(scheme or {"bits": 4}))[0][0]["w"]


def scanned(w, x):
    return jax.lax.scan(lambda x, layer: (jnp.tanh(times(x, layer)), None), x, w)[0]


def in_a_loop(w, x):
    """The weight is constant in a loop, in branches of its body, and in a remat of one."""
    once = jax.checkpoint(lambda x: jnp.tanh(times(x, w)))

    def body(state):
        count, x = state
        return count + 1, jax.lax.cond(count % 2 == 0, once, lambda x: x - w.dequantized()[0], x)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def called(w, x):
    layer = jax.jit(lambda w, x: jnp.tanh(times(x, w)))
    return layer(w, layer(w, x))


def tied(w, x):
    return times_transposed(rows(w, jnp.array([1, 63])), w, jnp.float32) + x[0, 0]


def lone_rows(w, x):
    return rows(w, jnp.array([1, 5])) + x[0, 0]


def read_otherwise(w, x):
    return times(x, w) + w.integers.sum()


def changed_in_a_loop(w, x):
    def body(carry, _):
        return (carry[0].replace(integers=carry[0].integers + jnp.int8(1)), carry[1]), None

    w, x = jax.lax.scan(body, (w, x), None, length=2)[0]
    return times(x, w)


def traced(function, w):
    leaves, tree = jax.tree.flatten(w)
    program = jax.make_jaxpr(lambda *given: function(tree.unflatten(given[:-1]), given[-1]))
    return program(*leaves, X), leaves


BYTES, HALVES, SHIFTED = {"bits": 8}, {"bits": 4}, {"bits": 4, "scheme": "asymmetric"}


@pytest.mark.parametrize(
    ("function", "scheme"),
    [
        (scanned, BYTES),
        (scanned, SHIFTED),
        (in_a_loop, HALVES),
        (called, SHIFTED),
        (tied, BYTES),
        (tied, HALVES),
    ],
)
def test_integers_are_numbers(function, scheme):
    w = weights(64, 64, **scheme)
    if function is tied:
        w = pax.quantize(pax.Embed(64, 64), **scheme)[0].weight
    if function is scanned:
        w = jax.tree.map(lambda each: jnp.stack([each, each // 2, each]), w)
    program, leaves = traced(function, w)
    new, (found,) = dequantized_ahead(program, set(range(len(leaves))))
    assert found == (0, tuple(range(1, len(leaves))), w.form)
    assert not jaxpr_primitives(new) & {"dequantize", "quantized_dot", "quantized_rows"}
    (got,) = jax.jit(jaxpr_as_fun(new))(w.dequantized(), *leaves[1:], X)
    assert_close(got, jax.jit(function)(w, X), rtol=1e-5, atol=1e-5)
    if function is called:
        calls = [each for each in new.jaxpr.eqns if each.primitive.name in ("jit", "pjit")]
        assert len(calls) == 2


@pytest.mark.parametrize("function", [lone_rows, read_otherwise, changed_in_a_loop])
def test_integers_that_are_read_stay(function):
    w = weights(64, 64, bits=8)
    if function is lone_rows:
        w = pax.quantize(pax.Embed(64, 64), bits=8)[0].weight
    program, _ = traced(function, w)
    assert dequantized_ahead(program, {0, 1}) == (program, ())


def test_operands_that_calls_change_stay():
    program, _ = traced(called, weights(64, 64))
    for fixed in ({1}, {0}, ()):
        assert dequantized_ahead(program, fixed) == (program, ())


def test_numbers_have_the_dtype_of_the_weight():
    w = weights(64, 32, dtype=jnp.bfloat16)
    new, _ = dequantized_ahead(traced(lambda w, x: times(x, w), w)[0], {0, 1})
    assert new.jaxpr.invars[0].aval.dtype == jnp.bfloat16
