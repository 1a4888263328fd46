"""Layers that change in train mode, called where nothing may change: somebody forgot `eval`."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export._errors import ImmutableModuleError

LAYERS = {
    "BatchNorm1D": (lambda: pax.BatchNorm1D(3), (4, 3)),
    "BatchNorm2D": (lambda: pax.BatchNorm2D(3), (4, 5, 5, 3)),
    "EMA": (lambda: pax.EMA(jnp.zeros(3), 0.9, debias=True), (3,)),
    "Dropout": (lambda: pax.Dropout(0.5), (4, 3)),
    "Transformer": (lambda: pax.nets.Transformer(4, 2, 1, 0.5), (2, 3, 4)),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


@each_layer
def test_a_forgotten_eval_is_named(name):
    build, shape = LAYERS[name]
    layer, x = build(), jnp.ones(shape)
    for call in (layer, jax.jit(lambda x: layer(x))):
        with pytest.raises(ImmutableModuleError) as error:
            call(x)
        assert str(error.value) == (
            "Cannot set an attribute of an immutable module: in train mode this layer changes its "
            "state at each call.\n"
            f"  where: {layer!r}\n"
            "  got: a call in train mode that no pax.pure, % or mutable() has open for change\n"
            "  write: model.eval()(x) where nothing is trained; in training model, y = model % x"
        )
    # What it says to write works.
    layer.eval()(x)
    layer, _ = layer % x


@each_layer
def test_inside_of_a_model_the_layer_is_named(name):
    build, shape = LAYERS[name]
    layer = build()
    model = pax.Sequential(layer, jnp.tanh)
    with pytest.raises(ValueError, match="in train mode this layer") as error:
        model(jnp.ones(shape))
    assert error.value.where == repr(layer)


@each_layer
def test_a_module_that_another_trace_has_open_is_another_mistake(name):
    build, shape = LAYERS[name]
    with pytest.raises(ImmutableModuleError, match="under a jax transformation that began after"):
        pax.pure(lambda layer, x: jax.jit(lambda x: layer(x))(x))(build(), jnp.ones(shape))
