"""SavedModels in sessions, the way of C programs, Java and TensorFlow Serving."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import ValidationError
from pax_export.export import spec, to_saved_model
from pax_export.export.formats.saved_model import SAVED_MODEL, run
from pax_export.export.formats.saved_model.proto import objects
from pax_export.export.validation.validate import in_process
from tests.refusals import refused

tf = pytest.importorskip("tensorflow")


def test_a_model_without_variables_is_served(tmp_path):
    to_saved_model(lambda x: 2 * x, tmp_path / "m", spec("n"))
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "m"))
        (y,) = graph.signature_def["serving_default"].outputs.values()
        assert session.run(y.name, {"serving_default_x:0": [1.0, 2.0]}).tolist() == [2, 4]
        saver = graph.saver_def
        session.run(saver.save_tensor_name, {saver.filename_tensor_name: "nothing"})


def test_a_graph_that_sessions_cannot_import_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "legal_names", list)
    methods = {"encode": lambda p, text_x: text_x, "encode_text": lambda p, x: 2 * x}
    with refused(ValidationError, "cannot be called") as error:
        to_saved_model(
            ({}, methods["encode"]), tmp_path / "m", dict.fromkeys(methods, spec("n")),
            methods=methods,
        )  # fmt: skip
    assert "encode_text_x" in error.value.got
    assert not list(tmp_path.iterdir())


def test_calls_in_a_session_are_compared(tmp_path, monkeypatch):
    call = run._Session.call

    def wrong(self, case):
        return {name: value + 1 for name, value in call(self, case).items()}

    monkeypatch.setattr(run._Session, "call", wrong)
    with refused(ValidationError, "differs") as error:
        to_saved_model(pax.Linear(3, 2), tmp_path / "m", spec("n, 3"))
    assert "in a session" in error.value.where


class Counter(pax.StateModule):
    def __init__(self):
        super().__init__()
        self.count = jnp.zeros(())

    def __call__(self, x):
        self.count = self.count + 1
        return x + self.count

    def again(self, x):
        return -self(x)


def test_each_call_in_a_session_starts_with_the_exported_state(tmp_path):
    methods = {"one": "__call__", "two": "again"}
    inputs = dict.fromkeys(methods, spec("n"))
    to_saved_model(Counter(), tmp_path / "m", inputs, methods=methods, state="update")


def test_other_processes_have_no_xla(tmp_path):
    module = tf.Module()
    module.leaves = {}
    specs = [tf.TensorSpec([None], tf.float32, "x")]
    signatures = {
        key: tf.function(lambda x: {"y": 2 * x}, specs, jit_compile=compiled)
        for key, compiled in (("plain", None), ("compiled", True))
    }
    tf.saved_model.save(module, str(tmp_path / "m"), signatures)
    cases = [{"signature": key, "inputs": {"x": np.ones(2, np.float32)}} for key in signatures]
    plain, compiled = in_process(SAVED_MODEL, tmp_path / "m", cases, "each")
    assert plain["results"]["y"].tolist() == [2, 2]
    assert "XLA compilation disabled" in compiled["error"]
