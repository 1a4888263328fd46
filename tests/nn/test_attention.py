"""MultiHeadAttention: its formula, masks, half precision, initial weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import dense
from tests.refusals import refused

HEADS, SIZE = 2, 3
WIDTH = HEADS * SIZE


def attention(scale=1.0):
    return pax.MultiHeadAttention(HEADS, SIZE, scale)


def inputs(*lead, t=4, T=5, dtype="float32"):
    draws = np.random.RandomState(0)
    shapes = [(*lead, t, WIDTH), (*lead, T, WIDTH), (*lead, T, WIDTH)]
    return [jnp.asarray(draws.standard_normal(shape).astype(jnp.dtype(dtype))) for shape in shapes]


def formula(module, query, key, value, mask=None):
    """One head and one query after the other, for ``[t, width]`` and ``[T, width]``."""
    query = dense(module.query_projection, np.asarray(query))
    key = dense(module.key_projection, np.asarray(key))
    value = dense(module.value_projection, np.asarray(value))
    rows = np.zeros((len(query), WIDTH))
    for head in range(HEADS):
        part = slice(head * SIZE, (head + 1) * SIZE)
        for i, row in enumerate(query):
            logits = key[:, part] @ row[part] / np.sqrt(SIZE)
            if mask is not None:
                logits = np.where(mask[head, i], logits, -1e30)
            weights = np.exp(logits - logits.max())
            rows[i, part] = weights / weights.sum() @ value[:, part]
    return dense(module.output_projection, rows)


def test_formula():
    module, (query, key, value) = attention(), inputs()
    expected = formula(module, query, key, value)
    assert_close(module(query, key, value), expected, atol=1e-5)


def test_any_leading_axes():
    lead = (2, 3)
    module, arrays = attention(), inputs(*lead)
    y = module(*arrays)
    assert y.shape == (*lead, 4, WIDTH)
    for index in np.ndindex(lead):
        expected = formula(module, *[array[index] for array in arrays])
        assert_close(y[index], expected, atol=1e-5)


def test_mask():
    module, (query, key, value) = attention(), inputs()
    mask = np.random.RandomState(1).uniform(size=(HEADS, 4, 5)) > 0.4
    mask[:, 2] = False  # a query that sees nothing gets the mean of all values
    y = module(query, key, value, jnp.asarray(mask))
    assert_close(y, formula(module, query, key, value, mask), atol=1e-5)


@pytest.mark.parametrize("zero, one", [(0.0, 1.0), (-np.inf, 0.0), (-10000, 0), (0, 1)])
def test_masks_of_numbers_are_refused_by_all_attention(zero, one):
    """Ones and zeros, or numbers that are added to the logits: nothing tells which."""
    q = jnp.ones((1, 3, 8))
    heads = q.reshape((1, 3, 2, 4))
    mask = jnp.where(jnp.tril(jnp.ones((1, 3, 3), bool)), one, zero)
    net = pax.nets.Transformer(8, num_heads=2, num_layers=1, dropout_rate=0.0)
    for call in (
        lambda: pax.MultiHeadAttention(2, 4)(q, q, q, mask=mask),
        lambda: net.layers[0]["attention"](q, mask=mask),
        lambda: net(q, mask=mask[:, 0]),
        lambda: pax.GroupedQueryAttention(8, 2)(q, mask=mask),
        lambda: pax.dot_product_attention(heads, heads, heads, mask=mask),
    ):
        with refused(TypeError, "mask != 0 for ones and zeros", "mask == 0 for numbers"):
            call()


def test_a_hidden_key_has_no_influence():
    module, (query, key, value) = attention(), inputs(2)
    mask = jnp.array([True, True, False, True, True])
    y = module(query, key, value, mask)
    key, value = key.at[:, 2].set(9.0), value.at[:, 2].set(-7.0)
    assert (y == module(query, key, value, mask)).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_see_nothing_are_finite(dtype):
    module = attention().map(lambda x: x.astype(dtype))
    query, key, value = inputs(dtype=dtype)
    mask = jnp.zeros((4, 5), bool).at[0, 1].set(True)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(module):
        y = module(query, key, value, mask)
        return y.astype("float32").sum(), y

    gradient, y = gradients(module)
    assert y.dtype == dtype and np.isfinite(y.astype("float32")).all()
    mean = module.output_projection(module.value_projection(value).mean(0, keepdims=True))
    assert_close(*np.broadcast_arrays(y[1:], mean), atol=2e-2)
    for leaf in jax.tree_util.tree_leaves(gradient):
        assert leaf.dtype == dtype and np.isfinite(leaf.astype("float32")).all()


def test_large_logits_do_not_overflow_float16():
    eye = jnp.eye(WIDTH, dtype="float16")
    module = attention().map(lambda x: eye if x.ndim == 2 else jnp.zeros(WIDTH, "float16"))
    x = jnp.full((2, WIDTH), 200.0, "float16").at[0].set(-200.0)  # 3 * 200² > 65504
    np.testing.assert_array_equal(jax.jit(module)(x, x, x), x)


def test_weights_come_from_four_keys():
    pax.seed_rng_key(3)
    module = attention(0.5)
    pax.seed_rng_key(3)
    for name in ("query", "key", "value", "output"):
        layer = getattr(module, f"{name}_projection")
        weight, bias = jax.random.split(pax.next_rng_key())
        normal = jax.random.normal(weight, (WIDTH, WIDTH)) * np.sqrt(0.5 / WIDTH)
        assert_close(layer.weight, normal, rtol=1e-5)
        normal = jax.random.normal(bias, (WIDTH,)) * np.sqrt(1 / WIDTH)
        assert_close(layer.bias, normal, rtol=1e-5)


def test_attributes_repr_and_summary():
    module = attention()
    assert (module.num_heads, module.key_size) == (HEADS, SIZE)
    assert (module.value_size, module.model_size) == (SIZE, WIDTH)
    layer = f"Linear(in_dim={WIDTH}, out_dim={WIDTH}, with_bias=True)"
    assert module.summary() == (
        "MultiHeadAttention(num_heads=2, key_size=3)\n"
        f"├── query_projection: (qry_proj) {layer}\n"
        f"├── key_projection: (key_proj) {layer}\n"
        f"├── value_projection: (val_proj) {layer}\n"
        f"└── output_projection: (out_proj) {layer}"
    )


def test_invalid_masks_widths_and_sizes():
    module, arrays = attention(), inputs(3)
    with refused(
        ValueError, "mask[:, None, None, :]", where="MultiHeadAttention(num_heads=2, key_size=3)",
        got="shape (3, 5) for (3, 2, 4, 5)",
    ):  # fmt: skip
        module(*arrays, mask=jnp.ones((3, 5), bool))
    with refused(TypeError, "where: (qry_proj) Linear"):
        module(*[jnp.ones((2, 4, 5))] * 3)
    with refused(ValueError, where="MultiHeadAttention.num_heads"):
        pax.MultiHeadAttention(0, 3, 1.0)
    with refused(TypeError, where="MultiHeadAttention.key_size"):
        pax.MultiHeadAttention(2, "3", 1.0)
