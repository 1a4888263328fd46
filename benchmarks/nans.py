"""What it costs to watch a training step for NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax

import pax_export as pax
from benchmarks.compare import compare, table

_DIM, _BATCH, _LENGTH, _STEPS = 64, 8, 64, 5


def tables() -> Iterator[str]:
    """An Adam step of a Transformer of 12 layers: alone, and under each watch.

    A turn is five steps, one after the other: the context compiles its look when it is entered.
    """
    rows = compare(
        {
            "jax.jit": _turn(jax.jit),
            "pax.debug.nans(step)": _turn(pax.debug.nans),
            "with pax.debug.nans():": _turn(jax.jit, pax.debug.nans),
            "jax_debug_nans": _turn(jax.jit, _debug_nans),
        },
        rounds=11,
    )
    yield table("watching a step of a Transformer", rows, "under 1.10", "none")


def _debug_nans() -> AbstractContextManager:
    return jax.debug_nans(True)


def _turn(
    compiled: Callable[[Callable], Callable], watch: Callable[[], Any] = nullcontext
) -> Callable[[], Any]:
    def loss_fn(net: Any, tokens: jax.Array) -> tuple:
        logits = net(tokens)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.argmax(tokens, -1))
        return loss.mean(), (loss.mean(), net)

    net = pax.nets.Transformer(_DIM, 4, 12, 0.0)
    optimizer = pax.optim.from_optax(optax.adam(1e-3))(net.parameters())
    step = compiled(pax.build_update_fn(loss_fn))
    x = jax.random.normal(jax.random.key(0), (_BATCH, _LENGTH, _DIM))
    held = [net, optimizer]

    def five() -> None:
        with watch():
            for _ in range(_STEPS):
                held[0], held[1], loss = step(held[0], held[1], x)
                loss.block_until_ready()

    return five
