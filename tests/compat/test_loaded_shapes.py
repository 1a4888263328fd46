"""A program written for PAX goes on from its own checkpoint, whatever its states have become."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.compat.processes import code

PROGRAM = """
import pickle, warnings, jax, jax.numpy as jnp
import pax_export; pax_export.install_as_pax()
import pax

class Attention(pax.StateModule):
    def __init__(self):
        super().__init__()
        self.log = jnp.zeros((1,))
        self.seen = [jnp.zeros((2,), jnp.int32)]

class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.fc = Attention(), pax.Linear(3, 4)

    def __call__(self, x):
        y = self.fc(x)
        if self.training:
            self.attention.log = y
        return y

net, _ = Net() % jnp.ones((5, 3))
saved = pickle.loads(pickle.dumps(jax.device_get(net.state_dict())))
saved["attention"]["seen"] = [jnp.zeros((7,))]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    again = Net().load_state_dict(saved)
print(again.attention.log.shape, again.attention.seen[0].shape, again.fc.weight.shape)
(warning,) = caught
print(warning.category.__module__, warning.category.__name__)
print(warning.filename)
print(*str(warning.message).splitlines(), sep="|")
again, y = again % jnp.ones((2, 3))
print(again.attention.log.shape)
saved["fc"]["weight"] = jnp.ones((1, 1))
try:
    Net().load_state_dict(saved)
except ValueError as error:
    print(type(error).__name__, error.where)
"""


def test_a_state_takes_the_loaded_shape_and_a_parameter_does_not():
    shapes, kind, file, text, later, refused = code(PROGRAM)
    assert shapes == "(5, 4) (7,) (3, 4)"
    assert kind == "pax_export.errors LoadedShapeWarning"
    assert file == "<string>"
    assert "attention.log: float32[5,4], not float32[1]" in text
    assert "attention.seen.0: float32[7], not int32[2]" in text
    assert later == "(2, 4)"
    assert refused == "StructureMismatchError fc.weight"


def test_without_it_a_state_of_another_shape_is_refused():
    norm = pax.BatchNorm1D(3)
    saved = norm.state_dict()
    saved["ema_mean"]["averages"] = jnp.zeros((1, 1, 4))
    with pytest.raises(pax.errors.StructureMismatchError):
        norm.load_state_dict(saved)
