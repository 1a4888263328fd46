"""Modules from dataclasses, and the operators: `%`, `~`, `|`, `==`, apply, map, replace_method."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


@dataclass
class Linear(pax.Module):
    in_dim: int
    out_dim: int
    with_bias: bool = True
    name: str | None = None
    weight: jnp.ndarray = field(init=False, repr=False)
    bias: jnp.ndarray | None = field(init=False, repr=False)
    counter: jnp.ndarray = field(init=False)
    w_init: Callable = field(default=jax.nn.initializers.normal(), repr=False)
    parameters = pax.parameters_method("weight", "bias")

    def __post_init__(self):
        self.weight = self.w_init(pax.next_rng_key(), (self.in_dim, self.out_dim))
        self.bias = jnp.zeros((self.out_dim,)) if self.with_bias else None
        self.counter = jnp.array(0)

    def __call__(self, x):
        self.counter += 1
        x = jnp.dot(x, self.weight)
        return x if self.bias is None else x + self.bias


@dataclass
class Affine(pax.ParameterModule):
    weight: jnp.ndarray
    bias: jnp.ndarray

    def __call__(self, x):
        return x * self.weight + self.bias


@dataclass
class Mlp(pax.Module):
    first: Linear
    last: Affine

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


class Gated(pax.Module):
    parameters = pax.parameters_method("gate")

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.gate = jnp.array(0.5)
        self.seen = [jnp.array(0.0), jnp.array(1.0)]

    def __call__(self, x):
        self.seen[0] = self.seen[0] + jnp.mean(x)
        return self.gate * self.inner(x)


def loss_fn(model, x, y):
    model, out = model % x
    return jnp.mean((out - y) ** 2), model


def train(name, model, x, y):
    optimizer = opax.sgd(0.3, momentum=0.5).init(~model)
    step = jax.jit(pax.value_and_grad(loss_fn, has_aux=True))
    for i in range(7):
        (loss, model), grads = step(model, x, y)
        model, optimizer = opax.apply_gradients(model, optimizer, grads)
        print(name, i, float(loss))
    return model


def main():
    pax.seed_rng_key(42)
    x = np.random.RandomState(0).randn(6, 3).astype(np.float32)
    y = np.random.RandomState(1).randn(6, 2).astype(np.float32)

    fc = Linear(3, 2, name="fc1")
    fc = train("fc", fc, x, y)
    print(int(fc.counter), fc.in_dim, fc.name)

    mlp = Mlp(Linear(3, 2, with_bias=False), Affine(jnp.array(2.0), jnp.zeros((2,))))
    mlp = train("mlp", mlp, x, y)
    print(len(mlp.submodules()), mlp.pytree_attributes, mlp.first.pytree_attributes)

    gated = train("gated", Gated(fc), x, y)
    print(float(gated.gate), [float(a) for a in gated.seen], int(gated.inner.counter))
    print(gated == gated.copy(), gated == gated.eval(), ~gated == ~(~gated))

    other = gated.map(lambda a: a * 0)
    merged = other | ~gated
    print(float(merged.gate), float(jnp.sum(jnp.abs(merged.inner.weight))))
    doubled = fc.replace_method(__call__=lambda self, x: 2 * jnp.dot(x, self.weight))
    print(float(jnp.sum(doubled(x))), isinstance(doubled, Linear), type(doubled).__name__)
    names = []
    gated.apply(lambda m: names.append(type(m).__name__) or m)
    print(names, gated.inner.replace(bias=None).bias)


if __name__ == "__main__":
    main()
