"""Small modules that the tests of the core are written with."""

import jax.numpy as jnp

import pax_export as pax


class Dense(pax.ParameterModule):
    """A layer with two arrays and some static data."""

    def __init__(self, din=2, dout=3, name=None):
        super().__init__(name=name)
        self.din = din
        self.dout = dout
        self.weight = jnp.full((din, dout), 0.5)
        self.bias = jnp.zeros(dout)

    def __call__(self, x):
        return x @ self.weight + self.bias

    def __repr__(self):
        return super()._repr({"din": self.din, "dout": self.dout})


class Free(pax.Module):
    """A module of these attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Counter(pax.StateModule):
    """Counts its calls in an array."""

    def __init__(self):
        super().__init__()
        self.count = jnp.zeros((), jnp.int32)

    def __call__(self, x):
        self.count = self.count + 1
        return x


class Net(pax.Module):
    """Submodules in a list, in a dict and alone; a mixed list; static data."""

    def __init__(self):
        super().__init__()
        self.mixed = [Dense(1, 1), 5, jnp.tanh]
        self.layers = [Dense(2, 2), Dense(2, 2)]
        self.parts = {"b": Counter(), "a": Dense(3, 3)}
        self.scale = jnp.ones(2)
        self.options = {"rate": 0.1}
        self.kind = "net"

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.parts["b"](x) * self.scale
