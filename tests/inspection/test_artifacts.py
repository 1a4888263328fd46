"""`pax.inspect` of exports, and `diff`."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import spec, to_saved_model, to_stablehlo, to_tflite
from pax_export.inspection import Inspection, Row, diff
from tests.closeness import assert_close
from tests.refusals import refused


def make(seed: int = 0):
    pax.seed_rng_key(seed)
    return pax.Sequential(pax.Linear(3, 4), jax.nn.relu, pax.BatchNorm1D(4)).eval()


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """One net in three formats, and a SavedModel of another one."""
    folder, net = tmp_path_factory.mktemp("exports"), make()
    inputs = spec("batch, 3")
    to_saved_model(net, folder / "saved", inputs, validate=False)
    to_saved_model(make(1), folder / "other", inputs, validate=False)
    to_stablehlo(net, folder / "bundle", inputs, validate=False)
    to_tflite(net, folder / "net.tflite", spec("2, 3"), validate=False)
    return folder


@pytest.mark.parametrize("name", ["saved", "bundle", "net.tflite"])
def test_the_rows_of_an_export_have_the_paths_of_the_model(exports, name):
    found = pax.inspect(exports / name)
    arrays = {row.path: row.shape for row in found if row.kind == "array"}
    assert arrays == {path: leaf.shape for path, leaf in pax.core.named_leaves(make())}
    assert found.bytes == sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(make()))
    net = pax.inspect(make())
    assert found.parameters == net.parameters  # averages of the norm are not counted
    roles = {row.path: row.role for row in net if row.kind == "array"}
    for row in found:
        if row.kind == "array":
            assert row.role == roles[row.path].replace("state", "")
    assert found[""].class_name == "Sequential"
    assert found[""].inputs[0].endswith(",3]")


@pytest.mark.parametrize("name", ["saved", "bundle"])
def test_the_work_of_a_call_is_that_of_the_net(exports, name):
    found, net = pax.inspect(exports / name), pax.inspect(make(), spec("batch, 3"))
    assert (found.flops, found.uncounted) == (net.flops, net.uncounted)
    assert found[""].transcendentals == net[""].transcendentals
    assert found[""].computed_in == "float32"
    assert pax.inspect(exports / "net.tflite").flops == pax.inspect(make(), spec("2, 3")).flops


def test_each_signature_has_the_work_of_its_outputs(tmp_path):
    methods = {
        "serving_default": lambda p, x: x @ p["w"],
        "twice": lambda p, x: x @ p["w"] @ p["w"],
    }
    inputs = {"serving_default": spec("batch, 4"), "twice": spec("batch, 4")}
    params = {"w": jnp.ones((4, 4))}
    to_saved_model(
        (params, methods["twice"]), tmp_path / "net", inputs, methods=methods, validate=False
    )
    found = pax.inspect(tmp_path / "net")
    assert (found["serving_default"].flops, found["twice"].flops) == ("32*batch", "64*batch")


def test_a_page_tells_rows_of_one_path_apart():
    """Params that are one array have its path, none, as the export has."""
    rows = Row("", "module", class_name="Net"), Row("", "array", 1, dtype="int8")
    page = Inspection(rows)._repr_html_()
    assert page.count("Net") == page.count("int8") == 1


def test_a_loop_of_unknown_length_is_named(tmp_path):
    def run(params, x):
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y @ params, x)

    to_stablehlo((jnp.ones((4, 4)), run), tmp_path / "net", spec("3, 4"), validate=False)
    found = pax.inspect(tmp_path / "net")
    assert found.uncounted == ("while (its body counts once)",)


def test_an_export_from_before_has_no_counts(tmp_path):
    to_stablehlo(make(), tmp_path / "net", spec("batch, 3"), validate=False)
    file = tmp_path / "net" / "pax_export.json"
    report = json.loads(file.read_text())
    for signature in report["signatures"].values():
        for name in ("flops", "transcendentals", "computed_in", "uncounted"):
            del signature[name]
    file.write_text(json.dumps(report))
    assert pax.inspect(tmp_path / "net").flops is None


def test_somebody_elses_savedmodel(tmp_path):
    import tensorflow as tf

    module = tf.Module()
    module.kernel = tf.Variable(np.ones((3, 2), np.float32), name="kernel")
    call = tf.function(
        lambda x: {"y": x @ module.kernel}, input_signature=[tf.TensorSpec([None, 3], name="x")]
    )
    tf.saved_model.save(module, str(tmp_path), signatures=call)
    found = pax.inspect(tmp_path)
    assert found["kernel"].shape == (3, 2)
    assert found[""].inputs == ("x: float32[?,3]",)
    assert found.flops is None
    assert not diff(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["saved", "bundle"])
def test_a_model_and_its_export_do_not_differ(exports, name):
    found = diff(make(), exports / name)
    assert (list(found), found.unseen) == ([], ())
    assert str(found) == "no difference"


def test_values_without_names_are_reported(exports):
    found = diff(make(), exports / "net.tflite")
    assert not found
    assert len(found.unseen) == 8


def test_two_exports_differ_in_values(exports):
    change, _ = diff(exports / "saved", exports / "other")
    assert (change.path, change.kind) == ("modules.0.weight", "changed")
    expected = np.abs(make()[0].weight - make(1)[0].weight).max()
    assert_close(change.difference, expected)


def test_added_removed_reshaped_and_retyped_leaves():
    before = make()
    after = before.set(0, pax.Linear(3, 5)).set(2, pax.Linear(4, 1))
    after = after.replace_node(after[0].bias, after[0].bias.astype(jnp.bfloat16)[:4])
    kinds = {change.path: change.kind for change in diff(before, after)}
    assert kinds["modules.0.weight"] == "reshaped"
    assert kinds["modules.0.bias"] == "retyped"
    assert kinds["modules.2.scale"] == "dropped"
    assert kinds["modules.2.weight"] == "added"


def test_on_the_command_line(exports, capsys):
    from pax_export.cli import main

    assert main(["diff", str(exports / "saved"), str(exports / "other")]) == 0
    assert "modules.0.weight: changed, float32[3,4], by at most" in capsys.readouterr().out


def test_no_export_there(tmp_path):
    with refused(OSError, "export"):
        pax.inspect(tmp_path)
    with refused(TypeError, "export"):
        pax.inspect(tmp_path, np.ones(3))
