"""Optimizers of optax as modules: equal to optax, equal treedefs, pickles."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import pax_export as pax
from pax_export.optim import apply_gradients, from_optax
from tests.closeness import assert_close
from tests.optim.steps import (
    X,
    Y,
    assert_trees_close,
    grads_of,
    kinds,
    labels,
    loss_fn,
    make_model,
    matrices,
)
from tests.refusals import refused


def schedule():
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)


MAKERS = {
    "adam": lambda: optax.adam(1e-2),
    "sgd": lambda: optax.sgd(1e-2),
    "adamw, mask": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "schedule": lambda: optax.adam(schedule()),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2)}, labels
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), matrices),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "MultiSteps as transformation": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
    "set_to_zero": optax.set_to_zero,
    "named_chain": lambda: optax.named_chain(("a", optax.clip(1.0)), ("b", optax.sgd(0.1))),
}

each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_maker
def test_equal_to_optax_and_traced_once(make):
    traces = []

    @jax.jit
    def step(model, optimizer):
        traces.append(model)
        grads, (_, model) = pax.grad(loss_fn, has_aux=True)(model, X, Y)
        return apply_gradients(model, optimizer, grads)

    model = make_model()
    params = list_of(model)
    plain = make()
    state, update = plain.init(params), jax.jit(plain.update)
    optimizer = from_optax(make())(model.parameters())
    first = kinds(optimizer), jax.tree_util.tree_structure(optimizer)
    for _ in range(4):
        grads = list_of(grads_of(model))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        model, optimizer = step(model, optimizer)
        for ours, theirs in zip(list_of(model), params, strict=True):
            assert_close(ours, theirs, rtol=2e-4, atol=2e-6)
        params = list_of(model)
    assert len(traces) == 1
    structure = jax.tree_util.tree_structure(optimizer)
    assert (kinds(optimizer), structure) == first
    again = jax.tree_util.tree_structure(from_optax(make())(model.parameters()))
    assert again == structure and hash(again) == hash(structure)
    assert jax.tree_util.tree_structure(copy.deepcopy(optimizer)) == structure
    assert copy.copy(optimizer) == optimizer


def list_of(model):
    return jax.tree_util.tree_leaves(model.parameters())


DIFFERENT = [
    optax.adam(1e-2),
    optax.adam(1e-3),
    optax.adam(1e-3, b1=0.8),
    optax.adam(schedule()),
    optax.adam(optax.constant_schedule(1e-2)),
    optax.adam(jnp.float32(1e-2)),
    optax.adam(jnp.float32(2e-2)),
    optax.adamw(1e-2, mask=matrices),
    optax.adamw(1e-2, mask=labels),
    optax.adamw(1e-2, mask=make_model().parameters().map(lambda x: x.ndim > 1)),
    optax.adamw(1e-2, mask=make_model().parameters().map(lambda x: x.ndim > 0)),
    optax.MultiSteps(optax.adam(1e-2), 2),
    optax.MultiSteps(optax.adam(1e-2), 3),
]


def test_different_recipes_have_different_treedefs():
    keys = {from_optax(transformation).args[0] for transformation in DIFFERENT}
    assert len(keys) == len(DIFFERENT)


def test_a_mask_may_be_a_tree():
    model = make_model()
    mask = model.parameters().map(lambda x: x.ndim > 1)
    grads = grads_of(model)
    stepped = []
    for given in (mask, matrices):
        recipe = from_optax(optax.adamw(1e-2, weight_decay=0.1, mask=given))
        stepped.append(apply_gradients(model, recipe(model.parameters()), grads)[0])
    assert_trees_close(*stepped)


def test_label_trees_may_be_modules():
    """Of layers, which can be called, although optax calls what is no tree."""
    params, grads = make_model().parameters(), grads_of(make_model())
    label = lambda tree: jax.tree.map(lambda x: "w" if x.ndim > 1 else "b", tree)  # noqa: E731
    muon = optax.contrib.MuonDimensionNumbers
    sizes = lambda tree: jax.tree.map(lambda x: muon() if x.ndim == 2 else None, tree)  # noqa: E731
    rules = {"w": optax.adam(0.1), "b": optax.sgd(0.1)}
    for make in (
        lambda form: optax.multi_transform(rules, form(label)),
        lambda form: optax.contrib.muon(0.1, muon_weight_dimension_numbers=form(sizes)),
        lambda form: optax.inject_hyperparams(lambda rate: optax.multi_transform(
            {"w": optax.adam(rate), "b": optax.set_to_zero()}, form(label)))(0.1),
        lambda form: optax.inject_hyperparams(optax.sgd)(jnp.float32(0.1)),
    ):  # fmt: skip
        by_tree, by_function = (
            jax.jit(lambda opt: opt % (grads, params))(from_optax(make(form))(params))[1]
            for form in (lambda f: f(params), lambda f: f)
        )
        assert_trees_close(by_tree, by_function)
    with pytest.raises(TypeError):
        label(params)(jnp.ones((4, 2)))  # and labels are no model


def test_updates_are_to_be_subtracted():
    layer = pax.Linear(2, 3)
    optimizer = from_optax(optax.sgd(0.5))(layer.parameters())
    grads = layer.parameters().map(jnp.ones_like)
    new, updates = pax.module_and_value(optimizer)(grads, layer.parameters())
    assert updates.weight.tolist() == [[0.5] * 3] * 2
    assert isinstance(new, pax.optim.OptaxOptimizer)


def test_state_of_the_optimizer():
    model = make_model()
    optimizer = from_optax(optax.adam(1e-2))(model)  # a whole model: its parameters count
    moments = optimizer.state[0].mu
    pax.assert_structure_equal(moments, model.parameters())
    assert optimizer.pytree_attributes == ("state",)
    assert jax.tree_util.tree_leaves(optimizer.parameters().recipe) != []
    assert repr(optimizer) == "OptaxOptimizer(rules=[ScaleByAdam], state=83, mode=train)"
    again = optimizer.load_state_dict(optimizer.state_dict())
    assert again == optimizer


def test_numbers_in_a_state_become_arrays():
    def init(params):
        return {"count": 0, "params": params}

    def update(grads, state, params=None):
        return grads, {"count": state["count"] + 1, "params": params}

    layer = pax.Linear(2, 2)
    optimizer = from_optax(optax.GradientTransformation(init, update))(layer)
    step = jax.jit(lambda o, p: pax.module_and_value(o)(p, p)[0])
    for _ in range(3):
        optimizer = step(optimizer, layer.parameters())
    assert int(optimizer.state["count"]) == 3


def init_empty(params):
    return optax.EmptyState()


def update_by_sign(grads, state, params=None):
    return jax.tree_util.tree_map(lambda g: -jnp.sign(g), grads), state


@pytest.mark.parametrize(
    "source",
    [
        functools.partial(optax.adam, 1e-2),
        functools.partial(optax.chain, optax.GradientTransformation(init_empty, update_by_sign)),
        optax.GradientTransformation(init_empty, update_by_sign),
    ],
    ids=["partial", "partial of a chain", "functions with names"],
)
def test_recipes_that_pickle(source):
    layer = pax.Linear(2, 2)
    optimizer = from_optax(source)(layer)
    again = pickle.loads(pickle.dumps(optimizer))
    assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(optimizer)
    one, other = [o % (layer.parameters(), layer.parameters()) for o in (optimizer, again)]
    assert_trees_close(one, other)


@pytest.mark.parametrize("make", [MAKERS["adam"], MAKERS["MultiSteps"]], ids=["adam", "MultiSteps"])
def test_unpicklable_recipes_are_refused(make):
    optimizer = from_optax(make())(pax.Linear(2, 2))
    with refused(TypeError, "from_optax(functools.partial(optax.adam, 1e-3))"):
        pickle.dumps(optimizer)


@pytest.mark.parametrize("wrong", [3, "adam", lambda: 3, None])
def test_other_values_are_refused(wrong):
    with refused(TypeError, write="from_optax(optax.adam(1e-3))"):
        from_optax(wrong)


def test_a_factory_that_was_not_called():
    with refused(TypeError, "'learning_rate'"):
        from_optax(optax.sgd)
