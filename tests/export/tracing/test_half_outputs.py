"""Half-precision outputs of a policy are float32 in exports, unless they are asked for."""

import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.artifact.dimensions import RandomCall
from pax_export.export.validation.cases import ReferenceModel
from pax_export.precision import mixed_precision
from tests.closeness import assert_close

BATCH = spec("batch, 4")
X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
NET = pax.Sequential(pax.Linear(4, 8), pax.Linear(8, 2))
HALF = mixed_precision(NET, jmp.get_policy("p=f32,c=bfloat16,o=bfloat16"), exempt="modules.1")
FORMATS = [(to_saved_model, ""), (to_stablehlo, ""), (to_tflite, ".tflite"), (to_onnx, ".onnx")]


def dtype_of(report):
    (output,) = report.signatures["serving_default"].outputs
    return output.dtype


@pytest.mark.parametrize("export, suffix", FORMATS)
@pytest.mark.parametrize("outputs, dtype", [("float32", "float32"), ("model", "bfloat16")])
def test_every_format(export, suffix, outputs, dtype, tmp_path):
    path = tmp_path / f"net{suffix}"
    assert dtype_of(export(HALF, path, BATCH, outputs=outputs, validate=False)) == dtype
    got = load(path)(X)
    assert got.dtype == dtype
    assert_close(got.astype("float32"), np.float32(HALF(X)), rtol=2e-2)


def test_onnxruntime_alone(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    report = to_onnx(HALF, tmp_path / "net.onnx", BATCH)
    assert report.needs_load == ()
    (result,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": X})
    assert result.dtype == np.float32
    half = spec("3, 4", "bfloat16")
    report = to_onnx(HALF, tmp_path / "half.onnx", half, outputs="model", validate=False)
    assert [text.split(":")[0] for text in report.needs_load] == ["x", "output"]


def test_half_precision_without_a_policy_stays(tmp_path):
    net = pax.Sequential(lambda x: x.astype(jnp.bfloat16))
    assert dtype_of(to_stablehlo(net, tmp_path / "net", BATCH, validate=False)) == "bfloat16"


@pytest.mark.parametrize("only", [0, 1], ids=["inside", "last"])
def test_a_policy_of_one_layer(only, tmp_path):
    policy = jmp.get_policy("p=f32,c=f16,o=f16")
    layers = [
        pax.apply_mp_policy(each, policy) if i == only else each for i, each in enumerate(NET)
    ]
    report = to_onnx(pax.Sequential(*layers), tmp_path / "net.onnx", BATCH, validate=False)
    assert dtype_of(report) == "float32"


@pytest.mark.parametrize("outputs", ["float32", "model"])
def test_an_export_is_compared_with_its_model(outputs, tmp_path):
    """The comparison of `pax-export validate --against` knows which of the two it was."""
    report = to_stablehlo(HALF, tmp_path / "net", BATCH, outputs=outputs, validate=False)
    info = report.signatures["serving_default"]
    got = {"output": np.asarray(load(tmp_path / "net")(X))}
    model = ReferenceModel(HALF, report, {})
    errors = model.differences("serving_default", RandomCall({}, {"x": X}), info, got)
    assert errors


def test_another_choice(tmp_path):
    with pytest.raises(errors.InvalidArgumentError):
        to_onnx(HALF, tmp_path / "net.onnx", BATCH, outputs="half")
