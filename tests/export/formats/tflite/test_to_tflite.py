"""Models through `to_tflite`, run by LiteRT."""

import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

from pax_export import errors
from pax_export.export import Report, load, spec, to_tflite
from pax_export.export.artifact import embedded
from tests.closeness import assert_close
from tests.export.models import Net, affine, affine_params, random
from tests.export.targets import TARGETS
from tests.refusals import refused


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_models_run_in_litert_with_any_batch(target, tmp_path):
    target.check(to_tflite, tmp_path / "model.tflite")


@pytest.fixture(scope="module")
def net():
    return Net()


@pytest.fixture(scope="module")
def path(tmp_path_factory, net):
    path = tmp_path_factory.mktemp("tflite") / "net.tflite"
    to_tflite(
        net,
        path,
        {"serving_default": spec("2, 3"), "encode": spec("2, 3")},
        kwargs={"encode": {"scale": spec("")}},
        methods={"serving_default": "__call__", "encode": "encode"},
    )
    return path


def test_litert_alone_runs_it_with_built_in_operations(path, net):
    interpreter = Interpreter(model_path=str(path))
    run = interpreter.get_signature_runner("encode")
    found = run(x=random(2, 3), scale=np.float32(2))
    expected = net.encode(random(2, 3), scale=2.0)
    assert_close(found["code"], expected["code"], rtol=1e-5)
    operations = {each["op_name"] for each in interpreter._get_ops_details()}
    assert not {name for name in operations if name.startswith(("Flex", "STABLEHLO"))}


def test_several_signatures_and_nested_outputs_come_back(path, net):
    loaded = load(path)
    found = loaded.signatures["encode"](random(2, 3), scale=2.0)
    assert sorted(found) == ["code", "total"]
    assert_close(loaded(random(2, 3)), net(random(2, 3)), rtol=1e-5)
    assert repr(loaded) == "LoadedFile(Net: serving_default, encode)"
    assert loaded.runtime.get_signature_list().keys() == {"serving_default", "encode"}


def test_jax_arrays_in_jax_arrays_out(path):
    loaded = load(path)
    assert isinstance(loaded(jnp.ones((2, 3))), jnp.ndarray)
    assert isinstance(loaded(np.ones((2, 3), np.float32)), np.ndarray)


def test_the_report_lies_in_the_file(path):
    report = Report.read(path)
    assert (report.target, report.validated) == ("tflite", "here")
    assert zipfile.ZipFile(path).namelist() == ["pax_export.json"]
    assert "Net as a TFLite model" in str(report)


@pytest.mark.parametrize(
    ("function", "what", "where"),
    [
        (lambda params, x: x * 1j, "cannot return complex", "output output"),
        (lambda params, x: {"kept": x[1:], "none": x[:0]}, "without elements", "output none"),
    ],
)
def test_arrays_that_tflite_has_not_are_named(tmp_path, function, what, where):
    with pytest.raises(errors.UnsupportedOperationError, match=what) as caught:
        to_tflite(({}, function), tmp_path / "m.tflite", spec("n, 6"))
    assert caught.value.where == where


def test_validation_in_a_process_without_jax(tmp_path):
    model = (affine_params(), affine)
    report = to_tflite(model, tmp_path / "m.tflite", spec("n, 3"), validate="process")
    assert report.validated == "process"
    assert report.largest_error["serving_default: output"] < 1e-5


def test_refusals(tmp_path):
    model = (affine_params(), affine)
    with pytest.raises(errors.InvalidArgumentError, match="unknown value"):
        to_tflite(model, tmp_path / "m.tflite", spec("2, 3"), quantize="int4")
    with pytest.raises(errors.InvalidArgumentError, match=r'quantize\(.*activations="static"\)'):
        to_tflite(model, tmp_path / "m.tflite", spec("2, 3"), quantize="int8")
    (tmp_path / "there.tflite").write_bytes(b"old")
    with pytest.raises(errors.ExportPathError, match="overwrite=True"):
        to_tflite(model, tmp_path / "there.tflite", spec("2, 3"))
    with pytest.raises(errors.ExportPathError, match="not an export of pax_export"):
        to_tflite(model, tmp_path / "there.tflite", spec("2, 3"), overwrite=True)
    (tmp_path / "there.tflite").write_bytes(b"")
    for _ in range(2):
        to_tflite(model, tmp_path / "there.tflite", spec("2, 3"), overwrite=True, validate=False)
    assert load(tmp_path / "there.tflite")(random(2, 3)).shape == (2, 4)
    with pytest.raises(errors.ExportPathError, match="one file"):
        to_tflite(model, tmp_path, spec("2, 3"))


