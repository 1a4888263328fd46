"""Builds the ONNX model of a traced program, with named inputs, outputs and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError, UnsupportedOperationError
from pax_export._foundations.optional import require
from pax_export.export.formats.onnx import rules
from pax_export.export.formats.onnx.fusions import (
    arithmetic,
    with_biases,
    with_integer_convolutions,
)
from pax_export.export.formats.onnx.graph import (
    MICROSOFT,
    RULES,
    GraphBuilder,
    all_nodes,
    bodies,
    is_number,
    needed,
    read_in,
)
from pax_export.export.formats.onnx.values import Value, carrier, is_complex, is_rounded
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline.format_exporter import portable_program
from pax_export.export.portable import (
    NotInTargetError,
    NotWrittenError,
    PassOptions,
    PortableProgram,
    Weight,
    in_parts,
    written_fast,
)
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import other_target, refuse_operation
from pax_export.export.validation.integers import Arithmetic, Quantized

if TYPE_CHECKING:
    from onnx import NodeProto

RULES.load(rules)
_WRITE = (
    "the same in other operations of jax.numpy and jax.lax, a size instead of a symbolic dimension"
)


@dataclass(frozen=True)
class OnnxOptions:
    opset: int
    fold: bool = True
    exact: bool = False
    accuracy_level: int = 4
    external_data: bool = False


@dataclass(frozen=True)
class Converted:
    """An ONNX model, and what became of the program.

    Attributes:
        model: the message, without initializers.
        arrays: the initializers by name.
        quantized: integers of weights by their names in the file.
        folded: names of weights that are in the file only in another form.
        notes: parts that were not optimized, with reasons.
        arithmetic: the products of quantized weights, and roundings to half precision.
    """

    model: Any
    arrays: Mapping[str, np.ndarray]
    quantized: Mapping[str, Quantized]
    folded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    arithmetic: Arithmetic = dataclasses.field(default_factory=Arithmetic)


def converted(program: Program, store: Store, options: OnnxOptions) -> Converted:
    """Converts a program to an ONNX model; its leaves and constants are in the store."""
    onnx = require("onnx", "onnx", "to_onnx")
    integers = options.accuracy_level == 4 and not options.exact
    wanted = PassOptions(fold=options.fold, keep=not options.exact, integers=integers)
    conversion, portable = written_fast(
        partial(portable_program, program, store),
        wanted,
        lambda portable: _ModelBuilder(onnx, program, store, options).build(portable),
    )
    _check_operators(onnx, conversion.model, options.opset)
    weights = (each for each in portable.weights if each.name in conversion.arrays)
    used = {source for each in weights for source in each.sources}
    names = (each.name for each in store.variables)
    folded = tuple(name for name in names if name in used and name not in conversion.arrays)
    return dataclasses.replace(conversion, folded=folded, notes=portable.notes)


class _ModelBuilder:
    def __init__(self, onnx: ModuleType, program: Program, store: Store, options: OnnxOptions):
        self._program = program
        self._builder = GraphBuilder(onnx, options.opset, options.exact, options.accuracy_level)
        names = [entry.name for entry in program.inputs.flat]
        self._inputs = list(zip(names, program.traced.structs[-len(names) :])) if names else []
        self._weights = {each.name: each.value for each in store.variables}
        self._constant_names = {
            id(each): store.variables[store.of_constant(each)].name
            for each in program.traced.constants
        }
        self._leaves: dict[str, list[Value]] = {}

    def build(self, portable: PortableProgram) -> Converted:
        try:
            inputs = self._read_inputs()
            values = [part for each in portable.weights for part in self._parts(each)]
            for key, name in self._constant_names.items():  # of loops and branches
                if len(stored := self._leaf(name)) == 1:
                    self._builder.known_arrays[key] = stored[0]
            found = self._builder.write(portable.program, [*values, *inputs])
        except NotInTargetError as error:
            raise UnsupportedOperationError(
                f"ONNX cannot express {error}.",
                where=self._program.key,
                write=f"{_WRITE}, or {other_target('')}",
            ) from error
        except NotWrittenError as error:
            raise refuse_operation("ONNX", error, self._program.key, _WRITE) from error
        return self._finish(found)

    def _read_inputs(self) -> list[Value]:
        self._builder.operation = "input"
        for name, struct in zip(self._program.output_names, self._program.traced.results):
            _refuse_complex(struct, f"output {name}")
        inputs = [self._input(*each) for each in self._inputs]
        self._builder.sizes.learn((name, each.shape) for name, each in self._inputs)
        return inputs

    def _finish(self, results: Sequence[Value]) -> Converted:
        onnx, builder = self._builder.onnx, self._builder
        names = self._program.output_names
        outputs = [self._output(*each) for each in zip(names, results)]
        entries = [self._entry(*each) for each in self._inputs]
        wanted = set(names)
        nodes = needed(builder.with_quotients(builder.nodes, wanted), wanted)
        nodes = with_biases(builder, nodes)
        nodes = needed(with_integer_convolutions(builder, nodes, wanted), wanted)
        nodes = _named_results(nodes, wanted)
        _turn_apart(builder, nodes)
        inner = [each for each in declare_shapes(builder, nodes) if each.name not in wanted]
        used = {name for node in nodes for name in read_in(node)}
        arrays = {name: each for name, each in builder.initializers.items() if name in used}
        graph = onnx.helper.make_graph(nodes, "pax_export", entries, outputs, value_info=inner)
        versions = [onnx.helper.make_opsetid("", builder.opset)]
        model = onnx.helper.make_model(graph, producer_name="pax_export", opset_imports=versions)
        model.ir_version = onnx.helper.find_min_ir_version_for(versions)
        if any(node.domain == MICROSOFT for node in all_nodes(nodes)):
            model.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
        quantized = {name: each for name, each in builder.quantized.items() if name in arrays}
        counted = arithmetic(builder, nodes, wanted)
        return Converted(model, arrays, quantized, arithmetic=counted)

    def _input(self, name: str, struct: Any) -> Value:
        """An input, as the type that carries it."""
        _refuse_complex(struct, f"input {name}")
        carried = name
        if is_rounded(struct.dtype):
            carried = self._builder.cast(name, carrier(struct.dtype))
        return Value(carried, np.dtype(struct.dtype), tuple(struct.shape))

    def _leaf(self, name: str) -> list[Value]:
        """Returns a weight, named like its leaf if that name is free."""
        if name not in self._leaves:
            is_free = name not in {*dict(self._inputs), *self._program.output_names}
            array = np.asarray(self._weights[name])
            self._leaves[name] = self._store(name if is_free else f"weight:{name}", array)
        return self._leaves[name]

    def _parts(self, weight: Weight) -> list[Value]:
        """A weight of the program; complex numbers are two."""
        if not weight.name:
            return [self._builder.literal(part) for part in in_parts(weight.array)]
        if not weight.sources:
            return self._leaf(weight.name)
        return self._store(weight.name, np.asarray(weight.array))

    def _store(self, name: str, array: np.ndarray) -> list[Value]:
        parts = in_parts(array)
        if len(parts) > 1:
            named = zip(("real", "imag"), parts)
            return [each for kind, part in named for each in self._store(f"{name}.{kind}", part)]
        stored = carried = self._builder.store(array, name)
        if is_rounded(array.dtype):
            carried = self._builder.cast(stored, carrier(array.dtype))
        self._builder.stored[carried] = stored
        return [Value(carried, array.dtype, array.shape)]

    def _output(self, name: str, value: Value) -> Any:
        """Makes a value an output, in its own dtype."""
        helper = self._builder.onnx.helper
        if is_rounded(value.dtype):
            kind = self._builder.cast_to(value.dtype)
            node = helper.make_node("Cast", [value.name], [name], name=name, **kind)
        else:
            node = helper.make_node("Identity", [value.name], [name], name=name)
        self._builder.nodes.append(node)
        return self._entry(name, value)

    def _entry(self, name: str, struct: Any) -> Any:
        shape = [int(size) if is_number(size) else str(size) for size in struct.shape]
        number = self._builder.type(struct.dtype)
        return self._builder.onnx.helper.make_tensor_value_info(name, number, shape)


def _named_results(nodes: Sequence[Any], outputs: Collection[str]) -> list[Any]:
    """Names results where they are computed, since runtimes copy them in `Identity`."""
    computed = {name for node in nodes for name in node.output}
    names: dict[str, str] = {}
    remaining = []
    for node in nodes:
        if node.op_type == "Identity" and not computed.isdisjoint(node.input):
            ((source,), (name,)) = node.input, node.output
            if name in outputs and source not in names and source not in outputs:
                names[source] = name
                continue
        remaining.append(node)
    for node in all_nodes(remaining):
        for field in (node.input, node.output):
            field[:] = [names.get(each, each) for each in field]
    return remaining


def _turn_apart(builder: GraphBuilder, nodes: Sequence[NodeProto]) -> None:
    """Expresses products with transposed weights by `Einsum`, if other products read the weights.

    OpenVINO 2026.4 shares one packed copy of such a weight for both if it is square.
    """
    every = list(all_nodes(nodes))
    read = {node.input[1] for node in every if node.op_type == "MatMul"}
    for node in every:
        if node.op_type == "Transpose" and node.input[0] in read:
            shape = np.shape(builder.initializers.get(node.input[0], ()))
            if len(shape) == 2 and shape[0] == shape[1]:
                make, names = builder.onnx.helper.make_node, (node.input, node.output)
                node.CopyFrom(make("Einsum", *names, name=node.name, equation="ij->ji"))


def _refuse_complex(struct: Any, where: str) -> None:
    if is_complex(struct.dtype):
        raise UnsupportedDtypeError(
            "ONNX files do not support complex inputs and outputs.",
            where=where,
            got=np.dtype(struct.dtype).name,
            write="the real and the imaginary part, as two arrays",
        )


def _check_operators(onnx: ModuleType, model: Any, opset: int) -> None:
    newer: dict[str, int] = {}
    for node in all_nodes(model.graph.node):
        if not (node.domain or onnx.defs.has(node.op_type, max_inclusive_version=opset)):
            newer[node.op_type] = onnx.defs.get_schema(node.op_type).since_version
    if newer:
        names = ", ".join(sorted(newer))
        raise UnsupportedOperationError(
            f"This opset of ONNX does not have all operators of the model: {names}.",
            got=f"opset={opset}",
            write=f"opset={max(newer.values())}, if the runtime supports it",
        )


def with_names_of_their_own(program: Program) -> Program:
    """Renames outputs that have the name of an input.

    The structure of the results does not change, so `load` returns the names of the model.
    """
    inputs = {entry.name for entry in program.inputs.flat}
    used = {*inputs, *program.output_names}
    new = {}
    for name in program.output_names:
        new[name] = _free(name, used) if name in inputs else name
        used.add(new[name])
    return dataclasses.replace(
        program,
        output_names=tuple(new[name] for name in program.output_names),
        output_structure=_renamed(program.output_structure, new),
    )


def _free(name: str, used: set[str]) -> str:
    free, number = f"{name}_output", 1
    while free in used:
        number += 1
        free = f"{name}_output_{number}"
    return free


def _renamed(structure: Mapping[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
    """A description of a structure, see `describe`, with other names of its leaves."""
    ((kind, content),) = structure.items()
    if kind == "leaf":
        return {kind: new[content]}
    if kind == "dict":
        return {kind: [[key, _renamed(child, new)] for key, child in content]}
    if kind in ("list", "tuple"):
        return {kind: [_renamed(child, new) for child in content]}
    return dict(structure)


# --- Shapes of what loops and branches compute, for importers that know only what a file says ----
# ONNX's inference of shapes finds none for results of loops and branches, and none in a body for
# operators whose axes are stored outside. IREE's importer takes values without shape for scalars.

#: Axes and shapes have no more elements; ONNX has them as int64.
_MOST_AXES = 8


def declare_shapes(builder: GraphBuilder, nodes: Sequence[Any]) -> list[Any]:
    """Returns entries for results of operators, above all loops; completes their bodies."""
    entries = []
    for node in nodes:
        for body in bodies(node):
            body.value_info.extend(declare_shapes(builder, body.node))
            _store_axes(builder, body)
        entries.extend(_describe_results(node))
        entries.extend(builder.declared[name] for name in node.output if name in builder.declared)
    return entries


def _describe_results(node: NodeProto) -> Iterator[Any]:
    """The entries of the results of a loop or branch; stacked ones have one more dimension."""
    body = next(bodies(node), None)
    if body is None:
        return
    outputs, attributes = list(body.output), {each.name: each.i for each in node.attribute}
    states = len(outputs)
    if node.op_type == "Loop":  # whose body computes a condition first
        outputs, states = outputs[1:], len(node.input) - 2
    elif node.op_type == "Scan":
        states = len(node.input) - attributes["num_scan_inputs"]
    for index, (name, result) in enumerate(zip(node.output, outputs, strict=True)):
        if not result.type.tensor_type.HasField("shape"):
            continue
        entry = type(result)(name=name, type=result.type)
        if index >= states:
            sizes = entry.type.tensor_type.shape
            sizes.ClearField("dim")
            sizes.dim.add()
            sizes.dim.extend(result.type.tensor_type.shape.dim)
        yield entry


def _store_axes(builder: GraphBuilder, body: Any) -> None:
    """Stores the axes and shapes that operators of a body read in the body itself."""
    stored: Mapping[str, np.ndarray] = builder.initializers
    inside: dict[str, Any] = {}
    for node in body.node:
        for index, name in enumerate(node.input):
            array = stored.get(name)
            if array is None or array.dtype != np.int64 or array.size > _MOST_AXES:
                continue
            if name not in inside:
                constant = builder.new_name("constant")
                value = builder.onnx.numpy_helper.from_array(array)
                inside[name] = builder.onnx.helper.make_node("Constant", [], [constant], constant)
                inside[name].attribute.append(builder.onnx.helper.make_attribute("value", value))
            node.input[index] = inside[name].output[0]
    every = [*inside.values(), *body.node]
    body.ClearField("node")
    body.node.extend(every)
