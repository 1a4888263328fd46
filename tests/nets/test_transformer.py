"""Transformer: its formula, what a place can see, and when it draws keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import dense
from tests.refusals import refused

DIM, HEADS, LAYERS = 4, 2, 2


def transformer(rate=0.0):
    return pax.nets.Transformer(DIM, HEADS, LAYERS, rate)


def sequences(batch=2, time=5, dtype="float32"):
    return jnp.asarray(np.random.RandomState(0).standard_normal((batch, time, DIM)), dtype)


def norm(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * np.asarray(layer.scale) + np.asarray(layer.offset)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attend(layer, x, mask):
    """One sequence, one head and one place after the other."""
    size = DIM // HEADS
    query, key, value = (
        dense(projection, x)
        for projection in (layer.query_projection, layer.key_projection, layer.value_projection)
    )
    rows = np.zeros_like(x)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        for i in range(len(x)):
            visible = (np.arange(len(x)) <= i) & mask
            logits = np.where(visible, key[:, part] @ query[i, part] / np.sqrt(size), -1e30)
            weights = np.exp(logits - logits.max())
            rows[i, part] = weights / weights.sum() @ value[:, part]
    return dense(layer.output_projection, rows)


def formula(net, sequence, mask):
    h = np.asarray(sequence, np.float64)
    for layer in net.layers:
        h = h + attend(layer["attention"], norm(layer["attn_layer_norm"], h), mask)
        block, x = layer["dense_block"], norm(layer["dense_layer_norm"], h)
        h = h + dense(block.fc2, gelu(dense(block.fc1, x)))
    return norm(net.layer_norm_output, h)


@jax.jit
def run(net, h, mask=None):
    return net(h, mask)


@pytest.fixture(scope="module")
def net():
    """A Transformer whose norms are not the identity."""
    pax.seed_rng_key(0)
    draws = np.random.RandomState(1)

    def shifted(x):
        if x.dtype != jnp.float32:
            return x  # the state of rng_seq
        return x + draws.standard_normal(x.shape).astype(x.dtype) / 4

    return transformer(0.3).eval().map(shifted)


def test_formula(net):
    h = sequences()
    for y, sequence in zip(run(net, h), h):
        assert_close(y, formula(net, sequence, np.ones(5, bool)), atol=1e-5)


def test_mask(net):
    h = sequences()
    mask = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], bool)
    for y, sequence, visible in zip(run(net, h, jnp.asarray(mask)), h, mask):
        assert_close(y, formula(net, sequence, visible), atol=1e-5)


def test_one_mask_for_the_batch(net):
    h, mask = sequences(), jnp.array([[True, False, True, True, True]])
    assert (run(net, h, mask) == run(net, h, jnp.tile(mask, (2, 1)))).all()


def test_the_future_has_no_influence(net):
    h = sequences()
    y, changed = run(net, h), run(net, h.at[:, 3:].set(9.0))
    assert (y[:, :3] == changed[:, :3]).all()
    assert (y[:, 3:] != changed[:, 3:]).any(-1).all()


def test_a_hidden_place_has_no_influence_on_others(net):
    h, mask = sequences(), jnp.array([[True, False, True, True, True]] * 2)
    y, changed = run(net, h, mask), run(net, h.at[:, 1].set(9.0), mask)
    others = np.array([0, 2, 3, 4])
    assert (y[:, others] == changed[:, others]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padding_on_the_left_is_finite_in_half_precision(net, dtype):
    """The first places see nothing at all."""
    half = net.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x)
    h = sequences(dtype=dtype)
    mask = jnp.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]], bool)
    y = run(half, h, mask)
    assert y.dtype == dtype
    expected = run(net, h.astype("float32"), mask)
    assert_close(y.astype("float32"), expected, atol=0.1)


# --- random keys ----------------------------------------------------------------------


def test_keys_of_the_constructor():
    """One seed gives the weights of PAX, which draws in this order."""
    pax.seed_rng_key(5)
    net = transformer()
    after = pax.next_rng_key()
    pax.seed_rng_key(5)
    assert (net.rng_seq._rng_key == pax.next_rng_key()).all()
    scale = jax.nn.initializers.variance_scaling(2 / LAYERS, "fan_in", "normal")
    for layer in net.layers:
        attention = pax.MultiHeadAttention(HEADS, DIM // HEADS, 2 / LAYERS)
        assert_same(layer["attention"], attention)
        pax.next_rng_key(), pax.next_rng_key()  # the two norms
        assert_same(layer["dense_block"].fc1, pax.Linear(DIM, 4 * DIM, w_init=scale))
        assert_same(layer["dense_block"].fc2, pax.Linear(4 * DIM, DIM, w_init=scale))
    pax.next_rng_key()  # the last norm
    assert (after == pax.next_rng_key()).all()


def assert_same(a, b):
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        assert_close(x, y, rtol=1e-6)  # XLA may round programs of several draws otherwise


def test_dropout_takes_its_keys_in_order():
    net, h = transformer(0.4), sequences()
    state, *keys = jax.random.split(net.rng_seq._rng_key, 2 * LAYERS + 1)
    updated, y = net % h
    assert (updated.rng_seq._rng_key == state).all()
    for layer in net.layers:
        update = layer["attention"](layer["attn_layer_norm"](h))
        h = h + pax.dropout(keys.pop(0), 0.4, update)
        update = layer["dense_block"](layer["dense_layer_norm"](h))
        h = h + pax.dropout(keys.pop(0), 0.4, update)
    assert_close(y, net.layer_norm_output(h), atol=1e-6)


def test_eval_mode_draws_no_key():
    net, h = transformer(0.4).eval(), sequences()
    y = net(h)
    updated, again = net % h
    assert updated == net
    assert (y == again).all()
    _, in_scan = jax.lax.scan(lambda carry, x: (carry, net(x)), None, h[None])
    assert_close(in_scan[0], y, atol=1e-5)


def test_a_rate_of_zero_draws_no_key():
    net, h = transformer(0.0), sequences()
    updated, y = net % h
    assert updated == net
    assert (net(h) == y).all() and (net.eval()(h) == y).all()


# --- what stands around the formula --------------------------------------------------


def test_summary():
    net = pax.nets.Transformer(8, 2, 1, 0.1)
    linear = "Linear(in_dim=8, out_dim=8, with_bias=True)"
    norm = "LayerNorm(num_channels=8, axis=(-1,), create_scale=True, create_offset=True)"
    assert net.summary(return_list=True) == [
        "Transformer",
        "├── rng_seq: RngSeq",
        "├── layers.0.attention: CausalSelfAttention(num_heads=2, key_size=4)",
        f"│   ├── query_projection: (qry_proj) {linear}",
        f"│   ├── key_projection: (key_proj) {linear}",
        f"│   ├── value_projection: (val_proj) {linear}",
        f"│   └── output_projection: (out_proj) {linear}",
        f"├── layers.0.attn_layer_norm: {norm}",
        "├── layers.0.dense_block: DenseBlock",
        "│   ├── fc1: Linear(in_dim=8, out_dim=32, with_bias=True)",
        "│   └── fc2: Linear(in_dim=32, out_dim=8, with_bias=True)",
        f"├── layers.0.dense_layer_norm: {norm}",
        f"└── layer_norm_output: {norm}",
    ]


def test_attention_takes_other_keys_and_values():
    attention = transformer().layers[0]["attention"]
    x, key, value = sequences(), sequences() * 2, sequences() * 3
    assert (attention(x) == attention(x, x, x)).all()
    assert (attention(x) != attention(x, key)).any()
    assert (attention(x, key) != attention(x, key, value)).any()


def test_symbolic_batch_and_length(net):
    scope = jax.export.SymbolicScope()
    symbolic = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in (("b, t, 4", jnp.float32), ("b, t", jnp.bool_))
    ]
    exported = jax.export.export(jax.jit(lambda h, mask: net(h, mask)))(*symbolic)
    for batch, time in ((1, 1), (3, 6)):
        h, mask = sequences(batch, time), jnp.ones((batch, time), bool).at[:, -1].set(False)
        assert_close(exported.call(h, mask), run(net, h, mask), atol=1e-5)


REFUSED = {
    "one place": (lambda net: net(np.ones(DIM)), "got: shape (4,)"),
    "another width": (lambda net: net(np.ones((2, 5, 3))), "got: shape (2, 5, 3)"),
    "a mask of attention": (
        lambda net: net(np.ones((2, 5, DIM)), np.ones((2, 1, 5, 5))),
        "got: shape (2, 1, 5, 5)",
    ),
    "a mask of another length": (
        lambda net: net(np.ones((2, 5, DIM)), np.ones((2, 4))),
        "got: shape (2, 4)",
    ),
    "heads that do not divide": (
        lambda net: pax.nets.Transformer(8, 3, 1, 0.1),
        "got: 3 heads for 8 channels",
    ),
    "no layers": (lambda net: pax.nets.Transformer(8, 2, 0, 0.1), "Transformer.num_layers"),
    "a rate of one": (lambda net: pax.nets.Transformer(8, 2, 1, 1.0), "Transformer.dropout_rate"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_invalid_arguments_are_refused(net, wrong):
    call, name = REFUSED[wrong]
    with refused(AssertionError, name):
        call(net)
