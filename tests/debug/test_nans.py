"""`pax.debug.nans`: the first operation that gives NaN or infinity."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import pax_export as pax
from tests.closeness import assert_close


class Softmax(pax.Module):
    """As it should not be written."""

    def __call__(self, x):
        e = jnp.exp(x)
        return e / e.sum(-1, keepdims=True)


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.layers = [pax.Linear(3, 3), pax.Linear(3, 3)]
        self.weigh = Softmax()

    def __call__(self, x):
        return self.weigh(self.layers[1](self.layers[0](x)))


X = np.ones((2, 3), np.float32)


def raised(function, *args):
    with pytest.raises(pax.errors.NonFiniteError) as caught:
        pax.debug.nans(function)(*args)
    return caught.value


def test_a_cast_by_a_policy_names_the_line_that_calls_the_layer():
    half = jmp.get_policy("params=float32,compute=float16,output=float16")
    layer, line = pax.apply_mp_policy(pax.Linear(3, 3), half), sys._getframe().f_lineno + 1
    error = raised(lambda x: layer(x), 1e6 * X)
    assert f"test_nans.py:{line}" in error.where and "bfloat16" in error.write


def test_finite_results_are_unchanged():
    net = Net()
    assert_close(pax.debug.nans(net)(X), net(X))
    step = pax.debug.nans(lambda net, x, k: {"y": net(x) * k, "n": 3})
    assert_close(step(net, X, 2)["y"], 2 * net(X))


def test_a_dropped_loss_is_seen_where_it_is_returned_or_not_compiled():
    def step(net, x):
        loss = jnp.log(net(x).sum() * 0.0)
        return net, loss

    net = pax.Linear(3, 3)
    pax.debug.nans(lambda net, x: step(net, x)[0])(net, X)
    assert raised(step, net, X).what.startswith("log produced -inf")
    with pytest.raises(pax.errors.NonFiniteError), pax.debug.nans():
        step(net, X)


def test_the_operation_the_module_and_the_line():
    error = raised(Net(), 1000 * X)
    assert error.what.startswith("exp produced inf") or error.what.startswith("div produced NaN")
    assert error.where.startswith("weigh, ")
    assert "test_nans.py:" in error.where
    assert "float32[2,3] from" in error.got


def test_in_the_backward_pass_of_a_step():
    class Norm(pax.Module):
        def __init__(self):
            super().__init__()
            self.fc = pax.Linear(3, 3, with_bias=False)

        def __call__(self, x):
            return jnp.sqrt((self.fc(x) ** 2).sum())

    optimizer = optax.sgd(0.1)
    net = pax.Sequential(Norm())
    state = optimizer.init(net.parameters())

    @jax.jit
    def step(net, state, x):
        gradients = pax.grad(lambda net: net(x))(net)
        updates, state = optimizer.update(gradients.parameters(), state)
        return net.update_parameters(optax.apply_updates(net.parameters(), updates)), state

    error = raised(step, net, state, 0 * X)
    assert "modules.0" in error.where
    assert "from finite numbers" in error.what


@pytest.mark.parametrize("name", ["scan", "vmap", "cond", "while", "remat"])
def test_inside_of_transforms(name):
    class Log(pax.Module):
        def __call__(self, x):
            return jnp.log(x)

    class Wrapped(pax.Module):
        def __init__(self):
            super().__init__()
            self.log = Log()

        def __call__(self, x):
            if name == "scan":
                return jax.lax.scan(lambda c, y: (c, self.log(y - c)), 0.0, x)[1]
            if name == "vmap":
                return jax.vmap(self.log)(x)
            if name == "cond":
                return jax.lax.cond(x[0] > 0, self.log, lambda x: x, x)
            if name == "while":
                return jax.lax.fori_loop(0, x.shape[0], lambda i, y: self.log(x) + y, x)
            return jax.checkpoint(self.log)(x)

    error = raised(Wrapped(), jnp.array([1.0, 2.0, 0.0]))
    assert error.what == "log produced -inf from finite numbers."
    assert error.where.startswith("log, ")
    if name == "scan":
        assert error.where.endswith("round 2 of a loop")


def test_nonfinite_arguments_are_named():
    error = raised(lambda batch: batch["x"] * 2, {"x": np.array([1.0, np.nan], np.float32)})
    assert (error.what, error.where) == ("An argument is not finite already.", "0.x")


def test_infinities_that_nothing_depends_on_are_no_matter():
    masked = pax.debug.nans(lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)))
    assert_close(masked(jnp.array([1.0, -1.0])), np.array([1.0, 0.0], np.float32))


def test_a_function_is_compiled_once():
    calls = []

    def f(x):
        calls.append(1)
        return x + 1

    watched = pax.debug.nans(f)
    for _ in range(3):
        watched(X)
    assert len(calls) == 1


# Trees that hold copies of a net: moments, averages, nets of a closure

OPTIMIZERS = {
    "adam": lambda params: pax.optim.from_optax(optax.adam(1e-3))(params),
    "flat": lambda params: pax.optim.from_optax(optax.flatten(optax.adam(1e-3)))(params),
    "momentum": lambda params: pax.optim.from_optax(optax.sgd(1e-3, momentum=0.9))(params),
    "opax": lambda params: pax.opax.adam(1e-3)(params),
    "opax_momentum": lambda params: pax.opax.chain(pax.opax.trace(0.9), pax.opax.scale(1e-3))(
        params
    ),
}


class Rooted(pax.Module):
    def __call__(self, x):
        return jnp.sqrt(-1 - x**2)


def with_nan():
    """A net whose middle gives NaN."""
    return pax.Sequential(pax.Linear(3, 3), Rooted(), pax.Linear(3, 3))


def loss_fn(net, x):
    loss = (net(x) ** 2).mean()
    return loss, (loss, net)


def in_both_forms(step, *args):
    """The errors of both forms, which say the same but for lines that jax may shorten."""
    errors = [raised(step, *args)]
    with pytest.raises(pax.errors.NonFiniteError) as caught, pax.debug.nans():
        jax.jit(step)(*args)
    return [*errors, caught.value]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_whose_optimizer_holds_moments(name):
    net = with_nan()
    step = pax.build_update_fn(loss_fn)
    for error in in_both_forms(step, net, OPTIMIZERS[name](net.parameters()), X):
        assert error.what == "sqrt produced NaN from finite numbers."
        assert error.where.startswith("modules.1, ")
        assert "test_nans.py" in error.where


@pytest.mark.parametrize("stepping", [True, False])
def test_a_call_that_is_not_compiled(stepping):
    """Each operation runs by itself: the calls under way say which module it is of."""
    net = with_nan()
    with pytest.raises(pax.errors.NonFiniteError) as caught, pax.debug.nans():
        if stepping:
            optimizer = OPTIMIZERS["adam"](net.parameters())
            pax.build_update_fn(loss_fn)(net, optimizer, X)
        else:
            net(X)
    assert caught.value.where.startswith("modules.1, ")


def test_trees_with_the_structure_of_the_net():
    net, optimizer = with_nan(), optax.adam(1e-3)
    teacher = net.parameters()

    def step(net, state, average, x):
        params = net.parameters()
        loss, grads = jax.value_and_grad(lambda p: (net.update_parameters(p)(x) ** 2).sum())(params)
        far = jax.tree_util.tree_map(lambda p, t: ((p - t) ** 2).sum(), params, teacher)
        updates, state = optimizer.update(grads, state, params)
        net = net.update_parameters(optax.apply_updates(params, updates))
        average = jax.tree_util.tree_map(lambda a, b: 0.9 * a + 0.1 * b, average, net)
        return net, state, average, loss + sum(jax.tree_util.tree_leaves(far))

    for error in in_both_forms(step, net, optimizer.init(teacher), net, X):
        assert error.where.startswith("modules.1, ")


def test_a_net_that_stacks_its_layers_when_it_is_called():
    class Stacked(pax.Module):
        def __init__(self):
            super().__init__()
            self.layers = [pax.Sequential(pax.Linear(3, 3), Rooted()) for _ in range(2)]

        def __call__(self, x):
            layers = jax.tree_util.tree_map(lambda *each: jnp.stack(each), *self.layers)
            return jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)[0]

    for error in in_both_forms(Stacked(), X):
        assert error.what == "sqrt produced NaN from finite numbers."
        assert "modules.1, " in error.where
