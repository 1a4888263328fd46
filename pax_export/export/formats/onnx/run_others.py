"""Runs an ONNX model in other runtimes than onnxruntime, with numpy.

A separate process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
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
