"""Screens a SavedModel: parses its graph and checks every operation.

Operations outside of `allowed_operations` are refused, in all graphs and functions, by name,
attributes, and custom calls of their StableHLO programs, of which some take raw pointers.

Two kinds of operations may use files, if the file name comes from the right tensor:

- lookup tables: from an asset of the SavedModel. TensorFlow 1 stores the exporter's path there and
  loaders feed another, so no other operation may read that tensor;
- the saver: from the tensor fed with the path of the checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pax_export._foundations.errors import UntrustedExportError, a_few
from pax_export._foundations.optional import require
from pax_export.export.artifact import allowed_operations as operations
from pax_export.export.artifact import saved_models

#: XLA expands them itself, or they are only annotations.
EXPANDED = frozenset("""
    Sharding SPMDFullToShardShape SPMDShardToFullShape annotate_device_placement shape_assertion
    stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator stablehlo.dynamic_top_k
    stablehlo.dynamic_approx_top_k ApproxTopK mhlo.topk mhlo.erf AllocateBuffer
    Eigh Qr ProductOfElementaryHouseholderReflectors LuDecomposition
    xla.sdy.FuncResultSharding xla.sdy.GlobalToLocalShape xla.sdy.LocalToGlobalShape
""".split())  # fmt: skip
#: Functions of the SavedModel, which are looked over like all others.
_OF_TENSORFLOW = frozenset(("tf.call_tf_function",))
#: Operations that wait for another program.
WAITING = ("infeed", "outfeed", "send", "recv")

#: A module contains names literally or, in its text, with escapes for some letters.
_MARKS = tuple(each.encode() for each in ("custom_call", *WAITING, "\\"))
_OPERATION = re.compile(rf"\b(?:stablehlo|mhlo|vhlo)\.({'|'.join(WAITING)})(?:_v\d+)?\b")
_CALL = re.compile(r"\b(?:stablehlo|mhlo|vhlo)\.custom_call(?:_v\d+)?\b(.)(.?)")
_TARGET = re.compile(r'custom_call @(?:"((?:[^"\\]|\\.)*)"|([\w$.-]+))\(')


def may_call(module: bytes) -> bool:
    """Returns whether a module may contain operations to check."""
    return any(mark in module for mark in _MARKS)


def unknown_calls(module: bytes) -> list[str]:
    """Returns the calls of an `XlaCallModule` that are not allowed."""
    if not may_call(module):
        return []
    text = _module_text(module)
    if text is None:
        return ["a program that cannot be read"]
    targets = {quoted or plain for quoted, plain in _TARGET.findall(text)}
    found = sorted(targets - EXPANDED - _OF_TENSORFLOW)
    found += sorted(set(_OPERATION.findall(text)))
    if any(each != (" ", "@") for each in _CALL.findall(text)):
        found.append("a custom call without a name")
    return found


def _module_text(module: bytes) -> str | None:
    """Returns a program as text, by TensorFlow or by jax, whichever can read it."""
    for read in (_text_by_tensorflow, _text_by_jax):
        try:
            return read(module)
        except Exception:  # of several kinds; what a mistake hides is refused, never run
            continue
    return None


def _text_by_tensorflow(module: bytes) -> str:
    reader: Any = require("tensorflow.compiler.mlir.stablehlo.stablehlo", "tensorflow", "load")
    passes: Any = require("tensorflow.python.pywrap_mlir", "tensorflow", "load")
    name = "deserialize_portable_artifact"  # and of TensorFlow 2.19 on, with `_str`
    read = getattr(reader, f"{name}_str", None) or getattr(reader, name)
    return passes.ExperimentalRunPassPipeline(read(module), b"", False)


def _text_by_jax(module: bytes) -> str:
    stablehlo: Any = require("jax.extend.mlir.dialects.stablehlo", "all", "load")
    with require("jax.interpreters.mlir", "all", "load").make_ir_context() as context:
        handler = context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            parsed = stablehlo.deserialize_portable_artifact(context, module)
            return parsed.operation.get_asm(large_elements_limit=16)
        finally:
            handler.detach()


# --- Screens a SavedModel: parses its graph and checks every operation ---


_MOST_NAMED = 5
_DEEPEST = 20
_SAME = frozenset(("Identity", "IdentityN", "EnsureShape"))
_LOOKS_AT_VARIABLE = frozenset(("ReadVariableOp", "VarIsInitializedOp"))
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
#: Where the first releases of TensorFlow listed the assets.
_ASSETS = "saved_model_assets"
#: Text that leads out of the folder of a checkpoint.
_LEADS_AWAY = re.compile(rb"^/|\.\.|://|\\")


def screen(path: Path) -> None:
    """Refuses a SavedModel with operations that may do more than compute.

    Raises:
        UntrustedExportError: it has such operations; the message names them and their functions.
        ExportPathError: the SavedModel is missing or unreadable.
    """
    model = saved_models.read_saved_model(path, "load")
    with saved_models.unreadable_as_error(path):
        found = list(dict.fromkeys(_find_violations(model, path)))
    if found:
        raise UntrustedExportError(
            "The SavedModel contains operations that are not allowed in untrusted models.",
            where=str(path),
            got=a_few(found, _MOST_NAMED),
            write="trusted=True, if you trust its source and allow these operations",
        )


def _find_violations(model: Any, path: Path) -> Iterator[str]:
    for graph in model.meta_graphs:
        yield from _assets_outside(graph, path)
        scopes = _graph_scopes(graph)
        functions = {each.name for each in scopes if each.place}
        # A function by the name of an operation would do something else where that is followed.
        for name in sorted(functions & (operations.KNOWN | operations.REFUSED.keys())):
            yield f"a function called {name}"
        suspects: list[tuple[_GraphScope, Any]] = []
        for scope in scopes:
            for node in scope.nodes:
                operation = node.op
                if operation in operations.TABLE_FILES or operation in operations.CHECKPOINTS:
                    suspects.append((scope, node))
                elif operation not in operations.ALLOWED and operation not in functions:
                    yield from (f"{each} in {scope}" for each in _disallowed_parts(node))
                called = map(_functions_in, node.attr.values())
                names = {function.name for each in called for function in each}
                for name in sorted(names - functions - operations.ALLOWED - {""}):
                    yield f"{name}, which {operation} calls, in {scope}"
        flow = _FileNames(graph, scopes)
        for scope, node in suspects:
            if not flow.is_honest(scope, node):
                yield f"{node.op} in {scope}"


def _disallowed_parts(node: Any) -> Iterator[str]:
    """Yields disallowed parts of an operation: itself, or calls of the program in it."""
    if node.op in operations.MODULES:
        module = node.attr["module"]
        if module.WhichOneof("value") == "s":
            yield from (f"{each} of {node.op}" for each in unknown_calls(module.s))
        else:  # a function may take it from its caller
            yield node.op
    elif node.op not in operations.BY_ATTRIBUTE or _names_a_file(node):
        yield node.op


def _names_a_file(node: Any) -> bool:
    attribute = operations.BY_ATTRIBUTE[node.op]
    if attribute.name not in node.attr:
        return False
    value = node.attr[attribute.name]
    # A function may take the text from its caller.
    return value.WhichOneof("value") != "s" or not attribute.names_no_file(value.s)


def _assets_outside(graph: Any, path: Path) -> Iterator[str]:
    folder = path / "assets"
    for asset in _asset_files(graph):
        name = PurePosixPath(asset.filename)
        inside = not name.is_absolute() and ".." not in name.parts and "\\" not in asset.filename
        if not (inside and (folder / name).resolve().is_relative_to(path.resolve())):
            yield f"a vocabulary at {asset.filename!r}"


def _asset_files(graph: Any) -> Sequence[Any]:
    """Returns the assets that the loader uses."""
    if graph.asset_file_def or _ASSETS not in graph.collection_def:
        return graph.asset_file_def
    packed = graph.collection_def[_ASSETS].any_list.value
    found = [type(graph)().asset_file_def.add() for _ in packed]
    for asset, each in zip(found, packed):
        each.Unpack(asset)
    return found


def _tensors_of(arrays: Mapping[str, Any]) -> set[str]:
    """Returns the nodes of a signature's tensors; for sparse or composite ones, all parts."""
    found = set()
    for info in arrays.values():
        kinds = ("values", "indices", "dense_shape")
        parts = (getattr(info.coo_sparse, f"{kind}_tensor_name") for kind in kinds)
        components = (each.name for each in info.composite_tensor.components)
        found.update(map(_node_of, (info.name, *parts, *components)))
    return found


