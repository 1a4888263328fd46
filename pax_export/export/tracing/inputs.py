"""Inputs of an exported method: `spec`, and from descriptions to named, abstract arrays."""

from __future__ import annotations

import inspect
import itertools
import keyword
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._foundations import tables
from pax_export._foundations.check import as_named, as_strings
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    first_line,
)
from pax_export._foundations.jax import scope_constraints
from pax_export._foundations.types import DTypeLike, PyTree, TreeDef
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.structure import collect, fixed_arguments
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.names import (
    Static,
    describe_structure,
    dotted_name,
    is_fixed,
    is_switch,
    signature_names,
    unwrap_static,
    wrap_static,
)

#: What errors about inputs suggest.
EXAMPLE = 'spec("batch, 28, 28, 1")'
_INTEGER = re.compile("-?[0-9]{1,18}")


@dataclass(frozen=True)
class InputSpec:
    """The shape, dtype and name of one input; created by `spec`."""

    shape: str | tuple[int | str | None, ...]
    dtype: str
    name: str | None = None

    def _repr_html_(self) -> str:
        shape = self.shape
        if not isinstance(shape, str):
            shape = ", ".join("?" if size is None else str(size) for size in shape)
        name = f"{self.name}: " if self.name else ""
        return tables.block("", tables.grid((), [[f"{name}{self.dtype}[{shape}]"]]))


def spec(
    shape: str | Sequence[int | str | None], dtype: DTypeLike = "float32", name: str | None = None
) -> InputSpec:
    """Describes one input of an exported model.

    Args:
        shape: the dimensions, as a string (``"batch, 28, 28, 1"``) or a sequence (``("batch", 28,
            28, 1)``).  A name is a symbolic dimension: the exported model accepts any size there,
            and equal names mean equal sizes, in all inputs of one export.  Expressions (``"2*n"``)
            work as in `jax.export.symbolic_shape`.  ``None`` is a symbolic dimension with a unique
            name, also in a string (``"None, 28, 28, 1"``).
        dtype: the dtype, or its name.  ``"string"`` is text, for preprocessors only.
        name: the input's name in the signature; default: the name of the Python parameter.

    Returns:
        An input spec for the ``inputs`` of an exporter.

    Raises:
        InvalidArgumentTypeError: a dimension or the dtype has another type.

    Example:
        >>> spec(("batch", 28, 28, 1)).shape
        ('batch', 28, 28, 1)
        >>> spec("batch, length", "int32", name="tokens").name
        'tokens'
    """
    if isinstance(shape, str):
        for size in shape.split(","):
            _check_dimension(int(size) if _INTEGER.fullmatch(size.strip()) else size)
    elif isinstance(shape, Iterable):
        shape = tuple(_check_dimension(size) for size in shape)
    else:
        raise InvalidArgumentTypeError(
            "A shape must be a string or a sequence of dimensions.", got=repr(shape), write=EXAMPLE
        )
    return InputSpec(shape, _dtype_name(dtype), name)


def _check_dimension(size: int | str | None) -> int | str | None:
    if size is None or isinstance(size, str):
        return size
    if isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    raise InvalidArgumentTypeError(
        "A dimension must be a size, the name of a symbolic dimension, or None.",
        got=repr(size),
        write=EXAMPLE,
    )


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        if dtype is None:
            raise TypeError  # numpy would read it as float64
        if dtype is object or getattr(dtype, "name", dtype) == "string":
            return "string"
        known = np.dtype(dtype)
        return "string" if known.kind in "OSU" else known.name
    except TypeError as error:
        raise InvalidArgumentTypeError(
            "The dtype is unknown.", got=repr(dtype), write='spec("batch, 3", "float32")'
        ) from error


def from_tensorflow(leaf: Any) -> Any:
    """Converts a `tf.TensorSpec` or a tensor to a `spec`; returns other values unchanged."""
    if not hasattr(getattr(leaf, "dtype", None), "as_numpy_dtype"):
        return leaf
    return spec(leaf.shape.as_list(), leaf.dtype.name, getattr(leaf, "name", None))


_UNNAMED = re.compile(r"\bNone\b")
_POWER = re.compile(r"\^\s*([0-9]+)")
_CONSTRAINTS = 'constraints=("length <= 512", "length >= 2")'
_KWARGS = 'kwargs={"mask": spec("batch, length", "bool")}'


@dataclass(frozen=True)
class Input:
    name: str
    path: str
    struct: jax.ShapeDtypeStruct
    sharding: Any = None  # as it was described
    asked: str = ""  # the name in the spec, or else the path


