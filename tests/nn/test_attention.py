"""MultiHeadAttention, GroupedQueryAttention and dot_product_attention."""

from __future__ import annotations

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


# --- grouped attention ---------------------------------------------------------------


X = np.random.RandomState(0).standard_normal((2, 7, 12)).astype(np.float32)
DRAWS = np.random.RandomState(1)
Q = DRAWS.standard_normal((2, 7, 6, 4)).astype(np.float32)
K, V = DRAWS.standard_normal((2, 2, 7, 2, 4)).astype(np.float32)
SEEN = DRAWS.rand(2, 1, 7, 7) < 0.7
BIAS = DRAWS.standard_normal((6, 7, 7)).astype(np.float32)


def by_loops(seen: np.ndarray, scale=0.5, softcap=None, bias=None) -> np.ndarray:
    """Attention of `Q` to `K` and `V`; `seen` is [batch, 1, t, T]."""
    found = np.empty(Q.shape)
    for b, h, t in np.ndindex(2, 6, 7):
        logits = K[b, :, h // 3].astype(float) @ Q[b, t, h] * scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias[h, t]
        logits = logits[seen[b, 0, t]]
        weights = np.exp(logits - logits.max())
        found[b, t, h] = weights / weights.sum() @ V[b, seen[b, 0, t], h // 3]
    return found


def within(window: int) -> np.ndarray:
    t, place = np.ogrid[:7, :7]
    return np.broadcast_to((place <= t) & (place > t - window), (2, 1, 7, 7))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_heads_share_keys_and_see_what_mask_and_window_leave(softcap):
    seen = SEEN & within(3) | np.eye(7, dtype=bool)
    found = pax.dot_product_attention(
        Q, K, V, mask=jnp.asarray(SEEN | np.eye(7, dtype=bool)), is_causal=True, window=3,
        softcap=softcap,
    )  # fmt: skip
    assert_close(found, by_loops(seen, softcap=softcap), rtol=2e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_bias_is_added_to_scaled_logits(softcap):
    found = pax.dot_product_attention(Q, K, V, bias=BIAS[None], scale=0.1, softcap=softcap)
    whole = np.ones((2, 1, 7, 7), bool)
    assert_close(found, by_loops(whole, 0.1, softcap, BIAS), rtol=2e-6)


@pytest.mark.parametrize("heads", ["masked alike", "masked by head"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_single_query_gives_what_it_gives_among_others(softcap, heads):
    """As in decoding, where XLA's CPU is given one product of matrices for all heads."""
    seen = SEEN | np.eye(7, dtype=bool)
    expected = by_loops(seen, 0.3, softcap, BIAS)
    for t in range(7):
        mask = jnp.asarray(seen[:, :, t : t + 1])
        mask = jnp.broadcast_to(mask, (2, 6, 1, 7)) if heads == "masked by head" else mask
        found = pax.dot_product_attention(
            Q[:, t : t + 1], K, V, mask=mask, bias=BIAS[None, :, t : t + 1], scale=0.3,
            softcap=softcap,
        )  # fmt: skip
        assert found.shape == (2, 1, 6, 4)
        assert_close(found[:, 0], expected[:, t], rtol=2e-6)


@pytest.mark.parametrize("query", [slice(None), slice(6, None)], ids=["all", "one"])
def test_halves_have_logits_in_float32(query):
    halves = [jnp.asarray(x, jnp.bfloat16) for x in (Q[:, query], K, V)]
    found = pax.dot_product_attention(*halves)
    assert found.dtype == jnp.bfloat16
    expected = by_loops(np.ones((2, 1, 7, 7), bool))[:, query]
    assert_close(np.asarray(found, np.float32), expected, rtol=2e-2)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("count", [7, 3, 1])
def test_masks_biases_and_causality_broadcast_alike_in_every_path(softcap, count):
    """Whichever kernel is chosen: any number of axes, and fewer queries than keys."""
    seen, added = SEEN[0, 0, :count] | np.eye(7, dtype=bool)[:count], BIAS[0, :count]
    found = pax.dot_product_attention(
        Q[:, :count], K, V, mask=seen, bias=added, is_causal=True, softcap=softcap
    )
    whole = np.eye(7, dtype=bool)
    whole[:count] = seen & np.tri(count, 7, dtype=bool)
    expected = by_loops(
        np.broadcast_to(whole, (2, 1, 7, 7)),
        softcap=softcap,
        bias=np.broadcast_to(BIAS[0], (6, 7, 7)),
    )
    assert_close(found, expected[:, :count], rtol=2e-6)


def test_with_as_many_keys_as_queries_it_is_multi_head_attention():
    plain, grouped = pax.MultiHeadAttention(3, 4), pax.GroupedQueryAttention(12, 3, with_bias=True)
    for name in ("query", "key", "value", "output"):
        grouped = grouped.replace(**{name: getattr(plain, f"{name}_projection")})
    mask = np.tril(np.ones((7, 7), bool))
    assert_close(grouped(X), plain(X, X, X, mask), rtol=2e-6)


def test_positions_turn_queries_and_keys_and_only_distance_counts():
    layer = pax.GroupedQueryAttention(12, 6, 2, 4, rotary=pax.Rotary(4), query_key_norm=1e-5)
    assert layer.query_norm.scale.shape == (4,) and layer.key.weight.shape == (12, 8)
    whole = layer(X)
    assert_close(layer(X, np.arange(7) + 100), whole, rtol=2e-5)
    assert float(jnp.abs(layer(X, np.arange(7) * 2) - whole).max()) > 1e-3


def test_queries_and_keys_may_be_normalized_by_all_heads_together():
    layer = pax.GroupedQueryAttention(12, 6, 2, 4, query_key_norm=1e-5, norm_per_head=False)
    assert (layer.query_norm.scale.shape, layer.key_norm.scale.shape) == ((24,), (8,))
    scales = {name: np.random.RandomState(i).rand(size).astype("f") for i, (name, size) in
              enumerate((("query_norm", 24), ("key_norm", 8)))}  # fmt: skip
    for name, scale in scales.items():
        layer = layer.set_attribute(name, getattr(layer, name).replace(scale=jnp.asarray(scale)))
    query, key, value = layer.project(X)
    for found, linear, scale in ((query, layer.query, scales["query_norm"]),
                                 (key, layer.key, scales["key_norm"])):  # fmt: skip
        flat = np.asarray(linear(X), np.float64)
        flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-5) * scale
        assert_close(found, flat.reshape(found.shape), rtol=2e-6)
    assert_close(value, np.asarray(layer.value(X)).reshape(value.shape), rtol=0.0)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            lambda: pax.GroupedQueryAttention(12, 6, 4),
            [
                "where: GroupedQueryAttention.num_kv_heads",
                "got: 4 key heads for 6 heads",
                "a divisor of 6",
            ],
        ),
        (lambda: pax.GroupedQueryAttention(12, 5), ["fix: head_size="]),
        (
            lambda: pax.dot_product_attention(Q, Q[:, :, :4], Q[:, :, :4]),
            ["query (2, 7, 6, 4)", "key (2, 7, 4, 4)"],
        ),
        (
            lambda: pax.dot_product_attention(Q, K, V, implementation="flash"),
            ["where: dot_product_attention.implementation", "got: 'flash'"],
        ),
        (
            lambda: pax.dot_product_attention(Q, K, V, softcap=2.0, implementation="cudnn"),
            ["got: 'cudnn' with softcap=2.0", "fix: implementation=None"],
        ),
        (  # float32, which the kernel refuses, if there is cuDNN at all
            lambda: pax.dot_product_attention(Q, K, V, implementation="cudnn"),
            [
                "where: dot_product_attention.implementation",
                "got: 'cudnn' with float32[2, 7, 6, 4]",
                "fix: implementation=None",
            ],
        ),
        (lambda: pax.GroupedQueryAttention(12, 6)(X[0, 0]), ["[batch, length, dim]"]),
    ],
)
def test_mistakes_are_named(call, names):
    with refused(pax.errors.InvalidArgumentError, *names):
        call()
