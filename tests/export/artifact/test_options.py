"""The options of every writer, written once."""

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import (
    ExportOptions,
    load,
    spec,
    to_onnx,
    to_saved_model,
    to_stablehlo,
    to_tflite,
)
from pax_export.export.artifact import formats
from pax_export.export.artifact.options import Request, values
from pax_export.export.formats import export_as
from tests import refusals
from tests.export.models import affine, affine_params
from tests.refusals import fields

NAMES = list(get_type_hints(ExportOptions))
WRITERS = [formats.import_function(row.export) for row in formats.all_formats().values()]


@pytest.mark.parametrize("writer", [*WRITERS, export_as])
def test_help_of_a_writer_shows_all_of_them(writer):
    parameters = inspect.signature(writer).parameters
    assert list(parameters)[-len(NAMES) :] == NAMES
    for each in dataclasses.fields(Request):
        if each.kw_only:
            assert parameters[each.name].default == each.default
    assert all(f"\n    {name}: " in writer.__doc__ for name in NAMES)
    assert "**options" not in writer.__doc__


@pytest.mark.parametrize("writer", WRITERS)
def test_an_option_that_no_writer_has(writer, tmp_path):
    said = f"{writer.__name__} has no option validated(.|\n)*fix: validate=False"
    with pytest.raises(TypeError, match=said):
        writer(abs, tmp_path / "x.onnx", spec("n"), validated=False)


def test_the_command_line_offers_their_values():
    assert values("state") == ["frozen", "update", "keep"]
    assert values("validate") == ["full", "process", "variables"]
    source = Path(pax.__file__).parent / "cli" / "export.py"
    assert '"frozen"' not in source.read_text(encoding="utf-8")


# --- an argument of another kind than an exporter takes is named, and nothing is written ---


MODEL = affine_params(), affine
EXPORTERS = {
    "saved_model": to_saved_model,
    "stablehlo": to_stablehlo,
    "onnx": to_onnx,
    "tflite": to_tflite,
}
#: Invalid values of arguments that every exporter takes.
WRONG = [
    ("methods", 5),
    ("methods", ["predict"]),
    ("methods", {1: "__call__"}),
    ("kwargs", 5),
    ("kwargs", [1]),
    ("kwargs", {1: 2}),
    ("constraints", None),
    ("constraints", 5),
    ("constraints", [1]),
    ("examples", 5),
]


def refused(tmp_path, argument, value, export):
    with pytest.raises(InvalidArgumentTypeError) as caught:
        export(MODEL, tmp_path / "model", spec("batch, 3"), **{argument: value})
    assert not list(tmp_path.iterdir())
    error = caught.value
    assert error.where.startswith(argument)
    assert error.got == repr(value)
    assert error.write
    return error


@pytest.mark.parametrize("format", EXPORTERS)
@pytest.mark.parametrize("argument, value", WRONG)
def test_what_every_exporter_takes(tmp_path, format, argument, value):
    refused(tmp_path, argument, value, EXPORTERS[format])


PLATFORMS = 'platforms=("cpu", "cuda")'
CHECKS = "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)]"
LEAVES = "trainable=True, False, or paths of leaves: some of b, w"
#: Invalid values of arguments that some exporters take, and what to write instead.
OF_SOME = [
    *(("platforms", each, to_saved_model, PLATFORMS) for each in (None, 5, [None])),
    *(("platforms", each, to_stablehlo, PLATFORMS) for each in (None, 5, [None])),
    *(("disabled_checks", each, to_stablehlo, CHECKS) for each in (None, "platform", [1])),
    *(("trainable", each, to_saved_model, LEAVES) for each in (None, 5, 1.5)),
]


@pytest.mark.parametrize("argument, value, export, write", OF_SOME)
def test_what_some_exporters_take(tmp_path, argument, value, export, write):
    assert refused(tmp_path, argument, value, export).write == write


@pytest.mark.parametrize("format", EXPORTERS)
def test_an_unknown_level_of_validation(tmp_path, format):
    with refusals.refused(InvalidArgumentError, "'full'", where="validate"):
        EXPORTERS[format](MODEL, tmp_path / "model", spec("batch, 3"), validate="quick")


@pytest.mark.parametrize("argument", ["preprocess", "postprocess"])
@pytest.mark.parametrize("value", [5, "scale", [len]])
def test_processors(tmp_path, argument, value):
    error = refused(tmp_path, argument, value, to_saved_model)
    assert error.where == f"{argument} of serving_default"


