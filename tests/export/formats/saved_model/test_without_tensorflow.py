"""A SavedModel is written where TensorFlow cannot be imported, and TensorFlow runs it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pax_export.export import Report, load
from tests.closeness import assert_close

ROOT = Path(__file__).parents[4]
PROGRAM = """
import importlib.abc, json, sys, warnings

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras", "google"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from tests.export.formats.saved_model.test_without_tensorflow import export

said = {}
for way in (True, False, "variables", "full", "process"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text = str(export(f"{sys.argv[1]}/{way}", way))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    said[str(way)] = [text, *(f"{each.category.__name__}: {each.message}" for each in caught)]
print(json.dumps(said))
"""


def model():
    params = {"w": np.arange(6.0, dtype=np.float32).reshape(3, 2), "steps": np.int32(2)}

    def function(params, x):
        return {"y": np.float32(2) * x @ params["w"], "steps": params["steps"] + 1}

    return params, function


def export(path, validate):
    from pax_export.export import spec, to_saved_model

    inputs = {"serving_default": spec("n, 3"), "twice": spec("n, 3")}
    methods = {key: model()[1] for key in inputs}
    return to_saved_model(
        model(), path, inputs, methods=methods, validate=validate, vjp_order=2, trainable=["w"]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("without")


@pytest.fixture(scope="module")
def said(folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True, text=True, timeout=900, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


INSTALL = 'python -m pip install "tensorflow<3,>=2.21"'


def test_the_report_and_a_warning_say_that_it_is_not_validated(said, folder):
    text, warning = said["True"]
    assert "  left out    not validated: TensorFlow is not installed\n" in text
    assert "  validated   no\n" in text and "load TensorFlow" not in text
    assert warning.startswith("NotValidatedWarning: The export is not validated: ")
    assert f"  fix: {INSTALL}, or validate=False" in warning
    report = Report.read(folder / "True")
    assert report.left_out == ("not validated: TensorFlow is not installed",)
    assert report.validated is None and "tensorflow" not in report.versions


def test_who_asks_for_no_calls_is_not_warned(said, folder):
    assert len(said["False"]) == len(said["variables"]) == 1
    assert "left out" not in said["False"][0]
    assert Report.read(folder / "variables").validated == "variables"


@pytest.mark.parametrize("way", ["full", "process"])
def test_a_test_that_was_asked_for_is_refused(said, folder, way):
    (error,) = said[way]
    assert error.startswith(f"MissingPackageError: to_saved_model(..., validate={way!r}) needs")
    assert f"  fix: {INSTALL} (the extra [tensorflow] of pax-export)" in error
    assert not (folder / way).exists()


def test_tensorflow_runs_what_was_written(said, folder):
    tf = pytest.importorskip("tensorflow")
    loaded = load(folder / "True")
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    params, function = model()
    for signature in loaded.signatures.values():
        found = signature(x)
        assert_close(found["y"], np.asarray(function(params, x)["y"]), rtol=1e-6)
        assert found["steps"] == 3
    w = loaded.variables["w"]
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(loaded.root.signatures["twice"](x=tf.constant(x))["y"] ** 2)
    expected = 8 * x.T @ (x @ params["w"])
    assert_close(tape.gradient(y, w), expected, rtol=1e-5)


def test_the_files_are_those_that_are_written_with_tensorflow(said, folder, tmp_path):
    pytest.importorskip("tensorflow")
    export(tmp_path / "with", False)
    for name in ("saved_model.pb", "variables/variables.index"):
        assert (folder / "False" / name).read_bytes() == (tmp_path / "with" / name).read_bytes()
