"""apply_scaled_gradients: overflow, growth, one trace, ours and jmp's scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

import pax_export as pax
from pax_export import opax
from pax_export.experimental import apply_scaled_gradients
from pax_export.optim import from_optax
from tests.optim.steps import (
    X,
    Y,
    assert_trees_close,
    grads_of,
    kinds,
    loss_fn,
    make_model,
    same_objects,
)
from tests.refusals import refused

OPTIMIZERS = pytest.mark.parametrize(
    "recipe", [from_optax(optax.adam(1e-2)), opax.adam(1e-2)], ids=["optax", "opax"]
)
DYNAMIC = pytest.mark.parametrize("kind", [pax.precision.DynamicLossScale, jmp.DynamicLossScale])
DTYPES = pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])


def make_step(traces):
    @jax.jit
    def step(model, optimizer, scale, x, y):
        traces.append(x)

        def scaled_loss(model, x, y):
            loss, aux = loss_fn(model, x, y)
            return scale.scale(loss), aux

        grads, (loss, model) = pax.grad(scaled_loss, has_aux=True)(model, x, y)
        return *apply_scaled_gradients(model, optimizer, scale, grads), loss

    return step


@OPTIMIZERS
@DYNAMIC
@DTYPES
def test_steps_with_overflow_and_growth_are_traced_once(recipe, kind, dtype):
    model = make_model().apply(pax.experimental.default_mp_policy)
    optimizer, scale = recipe(model.parameters()), kind(dtype(2**10), period=2)
    traces, scales = [], []
    step = make_step(traces)
    first = kinds((model, optimizer, scale))
    for target in (Y, Y * jnp.inf, Y, Y, Y):
        before = model, optimizer
        model, optimizer, scale, _ = step(model, optimizer, scale, X, target)
        assert kinds((model, optimizer, scale)) == first
        scales.append(float(scale.loss_scale))
        unchanged = jax.tree_util.tree_map(
            lambda a, b: bool((a == b).all()),
            (model.parameters(), optimizer), (before[0].parameters(), before[1]),
        )  # fmt: skip
        skipped = jax.tree_util.tree_leaves(unchanged)
        assert all(skipped) if target is not Y else not any(skipped[:4])
    assert len(traces) == 1
    assert scales == [2**10, 2**9, 2**9, 2**10, 2**10]
    assert int(model.modules[2].calls) == 5  # what the model itself changed is kept


@OPTIMIZERS
def test_scaling_changes_no_result(recipe):
    model = make_model()
    optimizer = recipe(model.parameters())
    grads = grads_of(model)
    plain = pax.optim.apply_gradients(model, optimizer, grads)
    for scale in (
        pax.precision.DynamicLossScale(64.0),
        pax.precision.StaticLossScale(jnp.float16(64)),
        jmp.DynamicLossScale(jnp.float16(64)),
        jmp.StaticLossScale(jnp.float32(64)),
        jmp.NoOpLossScale(),
    ):
        got = apply_scaled_gradients(model, optimizer, scale, scale.scale(grads))
        assert_trees_close(got[:2], plain)
        if not isinstance(scale, jmp.DynamicLossScale):
            assert got[2] is scale


def test_a_static_scale_does_not_skip():
    model = make_model()
    optimizer = from_optax(optax.sgd(0.1))(model.parameters())
    grads = model.parameters().map(lambda x: x * jnp.inf)
    scale = pax.precision.StaticLossScale(2.0)
    new, _, _ = apply_scaled_gradients(model, optimizer, scale, grads)
    assert not jmp.all_finite(new)


@DYNAMIC
def test_an_overflow_outside_of_jit(kind):
    model = make_model()
    optimizer = from_optax(optax.sgd(0.1))(model.parameters())
    grads = model.parameters().map(lambda x: x * jnp.nan)
    scale = kind(jnp.float16(4))
    new, state, scale = apply_scaled_gradients(model, optimizer, scale, grads)
    assert_trees_close((new, state), (model, optimizer), rtol=0, atol=0)
    assert float(scale.loss_scale) == 2 and scale.loss_scale.dtype == jnp.float16
    assert same_objects(new.modules[2], model.modules[2])


def test_the_example_of_the_seed():
    net = pax.Linear(2, 2)
    opt = opax.adam(1e-4)(net.parameters())
    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15))
    grads = net.parameters()
    net, opt, loss_scale = apply_scaled_gradients(net, opt, loss_scale, grads)
    assert float(loss_scale.loss_scale) == 2**15  # as a float16 it prints as 32770.0
    assert float(f"{loss_scale.loss_scale:.4g}") == 32770.0
    assert loss_scale.loss_scale.dtype == jmp.half_dtype()


def test_other_loss_scales_are_refused():
    model = make_model()
    optimizer = from_optax(optax.sgd(0.1))(model.parameters())
    with refused(AssertionError, "scale"):
        apply_scaled_gradients(model, optimizer, 2.0**15, model.parameters())
