"""Edits of a whole module: eval, parameters, pure, and construction."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table
from benchmarks.same_tree import as_equinox, as_nnx


class _Layer(pax.ParameterModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = np.ones((2, 2))


class _Net(pax.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = [_Layer() for _ in range(size)]


def tables() -> Iterator[str]:
    """Edits of a Transformer, their growth, and what constructing one costs."""
    import equinox as eqx
    from flax import nnx

    net = pax.nets.Transformer(64, 4, 12, 0.1)
    nothing = pax.pure(lambda module: module)
    equinox, flax = as_equinox(net), as_nnx(net)
    rows = compare(
        {
            "eval()": net.eval,
            "parameters()": net.parameters,
            "a pure that does nothing": lambda: nothing(net),
            "equinox: inference_mode": lambda: eqx.nn.inference_mode(equinox),
            "flax nnx: split and merge": lambda: nnx.merge(*nnx.split(flax)),
        }
    )
    yield table("edits of a Transformer", rows, "0.3 ms each", "30, 18.7 and 32 ms")

    small, large = _Net(50), _Net(800)
    rows = compare({"50 layers": small.eval, "800 layers": large.eval})
    yield table("growth of eval()", rows, "linear (16), and 2 µs a layer", "quadratic")

    rows = compare(
        {
            "its initial arrays, without modules": _initial_arrays,
            "Transformer": lambda: pax.nets.Transformer(64, 4, 12, 0.1),
        },
        rounds=9,
    )
    yield table("constructing a Transformer", rows, "20 ms beyond its arrays", "0.6 s")


def _initial_arrays() -> list[jax.Array]:
    """What `pax.nets.Transformer(64, 4, 12, 0.1)` draws and fills, key by key."""
    init = jax.nn.initializers.variance_scaling(2 / 12, "fan_in", "normal")
    made: list[jax.Array] = []
    for _ in range(12):
        for shape in [(64, 64)] * 4 + [(64, 256), (256, 64)]:
            weight_key, bias_key = jax.random.split(pax.next_rng_key())
            bias = jax.random.normal(bias_key, shape[1:]) * 0.1
            made += [init(weight_key, shape), bias]
        for _ in range(2):
            jax.random.split(pax.next_rng_key())
            made += [jnp.ones(64), jnp.zeros(64)]
    return made
