"""What is in memory already as a source."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentTypeError, WeightsFileError
from pax_export.weights import Source, open_source
from tests.closeness import assert_close
from tests.refusals import refused


def test_nested_mappings_keep_their_order():
    kernel = jnp.ones((2, 3), jnp.bfloat16)
    tree = {
        "z": {"b": kernel, "a": [np.zeros(2), np.float32(3)]},
        "a": kernel,
        "step": 3,
        "n": None,
    }
    with open_source(tree) as source:
        assert list(source.entries) == ["z.b", "z.a.0", "z.a.1", "a"]
        assert source.tied == {"a": "z.b"}
        assert source.metadata == {"step": 3}
        assert source.entries["z.b"].read().dtype.name == "bfloat16"
        assert_close(source.entries["z.b"].read_part((slice(1), slice(2))), np.ones((1, 2)))


def test_modules_and_pytrees():
    net = pax.Sequential(pax.Linear(2, 3))
    with open_source(net) as source:
        assert list(source.entries) == ["modules.0.weight", "modules.0.bias"]
    with open_source({"net": net, "key": jax.random.key(0)}) as source:
        assert list(source.entries) == ["net.modules.0.weight", "net.modules.0.bias", "key"]


def test_an_open_source_stays_as_it_is():
    source = open_source({})
    assert open_source(source) is source
    assert isinstance(source, Source)


@pytest.mark.parametrize("tree", [3, "x" * 9, None, object(), {"a": object()}])
def test_invalid_mappings_are_refused(tree):
    with pytest.raises((InvalidArgumentTypeError, WeightsFileError)):
        open_source(tree)


def test_names_that_clash_and_containers_without_end():
    endless: dict = {}
    endless["a"] = endless
    for tree in ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, endless):
        with pytest.raises(WeightsFileError):
            open_source(tree)


def test_arrays_without_numbers_are_named():
    texts, place = np.array(["x"]), "a in the dict that was given"
    with refused(InvalidArgumentTypeError, where=place):
        open_source({"a": jax.ShapeDtypeStruct((2,), "float32")})
    with refused(InvalidArgumentTypeError, got="a: an array of <U1"):
        open_source({"a": texts, "b": np.ones(2)})
    with refused(InvalidArgumentTypeError, got="a: an array of <U1, b: an array of object"):
        open_source({"a": texts, "b": np.array([None])})


def test_other_values_in_a_mapping_are_refused():
    with refused(InvalidArgumentTypeError, where="what was given"):
        open_source({"a": np.ones(2), "b": {"c": len}})
