"""SavedModels of plain jax2tf, mended; the calls that made them are jax2tf's own."""

import shutil

import jax
import jax.numpy as jnp
import pytest
import tensorflow as tf

from pax_export.errors import (
    ConsumerError,
    ExportPathError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export.export import retarget
from pax_export.export.artifact import saved_models
from pax_export.export.formats.saved_model import run as saved_model
from tests.closeness import assert_close
from tests.consumers.foreign import PARAMS, each_node, model, save
from tests.export.models import random
from tests.refusals import refused


def load(folder):
    loaded = tf.saved_model.load(str(folder))
    return loaded, loaded.signatures["serving_default"]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*-of-*")}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old") / "model"
    save(folder)
    return folder


@pytest.fixture(scope="module")
def mended(old, tmp_path_factory):
    folder = tmp_path_factory.mktemp("new") / "model"
    return folder, retarget(old, out=folder)


def test_it_does_what_jax_does(mended):
    folder, report = mended
    _loaded, serve = load(folder)
    for batch in (1, 4):
        x = random(batch, 5)
        for name, value in model(PARAMS, x).items():
            assert_close(serve(x=tf.constant(x))[name], value, rtol=1e-5, atol=1e-6)
    assert (report.modules, report.oldest_tensorflow) == (2, "2.15")
    assert report.stablehlo[1] == "0.9.0" and report.calling_convention == (10, 8)
    assert report.changes["composites"] and report.changes["batched indexing"]


def test_a_session_calls_it(mended):
    """As TensorFlow Serving, C and Java do; reading is enough to refuse a wrong graph."""
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(mended[0]))
        signature, x = graph.signature_def["serving_default"], random(4, 5)
        names = {name: each.name for name, each in signature.outputs.items()}
        outputs = session.run(names, {signature.inputs["x"].name: x})
    for name, value in model(PARAMS, x).items():
        assert_close(outputs[name], value, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_jax(mended):
    x = random(3, 5)
    _loaded, serve = load(mended[0])
    with tf.GradientTape() as tape:
        outputs = serve(x=tf.constant(x))
        loss = tf.add_n([tf.reduce_sum(outputs[name]) for name in ("best", "picked")])
    found = tape.gradient(loss, tape.watched_variables())

    def total(params):
        return sum(y.sum() for y in model(params, x).values())

    by_shape = {value.shape: value for value in jax.grad(total)(PARAMS).values()}
    assert len(found) == len(by_shape)
    for value in found:
        assert_close(value, by_shape[tuple(value.shape)], rtol=1e-4, atol=1e-5)


def test_variables_and_signatures_are_untouched(old, mended):
    assert files(old) == files(mended[0]) != {}
    before, after = (
        saved_models.read_saved_model(old, "test"),
        saved_models.read_saved_model(mended[0], "test"),
    )
    for one, other in zip(before.meta_graphs, after.meta_graphs):
        assert one.signature_def == other.signature_def
        assert one.object_graph_def == other.object_graph_def


def test_the_report_is_written_next_to_the_model(mended):
    folder, report = mended
    assert '"oldest_tensorflow": "2.15"' in (folder / "pax_export_retarget.json").read_text()
    text = str(report)
    assert "calling convention 10" in text and "TensorFlow 2.15 and newer" in text
    assert report.validated == "here" and list(report.signatures) == ["serving_default"]


def test_retargeted_artifacts_can_be_retargeted_and_compared(mended, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(mended[0], folder)
    with pytest.raises(ExportPathError):
        retarget(folder)
    report = retarget(folder, "tensorflow>=2.15", overwrite=True, validate="process")
    assert report.signatures == {"serving_default": "compared with the old one"}
    assert {key.split(": ")[1].split(" ")[0] for key in report.largest_error} == {
        *("best", "picked"),
        *("gradient:x", "gradient:0", "gradient:1"),
    }
    assert max(report.largest_error.values()) == 0
    assert not any(report.changes.values())


def test_another_result_is_found(mended, tmp_path, monkeypatch):
    call = saved_model.run_any
    counted = []

    def wrong(*args):
        results = call(*args)
        counted.append(args)
        for result in results if len(counted) == 2 else ():
            result["best"] = result["best"] + 1
        return results

    monkeypatch.setattr(saved_model, "run_any", wrong)
    with refused(ValidationError, "model's"):
        retarget(mended[0], out=tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_run_is_refused(mended, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(mended[0], folder)
    for file in folder.rglob("variables.data*"):
        file.unlink()
    with pytest.raises(ValidationError):
        retarget(folder, out=tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["old"]


def one_function(function, folder, shape="(b, 4, 4)"):
    save(folder, lambda params, x: {"y": function(x)}, {"unused": jnp.ones(())}, shape)


def test_lapack_is_named(tmp_path):
    one_function(jnp.linalg.cholesky, tmp_path / "old")
    with refused(UnsupportedOperationError, "lapack_spotrf", "to_saved_model"):
        retarget(tmp_path / "old", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_consumer_that_is_too_old_is_refused(tmp_path):
    one_function(lambda x: x.astype(jnp.int4).astype(jnp.int8), tmp_path / "old", "(b, 3)")
    with refused(ConsumerError, 'consumer="tensorflow>=2.18"'):
        retarget(tmp_path / "old", "tensorflow>=2.15", out=tmp_path / "new", validate=False)
    assert retarget(tmp_path / "old", out=tmp_path / "new").oldest_tensorflow == "2.18"


def test_other_folders_are_refused(tmp_path):
    with refused(ExportPathError, got="no file saved_model.pb"):
        retarget(tmp_path, out=tmp_path / "new")
    for content in (b"\xff\xff", b""):
        (tmp_path / "saved_model.pb").write_bytes(content)
        with pytest.raises(ExportPathError):
            retarget(tmp_path, out=tmp_path / "new")


def test_a_program_that_cannot_be_read_is_refused(old, tmp_path):
    shutil.copytree(old, tmp_path / "old")
    saved = saved_models.read_saved_model(old, "test")
    for _, node in each_node(saved, "XlaCallModule"):
        node.attr["module"].s = b"ML\xefRStableHLO_v99.0.0\x00" + node.attr["module"].s[30:]
    (tmp_path / "old" / saved_models.GRAPH_FILE).write_bytes(saved.SerializeToString())
    with pytest.raises(UnsupportedOperationError):
        retarget(tmp_path / "old", out=tmp_path / "new")
