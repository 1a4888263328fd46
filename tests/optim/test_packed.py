"""Optimizers whose state is one array for each dtype: equal to others, or refused."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.optim import apply_gradients, from_optax
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


class Scaled(pax.Module):
    """Parameters of two dtypes and of no axes; a constant; a part that may be frozen."""

    parameters = pax.parameters_method("scale", "half")

    def __init__(self):
        super().__init__()
        self.inner, self.outer = pax.Linear(3, 4), pax.Linear(4, 1)
        self.scale, self.half = jnp.array(0.5), jnp.ones((4,), jnp.bfloat16)
        self.constant = jnp.ones(())

    def __call__(self, x):
        x = self.inner(x) * self.half.astype(jnp.float32)
        return self.outer(x) * self.scale * self.constant


PACKABLE = {
    "adam": lambda: optax.adam(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clip, adamw, schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 3), weight_decay=0.1),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=1e-2),
}


@jax.jit
def step(model, optimizer):
    """A step whose gradients are the parameters: cheap to compile, and changes all of them."""
    return apply_gradients(model, optimizer, model.parameters())


@pytest.mark.parametrize("make", PACKABLE.values(), ids=PACKABLE)
def test_equal_to_an_unpacked_one(make):
    model = Scaled()
    plain, packed = [from_optax(make(), packed=p)(model.parameters()) for p in (False, True)]
    stepped = []
    for optimizer in (plain, packed):
        new, first = model, (kinds(optimizer), jax.tree_util.tree_structure(optimizer))
        for _ in range(2):
            new, optimizer = step(new, optimizer)
        same = first == (kinds(optimizer), jax.tree_util.tree_structure(optimizer))
        stepped.append((new, optimizer, same))
    (expected, plain, same), (found, packed, packed_same) = stepped
    assert packed_same == same  # optax itself computes some moments of bfloat16 in float32
    assert_trees_close(found, expected, rtol=8e-3, atol=1e-4)  # bfloat16
    assert_trees_close(found.inner, expected.inner)
    assert_trees_close(packed.unpacked(model.parameters()), plain, rtol=8e-3, atol=1e-4)


def test_state_of_the_optimizer():
    model = Scaled()
    optimizer = from_optax(optax.adam(1e-2), packed=True)(model)  # a whole model
    assert isinstance(optimizer, pax.optim.PackedOptimizer)
    shapes = {"bfloat16": (4,), "float32": (4 * 3 + 4 + 4 + 1 + 1,)}
    assert {dtype: x.shape for dtype, x in optimizer.state[0].mu.items()} == shapes
    assert len(jax.tree_util.tree_leaves(optimizer)) == 5  # a count, and two for mu and nu each
    assert [entry.name for entry in optimizer.packing.entries][:2] == ["inner.weight", "inner.bias"]
    again = optimizer.load_state_dict(optimizer.state_dict())
    assert again == optimizer
    assert pax.optim.from_optax(optax.adam(1e-2))(model).state[0].mu.inner.weight.shape == (3, 4)


def test_a_step_is_traced_once_and_its_arrays_may_be_donated():
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, optimizer):
        traces.append(model)
        grads, (_, model) = pax.grad(loss_fn, has_aux=True)(model, X, Y)
        return apply_gradients(model, optimizer, grads)

    model = make_model()
    optimizer = from_optax(optax.adam(1e-2), packed=True)(model.parameters())
    for _ in range(2):
        model, optimizer = step(model, optimizer)
    fresh = make_model()
    step(fresh, from_optax(optax.adam(1e-2), packed=True)(fresh.parameters()))
    assert len(traces) == 1


def test_one_vector_shares_no_array_with_the_model():
    class Vector(pax.ParameterModule):
        def __init__(self):
            super().__init__()
            self.vector = jnp.ones(3)

    model = Vector()
    held = from_optax(optax.contrib.schedule_free_adamw(1e-2), packed=True)(model)
    assert all(leaf is not model.vector for leaf in jax.tree_util.tree_leaves(held))


def test_frozen_parts():
    model = Scaled()
    frozen = model.replace(inner=pax.freeze_parameters(model.inner))
    optimizer = from_optax(optax.adam(1e-2), packed=True)(frozen.parameters())
    assert optimizer.state[0].mu["float32"].shape == (4 + 1 + 1,)
    trained, _ = step(frozen, optimizer)
    assert_trees_close(trained.inner, frozen.inner, 0, 0)
    assert (trained.outer.weight != frozen.outer.weight).all()


def test_where_not_finite_nothing_changes():
    model = make_model()
    optimizer = from_optax(optax.adam(1e-2), packed=True)(model)
    grads = grads_of(model)
    same, kept = apply_gradients(model, optimizer, grads, all_finite=jnp.array(False))
    assert_trees_close(same, model, 0, 0)
    assert_trees_close(kept, optimizer, 0, 0)


def test_copies_pickles_and_files(tmp_path):
    model = make_model()
    make = functools.partial(optax.adam, 1e-2)
    optimizer = from_optax(make, packed=True)(model)
    _, optimizer = apply_gradients(model, optimizer, grads_of(model))
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is type(optimizer)
        assert_trees_close(again, optimizer, 0, 0)
    file = tmp_path / "optimizer.safetensors"
    pax.save_weights(optimizer, file)
    assert_trees_close(
        pax.load_weights(from_optax(make, packed=True)(model), file), optimizer, 0, 0
    )


def test_an_ensemble():
    models = jax.vmap(lambda seed: pax.Linear(2, 3).replace(bias=jnp.ones(3) * seed))(jnp.ones(2))
    held = jax.vmap(from_optax(optax.adam(1e-2), packed=True))(models.parameters())
    assert held.state[0].mu["float32"].shape == (2, 9)
    new, held = jax.vmap(apply_gradients)(models, held, models.parameters())
    assert new.weight.shape == models.weight.shape


def without_state(change):
    """A rule of each gradient and of the first one."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: change(g, jax.tree.leaves(grads)[0]), grads), state

    return optax.GradientTransformation(lambda params: (), update)


