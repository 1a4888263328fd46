"""Depthwise convolutions and pools in a second form for CPUs: in jax, and in a SavedModel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pax_export.export import load, spec, to_saved_model
from pax_export.export.portable.for_xla import fast_on_cpus
from tests.closeness import assert_close

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def depthwise(layout=LAST, strides=(1, 1), padding="SAME", groups=6, **options):
    return lambda x, kernel: lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=layout, feature_group_count=groups, **options
    )


CONVOLUTIONS = {
    "features last": (depthwise(), (2, 7, 8, 6), (3, 3, 1, 6)),
    "features first": (depthwise(FIRST), (2, 6, 7, 8), (6, 1, 3, 3)),
    "another order of results": (depthwise(("NHWC", "HWIO", "CWHN")), (2, 7, 8, 6), (3, 3, 1, 6)),
    "strides": (depthwise(strides=(2, 3), padding=((1, 0), (2, 4))), (2, 7, 8, 6), (3, 2, 1, 6)),
    "negative padding": (depthwise(padding=((-1, 0), (0, -2))), (2, 7, 8, 6), (3, 2, 1, 6)),
    "dilated": (
        depthwise(padding=((2, 1), (3, 2)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        (2, 5, 6, 6),
        (3, 2, 1, 6),
    ),
    "several kernels of a feature": (depthwise(), (2, 7, 8, 6), (3, 3, 1, 18)),
    "one axis": (
        lambda x, kernel: lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
        ),
        (2, 9, 4),
        (5, 1, 4),
    ),
}
LEFT = {
    "one group": (depthwise(groups=1), (2, 7, 8, 6), (3, 3, 6, 6)),
    "groups of several features": (depthwise(groups=3), (2, 7, 8, 6), (3, 3, 2, 6)),
    "pools of complex numbers": (
        lambda x: lax.reduce_window_max_p.bind(
            x.astype(jnp.complex64),
            window_dimensions=(2, 2),
            window_strides=(1, 1),
            padding=((0, 0), (0, 0)),
            base_dilation=(1, 1),
            window_dilation=(1, 1),
        ),
        (4, 6),
    ),
    "large kernels": (depthwise(padding="VALID"), (1, 14, 14, 6), (12, 12, 1, 6)),
}
POOLS = {
    "2 x 2": (-np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "3 x 3, padded": (-np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "least": (np.inf, lax.min, (1, 3, 2, 1), (1, 1, 2, 1), "SAME"),
    "wide": (-np.inf, lax.max, (1, 7, 1, 1), (1, 1, 1, 1), "SAME"),
}


def lowered(function, *arrays):
    made = jax.jit(jaxpr_as_fun(fast_on_cpus(jax.make_jaxpr(function)(*arrays))))
    return made, made.lower(*arrays).as_text()


def random(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in CONVOLUTIONS), (next(iter(CONVOLUTIONS)), "bfloat16")],
)
def test_depthwise_convolutions_are_sums_of_shifts(name, dtype):
    function, *shapes = CONVOLUTIONS[name]
    x, kernel = (random(seed, shape, dtype) for seed, shape in enumerate(shapes))
    made, text = lowered(function, x, kernel)
    assert "stablehlo.convolution" not in text
    (found,), expected = made(x, kernel), function(x, kernel)
    assert found.dtype == expected.dtype
    assert_close(found, expected)


@pytest.mark.parametrize("name", LEFT)
def test_other_convolutions_stay(name):
    function, *shapes = LEFT[name]
    program = jax.make_jaxpr(function)(*map(np.ones, shapes))
    assert fast_on_cpus(program) is program


@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(POOLS, itertools.cycle(["float32", "bfloat16", "int8"]))]
)
def test_pools_are_extremes_of_shifts(name, dtype):
    neutral, combine, *window = POOLS[name]
    if dtype == "int8":
        neutral = np.iinfo(dtype).min if combine is lax.max else np.iinfo(dtype).max

    x = (10 * random(0, (2, 7, 8, 3))).astype(dtype)
    start = np.asarray(neutral, x.dtype)  # known while it is traced, so jax knows the function

    def pool(x):
        return lax.reduce_window(x, start, combine, *window)

    if dtype != "int8":
        x = x.at[0, 2, 3, 1].set(jnp.nan).at[1, 0, 0, 0].set(-jnp.inf)
    made, text = lowered(pool, x)
    assert "reduce_window" not in text
    assert_close(made(x)[0], pool(x))


def pool(x, width, strides):
    window = (1, width, width, 1), (1, strides, strides, 1), "VALID"
    return lax.reduce_window(x, -np.inf, lax.max, *window)


SIZED = {
    "shifted": depthwise(),
    "valid": depthwise(padding="VALID"),
    "strides": depthwise(strides=(2, 2)),
    "pool": lambda x, _: pool(x, 2, 2),
    "wide pool": lambda x, _: pool(x, 5, 1),
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_may_be_symbolic(name):
    """A batch of any size has the other form, and an image of any size stays."""
    kernel, given = random(1, (3, 3, 1, 6)), random(0, (2, 7, 8, 6))
    for shape in ("b, 7, 8, 6", "b, h, w, 6"):
        x = jax.ShapeDtypeStruct(jax_export.symbolic_shape(shape), np.float32)
        program = jax.make_jaxpr(SIZED[name])(x, kernel)
        made = fast_on_cpus(program)
        assert (made is program) == ("h" in shape)
        exported = jax_export.export(jax.jit(jaxpr_as_fun(made)), platforms=["cpu", "tpu"])
        (found,) = exported(x, kernel).call(given, kernel)
        assert_close(found, SIZED[name](given, kernel))


def test_saved_models_and_their_gradients(tmp_path):
    def loss(params, x):
        x = depthwise(strides=(2, 2))(x, params["kernel"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return (x**2).sum((1, 2, 3))

    params = {"kernel": random(1, (3, 3, 1, 6))}
    report = to_saved_model(
        (params, loss), tmp_path / "m", spec("batch, 7, 8, 6"), trainable=True, validate="full"
    )
    assert "cuda" in report.platforms and "cpu" in report.platforms
    x = random(0, (3, 7, 8, 6))
    assert_close(load(tmp_path / "m")(np.asarray(x)), loss(params, x))
