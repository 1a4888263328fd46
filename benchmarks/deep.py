"""Deep networks: compiling the gradient, and its memory, scanned and in a Python loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import pax_export as pax
from pax_export import transforms as T

DIM, HEADS, BATCH, LENGTH = 128, 4, 4, 32


def tables() -> Iterator[str]:
    """A Transformer by Scan, by Scan of Remat, and as a list of layers."""
    forms: list[tuple[str, Callable[[int], pax.Module], tuple[int, ...]]] = [
        ("Scan(Layer)", lambda n: T.Scan(_Layer, length=n)(), (12, 48)),
        ("Scan(Remat(Layer))", lambda n: T.Scan(T.Remat(_Layer), length=n)(), (12, 48)),
        ("a list of layers", _Listed, (12,)),  # 48 take minutes
    ]
    lines = ["| gradient of | layers | to compile | temporary memory |", "|---|---|---|---|"]
    for name, build, depths in forms:
        for depth in depths:
            seconds, memory = _compiled(build, depth)
            lines.append(f"| {name} | {depth} | {seconds:.1f} s | {memory:.1f} MiB |")
    yield "\n".join(lines) + "\n"


class _Layer(pax.Module):
    """One layer of a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = pax.MultiHeadAttention(HEADS, DIM // HEADS, 1.0)
        self.norm1 = pax.LayerNorm(DIM, -1, True, True)
        self.norm2 = pax.LayerNorm(DIM, -1, True, True)
        self.fc1, self.fc2 = pax.Linear(DIM, 4 * DIM), pax.Linear(4 * DIM, DIM)

    def __call__(self, h: jax.Array) -> tuple[jax.Array, None]:
        n = self.norm1(h)
        h = h + self.attention(n, n, n)
        return h + self.fc2(jax.nn.gelu(self.fc1(self.norm2(h)))), None


class _Listed(pax.Module):
    """The same with a list of layers, called one by one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = [_Layer() for _ in range(layers)]

    def __call__(self, h: jax.Array) -> tuple[jax.Array, None]:
        for layer in self.layers:
            h, _ = layer(h)
        return h, None


def _loss(net: pax.Module, h: jax.Array) -> jax.Array:
    return jnp.sum(net(h)[0] ** 2)


def _compiled(build: Callable[[int], pax.Module], depth: int) -> tuple[float, float]:
    """Seconds to trace and compile the gradient, and MiB of temporary memory."""
    net = jax.eval_shape(lambda: build(depth))
    spec = jax.ShapeDtypeStruct((BATCH, LENGTH, DIM), jnp.float32)
    start = time.perf_counter()
    program = jax.jit(T.grad(_loss)).lower(net, spec).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return seconds, memory.temp_size_in_bytes / 2**20 if memory else float("nan")
