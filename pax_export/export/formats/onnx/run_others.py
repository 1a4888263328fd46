"""Runs an ONNX model in other runtimes than onnxruntime, with numpy.

A separate process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    _refuse_for_openvino(_graph(file))
    library = importlib.import_module("openvino")
    # By itself it computes in bfloat16 and rounds inputs to int8 where the processor has that.
    hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = library.Core().compile_model(file, "CPU", hints)
    taken = set().union(*(each.names for each in model.inputs))
    names = [each.name for each in _graph(file).output]  # of several that each has
    found = []
    for case in cases:
        # It takes arrays that may be written to.
        given = {name: np.array(x) for name, x in case["inputs"].items() if name in taken}
        results = model(given)
        found.append({name: np.array(results[name]) for name in names})
    # It returns the bits of bfloat16 as if they were of float16.
    in_bits = [name for name in names if model.output(name).element_type == library.Type.bf16]
    for each, name in itertools.product(found, in_bits):
        each[name] = each[name].view(importlib.import_module("ml_dtypes").bfloat16)
    return found


def _refuse_for_openvino(graph: Any) -> None:
    """Refuses operations that OpenVINO computes differently on CPUs.

    It uses int32 for all integers, compares them as float32 except in `Max` and `Min`, and
    truncates to bfloat16.
    """
    read = importlib.import_module("onnx").numpy_helper.to_array
    small = [each for each in graph.initializer if each.dims in ([], [1])]
    numbers = {each.name: read(each).item() for each in small if each.data_type in _INTEGERS}
    signs = {name for name, each in numbers.items() if each == -(2**31)}
    masks = {name for name, each in numbers.items() if each >= 2**31}
    ordered: set[str] = set()  # unsigned integers, mapped to signed ones in the same order
    for node in _nodes(graph):
        given = set(node.input)
        compares = not ordered.isdisjoint(given)
        if node.op_type == "BitwiseXor" and signs & given:
            ordered.update(() if compares else node.output)
            compares = False
        elif node.op_type in ("Max", "Min") and compares:
            ordered.update(node.output)
            compares = False
        elif node.op_type == "Less" and node.input[1] in signs:  # below 0, which none is
            compares = False
        if node.op_type in ("BitwiseXor", "BitwiseAnd"):
            compares = compares or not masks.isdisjoint(given)
        if node.op_type == "BitShift" or compares:
            raise NotImplementedError(
                f"the model compares, divides, converts or shifts uint32 or uint64 ({node.name}), "
                "and OpenVINO computes these on CPUs as int32, and compares them as float32"
            )
        if node.op_type == "Cast" and _BFLOAT16 in [each.i for each in node.attribute]:
            raise NotImplementedError(
                f"the model rounds to bfloat16 ({node.name}), and OpenVINO cuts the bits off"
            )


#: ONNX's enum values of int32, int64 and bfloat16.
_INTEGERS, _BFLOAT16 = (6, 7), 16


def _nodes(graph: Any) -> Iterator[Any]:
    """The operators of a graph, of its loops and branches."""
    for node in graph.node:
        yield node
        for each in node.attribute:
            if each.HasField("g"):
                yield from _nodes(each.g)


def _graph(file: str) -> Any:
    return importlib.import_module("onnx").load(file, load_external_data=False).graph


def iree(file: str, cases: Cases) -> list[Arrays]:
    onnx = importlib.import_module("onnx")
    model = onnx.load(file, load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    _refuse_for_iree(graph)
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
        made = function(*(case["inputs"][each.name] for each in graph.input))
        results = made if isinstance(made, (tuple, list)) else (made,)
        # It returns unsigned integers as signed ones.
        arrays = [
            each.to_host().copy().view(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
            for each, kind in zip(results, (each.type.tensor_type for each in graph.output))
        ]
        found.append(dict(zip((each.name for each in graph.output), arrays)))
    return found


def _refuse_for_iree(graph: Any) -> None:
    """Refuses operations that IREE compiles to other results."""
    for node in _nodes(graph):
        told = {each.name: each for each in node.attribute}
        if node.op_type == "Gelu" and "approximate" in told and told["approximate"].s == b"tanh":
            raise NotImplementedError(
                f"the model has the operator Gelu ({node.name}), for which IREE takes 22/7 for pi; "
                "exact=True writes it in parts"
            )
        if any(1 in each.ints for name, each in told.items() if name.endswith("_directions")):
            raise NotImplementedError(
                f"the model scans from the end ({node.name}), and IREE scans from the beginning"
            )
    _refuse_symbolic(graph)
    _refuse_negative(graph)
    _refuse_sorts(graph)


def _refuse_symbolic(graph: Any) -> None:
    """Refuses loops and scatters that IREE runs right with fewer symbolic sizes only."""
    sizes = [size for each in graph.input for size in each.type.tensor_type.shape.dim]
    symbols = {size.dim_param for size in sizes if size.dim_param}
    reshaped = {node.output[0] for node in _nodes(graph) if node.op_type == "Reshape"}
    for node in _nodes(graph):
        scatters = node.op_type == "ScatterND" and node.input[0] in reshaped
        if len(symbols) > 1 and (scatters or node.op_type in ("Scan", "Loop")):
            raise NotImplementedError(
                f"the model has a {'scatter' if scatters else 'loop'} ({node.name}) and several "
                "symbolic sizes, with which IREE computes other numbers"
            )
        rows = [each.i for each in node.attribute if each.name == "num_scan_inputs"]
        if symbols and rows and len(node.output) > len(node.input) - rows[0]:
            raise NotImplementedError(
                f"the model stacks the results of a scan ({node.name}), of which IREE returns "
                "only one if sizes are symbolic"
            )


def _refuse_negative(graph: Any) -> None:
    """Refuses remainders of negative sizes, which IREE takes with another sign."""
    read = importlib.import_module("onnx").numpy_helper.to_array
    small = [each for each in graph.initializer if each.data_type in _INTEGERS and each.dims == [1]]
    zeros = {each.name for each in small if read(each).item() == 0}
    negative = {n.output[0] for n in graph.node if n.op_type == "Sub" and n.input[0] in zeros}
    for node in graph.node:
        if node.op_type == "Mod" and node.input[0] in negative:
            raise NotImplementedError(
                f"the model has the remainder of a negative size ({node.name}), which IREE takes "
                "with another sign"
            )


def _refuse_sorts(graph: Any) -> None:
    """Refuses sorts that may share an array of places: IREE lets each change it."""
    nodes = list(_nodes(graph))
    read = {name for node in nodes for name in node.input}
    shapes = {each.name: each.type.tensor_type.shape.dim for each in _list_entries(graph)}
    seen: list[tuple[int, int]] = []
    for node in nodes:
        if node.op_type != "TopK" or node.output[1] not in read:
            continue
        sizes = [each.dim_value for each in shapes.get(node.input[0], ())]  # 0 if symbolic
        axis = next((each.i for each in node.attribute if each.name == "axis"), -1)
        along, all_sizes = sizes[axis] if sizes else 0, math.prod(sizes)
        if not along:
            raise NotImplementedError(
                f"the model sorts along a symbolic size ({node.name}), which IREE cannot"
            )
        if any(
            each[0] == along and (0 in (each[1], all_sizes) or each[1] == all_sizes)
            for each in seen
        ):
            raise NotImplementedError(
                f"the model sorts twice along axes of one size ({node.name}), for which IREE uses "
                "one array of places, and changes it each time"
            )
        seen.append((along, all_sizes))


def _list_entries(graph: Any) -> Iterator[Any]:
    """What is known of the shapes of all values, in loops and branches as well."""
    yield from (*graph.input, *graph.value_info, *graph.output)
    for node in graph.node:
        for each in node.attribute:
            if each.HasField("g"):
                yield from _list_entries(each.g)


def web(file: str, cases: Cases) -> list[Arrays]:
    """Onnxruntime-web in Node.js."""
    calls = [{name: pack_array(x) for name, x in case["inputs"].items()} for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "calls.json")
        place.write_text(json.dumps(calls), encoding="utf-8")
        _run_tool(["node", "-e", _NODE, "--", file, str(place)])
        results = json.loads(place.read_text(encoding="utf-8"))
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
