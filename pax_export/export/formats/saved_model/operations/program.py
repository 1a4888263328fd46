"""Lowers a traced program to a graph of TensorFlow's operations, and writes it into a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedOperationError
from pax_export.export.artifact import compatibility
from pax_export.export.formats.saved_model.operations import rules
from pax_export.export.formats.saved_model.operations.graph import (
    RULES,
    GraphBuilder,
    Tensor,
)
from pax_export.export.formats.saved_model.proto.nodes import Body
from pax_export.export.lowering.lower import Lowered, Portable
from pax_export.export.portable import (
    NotInTargetError,
    NotWrittenError,
    PassOptions,
    PortableProgram,
    ProgramConverter,
    Rule,
    in_parts,
    kept,
    optimized,
)
from pax_export.export.portable.program import is_key, uses
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.source_lines import refuse_operation
from pax_export.export.tracing.traced import Traced

RULES.load(rules)
_WRITE = "the same in other operations of jax.numpy and jax.lax, or operations='xla'"
#: Models are convolved with features last, as TensorFlow does. Variables stay those of the model.
_PASSES = PassOptions(fold=False, compute=False, keep=True, features_first=False)


def lower_to_graph(
    traced: Traced,
    platforms: Sequence[str],
    count: int | None = None,
    names: Mapping[int, str] | None = None,
) -> Lowered:
    """Lowers a traced function, or its first `count` results, to operations of TensorFlow.

    Raises:
        UnsupportedOperationError: TensorFlow has no kernel for an operation.
    """
    del names  # TensorFlow's own messages name operands
    constants = {id(value): f"{at}" for at, value in enumerate(traced.constants)}
    results = tuple(traced.results[:count])
    program = optimized(traced.program, (), constants, _PASSES, len(results))
    first, read = len(traced.structs), uses(program.jaxpr)
    at: dict[Any, int] = {}
    for variable, weight in zip(program.jaxpr.invars, program.weights):
        if weight.name:
            at[variable] = first + int(weight.name)
    at |= {variable: place for place, variable in enumerate(program.inputs)}
    kept_places = tuple(sorted(place for variable, place in at.items() if read[variable]))
    structs = (*traced.structs, *map(dtypes.struct_of, traced.constants))
    operands = tuple(at.get(variable, -1) for variable in program.jaxpr.invars)
    graph = Graph(program, structs, results, kept_places, operands)
    graph.write(Body([], "trial"), [f"operand_{place}" for place in kept_places])
    empty = Portable(b"", compatibility.TARGETS[0])
    return Lowered(empty, kept_places, traced.constants, results, tuple(platforms), graph=graph)


@dataclass(frozen=True)
class Graph:
    """A program whose weights are constants, and the operands of a function that it takes."""

    program: PortableProgram
    structs: tuple[Any, ...]  # of all operands, as jax has them
    results: tuple[Any, ...]
    kept: tuple[int, ...]  # the operands that it reads
    operands: tuple[int, ...]  # the operand of each variable of the program; -1 for a constant

    def write(self, body: Body, tensors: Sequence[str], checked: Collection[str] = ()) -> list[str]:
        """Adds the operations to a function; returns the names of its results.

        `tensors` are the names of the kept operands; the shapes of those `checked` are compared
        with what the program takes.
        """
        try:
            return _GraphWriter(body, self, dict(zip(self.kept, tensors)), checked).write()
        except NotInTargetError as error:
            raise UnsupportedOperationError(
                f"TensorFlow cannot express {error}.", where=body.name, write=_WRITE
            ) from error
        except NotWrittenError as error:
            raise refuse_operation("TensorFlow", error, "", _WRITE) from error


class _GraphWriter:
    def __init__(
        self, body: Body, graph: Graph, names: Mapping[int, str], checked: Collection[str]
    ):
        self._body, self._names, self._checked = body, names, checked
        self._graph = graph
        self._converter = ProgramConverter(RULES, self._constant, self._by_rule, exact=False)
        self._builder = GraphBuilder(body.library, body.name, self._converter.convert)

    def write(self) -> list[str]:
        graph, builder = self._graph, self._builder
        builder.operation = "inputs"
        taken = {place: self._taken(place) for place in self._names}
        symbolic = [(x, dtypes.stored(graph.structs[place]).shape) for place, x in taken.items()]
        taken = self._fitting(builder.sizes.learn(symbolic), taken)
        operands: list[Any] = []
        for at, place in enumerate(graph.operands):
            if place >= 0:
                operands += self._parts(place, taken.get(place))
            else:
                operands += map(builder.literal, in_parts(graph.program.weights[at].array))
        found = iter(self._converter.write(graph.program.program, operands))
        builder.operation = "outputs"
        results = [self._given(struct, found) for struct in graph.results]
        return builder.finish(self._body, results)

    def _taken(self, place: int) -> Tensor:
        """An operand, in the dtype that TensorFlow has for it."""
        struct, builder = dtypes.stored(self._graph.structs[place]), self._builder
        name = self._names[place]
        tensor = Tensor(name, np.dtype(struct.dtype), tuple(struct.shape), builder.frame)
        if name not in self._checked:
            return tensor
        sizes = [size if isinstance(size, int) else -1 for size in struct.shape]
        made = builder("EnsureShape", tensor, shape={"dim": [{"size": size} for size in sizes]})
        return dataclasses.replace(made, shape=tensor.shape)

    def _fitting(
        self, pairs: Sequence[tuple[Any, Any, str]], taken: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Lets a call fail whose arrays have sizes that do not fit each other."""
        if not (pairs and self._checked):
            return taken
        builder = self._builder
        checks = [builder.check_equal(f"a size is not {text}", *pair) for *pair, text in pairs]
        return {
            place: builder.after(checks, x) if self._names[place] in self._checked else x
            for place, x in taken.items()
        }

    def _parts(self, place: int, tensor: Tensor | None) -> list[Any]:
        """The operands of the program for one of the function: of real numbers, and words."""
        struct = self._graph.structs[place]
        is_complex = not is_key(struct.dtype) and np.dtype(struct.dtype).kind == "c"
        if tensor is None:  # which nothing reads
            return [None] * (1 + is_complex)
        if is_complex:
            half = np.finfo(struct.dtype).dtype
            parts = (self._builder(each, tensor, Tout=half) for each in ("Real", "Imag"))
            return [dataclasses.replace(each, shape=tensor.shape) for each in parts]
        if not is_key(struct.dtype) and tensor.dtype != np.dtype(struct.dtype):
            raise NotInTargetError(f"arrays of {np.dtype(struct.dtype).name}")
        return [tensor]

    def _given(self, struct: Any, found: Any) -> Tensor:
        """A result, of the parts that the program has."""
        one = next(found)
        if is_key(struct.dtype) or np.dtype(struct.dtype).kind != "c":
            return one
        return self._builder("Complex", one, next(found), Tout=np.dtype(struct.dtype))

    def _constant(self, value: Any) -> Tensor:
        return self._builder.literal(getattr(value, "val", value))

    def _by_rule(self, rule: Rule, equation: Any, operands: Sequence[Any]) -> list[Tensor] | None:
        builder, results = self._builder, [variable.aval for variable in equation.outvars]
        outside = builder.operation, builder.results
        builder.operation, told = kept.operation(equation)
        builder.results = results
        made = rule.function(builder, *operands, **told)
        builder.operation, builder.results = outside
        if made is None:
            return None
        several = made if isinstance(made, (list, tuple)) else [made]
        return [_as(x, result) for x, result in zip(several, results, strict=True)]


def _as(tensor: Tensor, struct: Any) -> Tensor:
    """A result of a rule, with the shape that jax knows."""
    if tensor.dtype != np.dtype(struct.dtype):
        raise NotInTargetError(f"with a result of {tensor.dtype} for {struct.dtype}")
    return dataclasses.replace(tensor, shape=tuple(struct.shape))
