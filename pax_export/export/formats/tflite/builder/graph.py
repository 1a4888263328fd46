"""Tensors and operators of a TFLite graph; operators of constants are evaluated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from pax_export._foundations.types import DTypeLike

#: Equal constants up to this size, in bytes, are merged.
_SMALL = 1024

_here = threading.local()


class Shape(tuple):
    """The sizes of a tensor; None for sizes known only in a call."""

    __slots__ = ()

    @property
    def rank(self) -> int:
        return len(self)

    @property
    def known(self) -> bool:
        return None not in self

    @property
    def size(self) -> int:
        """The number of elements of a static shape."""
        return int(np.prod(self, dtype=np.int64))


def _dunder(name: str, turned: bool = False) -> Callable[..., Any]:
    def operate(x: Tensor, y: Tensor) -> Any:
        return ARITHMETIC[name](y, x) if turned else ARITHMETIC[name](x, y)

    return operate


#: Implementations of Python's operators by name; filled by `operators`.
ARITHMETIC: dict[str, Callable[..., Any]] = {}


class Tensor:
    """An array of a graph: a constant, an input, or the result of an operator.

    Attributes:
        shape: the sizes.
        dtype: the numpy dtype.
        value: the array of a constant.
        operator: the operator that produces it.
        graph: the graph that it belongs to; None for constants.
        sources: the names of the weights from which a constant is computed.
        is_computed: whether this used arithmetic, not only moves.
        scale: the scales of quantized integers along `axis`.
        zero: the zero point of rounded inputs.
        by_row: whether it is rounded with one scale per row.
        blocks: the scales of constant integers, one per 32 neighbors, as a tensor.
        twin: the model's integers that a constant represents.
    """

    __slots__ = (
        "axis", "blocks", "by_row", "dtype", "graph", "is_computed", "name", "operator", "scale",
        "shape", "sources", "twin", "value", "zero",
    )  # fmt: skip

    def __init__(
        self, shape: Sequence[Any], dtype: DTypeLike, graph: Graph | None, value: Any = None
    ):
        self.shape = Shape(shape)
        self.dtype = np.dtype(dtype)
        self.graph = graph
        self.value = value
        self.operator: Any = None
        self.name = ""
        self.sources: frozenset[str] = frozenset()
        self.is_computed = False
        self.scale: Any = None
        self.axis = 0
        self.zero: int | None = None
        self.by_row = False
        self.blocks: Tensor | None = None
        self.twin: Any = None

    @classmethod
    def of(cls, value: Any, name: str = "") -> Tensor:
        """A constant of its own: an array, or the numbers of a quantized weight."""
        result = cls(value.shape, value.dtype, None, value)
        result.name = name
        return result

    def set_shape(self, shape: Iterable[Any]) -> None:
        """Adds static sizes known from elsewhere."""
        if self.value is None:
            pairs = zip(shape, self.shape)
            self.shape = Shape(int(n) if isinstance(n, (int, np.integer)) else o for n, o in pairs)

    @property
    def made_by(self) -> str:
        """The name of the operator that produces it; empty for constants and inputs."""
        return self.operator.name if self.operator else ""

    def __repr__(self) -> str:
        return f"Tensor({self.made_by or 'constant'}, {list(self.shape)}, {self.dtype})"

    __add__ = _dunder("add")
    __radd__ = _dunder("add", True)
    __sub__ = _dunder("subtract")
    __rsub__ = _dunder("subtract", True)
    __mul__ = _dunder("multiply")
    __rmul__ = _dunder("multiply", True)
    __getitem__ = _dunder("getitem")

    def __neg__(self) -> Any:
        return ARITHMETIC["multiply"](self, -1)


@dataclass(eq=False)
class Operator:
    name: str
    inputs: list[Any]  # tensors, or None if omitted
    outputs: list[Tensor]
    options: dict[str, Any]
    source: Any = None  # the operations of jax that it is part of, the innermost last
    graphs: dict[str, Graph] = field(default_factory=dict)  # of loops and branches


class Graph:
    """Operators in execution order, as appended."""

    def __init__(self, name: str = "", parent: Graph | None = None):
        self.name = name
        self.parent = parent
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.operators: list[Operator] = []
        #: Tensors of enclosing graphs, and the inputs that represent them here.
        self.captured: list[tuple[Tensor, Tensor]] = []
        self.source: Any = parent.source if parent else None
        self._made: dict[Any, list[Tensor]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Operators are appended here."""
        before = getattr(_here, "graph", None)
        _here.graph = self
        try:
            yield
        finally:
            _here.graph = before

    def placeholder(self, shape: Sequence[Any], dtype: DTypeLike, name: str = "") -> Tensor:
        tensor = Tensor(shape, dtype, self)
        tensor.name = name
        self.inputs.append(tensor)
        return tensor

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in this graph; a tensor of an enclosing graph becomes an input."""
        if tensor.value is not None or tensor.graph is self:
            return tensor
        for outer, inner in self.captured:
            if outer is tensor:
                return inner
        if self.parent is None:
            raise ValueError(f"a tensor of another graph: {tensor!r}")
        self.parent.own(tensor)
        inner = Tensor(tensor.shape, tensor.dtype, self)
        self.captured.append((tensor, inner))
        return inner

    def append(
        self,
        name: str,
        inputs: Sequence[Any],
        results: Sequence[tuple[Sequence[Any], Any]],
        options: dict[str, Any],
    ) -> list[Tensor]:
        """Appends an operator, or finds an equal one; returns its results."""
        inputs = [each if each is None else self.own(each) for each in inputs]
        key = (name, tuple(map(id, inputs)), tuple(sorted(options.items())))
        if key in self._made:
            return self._made[key]
        outputs = [Tensor(shape, dtype, self) for shape, dtype in results]
        operator = Operator(name, list(inputs), outputs, options, _source())
        for each in outputs:
            each.operator = operator
        self.operators.append(operator)
        self._made[key] = outputs
        return outputs

    def result(
        self,
        name: str,
        inputs: Sequence[Any],
        shape: Sequence[Any],
        dtype: DTypeLike,
        options: dict[str, Any] | None = None,
    ) -> Tensor:
        """The result of an operator that a rewrite puts where it is needed."""
        result = Tensor(shape, dtype, self)
        result.operator = Operator(name, list(inputs), [result], options or {})
        return result


def current() -> Graph:
    """The graph to which operators are appended."""
    return _here.graph


def _source() -> Any:
    return getattr(_here, "source", None)


@contextmanager
def of_source(source: object) -> Iterator[None]:
    """Context manager that attributes appended operators to a source."""
    before = _source()
    _here.source = source
    try:
        yield
    finally:
        _here.source = before


@contextmanager
def constants_shared() -> Iterator[None]:
    """Context manager in which equal small constants, and results computed of them, are shared."""
    before = getattr(_here, "constants", None), getattr(_here, "computed", None)
    _here.constants, _here.computed = {}, {}
    try:
        yield
    finally:
        _here.constants, _here.computed = before


def computed_once(
    what: tuple[Any, ...], inputs: Sequence[Tensor], compute: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Returns a value computed from constants; equal computations share one tensor."""
    known = getattr(_here, "computed", None)
    if known is None:
        return compute()
    key = (*what, *map(id, inputs))
    if key not in known:
        known[key] = compute(), inputs  # which keeps their ids
    return known[key][0]


