"""build_update_fn: a step, a scan of steps, what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import pax_export as pax
from pax_export import opax
from tests.closeness import assert_close
from tests.optim.steps import X, Y, assert_trees_close, kinds, loss_fn, make_model
from tests.refusals import refused

RECIPES = pytest.mark.parametrize(
    "recipe", [pax.optim.from_optax(optax.adam(1e-2)), opax.adam(1e-2)], ids=["optax", "opax"]
)


@RECIPES
def test_training_is_traced_once_for_all_optimizers_of_a_recipe(recipe):
    traces = []

    def counted(model, x, y):
        traces.append(x)
        return loss_fn(model, x, y)

    update = jax.jit(pax.build_update_fn(counted))
    for _ in range(2):
        model = make_model()
        optimizer, losses = recipe(model.parameters()), []
        first = kinds((model, optimizer))
        for _ in range(20):
            model, optimizer, loss = update(model, optimizer, X, Y)
            losses.append(float(loss))
        assert losses[-1] < 0.7 * losses[0]
        assert kinds((model, optimizer)) == first
        assert int(model.modules[2].calls) == 20
    assert len(traces) == 1


@RECIPES
def test_scan_mode_equals_a_loop(recipe):
    model = make_model()
    optimizer = recipe(model.parameters())
    batches = jnp.stack([X, X + 1, X * 2]), jnp.stack([Y] * 3)
    step = pax.build_update_fn(lambda model, batch: loss_fn(model, *batch), scan_mode=True)
    scanned, losses = jax.lax.scan(step, (model, optimizer), batches)
    state, expected = (model, optimizer), []
    for x, y in zip(*batches):
        state, loss = step(state, (x, y))
        expected.append(loss)
    assert_trees_close(scanned, state)
    assert_close(losses, expected, rtol=1e-5)


def test_the_models_own_state_comes_from_the_loss_function():
    update = pax.build_update_fn(loss_fn)
    model = make_model()
    optimizer = pax.optim.from_optax(optax.sgd(0.0))(model.parameters())
    new, _, aux = update(model, optimizer, X, Y)
    assert int(new.modules[2].calls) == 1 and aux.shape == ()
    assert_trees_close(new.parameters(), model.parameters())


def test_a_model_of_another_structure_is_refused():
    update = pax.build_update_fn(lambda model: (jnp.sum(model.weight), (None, model.eval())))
    layer = pax.Linear(2, 2)
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(layer.parameters())
    with refused(ValueError, "training: True against False"):
        update(layer, optimizer)


@pytest.mark.parametrize("wrong", ["model", "optimizer"])
def test_other_arguments_are_refused(wrong):
    layer = pax.Linear(2, 2)
    given = {"model": layer, "optimizer": layer} | {wrong: 3}
    for update in (
        pax.build_update_fn(loss_fn),
        lambda *pair: pax.build_update_fn(loss_fn, scan_mode=True)(pair),
    ):
        with refused(AssertionError, f"int as the {wrong}"):
            update(given["model"], given["optimizer"])


@pytest.mark.parametrize(("returned", "got"), [
    *((lambda loss, model, x=x: (loss, x), f"(loss, {type(x).__name__})")
      for x in (None, 3.0, (1.0, 2.0), (1.0, 2.0, 3.0))),
    (lambda loss, model: loss, "float32[] alone"),
    (lambda loss, model: (loss, None, model), "tuple of 3"),
    (lambda loss, model: None, "NoneType"),
    (lambda loss, model: (model.bias, (None, model)), "float32[2]"),
])  # fmt: skip
def test_a_loss_function_that_returns_something_else(returned, got):
    layer = pax.Linear(2, 2)
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(layer.parameters())
    update = pax.build_update_fn(lambda model: returned(jnp.sum(model.weight), model))
    for step in (update, jax.jit(update)):
        with refused(TypeError, got=got):
            step(layer, optimizer)


def test_a_loss_function_must_not_change_its_model():
    def loss(model, x, y):
        y_hat = model(x)
        return jnp.sum(y_hat - y), (None, model)

    model = make_model()
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(model.parameters())
    with refused(ValueError, "immutable module"):
        pax.build_update_fn(loss)(model, optimizer, X, Y)


def test_the_model_comes_before_the_optimizer():
    model = make_model()
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(model.parameters())
    with refused(TypeError, "step(model, optimizer, ...)", "OptaxOptimizer as the model"):
        pax.build_update_fn(loss_fn)(optimizer, model, X, Y)


class Wave(pax.ParameterModule):
    """Complex parameters beside real ones."""

    def __init__(self):
        super().__init__()
        self.w = jnp.ones(2, jnp.complex64)
        self.b = jnp.zeros(2)

    def __call__(self):
        off = self.w - jnp.array([1 + 2j, -3 - 1j])
        return jnp.sum(jnp.abs(off) ** 2) + jnp.sum((self.b - 1) ** 2)


@pytest.mark.parametrize("rule", [optax.sgd(0.1), optax.adam(0.1), optax.polyak_sgd(0.2)])
def test_complex_parameters_are_trained(rule):
    def loss_fn(net):
        loss = net()
        return loss, (loss, net)

    net = Wave()
    assert (pax.grad(Wave.__call__)(net).w == jax.grad(Wave.__call__)(net).w).all()
    optimizer = pax.optim.from_optax(rule)(net.parameters())
    step = pax.build_update_fn(loss_fn, scan_mode=True)
    (net, _), losses = jax.lax.scan(lambda state, _: step(state), (net, optimizer), None, 300)
    assert losses[-1] < 1e-4


def test_complex_gradients_under_a_loss_scale():
    net, scale = Wave(), pax.precision.DynamicLossScale(2.0**15)
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(net.parameters())
    grads = pax.grad(lambda net: scale.scale(net()))(net)
    new, _, scale = pax.optim.apply_scaled_gradients(net, optimizer, scale, grads)
    assert_close(new(), 0.64 * net(), rtol=1e-5)
    assert float(scale.loss_scale) == 2.0**15


def with_averages():
    return pax.Sequential(pax.Linear(2, 3), pax.BatchNorm1D(3), pax.Linear(3, 1))


def returns_the_old_net(net, x):
    _, y = net % x
    return y.sum(), (y.sum(), net)


def sums(net, x):
    net, y = net % x
    return y.sum(), (y.sum(), net)


@pytest.mark.parametrize(
    ("net", "loss", "words"),
    [
        (with_averages(), returns_the_old_net, "averages"),
        (pax.Sequential(pax.Linear(2, 3), pax.Dropout(0.5)), returns_the_old_net, "keys"),
        (with_averages().eval(), sums, "eval mode"),
    ],
)
def test_steps_that_leave_the_state_as_it_is_warn(net, loss, words):
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(net.parameters())
    with pytest.warns(pax.errors.UnchangedStateWarning, match=words):
        jax.eval_shape(pax.build_update_fn(loss), net, optimizer, jnp.ones((2, 4, 2)))


class Averaged(pax.Module):
    """A net whose only averages are those of its weights, which a step updates after the loss."""

    def __init__(self):
        super().__init__()
        self.linear = pax.Linear(2, 3)
        self.average = pax.EMA(self.linear.parameters(), 0.99)

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [sums, returns_the_old_net])
@pytest.mark.parametrize("net", [Averaged(), Averaged().eval()], ids=["train", "eval"])
def test_averages_that_the_loss_never_updates_are_no_cause_to_warn(net, loss):
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(net.parameters())
    jax.eval_shape(pax.build_update_fn(loss), net, optimizer, jnp.ones((2, 4, 2)))


@pytest.mark.filterwarnings("error")
def test_steps_that_change_it_or_have_none_are_silent():
    parts = with_averages().at(pax.BatchNorm1D).eval()
    for net in (with_averages(), parts, pax.Linear(2, 3).eval()):
        optimizer = pax.optim.from_optax(optax.sgd(0.1))(net.parameters())
        jax.eval_shape(pax.build_update_fn(sums), net, optimizer, jnp.ones((2, 4, 2)))