UNPACKABLE = {
    "adafactor": (lambda: optax.adafactor(1e-2), "reduce_sum over some arrays, not over all"),
    "lamb": (lambda: optax.lamb(1e-2), "reduce_sum over some arrays, not over all together"),
    "a mask": (lambda: optax.adamw(1e-2, mask=matrices), "a rule that does not hold for all"),
    "masked": (lambda: optax.masked(optax.adam(1e-2), matrices), "a state of another structure"),
    "labels": (
        lambda: optax.multi_transform(
            {"matrix": optax.sgd(1e-2), "vector": optax.sgd(1e-3)}, labels
        ),
        "a rule that does not hold for all",
    ),
    "noise": (
        lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
        "random numbers?",
    ),
    "centralize": (
        lambda: optax.chain(optax.centralize(), optax.sgd(1e-2)),
        "reduce_sum, which looks at an array as a whole",
    ),
    "cond": (lambda: optax.MultiSteps(optax.adam(1e-2), 2), "cond of several arrays"),
    "the loss": (optax.polyak_sgd, "missing 1 required keyword-only argument: 'value'"),
    "lookahead": (lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), "parameters of its own"),
    "one for each": (
        lambda: optax.GradientTransformation(
            lambda params: {"sizes": jnp.arange(float(len(jax.tree.leaves(params))))},
            lambda grads, state, params=None: (grads, {"sizes": state["sizes"] * 2}),
        ),
        "a number in the state that depends on how the arrays are divided",
    ),
    "its neighbour": (
        lambda: without_state(lambda g, first: jnp.flip(g)),
        "rev, which looks at an array as a whole",
    ),
    "a part of the norm": (
        lambda: without_state(lambda g, first: g * jnp.sum(first)),
        "reduce_sum over some arrays, not over all together",
    ),
    "another's": (
        lambda: without_state(lambda g, first: first),
        "a result that is made of other arrays",
    ),
}


@pytest.mark.parametrize(("make", "reason"), UNPACKABLE.values(), ids=UNPACKABLE)
def test_what_would_compute_something_else_is_refused(make, reason):
    with refused(NotImplementedError, reason):
        from_optax(make(), packed=True)(make_model())


def test_the_message():
    with refused(NotImplementedError, where="modules.0.weight"):
        from_optax(optax.lamb(1e-2), packed=True)(make_model())


def test_parameters_that_it_was_not_made_for():
    model = Scaled()
    optimizer = from_optax(optax.adam(1e-2), packed=True)(model)
    frozen = model.replace(inner=pax.freeze_parameters(model.inner))
    with refused(
        ValueError, where="inner.weight", got="outer.weight: float32[4,1] for float32[3,4]"
    ):
        apply_gradients(frozen, optimizer, frozen.parameters())
    params = model.parameters()
    with refused(ValueError, "gradients"):
        optimizer % (params.map(lambda x: x.astype(jnp.float16)), params)
    with refused(ValueError, "parameters"):
        optimizer.unpacked(frozen)


def test_without_parameters():
    model = pax.freeze_parameters(make_model())
    optimizer = from_optax(optax.adam(1e-2), packed=True)(model)
    same, _ = apply_gradients(model, optimizer, model.parameters())
    np.testing.assert_equal(len(jax.tree_util.tree_leaves(optimizer.state[0].mu)), 0)
    assert_trees_close(same, model, 0, 0)
