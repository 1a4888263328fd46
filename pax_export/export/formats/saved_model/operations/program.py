"""Lowers a traced program to a graph of TensorFlow's operations, and writes it into a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.jax import is_key
from pax_export._foundations.jaxpr import jaxpr_primitives
from pax_export._foundations.types import Aval
from pax_export.export.artifact import dimensions, saved_models
from pax_export.export.formats.saved_model.operations import rules
from pax_export.export.formats.saved_model.operations.graph import RULES, NodeBuilder, Output
from pax_export.export.formats.saved_model.operations.operators import differentiates
from pax_export.export.formats.saved_model.proto.messages import Body, Message
from pax_export.export.lowering.lower import Lowered, Portable
from pax_export.export.portable import (
    NotInTargetError,
    NotWrittenError,
    PassOptions,
    PortableProgram,
    in_parts,
    optimized,
)
from pax_export.export.portable.program import uses
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.source_lines import refuse_operation
from pax_export.export.tracing.traced import Traced
from pax_export.export.validation.cases import constraints

RULES.load(rules)
_RELATIONS = {"==": "Equal", ">=": "GreaterEqual", "<=": "LessEqual"}
_WRITE = "the same in other operations of jax.numpy and jax.lax"
_OTHER = "operations='xla'"
#: Models are convolved with features last, as TensorFlow does. Variables stay those of the model:
#: the gates of recurrent layers would change their order in each call.
_PASSES = PassOptions(fold=False, recurrent=False, features_first=False)


def lower_to_graph(
    traced: Traced,
    platforms: Sequence[str],
    count: int | None = None,
    names: Mapping[int, str] | None = None,
    trains: bool = False,
) -> Lowered:
    """Lowers a traced function, or its first `count` results, to operations of TensorFlow.

    It checks the shapes of the operands that have `names`, read or not. If the model `trains`,
    TensorFlow differentiates the operations themselves where that is what jax does.

    Raises:
        UnsupportedOperationError: TensorFlow has no kernel for an operation.
    """
    constants = {id(value): f"{at}" for at, value in enumerate(traced.constants)}
    results, first = tuple(traced.results[:count]), len(traced.structs)
    trains = trains and differentiates(traced.program)
    if trains:  # as it was traced: passes replace functions by others with another derivative
        program = PortableProgram(traced.program, ())
    else:
        program = optimized(traced.program, (), constants, _PASSES, len(results))
    read, at = uses(program.jaxpr), dict[Any, int]()
    for variable, weight in zip(program.jaxpr.invars, program.weights):
        if weight.name:
            at[variable] = first + int(weight.name)
    at |= {variable: index for index, variable in enumerate(program.inputs)}
    kept_places = sorted({*(names or ()), *(at[variable] for variable in at if read[variable])})
    positions = {key: first + int(name) for key, name in constants.items()} if trains else {}
    kept_places += positions.values()
    structs = (*traced.structs, *map(dtypes.struct_of, traced.constants))
    operands = tuple(at.get(variable, -1) for variable in program.jaxpr.invars)
    writer = _GraphWriter(
        program, structs, results, tuple(kept_places), operands, names or {}, positions, trains
    )
    try:
        graph = writer.write()
    except NotInTargetError as error:
        raise UnsupportedOperationError(
            f"TensorFlow cannot express {error}.", write=_WRITE
        ) from error
    except NotWrittenError as error:
        raise refuse_operation("TensorFlow", error, "", _WRITE, _OTHER) from error
    return Lowered(
        Portable(b"", saved_models.TARGETS[0]),
        graph.kept,
        traced.constants,
        results,
        tuple(platforms),
        graph=graph,
        differentiates=trains,
    )


@dataclass(frozen=True)
class OperationsGraph:
    """Operations that a function of a SavedModel consists of."""

    kept: tuple[int, ...]  # the operands that it reads or checks
    nodes: Sequence[Message]
    results: Sequence[str]
    functions: Sequence[Message]  # of its loops and branches

    def write(self, body: Body, tensors: Sequence[str]) -> list[str]:
        """Adds the operations to a function; returns the names of its results.

        `tensors` are the names of the kept operands.
        """
        names = dict(zip(map(_operand, self.kept), tensors))
        body.include(self.nodes, self.functions, names)
        return [names.get(result, result) for result in self.results]


def _operand(index: int) -> str:
    return f"operand_{index}"


@dataclass
class _GraphWriter:
    """Writes a program whose weights are constants, and the operands of a function."""

    program: PortableProgram
    structs: Sequence[Any]  # of all operands, as jax has them
    results: Sequence[Any]
    kept: tuple[int, ...]  # the operands that it reads or checks
    operands: Sequence[int]  # the operand of each variable of the program; -1 for a constant
    names: Mapping[int, str]  # of the operands that it checks
    held: Mapping[int, int]  # the operands of arrays in the program, by `id`
    differentiable: bool  # write operations whose derivative is that of jax

    def __post_init__(self) -> None:
        self._rows: dict[str, Any] = {}  # sizes that may be 0, while one row is computed
        self._builder = NodeBuilder(self.differentiable)

    def write(self) -> OperationsGraph:
        builder = self._builder
        builder.operation = "inputs"
        tensors = {index: self._taken(index) for index in self.kept}
        symbolic = [
            (self.names.get(index, ""), x, dtypes.stored(self.structs[index]).shape)
            for index, x in tensors.items()
        ]
        tensors = self._checks(builder.sizes.learn(symbolic), tensors)
        tensors = self._with_rows(tensors)
        builder.known_arrays = {key: tensors[index] for key, index in self.held.items()}
        operands: list[Any] = []
        for at, index in enumerate(self.operands):
            if index >= 0:
                operands += self._parts(index, tensors.get(index))
            else:
                operands += map(builder.literal, in_parts(self.program.weights[at].array))
        found = iter(builder.write(self.program.program, operands))
        builder.operation = "outputs"
        nodes, results = builder.finish([self._given(struct, found) for struct in self.results])
        return OperationsGraph(self.kept, nodes, results, builder.functions)

    def _taken(self, index: int) -> Output:
        """An operand, in the dtype that TensorFlow has for it."""
        struct, builder = dtypes.stored(self.structs[index]), self._builder
        shape = tuple(struct.shape)
        tensor = Output(_operand(index), np.dtype(struct.dtype), shape, builder.frame)
        if index not in self.names:
            return tensor
        sizes = [size if isinstance(size, int) else -1 for size in struct.shape]
        checked = builder("EnsureShape", tensor, shape={"dim": [{"size": size} for size in sizes]})
        return dataclasses.replace(checked, shape=tensor.shape)

    def _checks(
        self, pairs: Sequence[tuple[Any, Any, str]], tensors: dict[int, Output]
    ) -> dict[int, Output]:
        """Lets a call fail whose arrays have sizes that do not fit each other, or constraints."""
        if not self.names:
            return tensors
        builder, sizes = self._builder, self._builder.sizes
        checks = [builder.check("Equal", text, *pair) for *pair, text in pairs]
        for text in constraints(self.structs[index] for index in self.names):
            left, relation, right = dimensions.sides(text)
            both = sizes.of(left), sizes.of(right)
            checks.append(builder.check(_RELATIONS[relation], f"sizes: not {text}", *both))
        jaxpr = self.program.jaxpr
        read = uses(jaxpr)
        used = {p for variable, p in zip(jaxpr.invars, self.operands) if read[variable]}
        checks += [tensors[index].name.split(":")[0] for index in self.names.keys() - used]
        if not checks:
            return tensors
        return {p: builder.after(checks, x) if p in self.names else x for p, x in tensors.items()}

    def _with_rows(self, tensors: dict[int, Output]) -> dict[int, Output]:
        """Lets calls with an empty batch compute one row, which no result has.

        In TensorFlow 2.21, a convolution of no images has the shape of the images (oneDNN).
        """
        if "conv_general_dilated" not in jaxpr_primitives(self.program.program):
            return tensors
        builder, sizes = self._builder, self._builder.sizes
        shapes = [list(map(str, x.shape)) for x in tensors.values()]
        results = [set(map(str, each.shape)) for each in self.results]
        every = {size for shape in shapes for size in shape}
        for name in filter(str.isidentifier, sorted(every)):
            alone = all(name not in dimensions.names(size) for size in every - {name})
            if not (alone and all(name in shape for shape in results)):
                continue
            count = sizes.of(name)
            more = builder("Maximum", builder("Sub", 1, count), 0)
            sizes.replace(name, builder("AddV2", count, more))
            self._rows[name] = count
            zero = builder.tensor(0)
            for (index, x), shape in zip(tensors.items(), shapes):
                if name in shape:
                    ends = [end for size in shape for end in (zero, more if size == name else zero)]
                    edges = builder("Reshape", builder("Pack", ends), [-1, 2])
                    wide = builder("PadV2", x, edges, np.zeros((), x.dtype))
                    tensors[index] = builder.shaped(wide, x.shape)
        return tensors

    def _without_rows(self, x: Output) -> Output:
        """A result without the rows that `_with_rows` added."""
        builder, shape = self._builder, list(map(str, x.shape))
        if not any(name in shape for name in self._rows):
            return x
        zero = builder.tensor(0)
        ends = builder("Pack", [builder.tensor(self._rows.get(size, zero)) for size in shape])
        mask = sum(1 << axis for axis, size in enumerate(shape) if size not in self._rows)
        begin, step = [0] * x.rank, [1] * x.rank
        return builder("StridedSlice", x, begin, ends, step, end_mask=mask)

    def _parts(self, index: int, tensor: Output | None) -> list[Any]:
        """The operands of the program for one of the function: of real numbers, and words."""
        struct = self.structs[index]
        is_complex = not is_key(struct.dtype) and np.dtype(struct.dtype).kind == "c"
        if tensor is None:  # which nothing reads
            return [None] * (1 + is_complex)
        if is_complex:
            half = np.finfo(struct.dtype).dtype
            parts = (self._builder(each, tensor, Tout=half) for each in ("Real", "Imag"))
            return [dataclasses.replace(each, shape=tensor.shape) for each in parts]
        if not is_key(struct.dtype) and tensor.dtype != np.dtype(struct.dtype):
            of = self.names.get(index, "a weight")
            raise NotInTargetError(f"arrays of {np.dtype(struct.dtype).name}, as {of}")
        return [tensor]

    def _given(self, struct: Aval, found: Iterator[Output]) -> Output:
        """A result, of the parts that the program has."""
        one = self._without_rows(next(found))
        if is_key(struct.dtype) or np.dtype(struct.dtype).kind != "c":
            return one
        other = self._without_rows(next(found))
        return self._builder("Complex", one, other, Tout=np.dtype(struct.dtype))
