"""Converts a traced program to a graph of TFLite operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.types import ArrayLike, Aval, Equation
from pax_export.export.formats.tflite import rules
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.encode import TfliteSignature
from pax_export.export.formats.tflite.builder.graph import Graph, Tensor, TensorLike, of_source
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    RULES,
    Operation,
    TfliteSizes,
    constant,
    from_carrier,
    full,
    is_static,
    kind,
    to_carrier,
)
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline.format_exporter import portable_program
from pax_export.export.portable import (
    EXACT,
    NotInTargetError,
    NotWrittenError,
    PassOptions,
    PortableProgram,
    ProgramConverter,
    Rule,
    Weight,
    in_parts,
    kept,
    written_fast,
)
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import refuse_operation

RULES.load(rules)
_WRITE = "the same in other operations of jax.numpy and jax.lax"


def make_signature(
    program: Program, weights: Weights, exact: bool, fold: bool, integers: bool
) -> tuple[TfliteSignature, tuple[str, ...]]:
    """A graph of the inputs of a program and its outputs, and notes for the report.

    Functions that TFLite has an operator for are kept whole, unless it is to be `exact`.
    """
    _check_places(program)
    # The builder computes constants.
    wanted = PassOptions(
        fold=fold,
        compute=False,
        keep=not exact,
        features_first=False,
        integers=integers and not exact,
    )

    signature, portable = written_fast(
        lambda options: portable_program(program, weights.store, options),
        wanted,
        lambda portable: _signature(program, weights, exact, portable),
    )
    return signature, portable.notes


def _signature(
    program: Program, weights: Weights, exact: bool, portable: PortableProgram
) -> TfliteSignature:
    traced, entries, store = program.traced, program.inputs.flat, weights.store
    structs = [dtypes.stored(s) for s in traced.structs[len(traced.structs) - len(entries) :]]
    graph = Graph(program.key)
    with graph.active():
        inputs = []
        for entry, struct in zip(entries, structs):
            shape = [size if is_static(size) else None for size in struct.shape]
            dtype = np.dtype(dtypes.name_of(struct.dtype))
            inputs.append(graph.placeholder(shape, dtype, entry.name))
        sizes = TfliteSizes([struct.shape for struct in structs], inputs)
        constants = {id(value): store.of_constant(value) for value in traced.constants}
        converter = _GraphConverter(sizes, constants, weights, exact)
        named = zip(inputs, structs)
        arrays = [part for x, s in named for part in to_carrier(x, kind(s))]
        operands = [each for weight in portable.weights for each in converter.held(weight)]
        try:
            results = converter.write(portable.program, [*operands, *arrays])
        except NotWrittenError as error:
            raise refuse_operation("TFLite", error, program.key, _WRITE) from error
        outputs = map(dtypes.stored, traced.results)
        for value, struct in zip(results[: len(program.output_names)], outputs):
            found = full(_now(value), struct.shape, sizes)
            found = graph.own(from_carrier(found, kind(struct)))
            # A result that is an input or a weight needs a separate tensor.
            graph.outputs.append(found if found.operator else moves.identity(found))
    names = [entry.name for entry in entries]
    return TfliteSignature(program.key, graph, names, list(program.output_names))


def _check_places(program: Program) -> None:
    """Refuses inputs of dtypes that TFLite lacks, and outputs that LiteRT cannot return."""
    structs = program.traced.structs[len(program.traced.structs) - len(program.inputs.flat) :]
    places = [(f"input {each.name}", struct) for each, struct in zip(program.inputs.flat, structs)]
    places += [(f"output {n}", s) for n, s in zip(program.output_names, program.traced.results)]
    for where, struct in places:
        name = kind(dtypes.stored(struct))
        if name not in (*CARRIERS, "complex64"):
            raise UnsupportedOperationError(
                f"TFLite does not compute with {name}.",
                where=where,
                write="float32, int32 or another dtype of at most 32 bits, or another target, "
                "e.g. to_saved_model",
            )
        if where.startswith("output") and 0 in filter(is_static, struct.shape):
            raise UnsupportedOperationError(
                "LiteRT cannot return an array without elements.",
                where=where,
                got=str(list(struct.shape)),
                write="the model without it, or another target, e.g. to_saved_model",
            )
        if name == "complex64" and where.startswith("output"):
            raise UnsupportedOperationError(
                "TFLite cannot return complex numbers.",
                where=where,
                write="the real and the imaginary part, each as an output",
            )


def _now(value: TensorLike, stored: bool = False) -> Any:
    if isinstance(value, LazyWeight):
        return value.stored() if stored else value()
    return value


class Weights:
    """The arrays of a store as constants of graphs, each made once and only if it is needed."""

    def __init__(self, store: Store):
        self.store = store
        self.places = {each.name: index for index, each in enumerate(store.variables)}
        self._stored: dict[int, Tensor] = {}

    def lazy(self, index: int) -> list[LazyWeight]:
        """Returns an array lazily, or the two parts of complex numbers."""
        count = len(in_parts(self.store.variables[index].value))
        return [LazyWeight(self, index, part) for part in range(count)]

    def stored(self, index: int) -> Tensor:
        """An array in the dtype that the model has."""
        if index not in self._stored:
            variable = self.store.variables[index]
            array = np.asarray(variable.value)
            tensor = Tensor.of(array, variable.name)
            tensor.sources = frozenset({variable.name})
            self._stored[index] = tensor
        return self._stored[index]


class LazyWeight(NamedTuple):
    """A weight, or a part of one, read when an operation needs it."""

    weights: Weights
    place: int
    part: int

    def __call__(self) -> Any:
        stored = self.stored()
        return to_carrier(stored, stored.dtype.name)[self.part]

    def stored(self) -> Tensor:
        return self.weights.stored(self.place)


class _GraphConverter(ProgramConverter):
    def __init__(
        self, sizes: TfliteSizes, constants: Mapping[int, int], read: Weights, exact: bool
    ):
        super().__init__(RULES, exact)
        self._sizes, self._constants, self._read = sizes, constants, read

    def held(self, weight: Weight) -> list[Any]:
        """Returns an array of a portable program lazily."""
        if weight.name:
            return self._read.lazy(self._read.places[weight.name])
        return [self.constant_value(part) for part in in_parts(weight.array)]

    def constant_value(self, value: ArrayLike) -> Any:
        if id(value) in self._constants:
            return self._read.lazy(self._constants[id(value)])[0]()
        value = getattr(value, "val", value)
        value = np.asarray(value)
        if value.dtype.name == "float64" and not jax.config.read("jax_enable_x64"):
            value = value.astype(np.float32)
        if value.dtype.name == "int64" and not jax.config.read("jax_enable_x64"):
            value = value.astype(np.int32)
        if value.dtype.name not in CARRIERS:
            return value  # its users report the unsupported dtype
        return constant(value)

    def apply_rule(
        self, rule: Rule, equation: Equation, operands: Sequence[Any]
    ) -> list[Any] | None:
        name, attributes = kept.operation(equation)
        operation = Operation(
            name,
            attributes,
            [atom.aval for atom in equation.invars],
            [variable.aval for variable in equation.outvars],
            self._sizes,
            self.inline,
            self.call,
        )
        stored, thin = (rule.options.get(each, False) for each in ("stored", "thin"))
        _check_dtypes(operation, stored)
        with of_source(self.source):
            values = [_now(each, stored) for each in operands]
            if not thin:
                pairs = zip(values, operation.operands)
                values = [full(each, struct.shape, self._sizes) for each, struct in pairs]
            options = {} if attributes is equation.params else attributes
            outputs = rule.function(operation, *values, **options)
            if outputs is None:
                return None
            outputs = outputs if isinstance(outputs, list) else [outputs]
            rounds = operation.name not in _EXACT
            pairs = zip(outputs, operation.results)
            return [self.rule_value(each, struct, rounds) for each, struct in pairs]

    def rule_value(self, output: TensorLike, struct: Aval, rounds: bool) -> Any:
        """Halves are computed as float32; each operation of jax rounds its result."""
        name = kind(struct)
        if not rounds or name not in ("float16", "bfloat16"):
            return output
        return lite.cast(lite.cast(output, name), lite.float32)


#: Rules of integers wrap these by themselves.
_EXACT = EXACT | {"neg", "abs"}


def _check_dtypes(operation: Operation, stored: bool) -> None:
    # Rules that take weights as the model has them see to their dtypes.
    for struct in (*(() if stored else operation.operands), *operation.results):
        name = kind(struct)
        if name not in CARRIERS:
            raise NotInTargetError(f"it does not compute with {name}.")
