from __future__ import annotations

import jax
import numpy as np
import pytest

from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import spec
from pax_export.export.tracing.spec import resolve_inputs
from tests.refusals import refused


def one(params, x):
    return x


def names(inputs):
    return [entry.name for entry in inputs.flat]


def shapes(inputs):
    return [str(entry.struct.shape) for entry in inputs.flat]


def resolved(function, inputs, kwargs=None, constraints=()):
    return resolve_inputs(function, 1, inputs, kwargs, constraints)


@pytest.mark.parametrize("shape", ["batch, 28, 1", ("batch", 28, 1), ["batch", np.int64(28), 1]])
def test_a_shape_is_text_or_its_dimensions(shape):
    inputs = resolved(one, spec(shape))
    assert shapes(inputs) == ["(batch, 28, 1)"]
    assert inputs.dimensions == ("batch",)


def test_none_is_a_dimension_with_a_name_of_its_own():
    inputs = resolved(lambda params, x, y: x, (spec((None, 3)), spec((None, "any0"))))
    assert inputs.dimensions == ("any1", "any2", "any0")


def test_equal_words_are_equal_sizes_in_all_inputs():
    inputs = resolved(lambda params, x, y: x, (spec("n, 2"), spec("2*n")))
    (x, y) = (entry.struct for entry in inputs.flat)
    assert 2 * x.shape[0] == y.shape[0]


def test_inputs_may_be_arrays_and_structs():
    struct = jax.ShapeDtypeStruct((3,), np.int32)
    inputs = resolved(lambda params, a, b, c: a, (np.ones((2, 3), np.float32), struct, 1.5))
    assert shapes(inputs) == ["(2, 3)", "(3,)", "()"]
    assert [entry.struct.dtype.name for entry in inputs.flat] == ["float32", "int32", "float32"]


def test_names_come_from_the_python_signature():
    def function(params, images, *more, mask=None):
        return images

    inputs = resolved(
        function,
        ({"left": spec("b"), "right": [spec("b"), spec("b")]}, spec("b"), spec("b", name="own")),
        {"mask": spec("b", "bool")},
    )
    assert names(inputs) == [
        "images.left", "images.right.0", "images.right.1", "more0", "own", "mask",
    ]  # fmt: skip
    assert [entry.path for entry in inputs.flat][4] == "more1"


def test_the_scope_of_given_symbols_is_kept():
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 4"])
    struct = jax.ShapeDtypeStruct((n, 2), np.float32)
    inputs = resolved(lambda params, x, y: x, (struct, spec("n")))
    assert inputs.flat[1].struct.shape[0] == n
    with pytest.raises(
        InvalidArgumentError, match="symbolic dimensions of the inputs have a scope"
    ):
        resolved(one, struct, constraints=("n >= 2",))


def test_a_misspelt_shape_says_where_and_how():
    with pytest.raises(InvalidArgumentError) as caught:
        resolved(one, spec("batch,, 3"))
    assert str(caught.value).startswith("A shape cannot be read: syntax error")
    assert caught.value.where == "x"
    assert caught.value.write == 'spec("batch, 28, 28, 1")'


def test_a_misspelt_constraint():
    with pytest.raises(InvalidArgumentError, match="A constraint cannot be read"):
        resolved(one, spec("n"), constraints=("n is large",))


@pytest.mark.parametrize("size", [-1, 2.5, True, b"n"])
def test_a_dimension_is_a_size_or_a_word(size):
    with pytest.raises(InvalidArgumentTypeError, match="A dimension must be a size"):
        spec((size, 3))


def test_a_negative_size_in_text():
    with pytest.raises(InvalidArgumentTypeError, match="A dimension must be a size"):
        spec("batch, -3")


@pytest.mark.parametrize("shape", [7, None])
def test_a_shape_is_text_or_dimensions(shape):
    with pytest.raises(InvalidArgumentTypeError, match="A shape must be a string"):
        spec(shape)


@pytest.mark.parametrize("dtype", ["float31", None])
def test_an_unknown_dtype(dtype):
    with pytest.raises(InvalidArgumentTypeError, match="The dtype is unknown"):
        spec("n", dtype)


def test_an_input_that_describes_nothing():
    with refused(InvalidArgumentTypeError, where="x.a", got="str"):
        resolved(one, {"a": "batch, 3"})


def test_inputs_that_do_not_fit_the_parameters():
    with refused(
        InvalidArgumentError,
        "too many positional arguments",
        "a tuple is several positional arguments",
    ):
        resolved(one, (spec("n"), spec("n")))
