"""Weights to nested dicts and back."""

import numpy as np
import pytest

import pax_export as pax
from pax_export.core import load_state_dict as load_weights_from_dict
from pax_export.core import state_dict as save_weights_to_dict
from tests.core.models import Dense, Net
from tests.refusals import refused


def test_round_trip():
    net = Net()
    weights = net.state_dict()
    assert list(weights) == ["layers", "parts", "scale", "mixed"]
    assert weights["layers"][0]["weight"] is net.layers[0].weight
    assert weights["mixed"][1:] == [None, None]
    assert net.load_state_dict(weights) == net
    other = Net().eval().load_state_dict(weights)
    assert other.scale is net.scale and not other.training
    assert load_weights_from_dict(net, save_weights_to_dict(net)) == net


def test_empty_nodes_and_none():
    params = Net().parameters()
    assert params.state_dict()["scale"] == pax.EmptyNode()
    net = Net()
    weights = net.state_dict() | {"scale": None}
    assert net.load_state_dict(weights).scale is net.scale
    assert net.load_state_dict(params.state_dict()).scale is net.scale


def test_missing_and_unknown_keys_are_named():
    net = Net()
    weights = net.state_dict()
    del weights["layers"][1]["bias"]
    with refused(KeyError, "where: layers.1.bias"):
        net.load_state_dict(weights)
    weights = net.state_dict()
    weights["layers"][1]["bais"] = 1
    with refused(ValueError, where="layers.1.bais", got="a module with weight, bias"):
        net.load_state_dict(weights)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(4, "float32"), "got: float32[4]"),
        (np.zeros(3, "int32"), "got: int32[3]"),
        (0.0, "got: float: 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(value, message):
    layer = Dense()
    with refused(ValueError, message):
        layer.load_state_dict({"weight": layer.weight, "bias": value})


def test_other_containers_are_refused():
    net = Net()
    weights = net.state_dict()
    for layers in (tuple(weights["layers"]), weights["layers"][:1], {"0": 1}):
        with refused(ValueError, where="layers"):
            net.load_state_dict(weights | {"layers": layers})
    with refused(ValueError, where="(the root)", got="list"):
        net.load_state_dict([1])


def test_only_modules():
    with refused(AssertionError, got="dict: {'a': 1}"):
        save_weights_to_dict({"a": 1})
    with refused(AssertionError, got="int: 3"):
        load_weights_from_dict(3, {})


def test_dotted_names_are_adopted():
    with refused(KeyError, "pax_export.weights.adopt(module, weights)"):
        Net().load_state_dict({"dense.weight": np.ones(3)})
