"""Three layers as a user writes them: they know the declaration of arrays, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax


def scaled_normal(layer):
    return lambda key, shape: jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))


class Bilinear(pax.ParameterModule):
    """``y_k = x_i · x_j · weight_ijk + bias_k``."""

    arrays = {
        "weight": pax.Declared("kernel", ("left", "in", "out"), init=scaled_normal),
        "bias": pax.Declared("bias", ("out",), init=lambda layer: jax.nn.initializers.zeros),
    }

    def __init__(self, size, outputs):
        super().__init__()
        self.weight = scaled_normal(self)(pax.next_rng_key(), (size, size, outputs))
        self.bias = jnp.zeros(outputs)

    def __call__(self, x):
        return jnp.einsum("...i,...j,ijk->...k", x, x, self.weight) + self.bias


class LowRank(pax.ParameterModule):
    """``y = x · down · up``."""

    arrays = {
        "down": pax.Declared("kernel", ("in", "rank"), outputs=("rank",), init=scaled_normal),
        "up": pax.Declared(
            "kernel",
            ("rank", "out"),
            init=scaled_normal,
            apply=lambda layer, up, x: (x @ layer.down) @ up,
        ),
    }

    def __init__(self, inputs, rank, outputs):
        super().__init__()
        self.down = scaled_normal(self)(pax.next_rng_key(), (inputs, rank))
        self.up = scaled_normal(self)(pax.next_rng_key(), (rank, outputs))

    def __call__(self, x):
        return (x @ self.down) @ self.up


class MaskedConv(pax.Module):
    """A convolution that sees no pixel below or right of its own."""

    parameters = pax.parameters_method("weight")
    arrays = {
        "weight": pax.Declared("kernel", ("height", "width", "in", "out"), init=scaled_normal)
    }

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = scaled_normal(self)(pax.next_rng_key(), (3, 3, inputs, outputs))
        self.mask = np.tril(np.ones((3, 3), "float32"))[:, :, None, None]

    def __call__(self, x):
        return jax.lax.conv_general_dilated(
            x, self.weight * self.mask, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


def rows():
    """Name -> a layer and an input."""
    draw = np.random.default_rng(0).standard_normal
    return {
        "Bilinear": (Bilinear(32, 8), draw((4, 32)).astype("float32")),
        "LowRank": (LowRank(64, 32, 8), draw((4, 64)).astype("float32")),
        "MaskedConv": (MaskedConv(32, 8), draw((2, 5, 6, 32)).astype("float32")),
    }
