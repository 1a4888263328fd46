"""Runs an ONNX model with onnxruntime and numpy only, or in another runtime.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

#: For larger files, a validation does not keep the weights twice in memory.
_LARGE = 1 << 26

#: Types that onnxruntime does not convert to numpy: its name of the type, the dtype's name, the
#: number that ONNX has for it, and whole numbers of as many bits.
_BITS = {
    "tensor(bfloat16)": ("bfloat16", 16, np.uint16),
    "tensor(float8e4m3fn)": ("float8_e4m3fn", 17, np.uint8),
    "tensor(float8e5m2)": ("float8_e5m2", 19, np.uint8),
}


#: Session option for float32 products of quantized weights, as stored in the file.
_EXACTLY = ("session.qdq_matmulnbits_accuracy_level", "1")


def opened(
    file: str, exactly: bool = False, lean: bool = False
) -> tuple[Any, Callable[[str, Arrays], Arrays]]:
    """Returns onnxruntime's session of a file, and a function that calls it.

    A `lean` session does not repack weights, which would double their memory.
    """
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; conversion leaves parts that cause warnings
    options.add_session_config_entry("session.disable_prepacking", str(int(lean)))
    if exactly:
        options.add_session_config_entry(*_EXACTLY)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    input_types = {entry.name: entry.type for entry in session.get_inputs()}
    in_bits = not _BITS.keys().isdisjoint({*input_types.values(), *_types(session)})

    def call(key: str, inputs: Arrays) -> Arrays:
        # An input that the model does not use is missing in the file.
        feed = {name: np.asarray(value) for name, value in inputs.items() if name in input_types}
        if in_bits:
            results = _run_bits(onnxruntime, session, feed, input_types)
        else:
            results = session.run(names, feed)
        return dict(zip(names, results))

    return session, call


def _types(session: Any) -> list[str]:
    return [output.type for output in session.get_outputs()]


def _run_bits(
    onnxruntime: Any, session: Any, feed: Arrays, types: Mapping[str, str]
) -> list[np.ndarray]:
    """A call with numbers that numpy has from another package only, by their bits."""
    make = onnxruntime.OrtValue
    values = {}
    for name, value in feed.items():
        value = np.require(value, requirements="C")  # and a number stays one
        if types[name] in _BITS:
            _, number, bits = _BITS[types[name]]
            values[name] = make.ortvalue_from_numpy_with_onnx_type(value.view(bits), number)
        else:
            values[name] = make.ortvalue_from_numpy(value)
    names = [output.name for output in session.get_outputs()]
    results = session.run_with_ort_values(names, values)
    return [_array(*each) for each in zip(results, _types(session))]


def _array(value: Any, type: str) -> np.ndarray:
    if type not in _BITS:
        return value.numpy()
    importlib.import_module("ml_dtypes")
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(content, np.dtype(_BITS[type][0])).reshape(value.shape()).copy()


def run(file: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    beside = (each for each in Path(file).parent.iterdir() if each.name.startswith(Path(file).name))
    size = sum(each.stat().st_size for each in beside)
    _, call = opened(file, exactly=True, lean=size > _LARGE)
    return [call(case["signature"], case["inputs"]) for case in cases]


# --- Other runtimes than onnxruntime ---


Cases = Iterable[Mapping[str, Any]]

_NODE = """
const fs = require("fs"), path = require("path");
const ort = require("onnxruntime-web");
const [file, calls] = process.argv.slice(1);
(async () => {
  ort.env.logLevel = "error";
  const beside = fs.readdirSync(path.dirname(file))
    .filter((name) => name.startsWith(path.basename(file) + ".") && name.endsWith(".data"));
  const externalData = beside
    .map((name) => ({path: name, data: fs.readFileSync(path.join(path.dirname(file), name))}));
  const session = await ort.InferenceSession.create(fs.readFileSync(file), {externalData});
  const results = [];
  for (const call of JSON.parse(fs.readFileSync(calls))) {
    const feeds = {};
    for (const name of session.inputNames) {
      const [type, dims, text] = call[name];
      const bytes = Uint8Array.from(Buffer.from(text, "base64"));
      const kind = type === "float16" ? Uint16Array  // which no tensor of numbers is made of
        : new ort.Tensor(type, [], [0]).data.constructor;
      feeds[name] = new ort.Tensor(type, new kind(bytes.buffer), dims);
    }
    const made = await session.run(feeds), found = {};
    for (const [name, {type, dims, data}] of Object.entries(made)) {
      const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
      found[name] = [type, dims, bytes.toString("base64")];
    }
    results.push(found);
  }
  fs.writeFileSync(calls, JSON.stringify(results));
})().catch((error) => { console.error(String(error)); process.exit(1); });
"""


def openvino(file: str, cases: Cases) -> list[Arrays]:
    library = importlib.import_module("openvino")
    # By itself it computes in bfloat16 and rounds inputs to int8 where the processor has that.
    hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = library.Core().compile_model(file, "CPU", hints)
    input_names = set().union(*(each.names for each in model.inputs))
    names = [each.name for each in _graph(file).output]  # of several that each has
    found = []
    for case in cases:
        # It takes arrays that may be written to.
        inputs = {name: np.array(x) for name, x in case["inputs"].items() if name in input_names}
        results = model(inputs)
        found.append({name: np.array(results[name]) for name in names})
    # It returns the bits of bfloat16 as if they were of float16.
    in_bits = [name for name in names if model.output(name).element_type == library.Type.bf16]
    for each, name in itertools.product(found, in_bits):
        each[name] = each[name].view(importlib.import_module("ml_dtypes").bfloat16)
    return found


def _graph(file: str) -> Any:
    return importlib.import_module("onnx").load(file, load_external_data=False).graph


def iree(file: str, cases: Cases) -> list[Arrays]:
    onnx = importlib.import_module("onnx")
    model = onnx.load(file, load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    compiler = importlib.import_module("iree.compiler")
    runtime = importlib.import_module("iree.runtime")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "model.mlir")
        tool = [sys.executable, "-m", "iree.compiler.tools.import_onnx", file, "-o", str(program)]
        _run_tool(tool)
        content = compiler.compile_file(
            str(program),
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
    context = runtime.SystemContext(config=runtime.Config("local-task"))
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, content))
    function = context.modules.module[graph.name]
    found = []
    for case in cases:
        returned = function(*(case["inputs"][each.name] for each in graph.input))
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        # It returns unsigned integers as signed ones.
        arrays = [
            each.to_host().copy().view(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
            for each, kind in zip(results, (each.type.tensor_type for each in graph.output))
        ]
        found.append(dict(zip((each.name for each in graph.output), arrays)))
    return found


def web(file: str, cases: Cases) -> list[Arrays]:
    """Onnxruntime-web in Node.js."""
    calls = [{name: pack_array(x) for name, x in case["inputs"].items()} for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calls.json")
        path.write_text(json.dumps(calls), encoding="utf-8")
        _run_tool(["node", "-e", _NODE, "--", file, str(path)])
        results = json.loads(path.read_text(encoding="utf-8"))
    return [{name: unpack_array(*each) for name, each in result.items()} for result in results]


def pack_array(value: Any) -> list[Any]:
    """An array as JSON has it for JavaScript: dtype, shape, and its bytes in base64."""
    array = np.ascontiguousarray(value)
    return [array.dtype.name, list(np.shape(value)), base64.b64encode(array.tobytes()).decode()]


def unpack_array(dtype: str, shape: Sequence[int], text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def _run_tool(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1500:])
