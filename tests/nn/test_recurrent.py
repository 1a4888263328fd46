"""LSTM, GRU, VanillaRNN: formulas, keys, use as a loop body, what they refuse."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import dense, sigmoid
from tests.refusals import refused

CELLS = {
    pax.LSTM: (pax.LSTMState, ("hidden", "cell")),
    pax.GRU: (pax.GRUState, ("hidden",)),
    pax.VanillaRNN: (pax.VanillaRNNState, ("hidden",)),
}
each_cell = pytest.mark.parametrize("make", CELLS, ids=lambda make: make.__name__)


def sequence(time=5, batch=2, width=3, dtype="float32"):
    values = np.random.RandomState(0).standard_normal((time, batch, width))
    return jnp.asarray(values, dtype)


def lstm_formula(module, xs):
    hidden = cell = np.zeros((xs.shape[1], module.hidden_dim))
    for x in xs:
        i, g, f, o = np.split(dense(module.fc, x, hidden), 4, axis=-1)
        cell = sigmoid(f + module.forget_gate_bias) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        yield hidden, (hidden, cell)


def gru_formula(module, xs):
    hidden = np.zeros((xs.shape[1], module.hidden_dim))
    for x in xs:
        z, r = np.split(sigmoid(dense(module.xh_zr_fc, x, hidden)), 2, axis=-1)
        candidate = np.tanh(dense(module.xh_h_fc, x, r * hidden))
        hidden = (1 - z) * hidden + z * candidate
        yield hidden, (hidden,)


def rnn_formula(module, xs):
    hidden = np.zeros((xs.shape[1], module.hidden_dim))
    for x in xs:
        hidden = np.tanh(dense(module.fc, x, hidden))
        yield hidden, (hidden,)


@pytest.mark.parametrize(
    ("module", "formula"),
    [
        (lambda: pax.LSTM(3, 4), lstm_formula),
        (lambda: pax.LSTM(3, 4, forget_gate_bias=1.0), lstm_formula),
        (lambda: pax.GRU(3, 4), gru_formula),
        (lambda: pax.VanillaRNN(3, 4), rnn_formula),
    ],
    ids=["LSTM", "LSTM with a forget bias", "GRU", "VanillaRNN"],
)
def test_formula(module, formula):
    module, xs = module(), sequence()
    state = module.initial_state(2)
    for x, (expected, arrays) in zip(xs, formula(module, np.asarray(xs, np.float64))):
        state, y = module(state, x)
        assert_close(y, expected, atol=1e-6)
        for array, wanted in zip(state, arrays, strict=True):
            assert_close(array, wanted, atol=1e-6)


@each_cell
def test_initial_state_is_zeros(make):
    form, fields = CELLS[make]
    state = make(3, 4).initial_state(2)
    assert type(state) is form and form._fields == fields
    for array in state:
        assert array.shape == (2, 4) and array.dtype == jnp.float32 and not array.any()
    assert len({id(array) for array in state}) == len(fields)


def test_one_key_is_drawn():
    for make in CELLS:
        pax.seed_rng_key(1)
        make(2, 3)
        after = pax.next_rng_key()
        pax.seed_rng_key(1)
        pax.next_rng_key()
        assert (after == pax.next_rng_key()).all()


def test_weights_come_from_the_key():
    key = jax.random.PRNGKey(7)
    assert_same(pax.LSTM(2, 3, rng_key=key).fc, pax.Linear(5, 12, rng_key=key))
    assert_same(pax.VanillaRNN(2, 3, rng_key=key).fc, pax.Linear(5, 3, rng_key=key))
    gates, candidate = jax.random.split(key)
    gru = pax.GRU(2, 3, rng_key=key)
    assert_same(gru.xh_zr_fc, pax.Linear(5, 6, rng_key=gates))
    assert_same(gru.xh_h_fc, pax.Linear(5, 3, rng_key=candidate))


def assert_same(a, b):
    assert (a.weight == b.weight).all() and (a.bias == b.bias).all()


def test_initializer_of_the_weight():
    lstm = pax.LSTM(2, 3, jax.nn.initializers.ones)
    assert (lstm.fc.weight == 1).all()
    assert (lstm.fc.bias != 1).all()


def test_repr_and_summary():
    assert repr(pax.LSTM(2, 3, name="encoder")) == "(encoder) LSTM(input_dim=2, hidden_dim=3)"
    assert pax.LSTM(2, 3).summary() == (
        "LSTM(input_dim=2, hidden_dim=3)\n"
        "└── fc: (lstm_fc) Linear(in_dim=5, out_dim=12, with_bias=True)"
    )
    assert pax.GRU(2, 3).summary() == (
        "GRU(input_dim=2, hidden_dim=3)\n"
        "├── xh_zr_fc: (xh_to_zr) Linear(in_dim=5, out_dim=6, with_bias=True)\n"
        "└── xh_h_fc: (xh_to_h) Linear(in_dim=5, out_dim=3, with_bias=True)"
    )
    assert pax.VanillaRNN(2, 3).summary() == (
        "VanillaRNN(input_dim=2, hidden_dim=3)\n"
        "└── fc: (vanilla_rnn_fc) Linear(in_dim=5, out_dim=3, with_bias=True)"
    )


@each_cell
def test_scan_is_the_loop(make):
    module, xs = make(3, 4), sequence()
    state, outputs = module.initial_state(2), []
    for x in xs:
        state, y = module(state, x)
        outputs.append(y)
    for loop in (pax.scan, jax.lax.scan):
        last, ys = loop(module, module.initial_state(2), xs)
        assert type(last) is type(state)
        assert_close(ys, jnp.stack(outputs), atol=1e-6)
        assert_close(last.hidden, state.hidden, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(pax.LSTM, "bfloat16"), (pax.GRU, "float16"), (pax.VanillaRNN, "bfloat16")],
)
def test_half_precision_weights_in_a_scan(make, dtype):
    full, xs = make(3, 4), sequence(dtype=dtype)
    half = full.map(lambda x: x.astype(dtype))
    _, ys = pax.scan(half, half.initial_state(2), xs)
    _, expected = pax.scan(full, full.initial_state(2), xs.astype("float32"))
    assert_close(ys, expected, atol=0.03)

    state = jax.tree_util.tree_map(lambda x: x.astype(dtype), half.initial_state(2))
    last, ys = pax.scan(half, state, xs)
    assert ys.dtype == last.hidden.dtype == dtype


@each_cell
def test_policy_in_a_scan(make):
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    module = make(3, 4).apply(lambda m: pax.apply_mp_policy(m, policy))
    _, ys = jax.jit(lambda m, xs: pax.scan(m, m.initial_state(2), xs))(module, sequence())
    assert ys.dtype == jnp.float32 and np.isfinite(ys).all()


@each_cell
def test_double_precision_in_a_scan(make):
    with jax.enable_x64(True):
        module = make(3, 4)
        _, ys = pax.scan(module, module.initial_state(2), sequence(dtype="float64"))
        assert ys.dtype == jnp.float64


REFUSED = {
    "no state": (
        lambda cell: cell(jnp.zeros((2, 4)), jnp.zeros((2, 3))),
        (TypeError, "LSTMState"),
    ),
    "the state of another cell": (
        lambda cell: cell(pax.GRUState(jnp.zeros((2, 4))), jnp.zeros((2, 3))),
        (TypeError, "got: GRUState"),
    ),
    "no axis": (lambda cell: cell(cell.initial_state(1), 1.0), (AssertionError, "[batch, 3]")),
    "another width": (
        lambda cell: cell(cell.initial_state(2), jnp.zeros((2, 5))),
        (TypeError, "got: shape (2, 5)"),
    ),
    "another batch": (
        lambda cell: cell(cell.initial_state(1), jnp.zeros((2, 3))),
        (TypeError, "(2, 4)"),
    ),
    "a sequence": (
        lambda cell: cell(cell.initial_state(2), jnp.zeros((7, 2, 3))),
        (TypeError, "pax.scan(cell, state, xs)"),
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused_call(wrong):
    call, (error, message) = REFUSED[wrong]
    with refused(error, message):
        call(pax.LSTM(3, 4))


@each_cell
def test_refused_sizes(make):
    with refused(ValueError, f"where: {make.__name__}.input_dim"):
        make(0, 4)
    with refused(TypeError, f"where: {make.__name__}.hidden_dim"):
        make(3, 4.5)