def test_a_constraint_alone_is_one(tmp_path):
    report = to_stablehlo(
        MODEL, tmp_path / "model", spec("batch, 3"), constraints="batch >= 2", validate=False
    )
    assert report.signatures["serving_default"].constraints == ("batch >= 2",)


@pytest.mark.parametrize("write", [to_stablehlo, to_tflite])
def test_an_array_for_validate_is_refused(write, tmp_path):
    with pytest.raises(InvalidArgumentError) as caught:
        write(MODEL, tmp_path / "m.tflite", spec("2, 3"), validate=np.zeros(2))
    assert caught.value.where == "validate"


@pytest.mark.parametrize("to", EXPORTERS.values())
def test_what_load_gives_refuses_sizes_by_the_constraints(tmp_path, to):
    """It names the input, in the words of the report, before or instead of the runtime."""

    def halves(_, x, y):
        return x.reshape(-1, 2).sum(0), 2 * y

    path = tmp_path / ("model" + {to_tflite: ".tflite", to_onnx: ".onnx"}.get(to, ""))
    to(
        ({}, halves), path, (spec("2*n"), spec("n, 3")),
        constraints=("n >= 4", "mod(n, 2) == 0"), validate=False,
    )  # fmt: skip
    call = load(path)
    assert call(np.ones(8, "float32"), np.ones((4, 3), "float32"))[0].tolist() == [4, 4]
    for x, y, where, got, write in [
        ((4,), (2, 3), "y", "[2, 3], n = 2", "n >= 4"),
        ((10,), (5, 3), "y", "[5, 3], n = 5", "mod(n, 2) == 0"),
        ((9,), (4, 3), "x", "[9], n = 4 by y", "[2*n]"),
        ((8,), (6, 3), "x", "[8], n = 6 by y", "[2*n]"),
        ((8,), (4, 2), "y", "[4, 2], n = 4 by y", "[n, 3]"),
        ((8, 1), (4, 3), "x", "[8, 1]", "[2*n]"),
    ]:
        error = fields(where=f"serving_default: {where}", got=got, write=write)
        with pytest.raises(InvalidArgumentError) as caught:
            call(np.ones(x, "float32"), np.ones(y, "float32"))
        assert caught.value == error
    with pytest.raises(InvalidArgumentTypeError) as caught:
        call(np.ones(8, "int32"), np.ones((4, 3), "float32"))
    assert caught.value.where == "serving_default: x"


@pytest.mark.parametrize("to", EXPORTERS.values())
def test_constraints_on_dimensions_of_no_input_are_refused(tmp_path, to):
    with refusals.refused(
        InvalidArgumentError, where="constraints", got="'m >= 2'", write="a constraint on n"
    ):
        to(({}, lambda _, x: -x), tmp_path / "m", spec("n"), constraints="m >= 2")
    assert list(tmp_path.iterdir()) == []


def test_each_function_has_the_constraints_on_its_dimensions(tmp_path):
    methods = {"one": lambda _, x: x + 1, "two": lambda _, y: 2 * y}
    inputs = {"one": spec("n"), "two": spec("m")}
    write = functools.partial(
        to_stablehlo, ({}, methods["one"]), tmp_path / "m", inputs, methods=methods
    )
    write(constraints=("n >= 2", "m <= 4"))
    one, two = load(tmp_path / "m").signatures.values()
    for call, sizes in ((one, (1, 5)), (two, (5, 1))):
        with pytest.raises(InvalidArgumentError):
            call(np.ones(sizes[0], "float32"))
        assert call(np.ones(sizes[1], "float32")).shape == (sizes[1],)
    with refusals.refused(
        InvalidArgumentError, where="constraints", got="'n >= m'", write="a constraint on n, m"
    ):
        write(constraints=["n >= m"], overwrite=True)


def test_sizes_known_from_an_expression_alone(tmp_path):
    pairs = ({}, lambda _, x: x.reshape(-1, 2).sum(1))
    to_onnx(pairs, tmp_path / "m.onnx", spec("2*n"), constraints=("n >= 4",), validate=False)
    call = load(tmp_path / "m.onnx")
    assert call(np.ones(8, "float32")).shape == (4,)
    for size, *names in [(6, "n = 3", "fix: n >= 4"), (9, "got: [9]", "fix: [2*n]")]:
        with pytest.raises(InvalidArgumentError) as caught:
            call(np.ones(size, "float32"))
        assert all(name in str(caught.value) for name in names)
