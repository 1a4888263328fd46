"""What is on disk of the variables is compared, bit by bit."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.errors import ValidationError
from pax_export.export import spec, to_saved_model
from pax_export.export.formats.saved_model import writer

PARAMS = {
    "a.b": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
    "a/b": jnp.ones((), jnp.bfloat16),
    "big": np.arange(700_000, dtype=np.float32).reshape(700, 1000).T,  # not in one piece
    "flag": jnp.array([True, False]),
    "many": {str(number): jnp.full(number, number) for number in range(40)},
    "small": jnp.ones(3, jnp.float8_e5m2),
    "tied": jnp.ones(3),
}
PARAMS["too"] = PARAMS["tied"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "m"
    model = PARAMS, lambda p, x: x + p["tied"]
    report = to_saved_model(model, path, spec("n, 3"), validate=False)
    by_path = {"['a.b']": "a.b", "['a/b']": "a/b"}
    weights = {}
    for variable in report.variables:
        parts = by_path.get(variable.leaves[0], variable.name).split(".")
        name = ".".join(parts)
        weights[variable.name] = PARAMS["many"][parts[1]] if parts[0] == "many" else PARAMS[name]
    return path, weights


def test_what_was_written_is_equal(saved):
    path, weights = saved
    assert len(weights) == len(PARAMS) - 2 + 40
    writer.compare(path, weights)


@pytest.mark.parametrize("name", ["a.b", "big", "flag", "many.39", "small", "tied"])
def test_one_bit_is_found(saved, name):
    path, weights = saved
    changed = np.array(weights[name], order="C")
    flat = changed.reshape(-1)
    flat[-1] = flat[-1] == 0
    with pytest.raises(ValidationError, match="differs from the model's") as caught:
        writer.compare(path, {**weights, name: changed})
    assert caught.value.where == name


def test_a_shape_and_a_missing_one_are_found(saved):
    path, weights = saved
    with pytest.raises(ValidationError, match="differs from the model's"):
        writer.compare(path, {**weights, "a.b": weights["a.b"].reshape(3, 2)})
    with pytest.raises(ValidationError, match="cannot be read") as caught:
        writer.compare(path, {**weights, "new": weights["a.b"]})
    assert caught.value.got == "KeyError: 'leaves/new/.ATTRIBUTES/VARIABLE_VALUE'"


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_index_is_explained(saved, damage, tmp_path):
    path, weights = saved
    shutil.copytree(path, tmp_path / "m")
    (tmp_path / "m" / "variables" / "variables.index").write_bytes(damage)
    with pytest.raises(ValidationError, match="cannot be read"):
        writer.compare(tmp_path / "m", weights)
