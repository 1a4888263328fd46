"""From a flat jax function to a portable module and the arrays that it needs.

Everything here is flat: a function takes a list of arrays, described by
`jax.ShapeDtypeStruct`, and returns a list of arrays.  Arrays that it closes
over do not become constants of the graph: they are handed out as `constants`,
to be stored once, and taken as further operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._errors import UnsupportedOperationError
from pax_export._jax import (
    allow_symbolic_padding,
    call_here,
    call_with_constants,
    neutral_platform,
    read_arguments,
    symbolic_convolutions,
)
from pax_export._jaxpr import jaxpr_constants, jaxpr_places, jaxpr_primitives
from pax_export.export.lowering.portable import CALLING_CONVENTION, XLA_EXPANDS, Portable, portable
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.outline import outline

#: A closed-over array of more bytes than this becomes a variable.
LARGEST_CONSTANT = 1024

Function = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Lowered:
    """A function as portable StableHLO.

    Its operands are those of the function, then the `constants`; only the ones
    that `kept` counts are used, in that order.
    """

    portable: Portable
    kept: tuple[int, ...]
    constants: tuple[Any, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]  # as they stand outside of jax
    platforms: tuple[str, ...]
    neutral: bool = False  # lowered with rules that hold on every platform
    calling_convention: int = CALLING_CONVENTION
    exported: Any = None  # of jax, where it is neutral

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Runs in jax what was lowered, with the rules that it was lowered with.

        jax by itself calls LAPACK, which may choose other signs of eigenvectors,
        and rounds in another way; so this is for modules that are `neutral`.
        """
        return call_here(self.exported, [*operands, *self.constants])


@dataclass(frozen=True)
class Traced:
    """A function that has been traced once: what it is made of, and how to run it again.

    Attributes:
        jitted: the function, for arrays of any shapes.
        program: what the trace gave, as a jaxpr, with repeated layers outlined.
        lowerable: the program as a jitted function, for arrays like `structs` only.
    """

    function: Function
    structs: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[Any, ...]
    jitted: Any
    program: Any
    lowerable: Any
    results: tuple[jax.ShapeDtypeStruct, ...]

    def run(self, operands: Sequence[Any]) -> Any:
        """Runs the function on arrays of any shapes, as `jitted` does.

        The arrays that it closes over are arguments here: XLA would copy and fold
        them, and on the CPU it gives NaN for ``(x @ w).sum(-1)`` where w is a
        constant of 16 MiB (jax 0.10.2 and 0.12.0.1).
        """
        if not self.constants:
            return self.jitted(operands)
        structs = [dtypes.struct_of(value) for value in operands]
        here = trace(self.function, structs, outlined=False)
        return jax.jit(here.with_constants)([*operands, *here.constants])

    def read(self, count: int) -> frozenset[int]:
        """The operands on which the first so many results depend."""
        return read_arguments(self.program, count)

    def with_constants(
        self, operands: Sequence[Any], count: int | None = None, keep_derivatives: bool = True
    ) -> list[Any]:
        """Runs the program with `structs` and then `constants` as operands.

        With a count, only what the first so many results need is run.  Without
        derivatives, constants are replaced inside of functions that define
        their own, too.
        """
        values = operands[len(self.structs) :]
        replaced = {id(old): new for old, new in zip(self.constants, values)}
        given = operands[: len(self.structs)]
        return call_with_constants(self.program, replaced, given, count, keep_derivatives)


def trace(
    function: Function, structs: Sequence[jax.ShapeDtypeStruct], outlined: bool = True
) -> Traced:
    """Traces a flat function; refuses what only a running jax can do.

    Args:
        function: takes and returns lists of arrays.
        structs: what it takes.
        outlined: whether to look for repeated layers.

    Raises:
        UnsupportedOperationError: the function calls back into Python.
    """
    jitted = lowerable = jax.jit(function)
    traced = jitted.trace(list(structs))
    _refuse_callbacks(traced.jaxpr)
    results = tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in traced.out_info)
    shorter = outline(traced.jaxpr) if outlined else None
    if shorter is not None:
        lowerable = jax.jit(shorter)
        traced = lowerable.trace(list(structs))
    program = traced.jaxpr
    constants = {id(value): value for value in jaxpr_constants(program) if _is_large(value)}
    held = tuple(constants.values())
    return Traced(function, tuple(structs), held, jitted, program, lowerable, results)


def _is_large(value: Any) -> bool:
    size = getattr(value, "size", 1) * getattr(value.dtype, "itemsize", 1)
    # A key is small, but TensorFlow has no constant of its dtype.
    return size > LARGEST_CONSTANT and not dtypes.is_key(value.dtype)


