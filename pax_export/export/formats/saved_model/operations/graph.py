"""A builder of TensorFlow graphs: operators, constants, and functions of loops and branches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from pax_export._foundations.types import ArrayLike, Aval, DTypeLike, Equation, Size
from pax_export.export.artifact import dimensions
from pax_export.export.formats.saved_model.operations.operators import OPERATORS
from pax_export.export.formats.saved_model.proto.messages import (
    STRING,
    VARIANT,
    Body,
    Message,
    Spec,
    add_node,
    dtype_number,
)
from pax_export.export.portable import NotInTargetError, ProgramConverter, Rule, RuleTable
from pax_export.export.portable.sizes import GraphSizes, is_number, same_shape, same_size, stay_thin

#: The rules that write primitives as operators: functions ``rule(builder, *operands,
#: **parameters)`` of `Output`s and of the parameters of the primitive; `builder.results` has the
#: shapes and dtypes of the results. A rule returns its only result, or a list, and raises
#: `NotInTargetError` for unsupported cases.
RULES = RuleTable()
rule = RULES.rule


class Frame:
    """A function that is being written: its nodes, and the tensors of outer functions it reads."""

    def __init__(self, parent: Frame | None = None):
        self.parent = parent
        self.nodes: list[Message] = []
        self.constants: dict[tuple, str] = {}
        self.captured: dict[Output, str] = {}
        self.arguments: list[Output] = []
        self.results: list[Output] = []


@dataclass(frozen=True, eq=False)
class Output:
    """An array of a graph.

    Attributes:
        name: its name in its function.
        dtype: its dtype, the same in jax and in TensorFlow.
        shape: its sizes in jax; None for a value in the middle of a rule.
        frame: the function that it belongs to; None for a constant.
        known: its value, if it is a literal.
        thin: a smaller tensor that broadcasts to it, if there is one.
    """

    name: str
    dtype: np.dtype
    shape: Any = None
    frame: Frame | None = field(default=None, repr=False)
    known: np.ndarray | None = None
    thin: Output | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return bool(jax.numpy.issubdtype(self.dtype, jax.numpy.floating))

    @property
    def is_half(self) -> bool:
        return self.is_float and self.dtype.itemsize == 2


#: What is a tensor, or becomes one.
Value: TypeAlias = Output | np.ndarray | int | Sequence[int]
Operand: TypeAlias = Value | Sequence[Value]


class NodeBuilder(ProgramConverter[Output]):
    """Writes the operators of one program; it is passed to the rules, which call it.

    ``builder("AddV2", x, y)`` adds an operator and returns its result, or a list of several.
    Operands are `Output`s, numpy arrays, which become constants, lists of sizes as int32, or lists
    of tensors. Dtypes among attributes are found by the table of operators.
    """

    folds = False  # as TensorFlow does, when it loads a model

    def __init__(self, differentiable: bool):
        super().__init__(RULES)
        self.differentiable = differentiable  # by TensorFlow
        self.known_arrays: dict[int, Output] = {}  # by the `id` of a constant of the program
        self.frame = self._root = Frame()
        self.sizes = TensorSizes(self._in_root)
        self.functions: list[Message] = []
        self._reshaped: dict[tuple[Frame | None, str], Output] = {}
        self._transposed: dict[tuple[Frame | None, str], tuple[Output, list[int]]] = {}
        self._count = 0

    def __call__(self, operator: str, *operands: Any, **attributes: Any) -> Any:
        if operator in _MOVES and (outside := self._outside(operands[0])):
            with self._in(outside):
                return self(operator, *operands, **attributes)
        form, names, found = OPERATORS[operator], [], dict[str, np.dtype]()
        for kind, operand in zip(form.operands, operands, strict=True):
            several = operand if kind.startswith("N*") else [operand]
            tensors = [self.tensor(each) for each in several]
            names += map(self._name_of, tensors)
            if kind.startswith("N*"):
                attributes["N"], kind = len(tensors), kind[2:]
            if found.setdefault(kind, tensors[0].dtype) != tensors[-1].dtype:
                raise NotInTargetError(f"with operands of {found[kind]} and {tensors[-1].dtype}")
        for kind, dtype in found.items():
            if kind not in _FIXED:
                attributes[kind] = dtype
        main = attributes.get(form.operands[-1 if form.operands[0] in _FIXED else 0])
        self._check_kernel(operator, main)
        count, results = 1, []
        for _, kind in form.results:
            count = attributes["num_split"] if kind.startswith("num_split*") else 1
        node = self._add(operator, names, attributes)
        for name, kind in form.results:
            kind = kind.rpartition("*")[2]
            dtype = VARIANT if kind == "variant" else np.dtype(attributes.get(kind, kind))
            results += [self._made(f"{node}:{name}:{at}", dtype) for at in range(count)]
        return results if len(form.results) > 1 or "num_split" in attributes else results[0]

    def _outside(self, x: Output) -> Frame | None:
        """The function around the loop that is being written, if all turns have the same array."""
        is_same = self.frame.arguments and x.frame not in (None, self.frame)
        return self.frame.parent if is_same else None

    @contextmanager
    def _in(self, frame: Frame) -> Iterator[None]:
        inside, self.frame = self.frame, frame
        try:
            yield
        finally:
            self.frame = inside

    def _check_kernel(self, operator: str, dtype: DTypeLike | None) -> None:
        computed = OPERATORS[operator].dtypes
        if computed and dtype is not None and np.dtype(dtype).name not in computed:
            raise NotInTargetError(f"TensorFlow has no kernel of {operator} for {dtype}")

    def _add(self, operator: str, names: Sequence[str], attributes: dict[str, Any]) -> str:
        self._count += 1
        word = re.sub(r"[^\w.\-]", "_", self.operation) or "graph"
        name = f"{word}/{operator}_{self._count}"
        values = {
            key: dtype_number(value) if isinstance(value, (np.dtype, type)) else value
            for key, value in attributes.items()
        }
        add_node(self.frame.nodes, name, operator, names, **values)
        return name

    def add(
        self, operator: str, operands: Sequence[Output], results: Sequence[Any], **attributes: Any
    ) -> list[Output]:
        """Adds an operator with one list of operands and one of results, such as a loop.

        `results` are their shapes and dtypes. A list of dtypes is an attribute like others.
        """
        node = self._add(operator, list(map(self._name_of, operands)), attributes)
        tensors = [self._made(f"{node}:output:{at}", x.dtype) for at, x in enumerate(results)]
        return [
            x if of.shape is None else self.shaped(x, of.shape) for x, of in zip(tensors, results)
        ]

    def _made(self, name: str, dtype: DTypeLike) -> Output:
        return Output(name, np.dtype(dtype), None, self.frame)

    def tensor(self, value: Value) -> Output:
        """A tensor, or a constant: of numpy, or sizes as int32."""
        if isinstance(value, Output):
            return value
        is_size = isinstance(value, (int, list, tuple))
        array = np.asarray(value, np.int32) if is_size else np.asarray(value)
        return self.literal(array, array.dtype)

    def literal(self, value: ArrayLike, dtype: DTypeLike | None = None) -> Output:
        dtype = np.dtype(jax.numpy.result_type(value) if dtype is None else dtype)
        array = np.asarray(value).astype(dtype)
        return Output("", dtype, array.shape, None, array)

    def constant_value(self, value: ArrayLike) -> Output:
        found = self.known_arrays.get(id(value))
        return self.literal(getattr(value, "val", value)) if found is None else found

    def apply_rule(
        self, rule: Rule, equation: Equation, operands: Sequence[Output]
    ) -> list[Output] | None:
        outside = self.operation, self.results
        outputs = super().apply_rule(rule, equation, operands)
        self.operation, self.results = outside
        return outputs

    def rule_value(self, output: Output, struct: Aval, rounds: bool) -> Output:
        if output.dtype != np.dtype(struct.dtype):
            raise NotInTargetError(f"with a result of {output.dtype} for {struct.dtype}")
        return dataclasses.replace(output, shape=tuple(struct.shape))

    def like(self, value: ArrayLike, operand: Output) -> np.ndarray:
        """A number of the dtype of an operand."""
        return np.asarray(value, operand.dtype)

    def cast(self, x: Output, dtype: DTypeLike) -> Output:
        if x.dtype == np.dtype(dtype):
            return x
        if x.known is not None and x.frame is None:
            return self.literal(x.known.astype(dtype), dtype)
        return dataclasses.replace(self("Cast", x, DstT=np.dtype(dtype)), shape=x.shape)

    def in_float32(self, operator: str, x: Output, *others: Operand, **attributes: Any) -> Output:
        """The result of an operator, which computes half precision in float32."""
        wide = np.dtype(np.float32) if x.is_half else x.dtype
        operands = [self.cast(each, wide) if isinstance(each, Output) else each for each in others]
        return self.cast(self(operator, self.cast(x, wide), *operands, **attributes), x.dtype)

    def shaped(self, x: Output, shape: Sequence[Size]) -> Output:
        """A tensor whose sizes are known in jax."""
        return dataclasses.replace(x, shape=tuple(shape))

    # Names in the current function.

    def _name_of(self, tensor: Output) -> str:
        if tensor.frame is None:
            assert tensor.known is not None
            return self._constant(tensor.known)
        return self._in_frame(self.frame, tensor)

    def _in_frame(self, frame: Frame, tensor: Output) -> str:
        """The name of a tensor in a function, which takes those of outer ones as arguments."""
        if tensor.frame is frame:
            return tensor.name
        assert frame.parent is not None
        self._in_frame(frame.parent, tensor)
        return frame.captured.setdefault(tensor, f"captured_{len(frame.captured)}")

    def _constant(self, array: np.ndarray) -> str:
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self.frame.constants:
            value = np.ascontiguousarray(array).reshape(array.shape)
            node = self._add("Const", [], {"dtype": array.dtype, "value": value})
            self.frame.constants[key] = f"{node}:output:0"
        return self.frame.constants[key]

    def _in_root(self, operator: str, *operands: Operand, **attributes: Any) -> Any:
        with self._in(self._root):
            return self(operator, *operands, **attributes)

    # Functions of loops and branches.

    @contextmanager
    def function(self, structs: Sequence[Any]) -> Iterator[Frame]:
        """Operators written in the block belong to a function with these arguments."""
        frame = Frame(self.frame)
        frame.arguments = [
            Output(f"argument_{at}", np.dtype(x.dtype), tuple(x.shape), frame)
            for at, x in enumerate(structs)
        ]
        with self._in(frame):
            yield frame

    def library(self, *frames: Frame, passes: Sequence[Frame] = ()) -> tuple[list[str], Any]:
        """Adds functions to the library; returns their names, and the tensors that all capture.

        These are arguments after their own, in one order. Functions of `passes` return them, too.
        """
        ends = [self._names_in(frame, frame.results) for frame in frames]
        captured = list(dict.fromkeys(each for frame in frames for each in frame.captured))
        names = []
        for frame, own in zip(frames, ends):
            inside = [frame.captured.get(x, f"unused_{at}") for at, x in enumerate(captured)]
            inputs = [dataclasses.replace(x, name=n, frame=frame) for n, x in zip(inside, captured)]
            self._count += 1
            names.append(f"_{self._count}")
            body = Body(self.functions, names[-1], stateful=False)
            for each in (*frame.arguments, *inputs):
                body.argument(each.name, Spec.of(each))
            body.extend(needed(frame.nodes, own))
            results = [*zip(own, frame.results)]
            results += zip(inside, inputs) if frame in passes else ()
            for at, (end, each) in enumerate(results):
                body.result(f"result_{at}", end, Spec.unknown(each.dtype))
        return names, captured

    def _names_in(self, frame: Frame, tensors: Sequence[Output]) -> list[str]:
        with self._in(frame):
            return list(map(self._name_of, tensors))

    def finish(self, results: Sequence[Output]) -> tuple[list[Message], list[str]]:
        """Returns the nodes of the outermost function, and the names of results."""
        ends = list(map(self._name_of, results))
        return needed(self._root.nodes, ends), ends

    # Checks of arguments.

    def check(self, relation: str, text: str, one: Value, other: Value) -> str:
        """Adds an operation that fails unless sizes are so; returns its name, for `after`."""
        both = [self.tensor(each) for each in (one, other)]
        same = self._name_of(self(relation, *both))
        message = f"{self._add('Const', [], {'dtype': STRING, 'value': text})}:output:0"
        names = [same, message, *map(self._name_of, both)]
        return self._add("Assert", names, {"T": [STRING, *(dtype_number(x.dtype) for x in both)]})

    def after(self, checks: Sequence[str], x: Output) -> Output:
        """A tensor that exists only if checks succeed."""
        identity = self("Identity", x)
        self.frame.nodes[-1]["input"] += [f"^{each}" for each in checks]
        return dataclasses.replace(identity, shape=x.shape)

    # Shapes.

    def reshape(self, x: Output, shape: Sequence[Size]) -> Output:
        x = self._reshaped.get((x.frame, x.name), x)  # reshaped twice, it is once
        if x.shape is not None and same_shape(x.shape, shape):
            return x
        symbolic = [size for size in shape if not is_number(size)]
        if len(symbolic) == 1 and all(size for size in shape if is_number(size)):
            result = self("Reshape", x, [size if is_number(size) else -1 for size in shape])
        else:
            result = self("Reshape", x, self.sizes.shape(shape))
        result = self.shaped(result, shape)
        self._reshaped[result.frame, result.name] = x
        return result

    def reshaped(self, x: Output, size: Size) -> Output:
        """The array that was reshaped to this one, if its last axis has this size, too."""
        source = self._reshaped.get((x.frame, x.name), x)
        return source if source.rank and same_size(source.shape[-1], size) else x

    def transpose(self, x: Output, order: Sequence[int]) -> Output:
        # Transposed twice, it is once.
        x, before = self._transposed.get((x.frame, x.name), (x, list(range(x.rank))))
        order = [before[axis] for axis in order]
        if order == sorted(order):
            return x
        result = self("Transpose", x, order)
        result = self.shaped(result, [x.shape[axis] for axis in order])
        self._transposed[result.frame, result.name] = x, order
        return result

    def turned_back(self, x: Output, order: Sequence[int]) -> Output:
        """An array whose axes were transposed to this order, with the axes as they were."""
        return self.transpose(x, [int(axis) for axis in np.argsort(order)])

    def broadcast(self, x: Output, shape: Sequence[Size]) -> Output:
        if x.shape is not None and same_shape(x.shape, shape):
            return x
        return self.shaped(self("BroadcastTo", x, self.sizes.shape(shape)), shape)

    def spread(self, *operands: Output) -> list[Output]:
        """Operands that broadcast together, unbroadcast where possible."""
        return [
            each.thin if thin and each.thin is not None else each
            for each, thin in zip(operands, stay_thin(operands))
        ]


#: Operators that are written before a loop whose turns would all do the same.
_MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Cast"})
#: Names of dtypes, which other operands of operators are not.
_FIXED = frozenset({"bool", "int32", "int64", "uint8", "variant"})


def needed(nodes: Sequence[Message], wanted: Sequence[str]) -> list[Message]:
    """The nodes that these results need, in order."""
    names, used = {each.lstrip("^").split(":")[0] for each in wanted}, []
    for node in reversed(nodes):
        if node["name"] in names:
            used.append(node)
            names.update(each.lstrip("^").split(":")[0] for each in node["input"])
    return used[::-1]


# --- sizes: numbers, or int32 scalars of the graph --------------------------

_OPERATORS = {
    "add": "AddV2", "sub": "Sub", "mul": "Mul", "div": "FloorDiv", "floordiv": "FloorDiv",
    "mod": "FloorMod", "max": "Maximum", "min": "Minimum",
}  # fmt: skip


class TensorSizes(GraphSizes):
    """The sizes of one graph; `node` adds an operator to the outermost function."""

    def __init__(self, node: Callable[..., Any]):
        super().__init__()
        self._node = node

    def learn(self, inputs: Iterable[tuple[str, Any, Sequence[Any]]]) -> list[tuple[Any, Any, str]]:
        """Reads the variables from shapes of named inputs.

        Returns sizes, with what they have to be, and an error if they are not.
        """
        sizes = [
            (f"{name}.shape[{axis}]", str(size), partial(self._size_of, tensor, axis))
            for name, tensor, shape in inputs
            for axis, size in enumerate(shape)
            if not is_number(size)
        ]
        self._variables = dimensions.solve_each([each[1:] for each in sizes], self._calculated)
        checks = ((read(), self.of(text), f"{at} is not {text}") for at, text, read in sizes)
        return [each for each in checks if each[0] is not each[1]]

    def replace(self, variable: str, value: Output) -> None:
        """Gives a variable another value, for all sizes that are computed from now on."""
        self._variables[variable] = value
        self._written = {key: x for key, x in self._written.items() if key.startswith("shape ")}

    def shape(self, sizes: Sequence[Any]) -> Any:
        """Sizes as one int32 array: a constant, or a tensor."""
        found = list(map(self.of, sizes))
        if all(map(is_number, found)):
            return np.array(found, np.int32).reshape(-1)
        text = f"({', '.join(map(str, sizes))})"
        return self._once(text, lambda: self._node("Pack", found))

    def arange(self, size: Size) -> Any:
        """0, 1, 2... as int32."""
        if is_number(size):
            return np.arange(size, dtype=np.int32)
        return self._once(f"range {size}", lambda: self._node("Range", 0, self.of(size), 1))

    def _size_of(self, tensor: Output, axis: int) -> Any:
        whole = self._once(f"shape {tensor.name}", lambda: self._node("Shape", tensor))
        ends = [axis], [axis + 1], [1]
        read = partial(self._node, "StridedSlice", whole, *ends, shrink_axis_mask=1)
        return self._once(f"shape {tensor.name} {axis}", read)

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._written:
            self._written[key] = make()
        return self._written[key]

    def _calculate(self, operation: str, left: Output | int, right: Output | int) -> Any:
        if operation == "neg":
            operation, left = "sub", 0
        return self._node(_OPERATORS[operation], left, right)
