"""Models that compute by the shardings of their arguments, on meshes with Explicit axes.

An export is traced without shardings. On such a mesh these are part of the types of arrays, and
`jax.shard_map` and branches of Python may read them: a trace with shardings is another program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from pax_export._errors import UnsupportedOperationError
from pax_export._jaxpr import called_program, inner_programs, interpret
from pax_export._types import Equation, PyTree, TracedProgram

#: Operations that only change a sharding.
_LAYOUT = frozenset({"mesh_cast", "pvary", "reshard", "sharding_constraint"})


def refuse_explicit(
    function: Callable[[list[Any]], list[Any]],
    structs: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Any],
    program: TracedProgram | None,
) -> None:
    """Raises if a function of sharded arrays is another program than one without shardings.

    There is no program, if jax refuses the function without them.
    """
    explicit = [_explicit_sharding(each) for each in arrays]
    if not any(explicit):
        return
    sharded = [
        jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
        if sharding is not None and struct.shape == getattr(array, "struct", array).shape
        else struct
        for struct, array, sharding in zip(structs, arrays, explicit)
    ]
    try:
        other = jax.make_jaxpr(lambda operands: function(operands))(sharded)
    except Exception:  # what jax refuses of sharded arrays, it computes of others
        return
    if program is None or _describe(program) != _describe(other):
        raise UnsupportedOperationError(
            "The model computes by the shardings of its arrays on a mesh with Explicit axes, "
            "without which an export is traced.",
            got=f"{next(filter(None, explicit))}",
            write="a mesh with Auto axes: jax.make_mesh(shape, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names)); or arrays without shardings",
        )


def _explicit_sharding(array: Any) -> Any:
    """Returns the sharding of an array that is split along an Explicit axis, or None."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    axes = [name for part in sharding.spec for name in (part if type(part) is tuple else (part,))]
    explicit = jax.sharding.AxisType.Explicit
    return sharding if any(kinds.get(name) == explicit for name in axes) else None


def _describe(program: TracedProgram) -> list[Hashable]:
    """Describes operations, shapes and wiring of a program, without shardings."""
    found: list[Hashable] = []

    def operate(equation: Equation, operands: list[Hashable]) -> list[Hashable] | None:
        name = equation.primitive.name
        if called_program(equation) is not None:
            return None
        if name in _LAYOUT:
            return operands
        plain = (int, float, str, tuple, np.dtype)
        parameters = [
            (key, repr(value))
            for key, value in sorted(equation.params.items())
            if isinstance(value, plain) and "shard" not in key and "spec" not in key
        ]
        inner = [_describe(each) for each in inner_programs(equation)]
        shapes = [getattr(each.aval, "shape", ()) for each in equation.outvars]
        found.append(repr((name, operands, parameters if not inner else [], shapes, inner)))
        return [(len(found), place) for place in range(len(shapes))]

    def constant(value: PyTree) -> Hashable:
        return repr(value) if np.ndim(value) == 0 else ("array", np.shape(value))

    count = len(getattr(program, "jaxpr", program).invars)
    results = interpret(program, list(range(count)), operate, constant=constant)
    return [*found, repr(results)]
