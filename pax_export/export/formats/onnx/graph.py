"""A builder of ONNX graphs: operators, constants, subgraphs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from pax_export._foundations.types import ArrayLike, Aval, DTypeLike
from pax_export.export.formats.onnx.values import (
    OnnxSizes,
    RoundedInputs,
    Value,
    carrier,
    is_number,
    is_rounded,
    same_shape,
)
from pax_export.export.portable import ProgramConverter, RuleTable
from pax_export.export.portable.sizes import stay_thin
from pax_export.export.validation.integers import Quantized

if TYPE_CHECKING:
    from onnx import NodeProto

#: The rules that write primitives as operators: functions ``rule(builder, *operands,
#: **parameters)`` of `Value`s and of the parameters of the primitive; `builder.results` has the
#: shapes and dtypes of the results. A rule returns the name of its only result, or one per result,
#: not yet rounded to its dtype, and raises `NotInTargetError` for unsupported cases.
RULES = RuleTable()
rule = RULES.rule

#: The domain of onnxruntime's own operators.
MICROSOFT = "com.microsoft"
#: Its attention takes heads whose channels are a multiple of this.
HEAD_CHANNELS = 8


#: An operand: a value, the name of one, a constant, or None for a missing one.
Operand: TypeAlias = Value | str | np.ndarray | np.generic | float | None


class GraphBuilder(ProgramConverter[Value]):
    """Writes the operators of one model; it is passed to the rules, which call it.

    ``builder("Add", x, y)`` adds an operator and returns the name of its result. Operands are
    names, `Value`s, numpy arrays, which become constants, or None if omitted.
    """

    def __init__(self, onnx: ModuleType, opset: int, exact: bool, accuracy_level: int):
        super().__init__(RULES, exact)
        self.onnx = onnx
        self.opset = opset
        self.exact = exact  # whether NaN, ties and signs of zero are guarded
        self.accuracy_level = accuracy_level  # of products of quantized weights
        self.known_arrays: dict[int, Value] = {}  # by the `id` of a constant of the program
        self.initializers: dict[str, np.ndarray] = {}
        self.stored: dict[str, str] = {}  # carrier of a weight -> its initializer
        #: Names of transposed arrays -> the transposes that produce them.
        self.turned: dict[str, Callable[[Sequence[int]], str]] = {}
        #: Names of reshaped arrays -> the original, and its shape if known.
        self.reshaped: dict[str, tuple[str, Any]] = {}
        self.quantized: dict[str, Quantized] = {}  # initializers of integers
        #: Arrays that represent integers: rounded inputs, and quantized weights with the order of
        #: their axes.
        self.rounded: dict[str, RoundedInputs] = {}
        self.weights: dict[str, tuple[Any, tuple[int, ...]]] = {}
        #: Entries of results whose shapes ONNX's inference does not find.
        self.declared: dict[str, Any] = {}
        self._constants: dict[tuple, str] = {}
        self._count = 0
        self._root: list[Any] = []
        self.nodes = self._root
        # Sizes are computed in the outermost graph.
        self.sizes = OnnxSizes(
            lambda operator, *operands, **attributes: self._add(
                self._root, operator, operands, None, attributes
            )
        )

    def new_name(self, kind: str = "") -> str:
        self._count += 1
        # No input, output or weight has a colon in its name.
        return f"{kind or self.operation}:{self._count}"

    def __call__(
        self, operator: str, *operands: Operand, results: int | None = None, **attributes: Any
    ) -> Any:
        """Adds an operator; returns the name of its result, or a list of names of several."""
        return self._add(self.nodes, operator, operands, results, attributes)

    def _add(
        self, nodes: list, operator: str, operands: Sequence, results: int | None, attributes: dict
    ) -> Any:
        names = [self.name(operand) for operand in operands]
        if operator in ("Greater", "GreaterOrEqual"):  # in OpenVINO, NaN is greater than all
            operator, names = operator.replace("Greater", "Less"), names[::-1]
        outputs = [self.new_name() for _ in range(1 if results is None else results)]
        nodes.append(
            self.onnx.helper.make_node(operator, names, outputs, name=outputs[0], **attributes)
        )
        return outputs[0] if results is None else outputs

    def name(self, operand: Operand) -> str:
        """The name of an operand; constants are stored."""
        if operand is None:
            return ""
        if isinstance(operand, str):
            return operand
        if isinstance(operand, Value):
            return operand.name
        return self.constant(np.asarray(operand))

    def constant(self, array: np.ndarray) -> str:
        """The name of a stored array; equal ones are stored once."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.store(array, self.new_name("constant"))
        return self._constants[key]

    def store(self, array: np.ndarray, name: str) -> str:
        self.initializers[name] = np.asarray(array)
        return name

    def type(self, dtype: DTypeLike) -> int:
        """The number that ONNX has for a dtype."""
        return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def cast(self, operand: Operand, dtype: DTypeLike) -> str:
        if isinstance(operand, Value):
            if operand.carrier == np.dtype(dtype):
                return operand.name
            if operand.known is not None and operand.known.dtype.kind in "bi":
                return self.constant(operand.known.astype(dtype))
        return self("Cast", operand, **self.cast_to(dtype))

    def cast_to(self, dtype: DTypeLike) -> dict[str, int]:
        """Returns attributes for `Cast`; overflows of float8 become infinite or NaN, as in jax."""
        saturate = {"saturate": 0} if np.dtype(dtype).name.startswith("float8") else {}
        return {"to": self.type(dtype), **saturate}

    def literal(self, value: ArrayLike) -> Value:
        dtype = jax.numpy.result_type(value)
        array = np.asarray(value).astype(carrier(dtype))
        return Value(self.constant(array), np.dtype(dtype), array.shape, array)

    def constant_value(self, value: ArrayLike) -> Value:
        found = self.known_arrays.get(id(value))
        return self.literal(value) if found is None else found

    def rule_value(self, output: Value | str, struct: Aval, rounds: bool) -> Value:
        dtype, shape = np.dtype(struct.dtype), tuple(struct.shape)
        if isinstance(output, Value):
            return dataclasses.replace(output, dtype=dtype, shape=shape)
        return Value(self.fit(output, dtype) if rounds else output, dtype, shape)

    def like(self, value: Operand, operand: Value) -> np.ndarray:
        """A number of the type that carries an operand."""
        return np.asarray(value, operand.carrier)

    def fit(self, name: str, dtype: DTypeLike) -> str:
        """Rounds or wraps computed numbers to a dtype."""
        dtype = np.dtype(dtype)
        if not is_rounded(dtype):
            return name
        if dtype in (np.uint32, np.uint64):
            return name
        if dtype.name in ("int4", "int2", "uint4", "uint2"):
            bits = int(dtype.name[-1])
            low = -(1 << (bits - 1)) if dtype.name.startswith("int") else 0
            moved = self("Sub", name, np.array(low, np.int32))
            moved = self("BitwiseAnd", moved, np.array((1 << bits) - 1, np.int32))
            return self("Add", moved, np.array(low, np.int32))
        return self.cast(self.cast(name, dtype), carrier(dtype))

    # Shapes.

    def reshape(self, name: Operand, shape: Sequence[Any]) -> str:
        """Gives another shape to an array of as many elements."""
        before = name.shape if isinstance(name, Value) else None
        name = self.name(name)
        name, before = self.reshaped.get(name, (name, before))  # reshaped twice, it is once
        if before is not None and same_shape(before, shape):
            return name
        symbolic = [index for index, size in enumerate(shape) if not is_number(size)]
        if len(symbolic) == 1 and all(size for size in shape if is_number(size)):
            sizes = [size if is_number(size) else -1 for size in shape]
            result = self("Reshape", name, np.array(sizes, np.int64))
        else:
            result = self("Reshape", name, self.sizes.shape(shape), allowzero=1)
        self.reshaped[result] = name, before
        return result

    def transpose(self, name: Operand, order: Sequence[int]) -> Any:
        if list(order) == list(range(len(order))):
            return name
        if (name := self.name(name)) in self.turned:
            return self.turned[name](order)
        result = self("Transpose", name, perm=list(order))
        # Transposed again, both become one transpose of the original.
        self.turned[result] = lambda axes: self.transpose(name, [order[axis] for axis in axes])
        return result

    def unsqueeze(self, name: Operand, axes: Sequence[int]) -> Any:
        return self("Unsqueeze", name, np.array(axes, np.int64)) if len(axes) else name

    def squeeze(self, name: Operand, axes: Sequence[int]) -> Any:
        return self("Squeeze", name, np.array(axes, np.int64)) if len(axes) else name

    def expand(self, name: Operand, shape: Sequence[Any]) -> str:
        return self("Expand", name, self.sizes.shape(shape))

    def arange(self, size: Any) -> Any:
        """0, 1, 2... as int64."""
        if is_number(size):
            return np.arange(size, dtype=np.int64)
        return self.sizes.arange(size)

    def spread(self, *operands: Value) -> list[str]:
        """Returns names of operands that broadcast together, unbroadcast where possible."""
        return [
            each.thin if thin and each.thin is not None else each.name
            for each, thin in zip(operands, stay_thin(operands))
        ]

    # Bodies.

    @property
    def in_body(self) -> bool:
        """Whether the body of a loop or branch is being written."""
        return self.nodes is not self._root

    @contextmanager
    def body(self) -> Iterator[list[Any]]:
        """Operators that are written in the block belong to a body of their own."""
        outside, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outside

    def entry(self, name: str, dtype: DTypeLike, shape: Sequence[Any]) -> Any:
        """Returns the graph's entry for an input or output; symbolic sizes are left open."""
        sizes = [int(size) if is_number(size) else None for size in shape]
        return self.onnx.helper.make_tensor_value_info(name, self.type(dtype), sizes)

    def declare(self, name: str, like: Value, shape: Sequence[Any]) -> str:
        """Gives a result a shape that does not follow from its operator; returns the name."""
        self.declared[name] = self.entry(name, like.carrier, shape)
        return name

    def graph(self, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Value]) -> Any:
        wanted = {value.name for value in outputs}
        nodes = needed(self.with_quotients(nodes, wanted), wanted)
        entries = []
        for value in outputs:
            # A result has to be made inside, and once.
            name = self.new_name("result")
            nodes.append(self.onnx.helper.make_node("Identity", [value.name], [name], name=name))
            entries.append(self.entry(name, value.carrier, value.shape))
        return self.onnx.helper.make_graph(nodes, self.new_name("body"), inputs, entries)

    def with_quotients(self, nodes: Sequence[Any], wanted: Collection[str]) -> Sequence[Any]:
        """Multiplies by no reciprocal that nothing else reads, but divides.

        onnxruntime 1.32 does so itself, and fails if the other factor is the result of an operator
        that changes nothing, as ``x + 0`` or ``x * 1``, which it removes at the same time.
        """
        counts = Counter([*wanted, *(name for node in nodes for name in read_in(node))])
        divisors = {
            node.output[0]: node.input[1]
            for node in nodes
            if node.op_type == "Div" and np.array_equal(self._number_of(node.input[0]), 1)
        }
        for node in nodes:
            for x, y in (node.input, node.input[::-1]) if node.op_type == "Mul" else ():
                if y in divisors and counts[y] == 1:
                    node.op_type, node.input[:] = "Div", [x, divisors[y]]
                    break
        return nodes

    def _number_of(self, name: str) -> Any:
        """The number in a stored array of one element; None for others."""
        array = self.initializers.get(name)
        return array.item() if array is not None and array.size == 1 else None

    def branched(
        self,
        condition: Operand,
        then: Callable[[], Sequence[Value]],
        otherwise: Callable[[], Sequence[Value]],
    ) -> list[str]:
        graphs, count = [], 0
        for make in (then, otherwise):
            with self.body() as nodes:
                results = make()
            count = len(results)
            graphs.append(self.graph(nodes, [], results))
        return self("If", condition, results=count, then_branch=graphs[0], else_branch=graphs[1])

    def is_some(self, size: Any) -> str | None:
        """Returns the name of whether a size is not 0; None if it cannot be 0."""
        text = str(size)
        # jax assumes that a plain variable is at least 1.
        if text.isidentifier() or (is_number(size) and size > 0):
            return None
        return self("Greater", self.squeeze(self.sizes.one(size), [0]), np.array(0, np.int64))

    def fresh(self, dtype: DTypeLike, shape: Sequence[Any]) -> Value:
        return Value(self.new_name("given"), np.dtype(dtype), tuple(shape))


def bodies(node: NodeProto) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Operators, and those of the bodies of loops and branches."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def read_in(node: NodeProto) -> Iterator[str]:
    """The names that an operator reads, in its bodies as well."""
    for each in all_nodes([node]):
        yield from each.input


def needed(nodes: Sequence[Any], wanted: Collection[str]) -> list[Any]:
    """The operators that these results need, in order."""
    wanted, selected = set(wanted), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            selected.append(node)
            wanted.update(read_in(node))
    return selected[::-1]


def values_of(structs: Sequence[Any], names: Sequence[str]) -> list[Value]:
    return [
        Value(name, np.dtype(struct.dtype), tuple(struct.shape))
        for struct, name in zip(structs, names, strict=True)
    ]
