"""Models of every kind, small, that each target is tried with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export.experimental.graph import build_graph_module
from pax_export.export import Report, load, spec
from tests.closeness import assert_close


def _flat(x):
    return x.reshape(x.shape[0], -1)


def mlp():
    return pax.Sequential(pax.Linear(3, 8), jax.nn.relu, pax.Linear(8, 2))


def convnet():
    """The digits model of the examples, smaller."""
    pool = functools.partial(pax.max_pool, window_shape=(2, 2, 1), strides=(2, 2, 1))
    net = pax.Sequential(
        pax.Conv2D(1, 4, 3, padding="SAME"),
        pax.BatchNorm2D(4),
        jax.nn.relu,
        functools.partial(pool, padding="SAME"),
        pax.Conv2D(4, 4, 3, padding="SAME"),
        pax.BatchNorm2D(4),
        jax.nn.gelu,
        functools.partial(pax.avg_pool, window_shape=(2, 2, 1), strides=(2, 2, 1), padding="VALID"),
        _flat,
        pax.Dropout(0.3),
        pax.Linear(16, 10),
    )
    # Statistics as after training, so that a wrong BatchNorm shows.
    images = np.random.default_rng(3).normal(2.0, 3.0, (16, 8, 8, 1)).astype(np.float32)
    return jax.jit(pax.purecall)(net, images)[0]


class Recurrent(pax.Module):
    def __init__(self):
        super().__init__()
        self.cell = pax.LSTM(3, 4)
        self.out = pax.Linear(4, 2)

    def __call__(self, xs):
        state = self.cell.initial_state(xs.shape[0])
        return self.out(pax.scan(self.cell, state, xs, time_major=False)[1])


def transformer():
    return pax.nets.Transformer(4, 2, 1, 0.2)


def _forked(x, y):
    hidden = (x | y) >> functools.partial(jnp.add) >> pax.Linear(4, 4) >> jax.nn.relu
    return (hidden & x) >> functools.partial(jnp.concatenate, axis=-1) >> pax.Linear(8, 2)


def graph():
    return build_graph_module(_forked)(jnp.zeros((3, 4)), jnp.zeros((3, 4)))


@dataclass(frozen=True)
class Target:
    """A model, its inputs, and how many sizes of a call are symbolic."""

    name: str
    build: Callable[[], Any]
    inputs: Any
    shapes: tuple[tuple[int, ...], ...]

    def arrays(self, batch: int) -> tuple[np.ndarray, ...]:
        draws = np.random.default_rng(7)
        return tuple(
            [draws.normal(size=(batch, *shape)).astype(np.float32) for shape in self.shapes]
        )

    def check(self, write: Callable[..., Report], path: Path) -> None:
        """Exports the model; the loaded file gives what the model gives, for any batch."""
        net = self.build()
        report = write(net, path, self.inputs)
        assert max(report.largest_error.values()) < 1e-4
        arrays = self.arrays(7)  # validation had other sizes
        expected = jax.jit(net.eval())(*arrays)
        assert_close(load(path)(*arrays), expected, rtol=1e-4, atol=1e-5)


TARGETS = [
    Target("MLP", mlp, spec("batch, 3"), ((3,),)),
    Target("convnet", convnet, spec("batch, 8, 8, 1"), ((8, 8, 1),)),
    Target("LSTM", Recurrent, spec("batch, 5, 3"), ((5, 3),)),
    Target("Transformer", transformer, spec("batch, 5, 4"), ((5, 4),)),
    Target("graph", graph, (spec("batch, 4"), spec("batch, 4")), ((4,), (4,))),
]