class _Origin(NamedTuple):
    """The required origin of a file name."""

    saver: bool  # the caller of save or restore supplies it; otherwise it is an asset's
    fed: bool = False  # the caller supplies the names of the assets


class _GraphScope(NamedTuple):
    """The graph, or a function of its library: where names of nodes mean something."""

    place: int  # 0 for the graph
    name: str
    nodes: Sequence[Any]
    arguments: Mapping[str, int]

    def __str__(self) -> str:
        return self.name if self.place else "the graph"


def _graph_scopes(graph: Any) -> list[_GraphScope]:
    scopes = [_GraphScope(0, "", graph.graph_def.node, {})]
    for number, function in enumerate(graph.graph_def.library.function, 1):
        arguments = {each.name: i for i, each in enumerate(function.signature.input_arg)}
        scopes.append(_GraphScope(number, function.signature.name, function.node_def, arguments))
    return scopes


class _FileNames:
    def __init__(self, graph: Any, scopes: Sequence[_GraphScope]):
        self._graph, self._scopes = graph, scopes
        self._nodes: dict[int, dict[str, Any]] = {}
        self._assets = {_node_of(each.tensor_info.name) for each in _asset_files(graph)}
        self._saver = _node_of(graph.saver_def.filename_tensor_name)
        for signature in graph.signature_def.values():
            # Whoever calls a signature is not the one who loads the model.
            tensors = _tensors_of(signature.inputs)
            self._assets -= tensors
            self._saver = "" if self._saver in tensors else self._saver

    def _find_node(self, scope: _GraphScope, tensor: str) -> Any:
        if scope.place not in self._nodes:
            self._nodes[scope.place] = {node.name: node for node in scope.nodes}
        return self._nodes[scope.place].get(_node_of(tensor))

    @cached_property
    def _call_graph(self) -> tuple[dict[str, list[tuple[_GraphScope, Any]]], set[str]]:
        """Returns the callers of each function; and functions with other uses."""
        library = self._graph.graph_def.library
        names = Counter(scope.name for scope in self._scopes)
        # Two functions with one name: it is unknown which one TensorFlow uses.
        tangled = {name for name, count in names.items() if count > 1}
        tangled.update(each.gradient_func for each in library.gradient)
        tangled.update(each.gradient_func for each in library.registered_gradients)
        callers: dict[str, list[tuple[_GraphScope, Any]]] = {}
        for scope in self._scopes:
            for node in scope.nodes:
                if node.op in names:
                    callers.setdefault(node.op, []).append((scope, node))
                for key, value in node.attr.items():
                    called = [each.name for each in _functions_in(value)]
                    if node.op in _CALLS and key == "f":
                        for name in called:
                            callers.setdefault(name, []).append((scope, node))
                    else:  # a loop, a branch, a dataset: their operands are not followed
                        tangled.update(called)
        return callers, tangled

    def is_honest(self, scope: _GraphScope, node: Any) -> bool:
        """Whether the files of an operation are assets, or paths given to the saver."""
        saver = node.op in operations.CHECKPOINTS
        indices = (operations.CHECKPOINTS if saver else operations.TABLE_FILES)[node.op]
        inputs = _data_inputs(node)
        fed = not saver and not scope.place and self._runs_only_when_loaded(node)
        return all(
            index < len(inputs) and self._is_from(_Origin(saver, fed), scope, inputs[index], set())
            for index in indices
        )

    def _runs_only_when_loaded(self, node: Any) -> bool:
        """Returns whether only the initialization of the model uses an operation of the graph."""
        found, new = {node.name}, [node.name]
        while new:
            for user in self._users_of_nodes.get(new.pop(), ()):
                if user.op != "NoOp":
                    return False
                if user.name not in found:
                    found.add(user.name)
                    new.append(user.name)
        return found.isdisjoint(self._run_later)

    @cached_property
    def _users_of_nodes(self) -> dict[str, list[Any]]:
        """The operations of the graph that wait for one."""
        found: dict[str, list[Any]] = {}
        for node in self._scopes[0].nodes:
            for each in node.input:
                found.setdefault(_node_of(each), []).append(node)
        return found

    @cached_property
    def _run_later(self) -> set[str]:
        """The nodes that run although no names of assets are given."""
        saver = self._graph.saver_def
        found = {_node_of(saver.save_tensor_name), saver.restore_op_name}
        for key, signature in self._graph.signature_def.items():
            found |= set() if key == saved_models.INITIALIZER else _tensors_of(signature.outputs)
        return found

    def _is_from(
        self, origin: _Origin, scope: _GraphScope, tensor: str, seen: set[tuple[int, str]]
    ) -> bool:
        name = _node_of(tensor)
        if (scope.place, name) in seen:
            return True  # a cycle adds nothing
        seen.add((scope.place, name))
        if name in scope.arguments:
            return self._argument_is_from(origin, scope, scope.arguments[name], seen)
        node = self._find_node(scope, tensor)
        if node is None:
            return False
        if not scope.place and name in ({self._saver} if origin.saver else self._assets):
            return self._is_fed(origin, node)
        inputs = _data_inputs(node)
        if node.op in _SAME and _output_number(tensor) < len(inputs):
            return self._is_from(origin, scope, inputs[_output_number(tensor)], seen)
        if not origin.saver and node.op == "ReadVariableOp" and not scope.place and inputs:
            return self._is_assigned_from(_node_of(inputs[0]), seen)
        if not origin.saver or not inputs:
            return False
        # The saver composes a path from the given one and suffixes.
        if node.op == "ShardedFilename":
            return self._is_from(origin, scope, inputs[0], seen)
        if node.op == "StringJoin":
            first, *rest = inputs
            return self._is_from(origin, scope, first, seen) and all(
                self._is_word(scope, each) for each in rest
            )
        if node.op == "Pack":
            return all(self._is_from(origin, scope, each, seen) for each in inputs)
        return False

    def _is_assigned_from(self, name: str, seen: set[tuple[int, str]]) -> bool:
        """Returns whether a variable only stores assets, whose paths TensorFlow assigns once."""
        graph = self._scopes[0]
        handle = self._find_node(graph, name)
        if handle is None or handle.op != "VarHandleOp":
            return False
        shared = _shared_name(handle)
        for scope in self._scopes:
            for node in scope.nodes:
                other = scope.place or node.name != name
                if node.op == "VarHandleOp" and other and _shared_name(node) == shared:
                    return False  # the same variable by another name
        for node in graph.nodes:
            inputs = _data_inputs(node)
            if name not in map(_node_of, inputs) or node.op in _LOOKS_AT_VARIABLE:
                continue
            if node.op != "AssignVariableOp" or len(inputs) != 2 or _node_of(inputs[1]) == name:
                return False  # other uses are not followed
            if not self._is_from(_Origin(saver=False), graph, inputs[1], seen):
                return False
        return True

    def _argument_is_from(
        self, origin: _Origin, scope: _GraphScope, index: int, seen: set[tuple[int, str]]
    ) -> bool:
        callers, tangled = self._call_graph
        if scope.name in tangled or not self._is_bound(origin.saver, scope, index):
            return False
        for caller, node in callers.get(scope.name, ()):
            inputs = _data_inputs(node)
            if index >= len(inputs) or not self._is_from(origin, caller, inputs[index], seen):
                return False
        return True

    def _is_bound(self, saver: bool, scope: _GraphScope, index: int) -> bool:
        """Whether the object that calls a function, if any, hands it an asset there."""
        objects = self._graph.object_graph_def
        if scope.name not in objects.concrete_functions:
            return True
        bound = objects.concrete_functions[scope.name].bound_inputs
        captured = index - (len(scope.arguments) - len(bound))
        if saver or captured < 0:
            return False
        return objects.nodes[bound[captured]].WhichOneof("kind") == "asset"

    def _is_fed(self, origin: _Origin, node: Any) -> bool:
        """Returns whether the loader of the model supplies the path; a default names no folder."""
        if node.op == "Placeholder":
            return True
        if node.op == "Const":
            return origin.fed or (
                origin.saver and self._is_word(self._scopes[0], node.name, alone=True)
            )
        default = _data_inputs(node)[:1]
        return node.op == "PlaceholderWithDefault" and all(
            self._is_word(self._scopes[0], each, alone=True) for each in default
        )

    def _is_word(
        self, scope: _GraphScope, tensor: str, alone: bool = False, depth: int = 0
    ) -> bool:
        """Whether this is text in the graph that leads to no other folder."""
        node = self._find_node(scope, tensor)
        if node is None or depth > _DEEPEST:
            return False
        inputs = _data_inputs(node)
        if node.op in ("Select", "SelectV2") and len(inputs) == 3:
            return all(self._is_word(scope, each, alone, depth + 1) for each in inputs[1:])
        if node.op in (*_SAME, "PlaceholderWithDefault") and _output_number(tensor) < len(inputs):
            return self._is_word(scope, inputs[_output_number(tensor)], alone, depth + 1)
        if node.op != "Const":
            return False
        values = node.attr["value"].tensor.string_val
        return bool(values) and not any(
            _LEADS_AWAY.search(each) or (alone and b"/" in each) for each in values
        )


def _functions_in(attribute: Any) -> Iterable[Any]:
    kind = attribute.WhichOneof("value")
    if kind == "func":
        return (attribute.func,)
    return attribute.list.func if kind == "list" else ()


def _shared_name(handle: Any) -> bytes:
    shared = handle.attr["shared_name"].s if "shared_name" in handle.attr else b""
    return shared or handle.name.encode()


def _data_inputs(node: Any) -> list[str]:
    return [each for each in node.input if not each.startswith("^")]


def _node_of(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]


def _output_number(tensor: str) -> int:
    """Returns the index of an output: of ``name``, ``name:1`` or ``name:output:1``."""
    last = tensor.rpartition(":")[2]
    return int(last) if ":" in tensor and last.isdigit() else 0
