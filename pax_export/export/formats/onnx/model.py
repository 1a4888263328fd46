"""An ONNX model of a traced program: its inputs, outputs and weights by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedDtypeError, UnsupportedOperationError
from pax_export._optional import require
from pax_export.export.formats.onnx import rules as rules
from pax_export.export.formats.onnx.convert import Converter, NotInOnnxError
from pax_export.export.formats.onnx.graph import Writer, bodies, flat, needed, read_in
from pax_export.export.formats.onnx.registry import Refused, has
from pax_export.export.formats.onnx.values import (
    AnyValue,
    Parts,
    Value,
    carrier,
    is_complex,
    is_number,
    is_rounded,
    part_dtype,
)
from pax_export.export.portable import decompose
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import placed

_WRITE = (
    "the same in other operations of jax.numpy and jax.lax, a size instead of a symbolic "
    "dimension, or another target, e.g. to_saved_model"
)


def converted(
    program: Program, names: Sequence[str], weights: Mapping[str, Any], opset: int
) -> bytes:
    """Converts a program to an ONNX model of a version of ONNX's operators.

    `names` are those of the weights that are its leaves and constants, in order.
    """
    onnx = require("onnx", "onnx", "to_onnx")
    model = _Model(onnx, program, names, weights, opset).made()
    _check_operators(onnx, model, opset)
    return model.SerializeToString(deterministic=True)


class _Model:
    def __init__(
        self,
        onnx: Any,
        program: Program,
        names: Sequence[str],
        weights: Mapping[str, Any],
        opset: int,
    ):
        self._onnx = onnx
        self._program = program
        self._opset = opset
        self._constants: dict[int, AnyValue] = {}
        self._converter = Converter(onnx, opset, self._constants)
        self._writer: Writer = self._converter.writer
        self._inputs = [entry.name for entry in program.inputs.flat]
        self._outputs = list(program.output_names)
        self._weights = weights
        self._names = names

    def made(self) -> Any:
        onnx, traced, writer = self._onnx, self._program.traced, self._writer
        count = len(traced.structs) - len(self._inputs)
        structs = traced.structs[count:]
        try:
            writer.operation = "input"
            taken = [self._taken(*each) for each in zip(self._inputs, structs)]
            writer.sizes.learn((n, each.shape) for n, each in zip(self._inputs, structs))
            stored = self._stored()
            values = [stored[name] for name in self._names]
            held = zip(traced.constants, values[count:])
            self._constants.update((id(array), value) for array, value in held)
            wanted = range(len(self._outputs))
            portable = decompose(traced.program, has)
            found = self._converter.inline(portable, [*values[:count], *taken], wanted)
        except Refused as error:
            raise UnsupportedOperationError(
                f"ONNX cannot express {error}.", where=self._program.key, write=_WRITE
            ) from error
        except NotInOnnxError as error:
            raise _refused(error, self._program) from error
        outputs = [self._given(*each) for each in zip(self._outputs, found)]
        entries = [self._entry(*each) for each in zip(self._inputs, structs)]
        nodes = needed(writer.nodes, set(self._outputs))
        used = {name for node in nodes for name in read_in(node)}
        initializers = [each for name, each in writer.initializers.items() if name in used]
        graph = onnx.helper.make_graph(nodes, "pax_export", entries, outputs, initializers)
        versions = [onnx.helper.make_opsetid("", self._opset)]
        model = onnx.helper.make_model(graph, producer_name="pax_export", opset_imports=versions)
        model.ir_version = onnx.helper.find_min_ir_version_for(versions)
        return model

    def _taken(self, name: str, struct: Any) -> AnyValue:
        """An input, as the type that carries it."""
        _refuse_complex(struct, f"input {name}")
        carried = name
        if is_rounded(struct.dtype):
            carried = self._writer.cast(name, carrier(struct.dtype))
        return Value(carried, np.dtype(struct.dtype), tuple(struct.shape))

    def _stored(self) -> dict[str, AnyValue]:
        """The weights, under the names of the leaves where nothing else has these."""
        taken = {*self._inputs, *self._outputs}
        made = {}
        for name, value in self._weights.items():
            free = name if name not in taken else f"weight:{name}"
            made[name] = self._weight(free, np.asarray(value))
        return made

    def _weight(self, name: str, array: np.ndarray) -> AnyValue:
        half = part_dtype(array.dtype)
        if half is not None:
            one, other = (
                self._weight(f"{name}.{kind}", np.ascontiguousarray(part))
                for kind, part in (("real", np.real(array)), ("imag", np.imag(array)))
            )
            assert isinstance(one, Value)
            assert isinstance(other, Value)
            return Parts((one, other), array.dtype)
        stored = carried = self._writer.store(array, name)
        if is_rounded(array.dtype):
            carried = self._writer.cast(stored, carrier(array.dtype))
        return Value(carried, array.dtype, array.shape)

    def _given(self, name: str, value: AnyValue) -> Any:
        """Makes a value an output, in its own dtype."""
        _refuse_complex(value, f"output {name}")
        (array,) = flat([value])
        helper = self._onnx.helper
        if is_rounded(array.dtype):
            kind = self._writer.cast_to(array.dtype)
            node = helper.make_node("Cast", [array.name], [name], name=name, **kind)
        else:
            node = helper.make_node("Identity", [array.name], [name], name=name)
        self._writer.nodes.append(node)
        return self._entry(name, value)

    def _entry(self, name: str, struct: Any) -> Any:
        shape = [int(size) if is_number(size) else str(size) for size in struct.shape]
        number = self._writer.type(struct.dtype)
        return self._onnx.helper.make_tensor_value_info(name, number, shape)


def _refuse_complex(struct: Any, where: str) -> None:
    if is_complex(struct.dtype):
        raise UnsupportedDtypeError(
            "ONNX files take and give no complex numbers.",
            where=where,
            got=np.dtype(struct.dtype).name,
            write="the real and the imaginary part, as two arrays",
        )


def _check_operators(onnx: Any, model: Any, opset: int) -> None:
    """Refuses operators that the opset does not have yet."""
    newer: dict[str, int] = {}
    for node in _nodes(model.graph):
        if not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            newer[node.op_type] = onnx.defs.get_schema(node.op_type).since_version
    if newer:
        raise UnsupportedOperationError(
            "This opset of ONNX does not have all operators of the model: "
            + ", ".join(sorted(newer))
            + ".",
            got=f"opset={opset}",
            write=f"opset={max(newer.values())}, if what will run the model has it",
        )


def _nodes(graph: Any) -> Any:
    """All operators, those of the bodies of loops and branches too."""
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from _nodes(body)


def _refused(error: NotInOnnxError, program: Program) -> UnsupportedOperationError:
    name = error.equation.primitive.name
    what = f"ONNX has no rule for the operation {name}"
    if error.reason:
        what = f"ONNX cannot express the operation {name}: {error.reason[:300]}"
    refusal = UnsupportedOperationError(f"{what}.", where=program.key, write=_WRITE)
    return placed(refusal, [(*error.callers, error.equation)])
