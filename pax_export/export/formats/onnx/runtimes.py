"""Calls of an ONNX model in other runtimes than onnxruntime, to test it there."""

from __future__ import annotations

import base64
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import MissingPackageError, UnsupportedOperationError
from pax_export._files import stale_temporaries
from pax_export._optional import find
from pax_export.export.validation.serve import Arrays

#: By the name of a runtime, the packages that it needs, each of an extra of that name.
_PACKAGES = {"openvino": ("openvino",), "iree": ("iree.compiler", "iree.runtime")}
NAMES = ("openvino", "iree", "web")
_WEB = "onnxruntime-web"
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
      const kind = new ort.Tensor(type, [], [0]).data.constructor;
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


def check(runtimes: Sequence[str]) -> None:
    """Refuses runtimes that are not installed, and says how they are."""
    for name in runtimes:
        for package in _PACKAGES.get(name, ()):
            find(package, name, f"to_onnx(..., runtimes=[{name!r}])")
    if "web" in runtimes and not _web_found():
        raise MissingPackageError(
            "to_onnx(..., runtimes=['web']) needs Node.js and the npm package onnxruntime-web, "
            "which are not found from here.",
            write=f"npm install {_WEB}, in the working directory or a folder of NODE_PATH",
        )


def run(name: str, file: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    """What each call gives in a runtime.

    Raises:
        UnsupportedOperationError: it does not run the model.
    """
    calls = [case["inputs"] for case in cases]
    try:
        return list(_RUNS[name](file, calls))
    except Exception as error:  # of any runtime, for any reason
        text = f"{type(error).__name__}: {error}"[-1500:]
        raise UnsupportedOperationError(
            f"The runtime {name} does not run this model.",
            where=f"runtimes=[{name!r}]",
            got=text,
            write="runtimes without it, or another form of what it names",
        ) from error


def _openvino(file: str, calls: Sequence[Arrays]) -> Iterator[Arrays]:
    openvino = importlib.import_module("openvino")
    # By itself it computes in bfloat16 where the processor has that.
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(file, "CPU", hints)
    taken = set().union(*(each.names for each in model.inputs))
    names = [each.name for each in _graph(file).output]
    for call in calls:
        results = model({name: value for name, value in call.items() if name in taken})
        yield {name: np.array(results[name]) for name in names}  # each has several names


def _graph(file: str) -> Any:
    return importlib.import_module("onnx").load(file, load_external_data=False).graph


def _iree(file: str, calls: Sequence[Arrays]) -> Iterator[Arrays]:
    compiler, runtime = map(importlib.import_module, _PACKAGES["iree"])
    graph = _graph(file)
    with stale_temporaries.scratch() as folder:
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
    for call in calls:
        made = function(*(call[each.name] for each in graph.input))
        results = made if isinstance(made, (tuple, list)) else (made,)
        yield {each.name: r.to_host().copy() for each, r in zip(graph.output, results)}


def _web(file: str, calls: Sequence[Arrays]) -> Iterator[Arrays]:
    def packed(value: Any) -> Any:
        array = np.ascontiguousarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        return [array.dtype.name, list(np.shape(value)), text]

    with stale_temporaries.scratch() as folder:
        place = Path(folder, "calls.json")
        place.write_text(json.dumps([{k: packed(v) for k, v in call.items()} for call in calls]))
        _run_tool(["node", "-e", _NODE, "--", file, str(place)])
        for result in json.loads(place.read_text()):
            yield {name: _array(*each) for name, each in result.items()}


def _array(dtype: str, shape: Sequence[int], text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def _web_found() -> bool:
    if not shutil.which("node"):
        return False
    found = subprocess.run(["node", "-e", f"require.resolve({_WEB!r})"], capture_output=True)
    return found.returncode == 0


def _run_tool(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1500:])


_RUNS = {"openvino": _openvino, "iree": _iree, "web": _web}
