"""Other readers of the graphs of operations, in `tox -e matrix`: five models at two batch sizes.

The table of docs/guide/serving.md says what they refuse.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import spec, to_saved_model
from tests.closeness import assert_close

tf = pytest.importorskip("tensorflow")
pytest.importorskip("openvino")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the readers


def _rows(x):
    """Rows in order and their places, the largest, and columns by number."""
    order = jnp.argsort(x, -1)
    places = jnp.argsort((x * 10).astype(jnp.int32), -1)
    return (
        jnp.take_along_axis(x, order, -1),
        jax.lax.top_k(x, 3)[0],
        x[:, jnp.array([2, 0])],
        places,
    )


class _Recurrent(pax.Module):
    def __init__(self):
        super().__init__()
        self.cell = pax.LSTM(8, 16)

    def __call__(self, x):
        state = self.cell.initial_state(x.shape[0])
        _, rows = jax.lax.scan(self.cell, state, jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(rows, 0, 1)


class _Attention(pax.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = pax.MultiHeadAttention(4, 4), pax.LayerNorm(16)

    def __call__(self, x):
        return jax.nn.gelu(self.norm(x + self.attention(x, x, x)))


def _convolutions():
    return pax.Sequential(
        pax.Conv2D(3, 8, 3, stride=2), pax.BatchNorm2D(8), jax.nn.relu, pax.Conv2D(8, 8, 3),
        lambda x: x.mean((1, 2)), pax.Linear(8, 4), lambda x: jnp.argmax(x, -1),
    ).eval()  # fmt: skip


def _quantized():
    net = pax.Sequential(pax.Linear(16, 32), jax.nn.relu, pax.Linear(32, 4))
    return pax.quantize(net)[0]


_MODELS = {
    "convolutions": (_convolutions, (16, 16, 3)),
    "recurrent": (_Recurrent, (6, 8)),
    "attention": (_Attention, (5, 16)),
    "quantized": (_quantized, (16,)),
    "rows": (lambda: _rows, (8,)),
}
_REFUSED = {
    ("convolutions", "tflite"), ("recurrent", "tflite"), ("rows", "tflite"),
    ("quantized", "openvino"), ("quantized", "tfjs"),
}  # fmt: skip


def _openvino(path, _):
    import openvino

    model = openvino.convert_model(path)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: list(compiled(x).values())


def _tflite(path, _):
    content = tf.lite.TFLiteConverter.from_saved_model(str(path)).convert()
    interpreter = tf.lite.Interpreter(model_content=content)
    (given,) = interpreter.get_input_details()

    def call(x):
        interpreter.resize_tensor_input(given["index"], x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        return [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]

    return call


def _tf2onnx(path, folder):
    pytest.importorskip("tf2onnx")
    runtime, file = pytest.importorskip("onnxruntime"), folder / "model.onnx"
    told = ["--saved-model", str(path), "--output", str(file), "--opset", "17"]
    subprocess.run([sys.executable, "-m", "tf2onnx.convert", *told], check=True)
    session = runtime.InferenceSession(file)
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})


def _saved_model_cli(path, folder):
    program, results = Path(sys.executable).with_name("saved_model_cli"), folder / "results"

    def call(x):
        np.save(folder / "x.npy", x)
        told = ["--tag_set", "serve", "--signature_def", "serving_default", "--overwrite"]
        told += ["--dir", str(path), "--inputs", f"x={folder / 'x.npy'}", "--outdir", str(results)]
        subprocess.run([program, "run", *told], check=True)
        return [np.load(each) for each in sorted(results.iterdir())]

    return call


#: The converter imports packages that it needs for other files, and that do not install here.
_CONVERT = """
import sys, types
for name in "tensorflow_decision_forests", "tensorflow_hub", "tf_keras", "jax.experimental.jax2tf":
    sys.modules[name] = types.ModuleType(name)
from tensorflowjs.converters.tf_saved_model_conversion_v2 import convert_tf_saved_model
convert_tf_saved_model(*sys.argv[1:])
"""
_RUN = """
const [folder, x] = process.argv.slice(1), fs = require("fs"), tf = require("@tensorflow/tfjs");
const model = JSON.parse(fs.readFileSync(folder + "/model.json"));
const weights = model.weightsManifest.flatMap((each) => each.weights);
const parts = model.weightsManifest.flatMap((each) => each.paths);
const data = Buffer.concat(parts.map((each) => fs.readFileSync(folder + "/" + each)));
const load = async () => ({
  modelTopology: model.modelTopology, signature: model.signature, weightSpecs: weights,
  weightData: data.buffer.slice(data.byteOffset, data.byteOffset + data.length),
});
(async () => {
  await tf.setBackend("cpu");
  const net = await tf.loadGraphModel({ load });
  const names = Object.values(model.signature.outputs).map((each) => each.name);
  const made = await net.executeAsync(tf.tensor(JSON.parse(x)), names);
  const all = [].concat(made).map((each) => ({ dtype: each.dtype, values: each.arraySync() }));
  console.log(JSON.stringify(all));
})();
"""


def _tfjs(path, folder):
    if importlib.util.find_spec("tensorflowjs") is None:
        pytest.skip("there is no tensorflowjs")
    web = folder / "web"
    subprocess.run([sys.executable, "-c", _CONVERT, str(path), str(web)], check=True)
    model = web / "model.json"
    model.write_text(model.read_text().replace('"EnsureShape"', '"Identity"'))  # see the guide

    def call(x):
        told = ["node", "-e", _RUN, str(web), json.dumps(x.tolist())]
        done = subprocess.run(told, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        return [np.asarray(each["values"], each["dtype"]) for each in found]

    return call


_READERS = {
    "openvino": _openvino, "tflite": _tflite, "tf2onnx": _tf2onnx, "cli": _saved_model_cli,
    "tfjs": _tfjs,
}  # fmt: skip


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize("name", _MODELS)
def test_results_are_those_of_jax(name, reader, tmp_path):
    make, shape = _MODELS[name]
    model, sizes = make(), ", ".join(map(str, shape))
    to_saved_model(model, tmp_path / "m", spec(f"b, {sizes}"), operations="tensorflow")
    if (name, reader) in _REFUSED:
        with pytest.raises(Exception):  # noqa: B017  each has errors of its own
            _READERS[reader](tmp_path / "m", tmp_path)
        return
    call = _READERS[reader](tmp_path / "m", tmp_path)
    for count in (2, 3):
        x = np.random.default_rng(count).normal(size=(count, *shape)).astype(np.float32)
        found = call(x)
        for wanted in jax.tree.leaves(model(x)):  # readers have an order of their own
            assert any(_is_close(each, wanted) for each in found)


def _is_close(found, wanted):
    try:
        assert_close(found, wanted, atol=2e-4)
    except AssertionError:
        return False
    return found.shape == wanted.shape
