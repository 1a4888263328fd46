"""pax.scan: equal to a Python loop, with either axis first."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.closeness import assert_close

xs = {"a": jnp.arange(10.0).reshape(5, 2), "b": jnp.arange(5.0)}


def step(state, x):
    state = state * 0.5 + x["a"].sum() + x["b"]
    return state, (state, x["a"] * state, None)


def loop(indices):
    state, states, arrays = 1.0, [None] * 5, [None] * 5
    for i in indices:
        x = {name: array[i] for name, array in xs.items()}
        state, (states[i], arrays[i], _) = step(state, x)
    return state, jnp.stack(states), jnp.stack(arrays)


@pytest.mark.parametrize("options", [{}, {"length": 5}, {"unroll": 2}, {"unroll": True}])
@pytest.mark.parametrize("reverse", [False, True])
def test_equal_to_a_loop(options, reverse):
    state, (states, arrays, nothing) = pax.scan(step, 1.0, xs, reverse=reverse, **options)
    expected = loop(range(5)[::-1] if reverse else range(5))
    for got, want in zip((state, states, arrays), expected):
        assert_close(got, want, rtol=1e-6)
    assert nothing is None


def test_batch_first():
    batch = {"a": jnp.moveaxis(xs["a"], 0, 1), "b": xs["b"]}  # b has time alone
    assert batch["a"].shape == (2, 5)
    state, (states, arrays, _) = pax.scan(step, 1.0, batch, time_major=False)
    expected = loop(range(5))
    assert_close(state, expected[0], rtol=1e-6)
    assert_close(states, expected[1], rtol=1e-6)  # one number a step (D60)
    assert_close(arrays, jnp.swapaxes(expected[2], 0, 1), rtol=1e-6)


def test_the_carry_keeps_its_axes():
    init = jnp.zeros((3, 4))
    state, _ = pax.scan(lambda s, x: (s + x.sum(), None), init, jnp.ones((2, 5)), time_major=False)
    assert state.shape == (3, 4) and float(state[0, 0]) == 10


class Cell(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.weight = jnp.full((2, 2), 0.3)

    def __call__(self, state, x):
        state = jnp.tanh(state @ self.weight + x)
        return state, state


def test_a_module_as_function():
    cell, state = Cell(), jnp.zeros(2)
    last, states = pax.scan(cell, state, xs["a"])
    for i, x in enumerate(xs["a"]):
        state, _ = cell(state, x)
        assert_close(states[i], state, rtol=1e-6)
    assert_close(last, state, rtol=1e-6)


def test_modules_of_one_structure_are_not_mixed_up():
    for value in (0.3, 0.7):
        cell = Cell().replace(weight=jnp.full((2, 2), value))
        _, states = pax.scan(cell, jnp.zeros(2), xs["a"])
        assert_close(states[1], cell(states[0], xs["a"][1])[0], rtol=1e-6)


def test_a_module_and_its_optimizer_as_state():
    def train(state, x):
        model, total = state
        return (model.map(lambda w: w * 0.5), total + x), model.weight.sum()

    (_, total), sums = pax.scan(train, (Cell(), 0.0), jnp.ones(3))
    assert_close(sums, [1.2, 0.6, 0.3], rtol=1e-6)
    assert float(total) == 3


def test_without_inputs():
    state, ys = pax.scan(lambda s, x: (s + 1, s), 0, None, length=3, time_major=False)
    assert int(state) == 3 and ys.tolist() == [0, 1, 2]
