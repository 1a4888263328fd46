"""The options of every writer, written once."""

import dataclasses
import inspect
from pathlib import Path
from typing import get_type_hints

import pytest

import pax_export as pax
from pax_export.export import ExportOptions, spec
from pax_export.export.artifact import formats
from pax_export.export.artifact.options import Request, values
from pax_export.export.formats import export_as

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