def _refuse_callbacks(program: Any) -> None:
    found = sorted(filter(_is_callback, jaxpr_primitives(program)))
    if found:
        raise UnsupportedOperationError(
            f"The model calls back into Python, which an export cannot: {', '.join(found)}.",
            where=_places(program, found),
            write="the same in operations of jax, or leave jax.debug.print, "
            "jax.pure_callback and the like out in eval mode",
        )


def _places(program: Any, primitives: Iterable[str]) -> str:
    places = {place for name in primitives for place in jaxpr_places(program, name)}
    return ", ".join(sorted(places))


def _is_callback(primitive: str) -> bool:
    return "callback" in primitive or primitive in ("debug_print", "infeed", "outfeed")


def lower(
    traced: Traced,
    platforms: Sequence[str],
    count: int | None = None,
    names: Mapping[int, str] | None = None,
) -> Lowered:
    """Lowers a traced function to portable StableHLO.

    Args:
        traced: the function.
        platforms: for which machines: `cpu`, `cuda`, `rocm`, `tpu`.
        count: lower only so many of its results, the first ones.
        names: how messages at run time call the operands with these numbers.
    """
    operands: tuple[Any, ...] = traced.structs
    function = traced.lowerable
    if traced.constants or (count is not None and count < len(traced.results)):
        operands += tuple(jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in traced.constants)
        function = jax.jit(lambda values: traced.with_constants(values, count, False))
    try:
        exported = _export(function, operands, platforms)
        module, neutral = portable(exported.mlir_module_serialized, names=names), False
    except (NotImplementedError, UnsupportedOperationError) as error:
        # Rules for real machines call their libraries (LAPACK, cuSOLVER), which
        # no consumer has.  A machine that nobody knows gets rules for all.
        exported = _export_neutral(traced, function, operands, error)
        module, neutral = portable(exported.mlir_module_serialized, XLA_EXPANDS, names), True
    return Lowered(
        module,
        tuple(exported.module_kept_var_idx),
        traced.constants,
        traced.results[:count],
        tuple(platforms),
        neutral,
        exported=exported if neutral else None,
    )


def _export(function: Any, operands: Sequence[Any], platforms: Sequence[str]) -> Any:
    # Which custom calls a consumer knows is our own check, with its own words.
    allow_symbolic_padding()
    unchecked = jax_export.DisabledSafetyCheck.custom_call("ALL")
    export = jax_export.export(function, platforms=tuple(platforms), disabled_checks=(unchecked,))
    return export(list(operands))


def _export_neutral(
    traced: Traced, function: Any, operands: Sequence[Any], cause: Exception
) -> Any:
    try:
        return _export(function, operands, (neutral_platform(),))
    except NotImplementedError as error:
        if isinstance(cause, UnsupportedOperationError):
            raise cause from None
        name = re.search(r"primitive '(\w+)'", str(error))
        if name is None:
            raise
        raise UnsupportedOperationError(
            f"The operation {name[1]} exists in jax only.",
            where=_places(traced.program, [name[1]]) or None,
            write="the same in other operations of jax.numpy and jax.lax",
        ) from error


def vjp(traced: Traced, wrt: Sequence[int], of: Sequence[int]) -> Traced:
    """The gradient of a traced function, as a function of its own.

    It takes all operands of the function, its constants among them, then one
    cotangent for each result in `of`, and gives one cotangent for each operand
    in `wrt`.
    """
    operands = [
        *traced.structs,
        *(jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in traced.constants),
    ]
    cotangents = [traced.results[index] for index in of]

    def run(values: list[Any]) -> list[Any]:
        given, incoming = values[: len(operands)], values[len(operands) :]
        return pull_back(traced.with_constants, wrt, of)(given, incoming)

    with symbolic_convolutions():
        # The gradients of a function that is called often are called as often.
        return trace(run, [*operands, *cotangents], outlined=False)


def pull_back(
    function: Function, wrt: Sequence[int], of: Sequence[int]
) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Cotangents of the operands `wrt` from those of the results `of`.

    Those of complex numbers are what TensorFlow calls so, the conjugates of jax's.
    """

    def run(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def outputs(chosen: list[Any]) -> list[Any]:
            filled = list(operands)
            for index, value in zip(wrt, chosen):
                filled[index] = value
            results = function(filled)
            return [results[index] for index in of]

        back = jax.vjp(outputs, [operands[index] for index in wrt])[1]
        return [_conjugate(value) for value in back([_conjugate(each) for each in cotangents])[0]]

    return run


def _conjugate(value: Any) -> Any:
    return jax.numpy.conj(value) if jax.numpy.iscomplexobj(value) else value
