import jax
import numpy as np
import pytest

from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo
from pax_export.export.tracing.inputs import resolve_inputs
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


def test_equal_names_are_equal_sizes_in_all_inputs():
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
    with pytest.raises(InvalidArgumentError):
        resolved(one, struct, constraints=("n >= 2",))


@pytest.mark.parametrize("text", ["batch,, 3", "a^3000000, 2", "9" * 30, "3²"])
def test_misspelt_shapes_are_refused(text):
    with refused(InvalidArgumentError, where="x", write='spec("batch, 28, 28, 1")'):
        resolved(one, spec(text))


def test_none_in_text_is_a_dimension_with_a_name_of_its_own():
    assert resolved(one, spec("None, 224, None")).dimensions == ("any0", "any1")


@pytest.mark.parametrize("name", ["class", "if", "größe", "ª", "None"])
@pytest.mark.parametrize("to, suffix", [(to_onnx, ".onnx"), (to_saved_model, "")])
def test_names_may_be_words_of_python_or_other_letters(tmp_path, to, suffix, name):
    path = tmp_path / f"m{suffix}"
    to(lambda x: 2 * x, path, spec(f"2*{name}, 3", name=name), card=False)
    np.testing.assert_array_equal(load(path)(np.ones((4, 3), "float32")), np.full((4, 3), 2))


def test_a_report_says_which_names_differ(tmp_path):
    inputs = (spec("2", name="my image"), spec("2", name="i"), spec("2", name="i"))
    report = to_stablehlo(lambda a, b, c: {"the sum": a + b + c}, tmp_path / "m", inputs)
    info = report.signatures["serving_default"]
    assert [each.name for each in info.inputs] == ["my_image", "i", "i-1"]
    assert info.renamed == (
        "'my image', the argument a, to my_image",
        "'i', the argument c, to i-1",
        "'the sum', an output, to the_sum",
    )
    assert "renamed 'my image', the argument a, to my_image" in str(report)


@pytest.mark.parametrize(
    "arguments",
    [((-1, 3),), ((2.5, 3),), ((True, 3),), ((b"n", 3),), ("batch, -3",), (7,), (None,),
     ("n", "float31"), ("n", None)],
)  # fmt: skip
def test_invalid_shapes_and_dtypes(arguments):
    with pytest.raises(InvalidArgumentTypeError):
        spec(*arguments)


def test_a_misspelt_constraint():
    for text, of_jax in (("n is large", "Constraint parsing"), ("n^3000000 >= 2", "power")):
        with refused(InvalidArgumentError, of_jax, where="constraints", got=text):
            resolved(one, spec("n"), constraints=(text,))


def test_an_input_that_describes_nothing():
    with refused(InvalidArgumentTypeError, where="x.a", got="str"):
        resolved(one, {"a": "batch, 3"})


def test_missing_inputs():
    with refused(InvalidArgumentTypeError, "inputs=None", "spec("):
        resolved(one, None)
    assert not names(resolved(one, (None,)))


def test_inputs_that_do_not_fit_the_parameters():
    with refused(InvalidArgumentError, "too many positional arguments"):
        resolved(one, (spec("n"), spec("n")))


EQUALITIES = {
    "a number": (("n == 4",), [(4,)], ()),
    "another": (("n == m",), [("m",), ("m",)], ()),
    "another, with more about it": (("n == m", "n >= 3"), [("m",), ("m",)], ("m >= 3",)),
    "a multiple": (("n == 2*m", "mod(n, 4) == 0"), [("2*m",), ("m",)], ("mod((2*m), 4) == 0",)),
    "a number, with more about it": (("n == 4", "n >= 2"), [(4,), ("m",)], ()),
}


@pytest.mark.parametrize("name", EQUALITIES)
def test_dimensions_that_equal_others_are_put_into_the_shapes(tmp_path, name):
    given, shapes, left = EQUALITIES[name]
    inputs = tuple(map(spec, ["n", "m"][: len(shapes)]))
    report = to_stablehlo(lambda *xs: xs, tmp_path / "bundle", inputs, constraints=given)
    info = report.signatures["serving_default"]
    assert [entry.shape for entry in info.inputs] == shapes and info.constraints == left
    assert report.validated


def test_what_is_left_of_constraints_is_checked_by_calls(tmp_path):
    options = {"constraints": ("n == m", "n >= 3"), "validate": False}
    to_stablehlo(lambda x, y: x + y, tmp_path / "bundle", (spec("n"), spec("m")), **options)
    model = load(tmp_path / "bundle")
    assert model(np.ones(3, np.float32), np.ones(3, np.float32)).shape == (3,)
    with refused(InvalidArgumentError, got="[2], m = 2", write="m >= 3"):
        model(np.ones(2, np.float32), np.ones(2, np.float32))


def call(params, text_x, y=None, *, z=None):
    return text_x * 2 if y is None else text_x * y


X = spec("batch, 2")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"text_x": X}, ["text_x"]),
        ({"y": spec(""), "text_x": X}, ["text_x", "y"]),
        ({"y": 2.0, "text_x": X}, ["text_x", "y"]),  # a number is an input, as by position
        ({"z": spec(""), "text_x": X}, ["text_x", "z"]),
        (({"text_x": X},), ["text_x.text_x"]),
        ({"a": X, "b": X}, ["text_x.a", "text_x.b"]),
    ],
)
def test_a_dict_of_arguments_by_name(given, found):
    assert names(resolved(call, given)) == found


def test_a_dict_for_the_only_argument_of_a_function():
    assert names(resolved(one, {"x": X, "b": X})) == ["x.b", "x.x"]


def test_a_dict_of_some_arguments():
    with refused(InvalidArgumentError, "Some keys of the inputs are names of arguments"):
        resolved(call, {"text_x": X, "yy": X})
    with refused(InvalidArgumentError, "missing a required argument: 'text_x'"):
        resolved(call, {"y": X})


@pytest.mark.parametrize(
    ("function", "given", "note"),
    [(call, {"text": X}, "{'text_x': ...}"), (lambda p, x: x["x"], {"x": X}, "({...},)")],
)
def test_an_error_of_the_other_reading_says_so(tmp_path, function, given, note):
    with pytest.raises(TypeError) as caught:
        to_onnx(({}, function), tmp_path / "net.onnx", given)
    assert note in caught.value.__notes__[-1]


@pytest.mark.parametrize("text", ["٣, 2", "(" * 500 + "a" + ")" * 500, "a^3000000, 2"])
def test_sizes_are_bounded_before_jax_reads_them(text):
    with refused(InvalidArgumentError, "A shape cannot be read"):
        resolved(one, spec(text))
