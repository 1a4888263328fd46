"""Every mistake has a message, and leaves nothing behind."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.artifact.dimensions import holds
from tests.export.models import Counter, Net, affine, affine_params
from tests.refusals import fields


class Reshaping(pax.Module):
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
    assert error == fields(where="steps", got='state="frozen"')
    assert 'state="update"' in error.write and 'state="keep"' in error.write


def test_state_that_changes_its_dtype(tmp_path):
    class Widening(Counter):
        def __call__(self, x):
            self.steps = self.steps + 0.5
            return x

    error = refused(
        tmp_path, errors.StateChangeError, Widening(), spec("n"), state="update", validate=False
    )
    assert error == fields(where="steps", got="float32[] after int32[]")


def test_a_dimension_that_cannot_be_symbolic_names_its_layer(tmp_path):
    error = refused(tmp_path, errors.SymbolicDimensionError, Reshaping(), spec("batch, 3"))
    assert error.where.startswith("inner: Pairing (test_errors.py:")
    assert error.got == "the symbolic dimension batch"
    assert "'batch'" in error.write
    assert to_saved_model(Reshaping(), tmp_path / "even", spec("2*half, 3"), validate=False)


def test_of_two_dimensions_the_guilty_one_is_named(tmp_path):
    def model(params, x):
        return jnp.zeros(int(x.shape[1])) + x

    error = refused(tmp_path, errors.SymbolicDimensionError, ({}, model), spec("batch, length"))
    assert error.got == "the symbolic dimension length"


def total(carry, row):
    return carry + row, None


@pytest.mark.parametrize(
    ("model", "constraint"),
    [
        (lambda params, x: x + jnp.ones((64, 4))[: x.shape[1]], "n <= 64"),
        (lambda params, x: x[:, 3:] + jnp.ones((x.shape[1] - 3, 4)), "n >= 3"),
        (lambda params, x: x if x.shape[1] > 3 else x + 1, "n >= 4"),
        (lambda params, x: x if x.shape[1] // 2 < 4 else x + 1, "n >= 8"),
        (lambda params, x: jax.lax.top_k(x[:, :, 0], 3)[0], "n >= 3"),
        (lambda params, x: jnp.pad(x, ((0, 0), (0, 16 - x.shape[1]), (0, 0))), "n <= 16"),
        (lambda params, x: x if x.shape[1] > x.shape[0] else x + 1, "n >= batch + 1"),
        (lambda params, x: x.at[:, :6].set(jnp.ones((6, 4))), "n >= 6"),
        (lambda params, x: jnp.diff(x, n=3, axis=1), "n >= 3"),
        (
            lambda params, x: (
                jax.lax.scan(total, 0.0, x[:, 0, 0], length=x.shape[0])[0] + x[:, 4:].max()
            ),
            "n >= 5",
        ),
    ],
)
def test_an_error_of_a_symbolic_dimension_offers_the_constraint(tmp_path, model, constraint):
    constraints = offered(tmp_path / "m", model, spec("batch, n, 4"))
    sizes = [
        n for n in range(1, 40) if all(holds(each, {"n": n, "batch": 2}) for each in constraints)
    ]
    assert sizes == [n for n in range(1, 40) if holds(constraint, {"n": n, "batch": 2})]


def offered(path, model, inputs, constraints=()):
    """The constraints with which a model is exported, by following the errors; None if none are."""
    try:
        to_saved_model(({}, model), path, inputs, constraints=constraints, validate=False)
    except errors.SymbolicDimensionError as error:
        offers = re.findall(r"constraints=\('(.+?)',\); or ", error.write)
        more = (offered(path, model, inputs, (*constraints, each)) for each in offers)
        return next((found for found in more if found is not None), None)
    except (TypeError, ValueError):  # of jax: it is wrong for all sizes that are left
        return None
    return constraints


def test_constraints_of_two_dimensions_are_offered_one_by_one(tmp_path):
    def model(params, x):
        return (x[1:] - x[:-1])[:, 2:].max((0, 1))

    constraints = offered(tmp_path / "m", model, spec("m, n, 4"))
    assert all(holds(each, {"m": 2, "n": 3}) for each in constraints)
    assert not all(holds(each, {"m": 1, "n": 3}) for each in constraints)
    assert not all(holds(each, {"m": 2, "n": 2}) for each in constraints)


def test_where_constraints_do_not_help_none_are_offered(tmp_path):
    def model(params, x):
        return jax.random.choice(jax.random.key(0), x, (12,), replace=False)

    given = {"constraints": ("n >= 12",)}
    error = refused(tmp_path, errors.SymbolicDimensionError, ({}, model), spec("n, 4"), **given)
    assert error.write.startswith("a number instead of 'n' in its spec")
    assert "permutation" in str(error) and "inconclusive" not in str(error)


def test_a_dimension_that_no_input_determines(tmp_path):
    for write in (to_saved_model, to_onnx, to_tflite, to_stablehlo):
        with pytest.raises(errors.SymbolicDimensionError, match="n\\^2"):
            write(({}, affine), tmp_path / "m", spec("n*n, 3"))


def test_an_error_of_a_symbolic_dimension_offers_a_multiple(tmp_path):
    def model(params, x):
        return x[:, ::3] + x[:, 1::3] + x[:, 2::3]

    error = refused(tmp_path, errors.SymbolicDimensionError, ({}, model), spec("batch, n"))
    assert error.write.startswith("'3*n' in its spec; or ")
    assert to_saved_model(({}, model), tmp_path / "m", spec("batch, 3*n"), validate=False)


def test_other_errors_of_the_model_stay_what_they_are(tmp_path):
    error = refused(tmp_path, TypeError, (affine_params(), affine), spec("n, 5"))
    assert not isinstance(error, errors.PaxError)
    assert error.__notes__[-1] == "The model was traced with the inputs x: float32[n, 5]."


def test_numbers_are_not_narrowed(tmp_path):
    error = refused(tmp_path, errors.UnsupportedDtypeError, ({}, affine), spec("n", "int64"))
    assert error == fields(where="x", got="int64")
    assert 'jax.config.update("jax_enable_x64", True)' in error.write


@pytest.mark.parametrize(
    ("params", "dtype", "expected"),
    [
        ({"w": np.ones(3)}, "float32", {"where": "w", "got": "float64"}),
        ({"w": jnp.ones(3), "names": np.array(["relu", None])}, "float32", {"where": "names"}),
        ({}, "float8_e3m4", {"got": "float8_e3m4"}),
        ({}, "float4_e2m1fn", {"got": "float4_e2m1fn"}),
    ],
)
def test_dtypes_and_leaves_that_consumers_do_not_have(tmp_path, params, dtype, expected):
    error = refused(tmp_path, errors.UnsupportedDtypeError, (params, affine), spec("n", dtype))
    assert error == fields(**expected)


def test_a_hidden_array(tmp_path):
    class Hiding(Net):
        """Keeps an array with its class, where no pytree sees it."""

    net = Hiding()
    Hiding.table = jnp.ones(3)
    error = refused(tmp_path, errors.HiddenArrayError, net, spec("n, 3"))
    assert "table" in str(error)


@pytest.mark.parametrize(
    ("model", "inputs", "methods", "names"),
    [
        (pax.Module, spec("n"), None, ["Module"]),
        (Net, {"a": spec("n, 3")}, {"a": "encoder"}, ["where: methods['a']", "got: 'encoder'"]),
        (Net, spec("n, 3"), {"a": "encode"}, ["fix: inputs={'a': ...}"]),
        (lambda: ({}, lambda p, x: None), spec("n"), None, ["array"]),
    ],
)
def test_models_and_methods_that_cannot_be_called(tmp_path, model, inputs, methods, names):
    options = {"methods": methods} if methods else {}
    error = refused(tmp_path, errors.InvalidArgumentError, model(), inputs, **options)
    assert [name for name in names if name not in str(error)] == []


def test_a_consumer_that_is_too_old(tmp_path):
    model = ({}, lambda p, x: x.astype(jnp.int4).astype(jnp.int8))
    inputs = spec("n, 5")
    error = refused(tmp_path, errors.ConsumerError, model, inputs, consumer="tensorflow>=2.15")
    assert error.write.startswith('consumer="tensorflow>=2.18"')
    report = to_saved_model(
        model, tmp_path / "newer", inputs, consumer="tensorflow>=2.18", validate=False
    )
    assert report.oldest_tensorflow == "2.18"


@pytest.mark.parametrize(
    "option",
    [{"state": "thaw"}, {"validate": "slowly"}, {"overwrite": "no"},
     {"platforms": ("cpu", "abacus")}, {"platforms": ()}, {"consumer": "onnx"}],
)  # fmt: skip
def test_invalid_options_are_refused(tmp_path, option):
    error = refused(tmp_path, errors.InvalidArgumentError, Net(), spec("n, 3"), **option)
    assert next(iter(option)) in str(error)


def test_a_call_that_changes_the_structure(tmp_path):
    class Growing(pax.Module):
        def __init__(self):
            super().__init__()
            self.seen = None

        def __call__(self, x):
            self.seen = x
            return x

    refused(tmp_path, errors.StructureMismatchError, Growing(), spec("n"))
