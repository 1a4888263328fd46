"""apply_gradients: signs, dtypes, skipped steps, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export import opax
from pax_export.optim import apply_gradients, from_optax
from tests.optim.steps import X, Y, assert_trees_close, grads_of, kinds, loss_fn, make_model
from tests.refusals import refused

KINDS = pytest.mark.parametrize(
    "recipe", [from_optax(optax.sgd(0.1, momentum=0.9)), opax.sgd(0.1, 0.9)], ids=["optax", "opax"]
)


@KINDS
def test_either_kind_goes_downhill_by_the_same_steps(recipe):
    first = model = by_hand = make_model()
    optimizer = recipe(model.parameters())
    velocity = jax.tree_util.tree_map(jnp.zeros_like, model.parameters())
    for _ in range(3):
        grads = grads_of(model)
        model, optimizer = apply_gradients(model, optimizer, grads)
        velocity = velocity.map(lambda v, g: 0.9 * v + g, grads_of(by_hand))
        new = by_hand.parameters().map(lambda p, v: p - 0.1 * v, velocity)
        by_hand = by_hand.update_parameters(new)
    assert_trees_close(model, by_hand)
    assert float(loss_fn(model, X, Y)[0]) < float(loss_fn(first, X, Y)[0])


@KINDS
def test_states_of_the_model_stay(recipe):
    model = make_model()
    new, _ = apply_gradients(model, recipe(model.parameters()), grads_of(model))
    assert new.modules[2].calls is model.modules[2].calls
    frozen = pax.freeze_parameters(model)
    grads = frozen.parameters()
    new, _ = apply_gradients(frozen, recipe(grads), grads)
    assert new == frozen


@KINDS
def test_whole_models_are_taken_for_their_parameters(recipe):
    model = make_model()
    a, _ = apply_gradients(model, recipe(model.parameters()), model.parameters())
    b, _ = apply_gradients(model, recipe(model.parameters()), model)
    assert_trees_close(a, b)


@KINDS
@pytest.mark.parametrize("finite", [True, False])
def test_all_finite(recipe, finite):
    model = make_model()
    optimizer = recipe(model.parameters())
    grads = grads_of(model)
    got = apply_gradients(model, optimizer, grads, all_finite=jnp.array(finite))
    expected = apply_gradients(model, optimizer, grads) if finite else (model, optimizer)
    assert_trees_close(got, expected)
    assert kinds(got) == kinds((model, optimizer))


def test_parameters_keep_their_dtype():
    layer = pax.Linear(2, 2).map(lambda x: x.astype(jnp.float16))
    optimizer = from_optax(optax.sgd(0.1))(layer.parameters())
    grads = layer.parameters().map(lambda x: x.astype(jnp.float32))
    new, _ = apply_gradients(layer, optimizer, grads)
    assert new.weight.dtype == jnp.float16


@pytest.mark.parametrize(
    "wrong", [optax.adam(1e-3), from_optax(optax.adam(1e-3)), opax.adam(1e-3), None]
)
def test_other_optimizers_are_refused(wrong):
    model = make_model()
    with refused(AssertionError, "got: ", "opax.adam(1e-3)(model.parameters())"):
        apply_gradients(model, wrong, model.parameters())


def test_other_models_are_refused():
    with refused(AssertionError, got="list as the model: [1.0]"):
        apply_gradients([1.0], from_optax(optax.sgd(0.1))([jnp.ones(1)]), [1.0])


@KINDS
def test_gradients_of_another_structure(recipe):
    model = make_model()
    with refused(ValueError, "against"):
        apply_gradients(model, recipe(model.parameters()), grads_of(model.eval()))


def test_an_optimizer_that_changes_a_dtype_is_named():
    class Drifting(pax.StateModule):
        def __init__(self):
            super().__init__()
            self.rate = jnp.array(1, jnp.int32)

        def __call__(self, grads, params):
            self.rate = self.rate * 0.5
            return grads

    model = make_model()
    with refused(ValueError, where="rate", got="int32[] before, float32[] after"):
        apply_gradients(model, Drifting(), model.parameters(), all_finite=jnp.array(True))


@KINDS
def test_gradients_of_another_shape_are_named(recipe):
    layer = pax.Linear(2, 2)
    optimizer = recipe(layer.parameters())
    one_for_each_example = layer.parameters().map(lambda x: jnp.stack([x] * 5))
    with refused(ValueError, "where: weight\n  got: float32[2,2] before, float32[5,2,2] after"):
        apply_gradients(layer, optimizer, one_for_each_example)


def test_it_runs_without_jit_and_with_numpy_arrays():
    layer = pax.Linear(2, 2).map(np.asarray)
    optimizer = from_optax(optax.sgd(1.0))(layer.parameters())
    new, _ = apply_gradients(layer, optimizer, layer.parameters())
    assert not np.any(new.weight)
