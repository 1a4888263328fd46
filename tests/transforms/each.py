"""A row for each transform, by which the tests of all transforms find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pax_export as pax
from pax_export import transforms as T
from tests.transforms.models import at, stacked

N = 2  # layers, steps or calls


# --- the same by hand: of functions that `pure` opened ------------------------------------


def plainly(f):
    return f


def grad_by_hand(f):
    def loss(parameters, net, x):
        value, net, y = f(net.update_parameters(parameters), x)
        return jnp.sum(value), (net, y)

    def both(net, x):
        (value, (new, y)), grads = jax.value_and_grad(loss, has_aux=True)(net.parameters(), net, x)
        norms = [jnp.sum(g**2) for g in jax.tree_util.tree_leaves(grads)]
        return value + sum(norms), new, y

    return both


def each_by_hand(f):
    def loop(net, x):
        values, nets, ys = zip(*[f(at(net, i), x[i]) for i in range(N)])
        return jnp.stack(values), stacked(nets), jnp.stack(ys)

    return loop


def sum_by_hand(f):
    def loop(net, x):
        values, nets, ys = each_by_hand(f)(net, x)
        return jnp.sum(values), nets, ys

    return loop


def again_by_hand(f):
    def loop(net, x):
        value = None
        for _ in range(N):
            value, net, x = f(net, x)
        return value, net, x

    return loop


# --- the transforms ---------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """How the tests use a transform.

    Args:
        alone: makes of a function that returns one number one of the same arguments.
        pair: makes of a function of ``(net, x)`` that returns ``(loss, net, y)`` another one.
        by_hand: does as `pair`, without the transform.
    """

    alone: Callable
    pair: Callable | None = None
    by_hand: Callable = plainly


def with_grad(f):
    def loss(net, x):
        value, net, y = f(net, x)
        return jnp.sum(value), (net, y)

    def both(net, x):
        (value, (net, y)), grads = T.value_and_grad(loss, has_aux=True)(net, x)
        norms = [jnp.sum(g**2) for g in jax.tree_util.tree_leaves(grads)]
        return value + sum(norms), net, y

    return both


def with_scan(f):
    def step(total, net, x):
        value, net, y = f(net, x)
        return total + jnp.sum(value), (net, y)

    def scanned(net, x):
        total, (net, y) = T.scan(step, in_axes=(None, 0, 0))(jnp.zeros(()), net, x)
        return total, net, y

    return scanned


def with_cond(f):
    return lambda net, x: T.cond(jnp.sum(x) < 1e9, f, lambda net, x: f(net, x + 1), net, x)


def with_fori_loop(f):
    def looped(net, x):
        value = jax.eval_shape(pax.pure(lambda net, x: f(net, x)[0]), net, x)
        first = (jnp.zeros(value.shape), net, x)
        return T.fori_loop(0, N, lambda _, last: f(last[1], last[2]), first)

    return looped


def one_step(f):
    return lambda total, *args: (total + f(*args), None)


ROWS = {
    "jit": Row(T.jit, T.jit),
    "remat": Row(T.remat, T.remat),
    "grad": Row(
        lambda f: lambda *args: T.value_and_grad(f)(*args)[0],
        with_grad,
        grad_by_hand,
    ),
    "vmap": Row(
        lambda f: T.vmap(f, in_axes=None, out_axes=None, axis_size=2),
        T.vmap,
        each_by_hand,
    ),
    "scan": Row(
        lambda f: (
            lambda *args: T.scan(one_step(f), in_axes=None, length=1)(jnp.zeros(()), *args)[0]
        ),
        with_scan,
        sum_by_hand,
    ),
    "cond": Row(lambda f: lambda *args: T.cond(True, f, f, *args), with_cond),
    "switch": Row(lambda f: lambda *args: T.switch(1, [f, f, f], *args)),
    "while_loop": Row(
        lambda f: (
            lambda *args: T.while_loop(
                lambda value: value[0] < 1,
                lambda value: (value[0] + 1, f(*value[2]), value[2]),
                (0, jnp.zeros(()), args),
            )[1]
        )
    ),
    "fori_loop": Row(
        lambda f: (
            lambda *args: T.fori_loop(
                3, 4, lambda _, value: (f(*value[1]), value[1]), (jnp.zeros(()), args)
            )[0]
        ),
        with_fori_loop,
        again_by_hand,
    ),
}
