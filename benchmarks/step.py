"""A jitted Adam step over 64 layers, in every framework the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import pax_export as pax
from benchmarks.compare import compare, table

_LAYERS, _WIDTH, _BATCH = 64, 16, 8
_ADAM = optax.adam(1e-3)


def tables() -> Iterator[str]:
    """One step after the other, state handed on as in a training loop that looks at each loss.

    A loop that does not would be timed with the threads of the step before.
    """
    rows = compare(
        {
            "nested dicts": _raw(),
            "a flat list of arrays": _flat(),
            "pax_export, jax.jit": _pax(jax.jit),
            "pax_export, pax.transforms.jit": _pax(pax.transforms.jit),
            "pax_export, jax.jit, optax.flatten": _pax(jax.jit, optax.flatten(_ADAM)),
            "pax_export, pax.transforms.jit, optax.flatten": _pax(
                pax.transforms.jit, optax.flatten(_ADAM)
            ),
            "equinox, jax.jit": _equinox(jitted=False),
            "equinox, filter_jit": _equinox(jitted=True),
            "flax nnx, nnx.jit": _nnx(),
            "dm-haiku, jax.jit": _haiku(),
        },
        rounds=21,
        least=0.1,
    )
    yield table(
        "jitted Adam step, 64 Linear",
        rows,
        "1.05 with jax.jit, 0.93 flat inside",
        "1.33, and 0.94 through its Flattener",
    )


def _data() -> tuple[jax.Array, jax.Array]:
    return jnp.ones((_BATCH, _WIDTH)), jnp.zeros((_BATCH, _WIDTH))


def _loop(step: Callable[..., tuple], model: Any, state: Any) -> Callable[[], Any]:
    held = [model, state]
    x, y = _data()

    def once() -> Any:
        held[0], held[1], loss = step(held[0], held[1], x, y)
        return loss.block_until_ready()

    return once


def _params() -> list[dict[str, jax.Array]]:
    return [{"bias": jnp.zeros(_WIDTH), "weight": jnp.eye(_WIDTH) * 0.9} for _ in range(_LAYERS)]


def _apply(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = x @ layer["weight"] + layer["bias"]
    return x


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((_apply(params, x) - y) ** 2)


def _update(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple:
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    updates, state = _ADAM.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


def _raw() -> Callable[[], Any]:
    params = _params()
    return _loop(jax.jit(_update), params, _ADAM.init(params))


def _flat() -> Callable[[], Any]:
    params = _params()
    state = _ADAM.init(params)
    leaves, treedef = jax.tree.flatten((params, state))
    count = len(jax.tree.leaves(params))

    @jax.jit
    def step(params: list, state: list, x: jax.Array, y: jax.Array) -> tuple:
        new_params, new_state, loss = _update(*jax.tree.unflatten(treedef, params + state), x, y)
        return jax.tree.leaves(new_params), jax.tree.leaves(new_state), loss

    return _loop(step, leaves[:count], leaves[count:])


class _Net(pax.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [pax.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def _pax(jit: Callable, rule: Any = _ADAM) -> Callable[[], Any]:
    def loss_fn(net: _Net, x: jax.Array, y: jax.Array) -> tuple:
        loss = jnp.mean((net(x) - y) ** 2)
        return loss, (loss, net)

    net = _Net()
    optimizer = pax.optim.from_optax(rule)(net.parameters())
    return _loop(jit(pax.build_update_fn(loss_fn)), net, optimizer)


def _equinox(*, jitted: bool) -> Callable[[], Any]:
    import equinox as eqx

    class Net(eqx.Module):
        layers: list

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = x @ layer.weight + layer.bias
            return x

    key = jax.random.key(0)
    net = Net([eqx.nn.Linear(_WIDTH, _WIDTH, key=key) for _ in range(_LAYERS)])

    def step(net: Net, state: Any, x: jax.Array, y: jax.Array) -> tuple:
        loss, grads = eqx.filter_value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        updates, state = _ADAM.update(grads, state)
        return eqx.apply_updates(net, updates), state, loss

    state = _ADAM.init(eqx.filter(net, eqx.is_array))
    return _loop(eqx.filter_jit(step) if jitted else jax.jit(step), net, state)


def _nnx() -> Callable[[], Any]:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            layers = [nnx.Linear(_WIDTH, _WIDTH, rngs=rngs) for _ in range(_LAYERS)]
            self.layers = nnx.List(layers)

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x)
            return x

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, _ADAM, wrt=nnx.Param)
    x, y = _data()

    @nnx.jit
    def step(net: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    return lambda: step(net, optimizer, x, y).block_until_ready()


def _haiku() -> Callable[[], Any]:
    import haiku as hk

    def apply(x: jax.Array) -> jax.Array:
        for _ in range(_LAYERS):
            x = hk.Linear(_WIDTH)(x)
        return x

    net = hk.without_apply_rng(hk.transform(apply))
    params = net.init(jax.random.key(0), _data()[0])

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((net.apply(params, x) - y) ** 2)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = _ADAM.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return _loop(jax.jit(step), params, _ADAM.init(params))
