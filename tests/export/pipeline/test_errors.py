"""Every mistake has a message, and leaves nothing behind."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import spec, to_saved_model
from tests.export.models import Counter, Net, affine, affine_params


class Reshaping(pax.Module):
    """Needs the size of its batch."""

    def __init__(self):
        super().__init__()
        self.inner = Pairing()

    def __call__(self, x):
        return self.inner(x)


class Pairing(pax.Module):
    def __call__(self, x):
        return x.reshape(-1, 2, 3)


def refused(tmp_path, error, model, inputs, **options):
    with pytest.raises(error) as caught:
        to_saved_model(model, tmp_path / "model", inputs, **options)
    assert not list(tmp_path.iterdir())
    return caught.value


def test_a_model_that_changes_state(tmp_path):
    error = refused(tmp_path, errors.StateChangeError, Counter(), spec("n"))
    assert str(error) == (
        "A call of the model in eval mode changes its state, and the export would not.\n"
        "  where: steps\n"
        '  got: state="frozen"\n'
        '  write: state="update", so that every call of the exported model assigns its state; '
        'state="keep", so that every call begins with the state that is exported; '
        "or a model that does not change it in eval mode"
    )


def test_state_that_changes_its_dtype(tmp_path):
    class Widening(Counter):
        def __call__(self, x):
            self.steps = self.steps + 0.5
            return x

    error = refused(
        tmp_path, errors.StateChangeError, Widening(), spec("n"), state="update", validate=False
    )
    assert error.what == "A call changes the dtype of a leaf, so no variable can hold it."
    assert (error.where, error.got) == ("steps", "float32[] after int32[]")


def test_a_dimension_that_cannot_be_symbolic_names_its_layer(tmp_path):
    error = refused(tmp_path, errors.SymbolicDimensionError, Reshaping(), spec("batch, 3"))
    assert error.what.startswith(
        "The size of the dimension batch must be known here: Cannot divide"
    )
    assert error.where.startswith("inner: Pairing (test_errors.py:")
    assert error.got == "the symbolic dimension batch"
    assert error.write.startswith("a number instead of 'batch' in its spec; or")
    assert to_saved_model(Reshaping(), tmp_path / "even", spec("2*half, 3"), validate=False)


def test_of_two_dimensions_the_guilty_one_is_named(tmp_path):
    def model(params, x):
        return jnp.zeros(int(x.shape[1])) + x

    error = refused(tmp_path, errors.SymbolicDimensionError, ({}, model), spec("batch, length"))
    assert error.got == "the symbolic dimension length"


def test_other_errors_of_the_model_stay_what_they_are(tmp_path):
    error = refused(tmp_path, TypeError, (affine_params(), affine), spec("n, 5"))
    assert not isinstance(error, errors.PaxError)
    assert error.__notes__[-1] == "The model was traced with the inputs x: float32[n, 5]."


def test_numbers_are_not_narrowed(tmp_path):
    error = refused(tmp_path, errors.UnsupportedDtypeError, ({}, affine), spec("n", "int64"))
    assert error.what == "jax would narrow this array to int32 while 64-bit numbers are off."
    assert (error.where, error.got) == ("x", "int64")
    assert 'jax.config.update("jax_enable_x64", True)' in error.write
    params = {"w": np.ones(3)}
    error = refused(tmp_path, errors.UnsupportedDtypeError, (params, affine), spec("n"))
    assert (error.where, error.got) == ("w", "float64")


@pytest.mark.parametrize("dtype", ["float8_e3m4", "float4_e2m1fn"])
def test_a_dtype_that_consumers_do_not_have(tmp_path, dtype):
    error = refused(tmp_path, errors.UnsupportedDtypeError, ({}, affine), spec("n", dtype))
    assert error.what == "The dtype is unsupported in exports."
    assert error.got == dtype


def test_invalid_leaves_are_refused(tmp_path):
    params = {"w": jnp.ones(3), "names": np.array(["relu", None])}
    error = refused(tmp_path, errors.UnsupportedDtypeError, (params, affine), spec("n"))
    assert (error.what, error.where) == ("A leaf of the model is not an array.", "names")


@pytest.mark.parametrize("make", [jnp.ones, np.ones])
def test_an_array_in_static_data(tmp_path, make):
    class Table(pax.Module):
        def __init__(self):
            self.table = types.SimpleNamespace(rows=[make((3, 2))], unused=make(3))

        def __call__(self, x):
            return x @ self.table.rows[0]

    net = pax.Sequential(pax.Identity(), Table())
    error = refused(tmp_path, errors.HiddenArrayError, net, spec("n, 3"))
    assert error.where == "modules.1.table.rows.0"
    assert "which is neither trained nor saved" in error.what


def test_a_hidden_array(tmp_path):
    class Hiding(Net):
        """Keeps an array with its class, where no pytree sees it."""

    net = Hiding()
    Hiding.table = jnp.ones(3)
    error = refused(tmp_path, errors.HiddenArrayError, net, spec("n, 3"))
    assert "table" in str(error)


def test_a_module_without_call(tmp_path):
    error = refused(tmp_path, errors.InvalidArgumentError, pax.Module(), spec("n"))
    assert error.what == "Module does not have this method."


def test_missing_methods_are_refused(tmp_path):
    options = {"methods": {"a": "encoder"}}
    error = refused(tmp_path, errors.InvalidArgumentError, Net(), {"a": spec("n, 3")}, **options)
    assert (error.where, error.got) == ("methods['a']", "'encoder'")


def test_inputs_of_another_method(tmp_path):
    options = {"methods": {"a": "encode"}}
    error = refused(tmp_path, errors.InvalidArgumentError, Net(), spec("n, 3"), **options)
    assert error.write == "inputs={'a': ...}"


def test_a_model_without_outputs(tmp_path):
    error = refused(tmp_path, errors.InvalidArgumentError, ({}, lambda p, x: None), spec("n"))
    assert error.what.startswith("The model returns no array")


def test_a_consumer_that_is_too_old(tmp_path):
    model = ({}, lambda p, x: x.astype(jnp.int4).astype(jnp.int8))
    inputs = spec("n, 5")
    error = refused(tmp_path, errors.ConsumerError, model, inputs, consumer="tensorflow>=2.15")
    assert error.what == "The model uses operations that the consumer does not support."
    assert error.write.startswith('consumer="tensorflow>=2.18"')
    report = to_saved_model(
        model, tmp_path / "newer", inputs, consumer="tensorflow>=2.18", validate=False
    )
    assert report.oldest_tensorflow == "2.18"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"state": "thaw"}, "state has an unknown value."),
        ({"validate": "slowly"}, "validate has an unknown value."),
        ({"platforms": ("cpu", "abacus")}, "platforms: expected some of"),
        ({"platforms": ()}, "platforms: expected some of"),
        ({"consumer": "onnx"}, "The consumer is unknown."),
    ],
)
def test_invalid_options_are_refused(tmp_path, option, message):
    error = refused(tmp_path, errors.InvalidArgumentError, Net(), spec("n, 3"), **option)
    assert error.what.startswith(message)


def test_a_call_that_changes_the_structure(tmp_path):
    class Growing(pax.Module):
        def __init__(self):
            super().__init__()
            self.seen = None

        def __call__(self, x):
            self.seen = x
            return x

    error = refused(tmp_path, errors.StructureMismatchError, Growing(), spec("n"))
    assert error.what.startswith("A call changes the structure of the model")