def test_damaged_and_foreign_files(tmp_path, path):
    foreign = tmp_path / "foreign.tflite"
    foreign.write_bytes(b"TFL3 and nothing else")
    with pytest.raises(errors.ExportPathError, match="not an export of pax_export"):
        load(foreign)
    content = path.read_bytes()
    start = content.index(b"PK\x03\x04")
    foreign.write_bytes(b"\0" * start + content[start:])
    with refused(errors.ExportPathError, write="a copy of the file, as it was written"):
        load(foreign)
    report = json.loads(embedded.read(path))
    del report["details"]["sha256"]  # as before hashes were written
    foreign.write_bytes(b"\0" * start)
    embedded.append_zip(foreign, json.dumps(report))
    with pytest.raises(errors.ExportPathError, match="cannot be loaded"):
        load(foreign)


@pytest.mark.parametrize("shape", ["8", "2*n"])
def test_reshapes_of_one_result_are_not_written_over(tmp_path, shape):
    """LiteRT 2.3 counts the readers of the first tensor in a chain of results in one memory."""

    def model(x):
        b = (x + 1) * 2
        return b[:, None] * 3 + b[None], (b.reshape(2, -1) * 5).reshape(-1) + b

    x = np.arange(1, 9, dtype=np.int32)
    to_tflite(model, tmp_path / "m.tflite", spec(shape, "int32"))
    for got, expected in zip(load(tmp_path / "m.tflite")(x), model(x)):
        np.testing.assert_array_equal(got, expected)


def test_functions_look_up_rows_of_a_large_table_of_bytes_as_it_is_stored(tmp_path):
    table = np.random.default_rng(0).integers(-127, 128, (1200, 1024), dtype=np.int8)

    def rows(params, index):
        return params[index].astype(jnp.float32)

    path, index = tmp_path / "m.tflite", spec("4", "int32")
    methods = {"rows": rows, "sums": lambda params, index: rows(params, index).sum(-1)}
    report = to_tflite((table, rows), path, dict.fromkeys(methods, index), methods=methods)
    assert max(report.largest_error.values()) == 0.0
    assert path.stat().st_size < 1.1 * table.nbytes
    tensors = Interpreter(str(path)).get_tensor_details()
    wide = [each for each in tensors if each["shape"].tolist() == [1200, 1024]]
    assert [each["dtype"] for each in wide] == [np.int8]  # four rows are cast, not the table


@pytest.mark.parametrize("inner", ["n", 3, 2500])
def test_products_of_truth_values(tmp_path, inner):
    inputs = spec((2, inner), "bool"), spec((inner, 3), "bool")
    to_tflite(lambda x, y: x @ y, tmp_path / "m.tflite", inputs, validate=False)
    size = 5 if inner == "n" else inner
    random = np.random.default_rng(0)
    x, y = random.random((2, size)) < 2 / size, random.random((size, 3)) < 0.5
    found = load(tmp_path / "m.tflite")(x, y)
    assert found.dtype == bool and np.array_equal(found, x @ y)


def test_typed_keys_are_inputs_and_outputs(tmp_path):
    def draw(x, key):
        key, now = jax.random.split(key)
        return x + jax.random.normal(now, x.shape), key

    key, x = jax.random.key(3), np.ones((2, 3), np.float32)
    report = to_tflite(draw, tmp_path / "draw.tflite", (spec("b, 3"), key))
    assert str(report.signatures["serving_default"].inputs[1]) == "key: uint32[2]"
    found, after = load(tmp_path / "draw.tflite")(x, jax.random.key_data(key))
    expected, key = draw(x, key)
    assert_close(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(after, jax.random.key_data(key))
