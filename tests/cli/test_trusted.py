"""A SavedModel that touches files: no command runs it unless it is told that it may."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from pax_export.export import spec, to_saved_model
from tests.export.artifact.test_trust import of_tensorflow_1


@pytest.fixture
def reader(here):
    """A SavedModel of somebody else that gives the content of a file, whatever it is asked."""
    import tensorflow as tf

    (here / "secret").write_text("secret")
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")], autograph=False)
    def function(x):
        return {"y": x + 1, "text": tf.io.read_file(str(here / "secret"))}

    module.function = function
    tf.saved_model.save(module, "reader", signatures=function)
    np.save("x.npy", np.ones(2, np.float32))
    return here / "reader"


def test_run_refuses_and_runs_when_it_is_trusted(reader, call):
    code, out, error = call("run", "reader", "--input", "x.npy")
    assert (code, out) == (1, "")
    assert error.startswith(
        "pax-export: error: The SavedModel contains operations that are not allowed in untrusted "
        "models. where: reader; got: ReadFile in __inference_"
    )
    assert error.endswith("fix: --trusted, if you trust its source and allow these operations")
    code, out, _ = call("run", "reader", "--input", "x.npy", "--trusted")
    assert (code, "y: float32[2]" in out) == (0, True)


def test_inspect_runs_nothing(reader, call):
    assert call("inspect", "reader")[0] == 0


def test_retarget_refuses_models_without_a_jax_program(reader, call):
    code, _, error = call("retarget", "reader", "--out", "mended")
    assert (code, "The SavedModel contains no jax program" in error) == (1, True)


@pytest.fixture
def posing(reader, here):
    """The same with a report of ours beside it."""
    to_saved_model(({}, lambda p, x: {"y": x + 1}), "honest", spec("n"), validate=False)
    report = json.loads((here / "honest" / "pax_export.json").read_text())
    (reader / "pax_export.json").write_text(json.dumps(report))
    shutil.rmtree(here / "honest")
    return reader


def test_validate_refuses_before_a_process_is_started(posing, call, monkeypatch):
    from pax_export.export.validation import recheck

    def forbidden(*_):
        raise AssertionError("it was run")

    with monkeypatch.context() as patch:
        patch.setattr(recheck, "in_process", forbidden)
        code, out, error = call("validate", "reader")
    assert (code, out) == (1, "")
    assert "The SavedModel contains operations that are not allowed in untrusted models" in error


def test_validate_runs_trusted_artifacts(posing, call, quick):
    code, out, _ = call("validate", "reader", "--trusted")
    assert (code, out.count("FAILED: AttributeError: ")) == (1, 3)  # it is no export of ours


def test_what_tensorflow_runs_itself_is_no_signature_to_call(here, call):
    import tensorflow as tf

    old = of_tensorflow_1(tf, here)
    assert call("run", old, "--signature", "__saved_model_init_op")[2].startswith(
        "pax-export: error: The export does not have this signature. got: __saved_model_init_op; "
        "fix: --signature serving_default"
    )