@dataclass(frozen=True)
class Inputs:
    """All inputs of an exported method: flat, with their structure."""

    flat: tuple[Input, ...]
    tree: TreeDef  # of `(args, kwargs)`, in which Python values are hidden
    arguments: dict[str, Any]  # parameter name -> tree of ShapeDtypeStruct and Python values
    positional: tuple[str, ...]  # the parameters that are passed by position
    constraints: tuple[str, ...] = ()  # constraints on symbolic dimensions
    written: frozenset[str] = frozenset()  # the names in specs, also of dimensions that are equal

    def structure(self) -> dict[str, Any]:
        """The nested structure of each argument, with the names of the flat inputs."""
        names = iter([entry.name for entry in self.flat])
        return {name: describe_structure(tree, names) for name, tree in self.arguments.items()}

    def call(self, flat: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call with these values of the flat inputs, by position and by name."""
        return unwrap_static(jax.tree_util.tree_unflatten(self.tree, flat))

    @property
    def named(self) -> frozenset[str]:
        """The names of all dimensions, also of those that an equality has put others for."""
        return self.written.union(self.dimensions)

    @property
    def dimensions(self) -> tuple[str, ...]:
        return _symbols(entry.struct for entry in self.flat)


def _symbols(structs: Iterable[jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    """The names of the symbolic dimensions in shapes, in order."""
    sizes = [str(size) for each in structs for size in each.shape if not isinstance(size, int)]
    return tuple(dict.fromkeys(name for size in sizes for name in sorted(dimensions.names(size))))


def resolve_inputs(
    function: Callable,
    skip: int,
    inputs: PyTree,
    kwargs: Mapping[str, Any] | None,
    constraints: Sequence[str],
    text: bool = False,
) -> Inputs:
    """Turns a user's ``inputs`` into named, abstract arrays; `skip` parameters are the model's."""
    args, named = _arguments(function, skip, inputs, kwargs)
    args, named = jax.tree_util.tree_map(from_tensorflow, (args, named))
    positional = _parameter_names(function, skip, args, named)
    hidden = tuple(
        Static(each) if _is_static(function, skip, args, at) else wrap_static(each, is_switch)
        for at, each in enumerate(args)
    )
    arguments = hidden, wrap_static(named, is_fixed)
    constraints = as_strings("constraints", constraints, _CONSTRAINTS)
    scope = _SymbolicScope(arguments, constraints)
    found, tree = jax.tree_util.tree_flatten_with_path(arguments)
    if not found and any(isinstance(each, str) for each in args):
        _refuse_shape(args)
    leaves = [leaf for _, leaf in found]
    paths = [
        dotted_name(positional[key.idx] if which.idx == 0 else key.key, rest)
        for (which, key, *rest), _ in found
    ]
    structs = [_abstract(leaf, path, scope, text) for leaf, path in zip(leaves, paths)]
    asked = [
        (isinstance(leaf, InputSpec) and leaf.name) or path for leaf, path in zip(leaves, paths)
    ]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    # TensorFlow calls a signature by keywords, none of which is a word of Python or `self`.
    names = signature_names(
        f"{name}_" if keyword.iskeyword(name) or name == "self" else name for name in asked
    )
    by_position, by_name = jax.tree_util.tree_unflatten(tree, structs)
    # The user's own text, from here or from where the scope was created.
    texts = constraints or scope_constraints(scope.scope)
    return Inputs(
        tuple(map(Input, names, paths, structs, shardings, asked)),
        tree,
        dict(zip(positional, by_position)) | by_name,
        positional,
        constraints_on(_symbols(structs), texts, scope.scope),
        scope.written,
    )


def _arguments(
    function: Callable, skip: int, inputs: PyTree, kwargs: Mapping[str, Any] | None
) -> tuple[tuple, dict[str, Any]]:
    """The described arguments, by position and by name."""
    if isinstance(inputs, str):
        _refuse_shape(inputs)
    if inputs is None:
        raise InvalidArgumentTypeError(
            "The inputs of this model must be described.",
            got="inputs=None",
            write='spec("batch, 3"), () without inputs, or (None,) where the model takes None',
        )
    args = inputs if type(inputs) is tuple else (inputs,)
    named = as_named("kwargs", kwargs or {}, "kwargs must be a dict by name.", _KWARGS)
    if type(inputs) is dict and (found := _by_name(function, skip, inputs)):
        args, named = found[0], found[1] | named
    return args, named


def constraints_on(
    names: Iterable[str], constraints: Sequence[str], scope: jax_export.SymbolicScope
) -> tuple[str, ...]:
    """Returns constraints in terms of the dimensions that shapes have.

    jax has put an equality into the shapes: "n == 2*m" leaves no n, and "n >= 2" is about m.
    """
    there = {*names}
    texts = (
        text
        if there.issuperset(dimensions.constrained_names(text))
        else _in_shapes(text, there, scope)
        for text in constraints
    )
    return tuple(dict.fromkeys(filter(None, texts)))


def _in_shapes(constraint: str, there: Collection[str], scope: jax_export.SymbolicScope) -> str:
    """Returns a constraint with the sizes that dimensions are equal to; "" if it says no more."""
    missing = [name for name in dimensions.constrained_names(constraint) if name not in there]
    left, relation, _ = re.split("([<>=]=)", constraint, maxsplit=1)
    if relation == "==" and left.strip() in missing:
        return ""
    for name in missing:
        size = str(jax_export.symbolic_shape(name, scope=scope)[0])
        size = size if size.isalnum() else f"({size})"
        constraint = re.sub(rf"\b{name}\b", size, constraint)
    return constraint if dimensions.constrained_names(constraint) else ""


def _by_name(function: Callable, skip: int, inputs: dict) -> tuple[tuple, dict] | None:
    """The arguments whose names are the keys of a dict; None if the dict is one argument."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):  # some built-in functions have none
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [each.name for each in parameters if each.kind in kinds]
    known = [name for name in names if name in inputs]
    if not known or (len(names) == 1 and len(inputs) > 1):
        return None
    if len(known) < len(inputs):
        raise InvalidArgumentError(
            "Some keys of the inputs are names of arguments, others are not.",
            got=f"keys {sorted(map(str, inputs))} for the arguments {names}",
            write="a dict whose keys are names of arguments, or a tuple, ({...},), if the dict "
            "is one argument",
        )
    # By position as far as it goes: a number there is an input, in kwargs= a constant.
    count = next((i for i, each in enumerate(parameters) if each.name not in inputs), len(names))
    first = [each.name for each in parameters[:count] if each.kind is kinds[0]]
    args = tuple(inputs[name] for name in first)
    return args, {name: inputs[name] for name in known[len(first) :]}


def _is_static(function: Any, skip: int, args: tuple, position: int) -> bool:
    """Whether a positional argument of numbers is static for a jitted function."""
    leaves = jax.tree_util.tree_leaves(args[position])
    is_numbers = leaves and all(type(leaf) in (int, float, complex) for leaf in leaves)
    if not (is_numbers and hasattr(function, "trace") and hasattr(function, "__wrapped__")):
        return False
    # jax refuses the probe before it calls the function: with a ValueError as a static argument,
    # because it cannot be hashed, and with a TypeError as another one, because it is no array.
    probes: list[Any] = [0] * (skip + len(args))
    probes[skip + position] = [object()]
    try:
        function.trace(*probes)
    except TypeError:
        return False
    except ValueError:
        return True
    return False


def _parameter_names(
    function: Callable, skip: int, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names under which positional arguments reach the function."""
    count = len(args)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return tuple(f"arg{index}" for index in range(count))
    try:
        signature.bind(*range(skip + count), **kwargs)
    except TypeError as error:
        _refuse_shape(args, error)
        raise InvalidArgumentError(
            f"The model cannot be called with these inputs: {error}.",
            got=f"{count} positional inputs, keyword inputs {sorted(kwargs)}",
            write=f"inputs that fit its parameters {signature}; "
            "a tuple is several positional arguments",
        ) from error
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{i}" for i in range(skip + count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return tuple(names[skip : skip + count])


def _refuse_shape(described: str | Sequence[Any], cause: Exception | None = None) -> None:
    """Refuses bare sizes and names where specs are expected, and suggests a shape."""
    sizes = described if isinstance(described, (tuple, list)) else (described,)
    if sizes and all(each is None or isinstance(each, (int, str)) for each in sizes):
        meant = described if isinstance(described, str) else tuple(sizes)
        raise InvalidArgumentTypeError(
            "Expected a description of an array, got a shape.",
            got=f"inputs={meant!r}",
            write=f"spec({meant!r})",
        ) from cause


class _SymbolicScope:
    """The one jax scope in which all symbolic dimensions of a call live."""

    def __init__(self, tree: PyTree, constraints: tuple[str, ...]):
        leaves = jax.tree_util.tree_leaves(tree)
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, InputSpec)]
        text = " ".join(str(shape) for shape in shapes)
        self.written = frozenset(re.findall(r"[^\W\d]\w*", text))
        self.fresh = (name for name in map("any{}".format, itertools.count()) if name not in text)
        self.scope = self._of_arrays(leaves, constraints) or self._new_scope(constraints)

    @staticmethod
    def _of_arrays(leaves: list[Any], constraints: tuple[str, ...]) -> Any:
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves if not isinstance(leaf, InputSpec)]
        symbolic = [size for shape in shapes for size in shape if not isinstance(size, int)]
        if symbolic and constraints:
            raise InvalidArgumentError(
                "The symbolic dimensions of the inputs have a scope of their own.",
                got=f"constraints={constraints}",
                write="the constraints where that scope is made: "
                "jax.export.symbolic_shape(..., constraints=...)",
            )
        return symbolic[0].scope if symbolic else None

    @staticmethod
    def _new_scope(constraints: tuple[str, ...]) -> Any:
        try:
            _check_powers(" ".join(constraints))
            return jax_export.SymbolicScope(constraints)
        except (ValueError, TokenError) as error:
            raise InvalidArgumentError(
                f"A constraint cannot be read: {first_line(error)}",
                where="constraints",
                got=", ".join(constraints),
                write=_CONSTRAINTS,
            ) from error

    def shape(self, described: InputSpec, path: str) -> tuple:
        text = described.shape
        if not isinstance(text, str):
            text = ", ".join(map(str, text))
        text = _UNNAMED.sub(lambda _: next(self.fresh), text)
        try:
            _check_powers(text)
            sizes = tuple(jax_export.symbolic_shape(text, scope=self.scope))
            if any(isinstance(size, int) and not 0 <= size < 2**63 for size in sizes):
                raise ValueError("a size is negative, or has more than 63 bits")
            for size in sizes:
                dimensions.names(str(size))  # jax reads more than files can say
            return sizes
        except (ValueError, TokenError) as error:
            raise InvalidArgumentError(
                f"A shape cannot be read: {first_line(error)}",
                where=path,
                got=repr(described.shape),
                write=EXAMPLE,
            ) from error


def _check_powers(text: str) -> None:
    """Refuses powers that jax would multiply out for minutes."""
    if any(float(power) > dimensions.MOST_POWER for power in _POWER.findall(text)):
        raise ValueError(f"a power is larger than {dimensions.MOST_POWER}")


def _abstract(leaf: Any, path: str, scope: _SymbolicScope, text: bool) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, InputSpec):
        dtype = dtypes.numpy_dtype(leaf.dtype)
        struct = jax.ShapeDtypeStruct(scope.shape(leaf, path), dtype)
    elif hasattr(leaf, "shape") and getattr(getattr(leaf, "dtype", None), "kind", "-") in "OSU":
        struct = jax.ShapeDtypeStruct(leaf.shape, dtypes.STRING)
    elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    elif isinstance(leaf, (bool, int, float, complex)):
        struct = jax.ShapeDtypeStruct((), jax.numpy.result_type(leaf))
    else:
        raise InvalidArgumentTypeError(
            "An input must be a spec, an array or a jax.ShapeDtypeStruct.",
            where=path,
            got=type(leaf).__name__,
            write=EXAMPLE,
        )
    if not (text and struct.dtype == dtypes.STRING):
        dtypes.check(struct.dtype, path)
    return struct


def bind_inputs(inputs: Inputs, values: PyTree, where: str) -> dict[str, Any]:
    """Arrays by the names of the inputs, from a tuple, the only argument, or a dict."""
    every, error = inputs.structure(), None
    # Python values may be repeated, or left out.
    fixed = fixed_arguments(every)
    arguments = {name: tree for name, tree in every.items() if name not in fixed}
    positional = [name for name in inputs.positional if name in arguments]
    readings = _possible_readings(values, arguments, positional)
    if len(every) > len(arguments):
        readings += _possible_readings(values, every, inputs.positional)
    for reading in readings:
        found: dict[str, Any] = {}
        try:
            for name, value in reading.items():
                collect(every[name], value, found, f"{where}: {name}")
        except InvalidArgumentError as mistake:
            error = error or mistake
        else:
            return found
    raise error or InvalidArgumentError(
        "The values do not match the arguments.",
        where=where,
        got=f"{len(values)} values" if isinstance(values, (tuple, Mapping)) else "1 value",
        write="a tuple of positional arguments, or a dict with " + ", ".join(arguments),
    )


def _possible_readings(
    values: PyTree, arguments: Mapping[str, Any], positional: Sequence[str]
) -> list[dict[str, Any]]:
    """The readings of a value: arguments by position or by name, or the only one."""
    readings = []
    if isinstance(values, tuple) and len(values) == len(arguments) == len(positional):
        readings.append(dict(zip(positional, values)))
    if isinstance(values, Mapping) and sorted(values) == sorted(arguments):
        readings.append(dict(values))
    if len(arguments) == 1:
        ((name, structure),) = arguments.items()
        if not (isinstance(values, tuple) and "leaf" in structure):
            readings.append({name: values})
    return readings
