"""Optimizers of optax that need more than gradients: the loss, a line search, slow parameters."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import pax_export as pax
from pax_export import opax
from pax_export.optim import apply_gradients, apply_scaled_gradients, from_optax
from tests.closeness import assert_close
from tests.optim.steps import X, Y, assert_trees_close, grads_of, kinds, loss_fn, make_model
from tests.refusals import fields, refused

MAKERS = {
    "polyak": optax.polyak_sgd,
    "backtracking": lambda: optax.chain(
        optax.sgd(0.5), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "plateau": lambda: optax.chain(
        optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9, cooldown=1)
    ),
    "momo": optax.contrib.momo,
}
LOOKAHEAD = {
    "lookahead": lambda: optax.lookahead(optax.adam(1e-2), 2, 0.5),
    "reset": lambda: optax.lookahead(optax.adam(1e-2), 2, 0.5, reset_state=True),
    "clipped": lambda: optax.chain(optax.clip(0.1), optax.lookahead(optax.sgd(0.1), 2, 0.5)),
}
STEPS = 4


def sgd_with_lookahead():
    return optax.lookahead(optax.sgd(0.1), 2, 0.5)


def list_of(model):
    return jax.tree_util.tree_leaves(model.parameters())


def loss_of(treedef, leaves):
    return loss_fn(jax.tree_util.tree_unflatten(treedef, leaves), X, Y)[0]


def train(make, count=None):
    """Our steps: the model, the optimizer and what jax saw of it at each step."""

    def counted(*arguments):
        if count is not None:
            count.append(1)
        return loss_fn(*arguments)

    pax.seed_rng_key(1)
    model = make_model()
    optimizer = from_optax(make())(model.parameters())
    update, seen = jax.jit(pax.build_update_fn(counted)), []
    for _ in range(STEPS):
        seen.append((kinds(optimizer), jax.tree_util.tree_structure(optimizer)))
        model, optimizer, _ = update(model, optimizer, X, Y)
    return model, optimizer, seen, update


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_build_update_fn_passes_what_optax_needs(make):
    model, _, seen, update = train(make)
    assert all(each == seen[0] for each in seen) and update._cache_size() == 1

    pax.seed_rng_key(1)
    fresh = make_model()
    params, rebuild = jax.tree_util.tree_flatten(fresh.parameters())
    whole = jax.tree_util.tree_structure(fresh)

    def value_fn(leaves):
        params = jax.tree_util.tree_unflatten(rebuild, leaves)
        return loss_fn(fresh.update_parameters(params), X, Y)[0]

    assert whole != rebuild  # the model has a state, which is no parameter
    plain = make()
    state = plain.init(params)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = plain.update(
            grad, state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    for ours, theirs in zip(list_of(model), params, strict=True):
        assert_close(ours, theirs, rtol=2e-3, atol=2e-5)


def test_the_value_is_that_of_the_model_before_the_step():
    """A layer with state: a line search sees the state that the gradients saw."""

    def loss_fn(model, x, y):
        model, y_hat = model % x
        loss = jnp.mean((y_hat - y) ** 2)
        return loss, (loss, model)

    def update(grads, state, params, *, value, value_fn, **extra):
        return jax.tree_util.tree_map(jnp.zeros_like, grads), (value, value_fn(params))

    probe = optax.GradientTransformationExtraArgs(lambda params: (0.0, 0.0), update)
    model = pax.Sequential(pax.Linear(3, 8), pax.Dropout(0.5), pax.Linear(8, 1))
    optimizer = from_optax(probe)(model)
    for _ in range(2):
        model, optimizer, loss = pax.build_update_fn(loss_fn)(model, optimizer, X, Y)
        assert [float(x) for x in optimizer.state] == [float(loss)] * 2


def test_arguments_pass_through_single_steps():
    model = make_model()
    optimizer = from_optax(optax.polyak_sgd())(model)
    grads = grads_of(model)
    steps = [apply_gradients(model, optimizer, grads, value=value)[0] for value in (0.1, 0.2)]
    moved = [abs(step[0].weight - model[0].weight).max() for step in steps]
    assert_close(moved[1], 2 * moved[0], rtol=1e-4)
    scale = pax.precision.StaticLossScale(4.0)
    scaled = apply_scaled_gradients(model, optimizer, scale, grads.map(lambda g: g * 4), value=0.2)
    assert_trees_close(scaled[0], steps[1])
    dynamic = pax.precision.DynamicLossScale(4.0)
    scaled = apply_scaled_gradients(
        model, optimizer, dynamic, grads.map(lambda g: g * 4), value=0.2
    )
    assert_trees_close(scaled[0], steps[1])


def test_an_optimizer_that_needs_no_more_ignores_more():
    model = make_model()
    grads = grads_of(model)
    for make in (lambda: optax.sgd(0.1), lambda: optax.MultiSteps(optax.sgd(0.1), 1)):
        optimizer = from_optax(make())(model)
        plain = apply_gradients(model, optimizer, grads)
        assert_trees_close(apply_gradients(model, optimizer, grads, value=1.0, other=2), plain)


def test_only_named_extra_arguments_are_passed():
    """sharpness-aware minimisation takes grad_fn and would refuse value."""
    model = make_model()
    outer, inner = optax.sgd(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.01))
    optimizer = from_optax(optax.contrib.sam(outer, inner))(model)
    before = model
    for _ in range(4):
        model, optimizer, _ = pax.build_update_fn(loss_fn)(model, optimizer, X, Y)
    assert (model[0].weight != before[0].weight).any()


def test_missing_parameters_are_named():
    params = pax.Linear(2, 3).parameters()
    optimizer = from_optax(optax.adamw(1e-3))(params)
    with refused(ValueError, "params"):
        optimizer % (params,)


def test_a_missing_loss_is_named():
    model = make_model()
    optimizer = from_optax(optax.polyak_sgd())(model)
    with refused(TypeError, "'value'"):
        apply_gradients(model, optimizer, grads_of(model))


def test_opax_gets_no_extra_arguments():
    model = make_model()
    optimizer = opax.sgd(0.1)(model.parameters())
    pax.build_update_fn(loss_fn)(model, optimizer, X, Y)
    with refused(TypeError, "'value'"):
        apply_gradients(model, optimizer, grads_of(model), value=1.0)


# --- lookahead ------------------------------------------------------------------------


@pytest.mark.parametrize("make", LOOKAHEAD.values(), ids=LOOKAHEAD)
def test_lookahead_is_equal_to_optax(make):
    model = make_model()
    optimizer = from_optax(make())(model)
    first = kinds(optimizer), jax.tree_util.tree_structure(optimizer)
    plain, params = make(), optax.LookaheadParams.init_synced(list_of(model))
    state = plain.init(params)
    step = jax.jit(lambda *state: apply_gradients(*state))
    update = jax.jit(plain.update)
    for _ in range(STEPS):
        grads = grads_of(model)
        updates, state = update(list_of(grads), state, params)
        params = optax.apply_updates(params, updates)
        model, optimizer = step(model, optimizer, grads)
        for ours, theirs in ((model, params.fast), (optimizer.slow_params, params.slow)):
            for x, y in zip(list_of(ours.parameters()), theirs, strict=True):
                assert_close(x, y, rtol=2e-4, atol=2e-6)
    assert (kinds(optimizer), jax.tree_util.tree_structure(optimizer)) == first
    assert step._cache_size() == 1
    assert model.update_parameters(optimizer.slow_params)[2].calls.dtype == jnp.int32


def test_slow_parameters_pickle_and_stay_in_a_step_that_overflowed():
    optimizer = from_optax(sgd_with_lookahead)(make_model())
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(optimizer)
    model = make_model()
    optimizer = from_optax(sgd_with_lookahead)(model)
    scale = pax.precision.DynamicLossScale(2.0)
    bad = grads_of(model).map(lambda g: g * jnp.inf)
    kept = apply_scaled_gradients(model, optimizer, scale, bad)
    assert_trees_close(kept[:2], (model, optimizer))


@pytest.mark.parametrize("make", [sgd_with_lookahead, optax.contrib.prodigy, optax.lbfgs])
def test_a_model_and_its_optimizer_share_no_array(make):
    """So they can be donated to one jitted step."""
    model = make_model()
    optimizer = from_optax(make())(model)
    leaves = jax.tree_util.tree_leaves((model, optimizer))
    assert len(set(map(id, leaves))) == len(leaves)
    if make is not optax.lbfgs:
        grads = grads_of(model)
        step = jax.jit(lambda *state: apply_gradients(*state), donate_argnums=(0, 1))
        step(model, optimizer, grads)


def test_updates_that_lookahead_did_not_make():
    model = make_model()

    def update(grads, state, params):
        return grads, state

    not_last = optax.GradientTransformation(sgd_with_lookahead().init, update)
    optimizer = from_optax(not_last)(model)
    with pytest.raises(TypeError) as error:
        apply_gradients(model, optimizer, grads_of(model))
    assert error.value == fields(got="updates of type Sequential")
