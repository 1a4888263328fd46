"""SavedModels that do harm as soon as they are loaded: what is to be refused.

    python -m tests.export.attacks FOLDER

makes them in FOLDER, loads each, and prints what became of it, and what they have left there.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VICTIM, PRECIOUS = "victim", "precious"


#: A custom call in a branch of a function that another calls.
NESTED = """
func.func private @inner(%x: tensor<4x4xf32>, %p: tensor<i1>) -> tensor<4x4xf32> {
  %0 = "stablehlo.if"(%p) ({
    %1 = stablehlo.custom_call @"TARGET"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32>
    stablehlo.return %1 : tensor<4x4xf32>
  }, { stablehlo.return %x : tensor<4x4xf32> }) : (tensor<i1>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}
func.func @main(%x: tensor<4x4xf32>, %p: tensor<i1>) -> tensor<4x4xf32> {
  %0 = call @inner(%x, %p) : (tensor<4x4xf32>, tensor<i1>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}
"""
WAITING = """
func.func @main() -> tensor<4x4xf32> {
  %token = stablehlo.create_token : !stablehlo.token
  %0:2 = "stablehlo.infeed"(%token) {infeed_config = "", layout = [[0, 1]]}
    : (!stablehlo.token) -> (tensor<4x4xf32>, !stablehlo.token)
  return %0#0 : tensor<4x4xf32>
}
"""


#: A factorization whose results have no room for what the library writes.
TOO_SMALL = """
func.func public @main(%x: tensor<256x256xf32>) -> tensor<256x256xf32> {
  %0:2 = stablehlo.custom_call @lapack_sgeqrf_ffi(%x) {mhlo.backend_config = {}}
    : (tensor<256x256xf32>) -> (tensor<1x1xf32>, tensor<1xf32>)
  %1 = stablehlo.reshape %0#0 : (tensor<1x1xf32>) -> tensor<f32>
  %2 = stablehlo.broadcast_in_dim %1, dims = [] : (tensor<f32>) -> tensor<256x256xf32>
  return %2 : tensor<256x256xf32>
}
"""
#: The same where the program says at run time how large they are.
SYMBOLIC = """
func.func public @main(%x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %one = stablehlo.constant dense<1> : tensor<2xi32>
  %k = stablehlo.constant dense<1> : tensor<1xi32>
  %0:2 = stablehlo.custom_call @lapack_sgeqrf_ffi(%x, %one, %k)
    {mhlo.backend_config = {}, indices_of_shape_operands = dense<[1, 2]> : tensor<2xi64>}
    : (tensor<?x?xf32>, tensor<2xi32>, tensor<1xi32>) -> (tensor<?x?xf32>, tensor<?xf32>)
  return %0#0 : tensor<?x?xf32>
}
"""


def bundle(path: Path, text: str, symbolic: bool = False) -> Path:
    """A bundle of a function of a square matrix, with a program of somebody else in it."""
    import dataclasses

    import jax
    from jax import export

    from pax_export.export import to_stablehlo

    shape = export.symbolic_shape("m, m") if symbolic else (256, 256)
    honest = export.export(jax.jit(lambda x: 2 * x), platforms=("cpu",))(
        jax.ShapeDtypeStruct(shape, "float32")
    )
    forged = dataclasses.replace(honest, mlir_module_serialized=module(text), _get_vjp=None)
    to_stablehlo(forged, path, validate=False)
    return path


def module(text: str) -> bytes:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        parsed = ir.Module.parse(text)
        return stablehlo.serialize_portable_artifact(parsed, "1.1.0")


def const(nodes: Any, name: str, value: Any) -> str:
    import tensorflow as tf

    node = nodes.add(op="Const", name=name)
    tensor = tf.make_tensor_proto(value)
    node.attr["value"].tensor.CopyFrom(tensor)
    node.attr["dtype"].type = tensor.dtype
    return f"{name}:output:0"


def overwrites_a_file(nodes: Any, node: Any, here: Path) -> None:
    import numpy as np

    node.op = "CalibrationStatisticsSaver"
    values = np.float32(0), np.float32(1), np.zeros(2, np.int64)
    node.input.extend(const(nodes, f"statistic{i}", each) for i, each in enumerate(values))
    node.attr["Tin"].list.type.extend((1, 1, 9))
    node.attr["ids"].list.s.append(b"1")
    node.attr["calibration_methods"].list.i.append(1)
    node.attr["output_file_path"].s = str(here / VICTIM).encode()


def writes_folders(nodes: Any, node: Any, here: Path) -> None:
    node.op = "DumpTensor"
    node.input.append(const(nodes, "dumped_tensor", "x"))
    node.attr["T"].type = 7
    node.attr["log_dir_path"].s = str(here / "dumped").encode()
    for each in ("tensor_name", "file_name", "func_name", "node_name"):
        node.attr[each].s = b"x"
    del node.attr["tensor_name"]
    node.attr["enabled"].b = True


def opens_a_port(nodes: Any, node: Any, here: Path) -> None:
    server = nodes.add(op="RpcServer", name="server")
    server.input.append(const(nodes, "address", "localhost:0"))
    node.op = "RpcServerStart"
    node.input.append("server:server:0")


def waits_for_ever(nodes: Any, node: Any, here: Path) -> None:
    queue = nodes.add(op="FIFOQueueV2", name="queue")
    queue.attr["component_types"].list.type.append(1)
    node.op = "QueueDequeueV2"
    node.input.append("queue:handle:0")
    node.attr["component_types"].list.type.append(1)


ATTACKS: tuple[Callable[[Any, Any, Path], None], ...] = (
    overwrites_a_file, writes_folders, opens_a_port, waits_for_ever,
)  # fmt: skip


def saved_model(attack: Callable[[Any, Any, Path], None], here: Path) -> Path:
    """A SavedModel that attacks in an initializer, which TensorFlow runs while it loads."""
    import tensorflow as tf
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    from tests.export.artifact.test_trust import writes

    path = here / attack.__name__
    module = writes(tf, here / "not_written")
    tf.saved_model.save(module, str(path), signatures=module.function)
    (here / "not_written").unlink(missing_ok=True)
    message = SavedModel.FromString((path / "saved_model.pb").read_bytes())
    for function in message.meta_graphs[0].graph_def.library.function:
        for node in [each for each in function.node_def if each.op == "WriteFile"]:
            node.attr.clear()
            del node.input[:]
            attack(function.node_def, node, here)
    (path / "saved_model.pb").write_bytes(message.SerializeToString())
    return path


def traces(here: Path) -> list[str]:
    found = [each.name for each in here.iterdir() if each.name in ("dumped", "not_written")]
    return found + [VICTIM] * ((here / VICTIM).read_bytes() != PRECIOUS.encode())


def of_saved_models(here: Path) -> None:
    from pax_export.export import load, spec, to_saved_model
    from pax_export.export.validation.recheck import Rechecked

    (here / VICTIM).write_text(PRECIOUS)
    to_saved_model(({}, lambda params, x: x), here / "honest", spec("n, 3"), validate=False)
    for attack in ATTACKS:
        path = saved_model(attack, here)
        shutil.copy(here / "honest" / "pax_export.json", path)
        for opened in (load, Rechecked):
            said = outcome(lambda opened=opened, path=path: opened(path))
            print(opened.__name__, attack.__name__, said, flush=True)
    print("traces", *traces(here), flush=True)
    for attack in ATTACKS[:2]:  # they are real
        outcome(lambda attack=attack: load(here / attack.__name__, trusted=True))
    print("trusted", *sorted(traces(here)), flush=True)


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'got', error)}"
    return "done"


if __name__ == "__main__":
    of_saved_models(Path(sys.argv[1]))
