"""Layers that change in train mode, called where nothing may change: somebody forgot `eval`."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.errors import ImmutableModuleError
from tests.refusals import refused

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
        with refused(ImmutableModuleError, "module.eval()(x)"):
            call(x)
    # What it says to write works.
    layer.eval()(x)
    layer, _ = layer % x


@each_layer
def test_inside_of_a_model_the_layer_is_named(name):
    build, shape = LAYERS[name]
    model = pax.Sequential(build(), jnp.tanh)
    with refused(ValueError, "train") as caught:
        model(jnp.ones(shape))
    assert any("modules.0" in note for note in caught.value.__notes__)


class Model(pax.Module):
    """A user's model, with a state of its own beside layers."""

    def __init__(self):
        super().__init__()
        self.keys, self.steps = pax.RngSeq(0), jnp.zeros(())

    def __call__(self, x):
        if self.training:
            x = x * jax.random.bernoulli(self.keys.next_rng_key(), 0.5, x.shape)
        return x

    def count(self):
        self.steps = self.steps + 1


def test_a_stream_of_keys_names_the_model_that_draws():
    with refused(ImmutableModuleError, where="RngSeq._rng_key") as caught:
        pax.Sequential(Model(), jnp.tanh)(jnp.ones(3))
    assert caught.value.__notes__ == ["in the call of modules.0 (Model) in Sequential"]
    Model() % jnp.ones(3)  # works


def test_a_state_of_a_users_own_is_said_to_be_one():
    with refused(ImmutableModuleError, "module = module.replace(steps=...)", where="Model.steps"):
        Model().count()
