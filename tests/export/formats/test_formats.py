"""The table of formats: what it says is there, and a format in one file joins it."""

import dataclasses
import inspect
import json
import sys

import jax
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.cli import main
from pax_export.export import Report, load, spec
from pax_export.export.artifact import formats
from tests.export.formats import toy_format
from tests.refusals import refused

FACTORY = "tests.export.formats.test_formats:make"


def make():
    return pax.Linear(3, 2, rng_key=np.zeros(2, np.uint32))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that brings `toy_format.py`, as pip would install it."""
    site = tmp_path / "site"
    (site / "toy-0.1.dist-info").mkdir(parents=True)
    (site / "toy-0.1.dist-info" / "METADATA").write_text("Name: toy\nVersion: 0.1\n")
    (site / "toy-0.1.dist-info" / "entry_points.txt").write_text(
        f"[{formats.GROUP}]\ntoy = tests.export.formats.toy_format:TOY\n"
    )
    monkeypatch.syspath_prepend(site)
    return site


def to_toy(path, **options):
    return formats.import_function(formats.find("toy").export)(
        make(), path, spec("n, 3"), **options
    )


def test_places_in_the_table_are_there():
    for row in formats.all_formats().values():
        for place in (row.load, row.run):
            assert inspect.signature(formats.import_function(place)).parameters
        shared = {"model", "path", "inputs", "kwargs", "methods", "validate", "overwrite"}
        assert shared | set(row.options) <= set(
            inspect.signature(formats.import_function(row.export)).parameters
        )
        assert getattr(pax.export, row.exporter) is formats.import_function(row.export)


def test_what_runs_alone_imports_nothing_of_ours():
    """Such a file is loaded by its path, where neither jax nor this package can be imported."""
    for row in formats.all_formats().values():
        if not row.run_imports:
            source = inspect.getsource(sys.modules[formats.import_function(row.run).__module__])
            assert "import pax_export" not in source
            assert "from pax_export" not in source


def test_a_format_in_one_file(installed, tmp_path):
    path = tmp_path / "linear.toy"
    report = to_toy(path)
    assert (report.target, report.validated) == ("toy", "here")
    assert report.largest_error["serving_default: output"] < 1e-6
    assert str(report).startswith("Linear as a toy\n")
    assert str(Report.read(path)) == str(report)
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(load(path)(x).shape, (4, 2))
    assert to_toy(path, validate="process", overwrite=True).validated == "process"


def test_a_package_that_its_row_does_not_name(installed, tmp_path, monkeypatch):
    """The row is wrong, and no operation of the model."""
    row = dataclasses.replace(toy_format.TOY, run_imports=("jax",))
    monkeypatch.setattr(toy_format, "TOY", row)
    with pytest.raises(errors.InvalidArgumentError, match="imports pax_export") as caught:
        to_toy(tmp_path / "linear.toy", validate="process")
    assert caught.value.write == "run_imports=('jax', 'pax_export')"
    assert "dot_general" not in str(caught.value)


def test_its_test_finds_what_is_wrong(installed, tmp_path):
    with pytest.raises(errors.InvalidArgumentError, match="validate"):
        to_toy(tmp_path / "linear.toy", validate="variables")

    def biased():
        return make().replace(bias=np.ones(2, np.float32))

    write = formats.import_function(formats.find("toy").export)
    with pytest.raises(errors.ValidationError, match="differs from the model's"):
        write(biased(), tmp_path / "linear.toy", spec("n, 3"), scale=2.0)
    assert not (tmp_path / "linear.toy").exists()


def test_the_command_line_knows_it(installed, tmp_path, capsys):
    path = str(tmp_path / "linear.toy")
    assert main(["export", FACTORY, path, "--target", "toy", "--input", "n, 3"]) == 0
    assert "Linear as a toy" in capsys.readouterr().out
    assert main(["export", FACTORY, path + "2", "--input", "n, 3", "--scale", "1"]) == 1
    assert "fix: --target toy" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    assert main(["run", path, "--input", str(tmp_path / "x.npy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"]["output"]["shape"] == [2, 2]
    assert main(["inspect", path]) == 0
    assert "runs in     numpy" in capsys.readouterr().out
    assert main(["validate", path, "--against", FACTORY]) == 0
    assert capsys.readouterr().out.count(": ok, ") == 2  # the sizes of the report, two here


def test_a_broken_format_of_others_breaks_no_other(installed, tmp_path):
    entries = installed / "toy-0.1.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + "broken = tests.export.nowhere:FORMAT\n")
    with pytest.warns(RuntimeWarning, match=r"The format broken \(tests.export.nowhere:FORMAT\)"):
        assert {"toy", "tflite"} <= set(formats.all_formats()) - {"broken"}
    with pytest.warns(RuntimeWarning, match="cannot be used: ModuleNotFoundError"):
        path = str(tmp_path / "linear.toy")
        assert main(["export", FACTORY, path, "--target", "toy", "--input", "n, 3"]) == 0


def test_a_format_that_is_not_installed(installed, tmp_path, monkeypatch):
    to_toy(tmp_path / "linear.toy", validate=False)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(installed)])
    assert formats.find("toy") is None
    assert str(Report.read(tmp_path / "linear.toy")).startswith("Linear as toy\n")
    with pytest.raises(errors.ExportPathError, match="another package") as caught:
        load(tmp_path / "linear.toy")
    assert caught.value.got == "toy"
    with pytest.raises(errors.InvalidArgumentError, match="cannot be validated again"):
        formats.import_function("pax_export.export.validation.recheck:Rechecked")(
            tmp_path / "linear.toy"
        )


class _Drawing(pax.Module):
    def __init__(self):
        super().__init__()
        self.keys = pax.RngSeq(seed=0)

    def __call__(self, x):
        return x + jax.random.normal(self.keys.next_rng_key(), x.shape)


@pytest.mark.parametrize("export", [pax.export.to_onnx, pax.export.to_tflite])
def test_a_format_without_variables_offers_no_update(tmp_path, export):
    with refused(errors.StateChangeError, "to_saved_model", 'state="keep"') as caught:
        export(_Drawing(), tmp_path / "net", spec("2"))
    assert not caught.value.write.startswith("state=")
    with refused(errors.InvalidArgumentError, "to_saved_model", got="state='update'"):
        export(_Drawing(), tmp_path / "net", spec("2"), state="update")


def test_nothing_at_the_path(tmp_path):
    with refused(errors.ExportPathError, got="no such file or directory"):
        load(tmp_path / "net.onnx")
