"""`with pax.debug.nans():` around code that stays as it is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused


class Unit(pax.Module):
    """Divides by the length, which may be zero."""

    def __init__(self):
        super().__init__()
        self.fc = pax.Linear(3, 3, with_bias=False)

    def __call__(self, x):
        return self.fc(x) / jnp.sqrt((x**2).sum())


def trainer(donate=()):
    optimizer = optax.sgd(0.01)
    net = pax.Sequential(pax.Linear(3, 3, with_bias=False), Unit())

    @functools.partial(jax.jit, donate_argnums=donate)
    def step(net, state, x):
        loss, gradients = pax.value_and_grad(lambda net: (net(x) ** 2).sum())(net)
        updates, state = optimizer.update(gradients.parameters(), state)
        params = optax.apply_updates(net.parameters(), updates)
        return net.update_parameters(params), state, loss

    return step, net, optimizer.init(net.parameters())


X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_a_training_step_in_the_block_names_module_operation_and_line(donate):
    step, net, state = trainer(donate)
    with pytest.raises(pax.errors.NonFiniteError) as caught, pax.debug.nans():
        for k in (1.0, 0.5, 0.0, 2.0):
            net, state, _ = step(net, state, k * X)
    assert caught.value.what.startswith("div produced ")
    assert caught.value.where.startswith("modules.1, ")
    assert "test_nans_context.py:" in caught.value.where
    assert k == 0.0


def test_finite_results_are_unchanged_and_traced_once():
    step, net, state = trainer()
    traced = []
    counted = jax.jit(lambda *args: (traced.append(1), step(*args))[1])
    expected = counted(net, state, X)
    with pax.debug.nans():
        found = [counted(net, state, X) for _ in range(3)][-1]
    assert len(traced) <= 2
    assert_close(found[2], expected[2])
    assert_close(found[0][0].weight, expected[0][0].weight)


def test_after_the_block_nothing_is_looked_at():
    log = jax.jit(jnp.log)
    with pax.debug.nans():
        log(jnp.ones(2))
    assert jnp.isneginf(log(jnp.zeros(2))).all()
    with pytest.raises(FloatingPointError), pax.debug.nans():
        log(jnp.zeros(2))
    assert jnp.isneginf(log(jnp.zeros(2))).all()
    assert jnp.isneginf(jnp.log(jnp.zeros(2))).all()


def test_eager_calls_are_checked():
    with refused(pax.errors.NonFiniteError, "test_nans_context.py:", got="float32[2] from 0 to 0"):
        with pax.debug.nans():
            jax.grad(lambda x: jnp.log(x).sum())(jnp.zeros(2))


def test_the_backward_pass():
    root = jax.jit(lambda net, x: jnp.sqrt(net(x)).sum())
    with pytest.raises(pax.errors.NonFiniteError) as caught, pax.debug.nans():
        pax.grad(root)(pax.Linear(2, 2, with_bias=False), jnp.zeros((1, 2)))
    assert "inf" in caught.value.what or "NaN" in caught.value.what


def test_masks_of_infinities_pass_and_nan_does_not():
    attend = jax.jit(lambda x, mask: jax.nn.softmax(x + mask))
    with pax.debug.nans():
        mask = jnp.where(jnp.arange(3) < 2, 0.0, -jnp.inf)
        out = attend(jnp.ones(3), jnp.reshape(mask, (1, 3)))
    assert_close(out, np.array([[0.5, 0.5, 0.0]], np.float32))
    with pytest.raises(pax.errors.NonFiniteError) as caught, pax.debug.nans():
        attend(jnp.ones(3), jnp.full(3, -jnp.inf))
    assert (caught.value.what, caught.value.where) == ("An argument is not finite already.", "1")


@pytest.mark.parametrize("options", [{}, {"donate_state": True}, {"static_argnums": 2}], ids=str)
def test_a_step_of_our_own_jit_names_the_module(options):
    @functools.partial(pax.transforms.jit, **options)
    def step(net, x, k):
        return net, net(x).sum()

    net = pax.Sequential(pax.Linear(3, 3), pax.BatchNorm1D(3), pax.Lambda(lambda x: x / jnp.std(x)))
    with pytest.raises(pax.errors.NonFiniteError) as caught, pax.debug.nans():
        for k in (1, 0):
            net, _ = step(net, k * X, 3)
    assert caught.value.what == "div produced NaN from finite numbers."
    assert caught.value.where.startswith("modules.2, ")


def test_the_line_is_that_of_the_user():
    with refused(pax.errors.NonFiniteError, "test_nans_context.py:"):
        with pax.debug.nans():
            jnp.ones(2) * 1e38 * jnp.full(2, 10.0)
    with refused(
        pax.errors.NonFiniteError, "test_nans_context.py:", got="float32[2] from 1 to 1, 50.0% NaN"
    ):
        with pax.debug.nans():
            jnp.asarray([1.0, np.nan])


def test_static_arguments_and_constants():
    @functools.partial(jax.jit, static_argnames="by")
    def f(x, by):
        return jnp.log(x) if by == "log" else x

    with pytest.raises(pax.errors.NonFiniteError), pax.debug.nans():
        f(jnp.zeros(2), by="log")
    constant = np.full(2, np.inf, np.float32)
    for watched in (pax.debug.nans(lambda x: (x, constant)), _in_the_block(constant)):
        with pytest.raises(pax.errors.NonFiniteError):
            watched(jnp.ones(2))


def _in_the_block(constant):
    @pax.debug.nans()
    def watched(x):
        return jax.jit(lambda x: (x, constant))(x)

    return watched


def test_keys_integers_vmap_scan_and_random_numbers_go_on():
    net = pax.Sequential(pax.Linear(3, 3), pax.Dropout(0.5), pax.BatchNorm1D(3))
    with pax.debug.nans():
        net, out = jax.jit(pax.purecall)(net, X)
        total = jax.lax.scan(lambda c, x: (c + x.sum(), c), 0.0, out)[0]
        keys = jax.random.split(jax.random.key(0), 3)
        noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
    assert noise.shape == (3, 2) and np.isfinite(float(total))


def test_inside_of_a_traced_function_it_is_refused():
    def f(x):
        with pax.debug.nans():
            return jnp.log(x)

    for call in (jax.jit(f), jax.grad(f), lambda x: jax.vmap(f)(x[None])):
        with refused(ValueError, "entered", "around the calls of the jitted function"):
            call(jnp.ones(()))


def test_blocks_in_blocks():
    with pax.debug.nans():
        with pax.debug.nans():
            jnp.ones(2) + 1
        with pytest.raises(FloatingPointError):
            jnp.log(jnp.zeros(2))


def test_where_jax_has_other_private_names_its_own_watch_is_there(monkeypatch):
    from pax_export._foundations import jax as ours

    monkeypatch.setattr(ours, "private", lambda name: None)
    said = []
    monkeypatch.setattr(ours, "say_less", said.append)
    with pytest.raises(FloatingPointError), pax.debug.nans():
        jax.jit(jnp.log)(-jnp.ones(2))
    assert said == ["jax._src.core.eval_trace"]
