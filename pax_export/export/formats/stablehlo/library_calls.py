"""Checks array sizes of LAPACK custom calls.

LAPACK trusts the program: it writes a factor as large as its operand, even if the result buffer is
smaller. So the sizes of each call are compared with those of its routine. If they are symbolic, the
program computes the sizes of results at run time; they are replaced by the sizes of the operands,
which changes nothing in a valid program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pax_export.export.artifact.saved_models import stablehlo_version
from pax_export.export.artifact.screening import WAITING, may_call

if TYPE_CHECKING:
    from jax.extend.mlir.ir import Operation

#: Axes of operands and results behind those of a batch: ``k`` is the smaller of ``m`` and ``n``,
#: ``p`` is ``n - 1``, ``t`` any number; ``*`` is the whole shape of the first operand.
_POTRF, _GETRF, _GEQRF = "nn -> nn, ", "mn -> mn, k, ", "mn -> mn, k"
_ORGQR, _SYEVD, _SYTRD = "mn, t -> mn", "nn -> nn, n, ", "nn -> nn, n, p, p, "
_GESDD = {True: "mn -> mn, k, mm, nn, ", False: "mn -> mn, k, mk, kn, "}
_SWAPPED = {True: "mn -> mn, k, nn, mm, ", False: "mn -> mn, k, kn, mk, "}
_GESVD = {(full, False): row for full, row in _GESDD.items()} | {
    (full, True): row for full, row in _SWAPPED.items()
}
_GEEV = {"sd": "nn -> n, n, nn, nn, ", "cz": "nn -> n, nn, nn, "}
_GEES = {"sd": "nn -> nn, nn, n, n, , ", "cz": "nn -> nn, nn, n, , "}
_TRSM = {(76,): "mm, mn -> mn", (82,): "nn, mn -> mn"}  # by its side, L or R


def _routine_rows() -> Iterator[tuple[str, Any]]:
    """Returns the shapes of each target, or attributes and the shapes by their values."""
    of_all = {"potrf": _POTRF, "getrf": _GETRF, "geqrf": _GEQRF}
    for types in ("sd", "cz"):
        names = {
            **of_all,
            "gehrd": "nn -> nn, p, ",
            "gtsv": "n, n, n, nr -> n, n, n, nr, ",
            "geev": _GEEV[types],
            "gees": ("sort", {(78,): _GEES[types]}),  # others call a function of the program
            "gesdd": ("mode", {(65,): _GESDD[True], (78,): _GESDD[True], (83,): _GESDD[False]}),
            "trsm": ("side", _TRSM),
            "orgqr" if types == "sd" else "ungqr": _ORGQR,
            "syevd" if types == "sd" else "heevd": _SYEVD,
            "sytrd" if types == "sd" else "hetrd": _SYTRD,
        }
        for letter in types:
            yield from ((f"lapack_{letter}{name}_ffi", row) for name, row in names.items())
    of_cards = {
        **of_all,
        "orgqr": _ORGQR,
        "syevd": _SYEVD,
        "sytrd": _SYTRD,
        "gesvd": ("full_matrices transposed", _GESVD),
        "gesvdj": ("full_matrices", {(full,): row for full, row in _GESDD.items()}),
    }
    for maker, solver, sparse in (
        ("cu", "cusolver", "cusparse"),
        ("hip", "hipsolver", "hipsparse"),
    ):
        yield from ((f"{solver}_{name}_ffi", row) for name, row in of_cards.items())
        yield f"{sparse}_gtsv2_ffi", "n, n, n, nr -> nr"
        yield f"{maker}_lu_pivots_to_permutation", "k -> t"
        yield f"{maker}_threefry2x32_ffi", "*, *, *, * -> *, *"
    # XLA writes these out, and takes their sizes for granted.
    yield "Qr", _GEQRF
    yield "ProductOfElementaryHouseholderReflectors", _ORGQR
    yield "Eigh", "nn -> nn, n"
    yield "LuDecomposition", "mn -> mn, k, m"


ROUTINES = dict(_routine_rows())
_DYNAMIC = ir.ShapedType.get_dynamic_size()
#: An axis: its size, or the number of an operand and of its axis; or two candidates.
_Axis = Any


class SizesError(ValueError):
    """A call has arrays of other sizes than its routine takes."""


@dataclass(frozen=True)
class Looked:
    """The calls of a program, and the program to run."""

    names: frozenset[str]
    module: bytes


def check_program(module: bytes) -> Looked:
    """Parses a program; raises if this jax version cannot read it.

    Raises:
        SizesError: a library call has arrays of invalid sizes.
    """
    calls, names = [], set()

    def visit(operation: Operation) -> Any:
        kind = operation.name.partition(".")[2].removesuffix("_v1")
        if kind == "custom_call":
            calls.append(operation)
            names.add(_call_target(operation))
        elif kind in WAITING:
            names.add(kind)
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context() as context:
        handler: Any = context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            parsed = stablehlo.deserialize_portable_artifact(context, module)
            if may_call(module):
                parsed.operation.walk(visit)
            routines = [each for each in calls if _call_target(each) in ROUTINES]
            bound = [_check_sizes(each) for each in routines]
            if any(bound):
                version = stablehlo_version(module) or stablehlo.get_current_version()
                module = stablehlo.serialize_portable_artifact(parsed, version, True)
        finally:
            handler.detach()
    return Looked(frozenset(names), module)


def _call_target(call: Operation) -> str:
    target: Any = call.attributes["call_target_name"]
    return target.value


def _check_sizes(call: Operation) -> bool:
    """Checks the sizes of a call; whether symbolic ones were bound to those of its operands."""
    indices = "indices_of_shape_operands"
    shape_indices: list[int] = []
    if indices in call.attributes:
        numbers: Any = ir.DenseIntElementsAttr(call.attributes[indices])
        shape_indices = list(numbers)
    count = len(call.operands) - len(shape_indices)
    operands, results = list(call.operands)[:count], list(call.results)
    types = [_shape(call, each) for each in operands], [_shape(call, each) for each in results]
    row = _routine_row(call)
    wanted = _expected_axes(row, types[0])
    if wanted is None or any(map(_shape_differs, types[0] + types[1], wanted[0] + wanted[1])):
        raise _sizes_error(call, row)
    if not any(_DYNAMIC in each for each in types[0] + types[1]):
        return False
    if shape_indices != list(range(count, count + len(results))):
        raise _sizes_error(call, row)
    changed = False
    with ir.InsertionPoint(call), ir.Location.unknown(call.context):
        for index, axes in list(enumerate(wanted[0]))[1:]:
            if _DYNAMIC in types[0][index] and None not in axes:
                shape = _shape_value(operands, axes)
                call.operands[index] = stablehlo.dynamic_reshape(
                    operands[index].type, operands[index], shape
                )
                changed = True
        for index, axes in enumerate(wanted[1], count):
            if axes and None not in axes:
                call.operands[index] = _shape_value(operands, axes)
                changed = True
    return changed


def _sizes_error(call: Operation, row: str) -> SizesError:
    def texts(values: Iterable[ir.Value]) -> str:
        return ", ".join(str(each.type).removeprefix("tensor") for each in values)

    found = f"{_call_target(call)}: {texts(call.operands)} -> {texts(call.results)}"
    return SizesError(f"{found}; the routine has {row or 'other attributes'}")


def _shape(call: Operation, value: ir.Value) -> list[int]:
    if not isinstance(value.type, ir.RankedTensorType):
        raise _sizes_error(call, "arrays")
    return list(ir.RankedTensorType(value.type).shape)


def _routine_row(call: Operation) -> str:
    row = ROUTINES[_call_target(call)]
    if isinstance(row, str):
        return row
    names, rows = row
    keys = [key for key in ("mhlo.backend_config", "backend_config") if key in call.attributes]
    configuration = call.attributes[keys[0]] if len(keys) == 1 else None
    if not isinstance(configuration, ir.DictAttr):
        raise _sizes_error(call, "")
    found = tuple(
        getattr(configuration[name], "value", None) if name in configuration else None
        for name in names.split()
    )
    if found not in rows:
        raise _sizes_error(call, "")
    return rows[found]


def _expected_axes(
    row: str, operands: Sequence[list[int]]
) -> tuple[list[list[_Axis]], list[list[_Axis]]] | None:
    """The axes of operands and results; `None` is one of any size."""
    words = [[each.strip() for each in side.split(",")] for side in row.split("->")]
    if len(words[0]) != len(operands):
        return None
    axes: dict[str, _Axis] = {"t": None}
    rank = len(operands[0]) - len(words[0][0])
    if rank < 0 and words[0][0] != "*":
        return None
    whole = [_axis_of(operands, 0, axis) for axis in range(len(operands[0]))]
    batch = whole[:rank]
    for index, word in enumerate(words[0]):
        if word != "*" and len(operands[index]) != len(batch) + len(word):
            return None
        for axis, letter in enumerate(word if word != "*" else "", len(batch)):
            axes.setdefault(letter, _axis_of(operands, index, axis))
    if "m" in axes and "n" in axes:
        axes["k"] = ("min", axes["m"], axes["n"])
    if "n" in axes:
        axes["p"] = ("less", axes["n"])

    sizes = {letter: _constant_size(axis) for letter, axis in axes.items()}

    def each(word: str) -> list[_Axis]:
        return whole if word == "*" else [*batch, *map(sizes.__getitem__, word)]

    return list(map(each, words[0])), list(map(each, words[1]))


def _axis_of(operands: Sequence[list[int]], index: int, axis: int) -> _Axis:
    size = operands[index][axis]
    return (index, axis) if size == _DYNAMIC else size


def _constant_size(axis: _Axis) -> _Axis:
    """Returns a number, if the sizes that it is computed from are numbers."""
    if isinstance(axis, tuple) and axis[0] in ("min", "less"):
        kind, *rest = axis
        if all(isinstance(each, int) for each in rest):
            return min(rest) if kind == "min" else max(rest[0] - 1, 0)
    return axis


def _shape_differs(shape: list[int], axes: list[_Axis]) -> bool:
    """Whether an array has other sizes; symbolic ones are bound, so they are as they should be."""
    return len(shape) != len(axes) or any(
        size != _DYNAMIC and axis is not None and size != axis for size, axis in zip(shape, axes)
    )


def _shape_value(operands: Sequence[Any], axes: Sequence[_Axis]) -> Any:
    one = ir.RankedTensorType.get([1], ir.IntegerType.get_signless(32))
    sizes = [stablehlo.reshape(one, _size_value(operands, axis)) for axis in axes]
    return stablehlo.concatenate(sizes, 0)


def _size_value(operands: Sequence[Any], axis: _Axis) -> Any:
    if isinstance(axis, int):
        number = ir.IntegerType.get_signless(32)
        scalar, value = ir.RankedTensorType.get([], number), ir.IntegerAttr.get(number, axis)
        return stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, value))
    kind, *rest = axis
    if kind == "min":
        return stablehlo.minimum(*(_size_value(operands, each) for each in rest))
    if kind == "less":
        less = stablehlo.subtract(_size_value(operands, rest[0]), _size_value(operands, 1))
        return stablehlo.maximum(less, _size_value(operands, 0))
    return stablehlo.get_dimension_size(operands[kind], rest[0])