def constant_tensor(value: np.ndarray) -> Tensor:
    known = getattr(_here, "constants", None)
    if known is None or value.nbytes > _SMALL:
        return Tensor.of(value)
    key = value.dtype.name, value.shape, value.tobytes()
    if key not in known:
        known[key] = Tensor.of(value)
    return known[key]


#: An operand: a tensor, or the array, number or numbers of a constant.
TensorLike: TypeAlias = Tensor | np.ndarray | np.generic | float | Sequence[Any]

# --- Appends an operator to the graph, or evaluates it if its inputs are constants ---------------

float32, int32, int64, bool_ = map(np.dtype, ("float32", "int32", "int64", "bool"))
#: Operators that only move the elements of their first input.
_MOVES = frozenset({"TRANSPOSE", "RESHAPE", "REVERSE_V2", "STRIDED_SLICE", "SLICE", "SQUEEZE"})
#: Constants larger than this, and than their inputs, are computed when the file runs.
_LARGEST_FOLDED = 1 << 22


def constant(value: TensorLike, dtype: DTypeLike | None = None) -> Tensor:
    array = np.asarray(value) if dtype is None else np.asarray(value).astype(np.dtype(dtype))
    if dtype is None and not hasattr(value, "dtype"):
        narrow = {"float64": "float32", "int64": "int32"}
        array = array.astype(narrow.get(array.dtype.name, array.dtype))
    return constant_tensor(array)


def tensor(value: TensorLike, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor, or the constant of a number or an array."""
    return value if isinstance(value, Tensor) else constant(value, dtype)


def emit(
    name: str,
    inputs: Sequence[Any],
    results: Sequence[tuple[Sequence[Any], Any]],
    fold: Callable[..., Any] | None = None,
    **options: object,
) -> list[Tensor]:
    """The results of an operator, or of `fold` where all inputs are constants."""
    operands = [each for each in inputs if each is not None]
    if fold is not None and all(each.value is not None for each in operands):
        grown = _LARGEST_FOLDED
        if name == "CAST" and operands[0].sources and len(operands[0].shape) > 1:
            # A file stores weights of integers unchanged.
            grown = 0 if operands[0].dtype.name in ("int8", "uint8") else grown
        limit = max(grown, *(each.value.nbytes for each in operands), 0)
        if all(_bytes(shape, dtype) <= limit for shape, dtype in results):
            return computed_once(
                (name, *options.items(), *((tuple(s), np.dtype(d)) for s, d in results)),
                operands,
                lambda: _folded(name, fold, operands, results),
            )
    return current().append(name, inputs, results, options)


def _folded(
    name: str, fold: Callable[..., Any], operands: Sequence[Tensor], results: Any
) -> list[Tensor]:
    first, sources = operands[0], frozenset().union(*(each.sources for each in operands))
    if name in _MOVES and first.twin is not None and first.twin is first.value:
        others = [each.value for each in operands[1:]]
        value = first.twin.moved(lambda x: fold(x, *others), tuple(results[0][0]))
        result = Tensor.of(value)
        result.twin, result.sources = value, sources
        return [result]
    with np.errstate(all="ignore"):
        found = fold(*(np.asarray(each.value) for each in operands))
    found = found if isinstance(found, list) else [found]
    pairs = zip(found, results)
    arrays = [np.asarray(value).astype(dtype, copy=False) for value, (_, dtype) in pairs]
    if not sources:
        return [constant_tensor(each) for each in arrays]
    tensors = [Tensor.of(each) for each in arrays]
    for each in tensors:
        each.sources = sources
        each.is_computed = name not in (*_MOVES, "CAST") or any(x.is_computed for x in operands)
    return tensors


def _bytes(shape: Sequence[Any], dtype: DTypeLike) -> float:
    if None in shape:
        return float("inf")
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def alike(*values: TensorLike) -> list[Tensor]:
    """Returns tensors of one dtype; numbers take that of the tensors."""
    found = next((each.dtype for each in values if isinstance(each, Tensor)), None)
    return [tensor(each, found) for each in values]
